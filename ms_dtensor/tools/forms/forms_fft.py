# SPDX-License-Identifier: Apache-2.0
"""Fourier transforms in every public spelling, along dims at the end, in the middle, and shorter or longer than asked for."""
from __future__ import annotations

from mindspore import ops

from .form import Form
from .forms_complex import numbers
from .samples import arrays, then

REAL = (arrays((4, 6)), arrays((3, 2, 5)), arrays((2, 4), dtype="float64"))
COMPLEX = (numbers((4, 6)), numbers((3, 2, 5)), arrays((4, 6)))
CUBES = (arrays((3, 4, 5)), arrays((2, 4, 6), dtype="float64"))
COMPLEX_CUBES = (numbers((3, 4, 5)), numbers((2, 4, 6)))
ORTHO = ("backward", "ortho", "forward")


def _line(name, samples):
    fn = getattr(ops, name)
    return [Form(f"ops.{name}", fn, samples), Form(f"ops.{name}(n)", lambda x: fn(x, 4, -1), samples),
            Form(f"ops.{name}(n=, dim=, norm=)", lambda x, norm: fn(x, n=5, dim=0, norm=norm),
                 tuple(then(m, norm) for m in samples[:1] for norm in ORTHO))]


def _many(name, samples):
    fn = getattr(ops, name)
    plane = [Form(f"ops.{name}(dim)", lambda x: fn(x, None, (0, 1)), samples),
             Form(f"ops.{name}(s=, dim=)", lambda x: fn(x, s=(4, 3), dim=(-2, 0), norm="ortho"), samples),
             Form(f"ops.{name}", fn, samples)]
    # without `dim` the gradient of a real result of other sizes kills the process: plain MindSpore 2.10's, too
    return [*plane, Form(f"ops.{name}(s)", lambda x: fn(x, (5, 4)), samples)] if name[-1] == "n" and name[0] not in "h" and \
        name[:2] != "ir" else plane


FORMS = [
    *(f for n in ("fft", "ifft", "irfft", "hfft") for f in _line(n, COMPLEX)), *(f for n in ("rfft", "ihfft") for f in _line(n, REAL)),
    *(f for n in ("fft2", "ifft2", "irfft2", "hfft2", "fftn", "ifftn", "irfftn", "hfftn") for f in _many(n, COMPLEX_CUBES)),
    *(f for n in ("rfft2", "ihfft2", "rfftn", "ihfftn") for f in _many(n, CUBES)),
    *(Form(f"ops.{n}{given}", call, REAL) for n in ("fftshift", "ifftshift") for given, call in (
        ("", getattr(ops, n)), ("(dim)", lambda x, fn=getattr(ops, n): fn(x, 1)), ("(dim=)", lambda x, fn=getattr(ops, n): fn(x, dim=(0, 1))))),
]
