# SPDX-License-Identifier: Apache-2.0
"""Ops that no single local call can compute on shards, written as several DTensor ops that can.

A variance over a sharded dim is no sum of the shards' variances; from a mean and a sum of squares it is exact, and only
those small results travel. Dispatch asks `COMPOSED` before it plans a call: where `when` says that the op's own rule
would have to gather a dim, `run` makes the same call out of public ops, each dispatched with its own rule and gradient.
Invariant: `when` looks at layouts and static arguments only, so every rank decides alike; on plain tensors `run` equals
the op, which `verify` checks for every call that can be composed.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import mint, ops

from .faces import redistribute
from .layout import Layout
from .local_ops import cpu_math
from .placements import REPLICATE
from .rules.loss import reduction_of
from .rules.spec import Call, dims_of


class Composed(NamedTuple):
    """`when(call, layouts)` chooses it; `run(primitive name, **arguments)` gives what the primitive gives."""

    when: Callable[[Call, tuple[Layout, ...]], bool]
    run: Callable[..., Any]


def _reduces_sharded(default=None):
    def when(call: Call, layouts) -> bool:
        x = call.args["input"]
        axes = layouts[x.index].dim_axes
        return 0 not in x.shape and any(axes[d] for d in dims_of(call.args.get("dim", default), x.ndim) if x.shape)
    return when


def _settled(x):
    """A row's total as every rank needs it next: one all-reduce, where op by op it would be scattered and gathered."""
    layout = getattr(x, "_layout", None)
    if layout is None or not layout.partial_axes:
        return x
    placed = [REPLICATE if p.is_partial() else p for p in layout.placements]
    return redistribute(x, layout.with_placements(placed, layout.order), implicit=True)


def _floating(x):
    return x if x.is_floating_point() else x.astype(ms.float32)


def variance(name, input, dim=None, correction=None, keepdim=False, **_):
    """`Var`, `Std` and their NumPy forms, whose correction is 0 by default."""
    correction = (0 if name.startswith("Deprecated") else 1) if correction is None else correction
    return (cpu_math.std if name.endswith("Std") else cpu_math.variance)(_floating(input), dim, correction, keepdim)


def variance_mean(name, input, dim=None, correction=1, keepdim=False, **_):
    """`VarMean`, `StdMean`."""
    return (cpu_math.std_mean if name == "StdMean" else cpu_math.var_mean)(input, dim, correction, keepdim)


def reduce_std(name, input, dim=None, unbiased=True, keepdim=False, **_):
    """`ReduceStd`: (standard deviation, mean)."""
    return cpu_math.std_mean(input, dim, int(unbiased), keepdim)


def vector_norm(name, input, p=2.0, dim=None, keepdim=False, dtype=None, **_):
    """`LinalgVectorNorm`, `Norm`."""
    return cpu_math.vector_norm(input, p, dim, keepdim, dtype)


def _norm_needs_sums(call: Call, layouts) -> bool:
    return call.get("p", 2) not in (0, 1, float("inf"), -float("inf")) and _reduces_sharded()(call, layouts)


def logsumexp(name, input, dim, keepdim=False, **_):
    """`LogSumExp`."""
    return cpu_math.logsumexp(input, dim, keepdim, _settled)


def _shifted(x, dim):
    """`x` minus its maximum along `dim`, which carries no gradient."""
    return x - ops.stop_gradient(_settled(mint.amax(x, dim, keepdim=True)))


def softmax(name, input, dim=-1, **_):
    """`Softmax` over a sharded dim: only the maxima and the sums travel."""
    dims = dims_of(dim, len(input.shape))
    e = mint.exp(_shifted(input, dims))
    return e / _settled(mint.sum(e, dims, keepdim=True))


def log_softmax(name, input, dim=-1, dtype=None, **_):
    """`LogSoftmax`, `LogSoftmaxExt`."""
    x = input if dtype is None else input.astype(cpu_math.as_dtype(dtype))
    if dim is None:
        dim = 0 if len(x.shape) in (1, 3) else 1
    off = _shifted(x, (dim,))
    return off - mint.log(_settled(mint.sum(mint.exp(off), (dim,), keepdim=True)))


def _log_softmax_sharded(call: Call, layouts) -> bool:
    x, dim = call.args["input"], call.args.get("dim", -1)
    dim = (0 if x.ndim in (1, 3) else 1) if dim is None else dim
    return 0 not in x.shape and bool(x.shape) and bool(layouts[x.index].dim_axes[dim % x.ndim])


def nll_loss(name, input, target, weight=None, reduction=1, ignore_index=-100, **_):
    """`NLLLoss`, `NLLLoss2d`: (loss, sum of weights); ignored targets have weight 0, and weights no gradient."""
    classes = 0 if len(input.shape) == 1 else 1
    ignored = target == ignore_index
    known = target * mint.logical_not(ignored).astype(target.dtype)
    loss = mint.squeeze(mint.gather(input, classes, mint.unsqueeze(known, classes).astype(ms.int64)), classes)
    w = ops.ones_like(loss) if weight is None else ops.gather(ops.stop_gradient(weight), known, 0)
    w = w.masked_fill(ignored, 0.0)
    loss = -loss.masked_fill(ignored, 0.0) * w
    kind = reduction_of(Call("nll_loss", {"reduction": reduction}, ()))
    if kind == "none":
        return loss, w.sum() * 0
    return (loss.sum() / w.sum() if kind == "mean" else loss.sum()), w.sum()


def _nll_sharded(call: Call, layouts) -> bool:
    x, t = call.args["input"], call.args["target"]
    if not x.shape or 0 in x.shape:
        return False
    classes = layouts[x.index].dim_axes[0 if x.ndim == 1 else 1]
    batch = any(a for o in (x, t) for a in layouts[o.index].dim_axes)
    return bool(classes) or (batch and reduction_of(call) == "mean")


def batch_norm(name, input, weight=None, bias=None, running_mean=None, running_var=None, training=False,
               momentum=0.1, eps=1e-5, extents=None, **_):
    """Training `BatchNorm` and `BatchNormExt`: statistics of the whole batch; running ones are written in place.

    `extents`: the shape to go by, where that is a shard's and not the global one.
    """
    extents = input.shape if extents is None else extents
    dims = tuple(d for d in range(len(extents)) if d != 1)
    shape, flat = tuple(n if d == 1 else 1 for d, n in enumerate(extents)), (extents[1],)
    count = math.prod(extents[d] for d in dims)
    middle = cpu_math.mean(input, dims, True)
    off = input - middle
    var = cpu_math.mean(off * off, dims, True)
    scale = mint.rsqrt(var + eps)
    out = off * scale
    if weight is not None:
        out = out * mint.reshape(weight, shape)
    if bias is not None:
        out = out + mint.reshape(bias, shape)
    for held, now in ((running_mean, middle), (running_var, var * (count / max(count - 1, 1)))):
        if held is not None:
            now = ops.stop_gradient(mint.reshape(now, flat))
            held.copy_(held * (1 - momentum) + now * momentum)
    if name == "BatchNormExt":
        return out, mint.reshape(middle, flat), mint.reshape(scale, flat)
    middle, var = mint.reshape(middle, flat), mint.reshape(var, flat)
    return out, middle * 0, middle * 0, middle, var


def _batch_norm_moves(call: Call, layouts) -> bool:
    """In training, unless every axis shards the channels of all operands, or nothing."""
    x = call.args["input"]
    if not call.get("training") or 0 in x.shape:
        return False
    for axis in range(layouts[0].mesh.ndim):
        placed = [layouts[o.index].placements[axis] for o in call.operands]
        alike = all(p.is_shard(1 if o.index == x.index else 0) for o, p in zip(call.operands, placed))
        if not alike and not all(p.is_replicate() for p in placed):
            return True
    return False


COMPOSED: dict[str, Composed] = {
    "var": Composed(_reduces_sharded(), variance), "var_mean": Composed(_reduces_sharded(), variance_mean),
    "reduce_std": Composed(_reduces_sharded(), reduce_std),
    "vector_norm": Composed(_norm_needs_sums, vector_norm), "logsumexp": Composed(_reduces_sharded(), logsumexp),
    "softmax": Composed(_reduces_sharded(-1), softmax), "log_softmax": Composed(_log_softmax_sharded, log_softmax),
    "nll_loss": Composed(_nll_sharded, nll_loss),
    "batch_norm": Composed(_batch_norm_moves, batch_norm), "batch_norm_ext": Composed(_batch_norm_moves, batch_norm),
}
