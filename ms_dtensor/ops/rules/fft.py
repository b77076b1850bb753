# SPDX-License-Identifier: Apache-2.0
"""Fourier transforms: along dims that no axis cuts each rank transforms its own lines; a dim that is cut is refused.

They are linear, so summands pass. `hfft`, `irfft` and their kin have as many numbers as were asked for, or 2 (m - 1).
"""
from __future__ import annotations

from .spec import PARTIALS, SUMS, Call, OpSpec

NAMES = """
fft:FFT,IFFT:input n dim norm
fft:FFT2,IFFT2,FFTN,IFFTN:input n dim norm
rfft:RFFT,IHFFT,RFFT2,IHFFT2,RFFTN,IHFFTN:input n dim norm
irfft:IRFFT,HFFT,IRFFT2,HFFT2,IRFFTN,HFFTN:input n dim norm
fftshift:FFTShift,IFFTShift:input dim
"""


def fft(call: Call) -> OpSpec:
    """`n` numbers each along `dim`; without a `dim` the last ones that `n` names, without either all."""
    x, sizes, dim = call.operands[0], call.get("n"), call.get("dim")
    sizes, dim = ((v,) if isinstance(v, int) else v for v in (sizes, dim))
    every = tuple(range(x.ndim))
    dims = every[x.ndim - len(sizes or every):] if dim is None else tuple(d % x.ndim for d in dim)  # their order counts
    shape = list(x.shape)
    for d, n in zip(dims, sizes or (shape[d] for d in dims)):
        shape[d] = int(n)
    last = dims[-1]
    if call.op == "rfft":
        shape[last] = shape[last] // 2 + 1
    elif call.op == "irfft" and sizes is None:
        shape[last] = 2 * (shape[last] - 1)
    cases = call.like_first([d for d in every if d not in dims], PARTIALS if call.op == "fftshift" else SUMS)
    wide = {"irfft": ("float32",), "fftshift": (x.dtype,)}.get(call.op, ("complex64",))  # of 16 bits
    return OpSpec((tuple(shape),), tuple(cases), dtypes=wide if x.dtype == "bfloat16" else None, uncut=dims)


RULES = dict.fromkeys(("fft", "rfft", "irfft", "fftshift"), fft)
