# SPDX-License-Identifier: Apache-2.0
"""Decompositions for CPU: arithmetic, reductions, cumulative sums and sorting that only the `mint` primitives name.

Same arguments as the primitive; differentiable by their parts. Invariant: an index is int64, as the primitive's is.
"""
from __future__ import annotations

import math

import mindspore as ms
from mindspore import Tensor, mint, ops

from ..rules.spec import dims_of
from .basic import clone
from .dtypes import as_dtype, rounded, wider


def _dims(dim, ndim: int) -> tuple[int, ...]:
    return dims_of(dim, ndim) if ndim else ()


def total(x, dims, keepdim=False):
    """Sum over dims; over none of them it is the value itself (MindSpore would sum over all)."""
    return mint.sum(x, dims, keepdim=keepdim) if dims else x


def mean(x, dims, keepdim=False):
    """Mean over dims."""
    return rounded(total(wider(x), dims, keepdim) / math.prod(x.shape[d] for d in dims), x)


def variance(input, dim=None, correction=1, keepdim=False):
    """`Var`."""
    return rounded(_variance(wider(input), dim, correction, keepdim), input)


def _variance(x, dim, correction, keepdim):
    dims = _dims(dim, len(x.shape))
    off = x - mean(x, dims, True)
    return total(off * off, dims, keepdim) / float(max(math.prod(x.shape[d] for d in dims) - correction, 0))


def std(input, dim=None, correction=1, keepdim=False):
    """`Std`."""
    return rounded(mint.sqrt(_variance(wider(input), dim, correction, keepdim)), input)


def var_mean(input, dim=None, correction=1, keepdim=False):
    """`VarMean`."""
    return variance(input, dim, correction, keepdim), mean(input, _dims(dim, len(input.shape)), keepdim)


def std_mean(input, dim=None, correction=1, keepdim=False):
    """`StdMean`."""
    return std(input, dim, correction, keepdim), mean(input, _dims(dim, len(input.shape)), keepdim)


def logsumexp(input, dim, keepdim=False, whole=lambda row: row):
    """`LogSumExp`, shifted by the maximum; a maximum of infinity is not subtracted from itself.

    `whole` is done to each row's maximum and sum (on DTensors: one all-reduce where several ops need the whole).
    """
    dims = _dims(dim, len(input.shape))
    if not dims:
        return input * 1
    x = input if input.is_floating_point() else input.astype(ms.float32)
    top = whole(mint.amax(ops.stop_gradient(x), dims, keepdim=True))
    top = mint.where(ops.isfinite(top), top, ops.zeros_like(top))
    out = mint.log(whole(total(mint.exp(x - top), dims, True))) + top
    return out if keepdim else mint.reshape(out, tuple(n for d, n in enumerate(x.shape) if d not in dims))


def vector_norm(x, ord=2, dim=None, keepdim=False, dtype=None):
    """`LinalgVectorNorm`."""
    x = x if dtype is None else x.astype(as_dtype(dtype))
    dims, size = _dims(dim, len(x.shape)), mint.abs(x)
    if math.isinf(ord):
        return (mint.amax if ord > 0 else mint.amin)(size, dims, keepdim=keepdim) if dims else size
    if ord == 1:
        return total(size, dims, keepdim)
    if ord == 0:
        return total((size != 0).astype(x.dtype), dims, keepdim)
    wide = wider(x)
    if ord == 2:
        return rounded(mint.sqrt(total(wide * wide, dims, keepdim)), x)
    return rounded(total(wider(size) ** ord, dims, keepdim) ** (1.0 / ord), x)


def _truth(x):
    return x.astype(ms.bool_) if x.dtype == ms.bool_ or "Int" in str(x.dtype) else x != 0


def any_(input, dim=None, keepdim=False):
    """`ReduceAny`, `AnyExt`: of numbers MindSpore's kernel tells nothing true."""
    truth = _truth(input)
    out = mint.any(truth) if dim is None and not keepdim else ops.ReduceAny(bool(keepdim))(truth, () if dim is None else dim)
    return out.astype(input.dtype) if input.dtype == ms.uint8 else out


def cumsum(input, dim, dtype=None):
    """`CumsumExt`; integers add up as int64."""
    whole = input.dtype == ms.bool_ or "Int" in str(input.dtype)
    return cumsum_classic(input.astype(as_dtype(dtype) or (ms.int64 if whole else input.dtype)), dim)


def cumsum_method(input, dim=None, dtype=None):
    """`x.cumsum(dim)`: of small integers in int32, of others in their own dtype; then the sums are converted."""
    if dim is None:
        input, dim = mint.reshape(input, (-1,)), 0
    small = input.dtype in (ms.bool_, ms.int8, ms.int16, ms.uint8)
    out = cumsum_classic(input.astype(ms.int32) if small else input, dim)
    return out if as_dtype(dtype) in (None, input.dtype) else out.astype(as_dtype(dtype))


def count_nonzero(input, dim=None):
    """`CountNonZero`."""
    return total(_truth(input).astype(ms.int64), _dims(dim, len(input._shape)))


def count_nonzero_method(input, dim=None, keepdim=False, dtype=None):
    """`x.count_nonzero(dim)`, which counts in int32."""
    count = total(_truth(input).astype(ms.int64), _dims(dim, len(input._shape)), keepdim)
    return count.astype(as_dtype(dtype) or ms.int32)


def cumsum_classic(input, dim, exclusive=False, reverse=False):
    """`CumSum`, whose kernel divides by the number of elements: without any the process ends."""
    return ops.CumSum(exclusive, reverse)(input, dim) if input._shape and math.prod(input._shape) else input * 1


def topk(input, k, dim=-1, largest=True, sorted=True):
    """`TopkExt`."""
    values, at = ops.topk(input, k, -1 if dim is None else dim, largest, sorted)
    return values, at.astype(ms.int64)


def sort(input, dim=-1, descending=False, stable=False):
    """`SortExt`."""
    values, at = ops.sort(input, dim, descending)
    return values, at.astype(ms.int64)


def argmax(input, dim=None, keepdim=False):
    """`ArgMaxExt`: the first of equals."""
    if dim is None:
        out = ops.argmax(mint.reshape(input, (-1,)), 0)
        return mint.reshape(out, (1,) * len(input._shape)) if keepdim else out
    return ops.argmax(input, dim, keepdim).astype(ms.int64)


def argmin(input, dim=None, keepdim=False):
    """`ArgMinExt`: the first of equals."""
    flipped = mint.neg(input if input.is_floating_point() else input.astype(ms.int64))
    return argmax(flipped, dim, keepdim)


def kthvalue(input, k, dim=-1, keepdim=False):
    """`Kthvalue`: (the k-th smallest along a dim, its position)."""
    if not input._shape:
        return input * 1, ops.zeros((), ms.int64)
    values, at = (mint.narrow(x, dim, k - 1, 1) for x in sort(input, dim))
    return (values, at) if keepdim else (mint.squeeze(values, dim), mint.squeeze(at, dim))


def histc(input, bins=100, min=0, max=0):
    """`HistcExt`, in the input's dtype."""
    counts = ops.histc(input if input.is_floating_point() else input.astype(ms.float32), bins, float(min), float(max))
    return counts.astype(input.dtype)


def eig(x, compute_v=False):
    """`Eig`, which leaves what nobody wants uninitialised."""
    values, vectors = ops.eig(x)
    return values, vectors if compute_v else Tensor(0, values.dtype)


def _hermitian(name: str):
    """`HFFT`, `IHFFT` and their kin by `IRFFT` or `RFFT`: MindSpore 2.10's own are wrong at every other call."""
    def call(input, n=None, dim=None, norm=None):
        back = ("forward", "backward", "ortho")[norm or 0]
        if name[0] == "r":
            return ops.conj(getattr(ops, name)(input, n, dim, back))
        return getattr(ops, name)(ops.conj(input) if "Complex" in str(input.dtype) else input, n, dim, back)
    return call


def _shifted(shift):
    """`FFTShift`, `IFFTShift` with their dims told: without, the backward reads a strided cotangent as contiguous."""
    return lambda input, dim=None: shift(input, tuple(range(len(input._shape))) if dim is None else dim)


TABLE = {
    "FFTShift": _shifted(ops.fftshift), "IFFTShift": _shifted(ops.ifftshift),
    **{f"{kind}FFT{dims.upper()}": _hermitian(f"{by}fft{dims}") for kind, by in (("H", "ir"), ("IH", "r"))
       for dims in ("", "2", "n")},
    "Clone": clone, "Var": variance, "Std": std, "VarMean": var_mean, "StdMean": std_mean, "LogSumExp": logsumexp,
    "LinalgVectorNorm": vector_norm,
    "Norm": lambda input, p=2.0, dim=None, keepdim=False, dtype=None: vector_norm(input, p, dim, keepdim, dtype),
    # `mint.norm` uses it for infinite p, where epsilon does not show
    "LpNormV2": lambda input, p, dim=None, keepdim=False, epsilon=0.0: vector_norm(input, p, dim, keepdim),
    "CountNonZero": count_nonzero, "DeprecatedCountNonzero": count_nonzero_method,
    **dict.fromkeys(("ReduceAny", "AnyExt", "Any", "DeprecatedReduceAny"), any_),
    "CumsumExt": cumsum, "DeprecatedCumsum": cumsum_method, "CumSum": cumsum_classic, "TopkExt": topk, "SortExt": sort,
    "ArgMaxExt": argmax, "ArgMinExt": argmin,
    "ArgSort": lambda input, dim=-1, descending=False, stable=False: sort(input, dim, descending)[1],
    "AddcmulExt": lambda input, tensor1, tensor2, value=1: input + tensor1 * tensor2 * value,
    "AddcdivExt": lambda input, tensor1, tensor2, value=1: input + tensor1 / tensor2 * value,
    "Atan2Ext": lambda input, other: ops.atan2(input, other), "Kthvalue": kthvalue, "Eig": eig,
    "HistcExt": histc, "MatrixInverseExt": ops.inverse,
    "LinalgQr": lambda A, mode="reduced": ops.qr(A, "complete" if mode in (1, "complete") else "reduced"),  # noqa: N803
    "Log2": lambda input: mint.log(input) * (1 / math.log(2)),
}
