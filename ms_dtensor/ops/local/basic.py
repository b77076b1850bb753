# SPDX-License-Identifier: Apache-2.0
"""Local forms of views, lookups, means and biases. Ordinary differentiable functions of plain local tensors.

Rules name these by string, so that rules need no MindSpore. An unused bias stays connected, or its gradient's
collective would run on some ranks only.
"""
from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, mint, ops

from ...internals.names import Function, recording
from ...internals.target import on_cpu
from ...redistribute.execute import among_zeros
from .dtypes import as_dtype, full, rounded, wider
from .run import zeros_of


class _Piece(Function):
    """Indices from start to stop along each dim; unlike narrow's, its backward does not ask for an `x` unwritten since."""

    @staticmethod
    def forward(ctx, x, bounds):
        ctx.bounds, ctx.extents = bounds, x._shape
        for d, (lo, hi, _) in enumerate(bounds):
            x = mint.narrow(x, d, lo, hi - lo)
        return x.copy()

    @staticmethod
    def backward(ctx, grad):
        for d, ((lo, hi, _), n) in enumerate(zip(ctx.bounds, ctx.extents)):
            if hi - lo < n:
                grad = among_zeros(grad, d, lo, hi, n)
        return grad, None


def slice_(x, bounds, drop):
    """Basic indexing by (start, stop, step) per dim; `drop` are dims indexed by an integer."""
    if recording() and x._requires_grad and all(step == 1 and lo < hi for lo, hi, step in bounds) and 0 not in x._shape:
        if any(hi - lo < n for (lo, hi, _), n in zip(bounds, x._shape)):
            x = _Piece.apply(x, bounds)
        bounds = ()
    for d, (lo, hi, step) in enumerate(bounds):
        n = x._shape[d]
        if step == 1:
            if (lo, hi) != (0, n):
                x = mint.narrow(x, d, lo, max(hi - lo, 0))
        elif not (picked := range(lo, hi, step)) or 0 in x._shape:  # the backward of gather on CPU refuses to do nothing
            x = mint.narrow(x, d, 0, len(picked))
        else:
            x = ops.gather(x, Tensor(list(picked), ms.int32), d)
    if drop:
        x = mint.reshape(x, tuple(n for d, n in enumerate(x._shape) if d not in drop))
    return x


def mean_of_shard(x, dims, keepdim, count, dtype):
    """This shard's summand of a global mean over `count` elements."""
    if dtype is not None:
        x = x.astype(as_dtype(dtype))
    return rounded(wider(x).sum(dims, keepdim=keepdim) / (count or float("nan")), x)  # a factor would be float32


def softmax_of_one(x):
    """1 for each number, NaN for what is none."""
    return mint.exp(x - x)


def linear_bias_once(x, w, b, share):
    """Linear with a bias that counts only where `share` is 1: the summands of a contraction over shards, or of nothing."""
    if not x._shape[-1]:
        return zeros_of((x, w), (*x._shape[:-1], *w._shape[:-1])) + b * share
    return mint.nn.functional.linear(x, w) + b * share


def bias_once(x, b, share):
    """Bias along dim 1, counted only where `share` is 1."""
    return ops.bias_add(x, b * share)


class TakenOnce(Function):
    """`x` on the one rank that takes it in, zeros elsewhere; its cotangent, whole on each rank, is that of what it is in."""

    @staticmethod
    def forward(ctx, x, mine, zero):
        ctx.mine = mine
        return x if mine else full(x._shape, zero if x.is_floating_point() else 0, x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return CotangentOfAll.apply(grad, ctx.mine) if recording() else grad, None, None


class CotangentOfAll(Function):
    """The transpose of `TakenOnce`, to be differentiated again: the cotangent as it is, whose own is taken in once."""

    @staticmethod
    def forward(ctx, grad, mine):
        ctx.mine = mine
        return grad * 1

    @staticmethod
    def backward(ctx, grad):
        return TakenOnce.apply(grad, ctx.mine, 0.0), None


def _taken_once(tensors, once, zeros):
    return [x if mine is None else TakenOnce.apply(x, mine, zero) for x, mine, zero in zip(tensors, once, zeros)]


def added_once(x, y, op, alpha, once):
    """`x + alpha * y` or `x - alpha * y`, of a summand and a whole value that one rank alone adds."""
    zeros = -0.0, -0.0 if (alpha > 0) == (op == "add") else 0.0  # what leaves -0.0 as it is
    x, y = _taken_once((x, y), once, zeros)
    fn = getattr(mint, op)
    return fn(x, y) if alpha == 1 else fn(x, y, alpha=alpha)


def joined_once(op, tensors, dim, once):
    """`cat` or `stack` of summands and whole values that one rank alone takes in."""
    tensors = _taken_once(tensors, once, (-0.0,) * len(tensors))
    return mint.cat(tensors if op == "cat" else [mint.unsqueeze(t, dim) for t in tensors], dim)


def clone(input):
    """A copy; MindSpore has no Clone kernel on CPU."""
    if input.dtype == ms.bool_:
        return mint.logical_not(mint.logical_not(input))
    return input * 1


def masked_fill(x, mask, value):
    """A number where the mask holds. Made where the tensor is: MindSpore copies it there from the host at every call."""
    return Tensor.masked_fill(x, mask, value) if on_cpu() else ops.masked_fill(x, mask, full((), value, x.dtype))


def logcumsumexp(input, dim, exclusive=False, reverse=False):
    """Logarithms of running sums of exponentials, of a dim that is a number: as the class would, which asks for DTensors."""
    op = ops.CumulativeLogsumexp(exclusive, reverse)
    return ops.Primitive.__call__(op, input, Tensor(dim)) if 0 not in input._shape else input * 1


TABLE = {
    "reshape": Tensor.reshape, "broadcast_to": mint.broadcast_to, "slice": slice_,  # to the local shape
    "mean_of_shard": mean_of_shard, "softmax_of_one": softmax_of_one,
    "linear_bias_once": linear_bias_once, "bias_once": bias_once, "clone": clone,
    "masked_fill": masked_fill, "added_once": added_once, "joined_once": joined_once,
    "logcumsumexp": logcumsumexp,
    "tril": ops.tril, "triu": mint.triu,  # with the diagonal shifted by the shard's offset
}
