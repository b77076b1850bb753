# SPDX-License-Identifier: Apache-2.0
"""Ops that no single local call can compute on shards, written as several DTensor ops that can.

A variance over a sharded dim is no sum of the shards' variances; from a mean and a sum of squares it is exact, and only
those small results travel. Dispatch asks `COMPOSED` before it plans a call: where `when` says that the op's own rule
would have to gather a dim, `run` makes the same call out of public ops, each dispatched with its own rule and gradient.
Invariant: `when` looks at layouts and static arguments only, so every rank decides alike; on plain tensors `run` equals
the op, which `verify` checks for every call that can be composed.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import mint, ops

from ..core.layout import Layout
from ..errors import OpRuleError
from ..ops.local import cpu_math
from ..ops.local.composites import batch_norm, nll_loss
from ..ops.rules.loss import reduction_of
from ..ops.rules.spec import Call, default_softmax_dim, dims_of
from .operands import redistribute


class Composed(NamedTuple):
    """`when(call, layouts)` chooses it; `run(primitive name, **arguments)` gives what the primitive gives."""

    when: Callable[[Call, tuple[Layout, ...]], bool]
    run: Callable[..., Any]


def _reduces_sharded(call: Call, layouts) -> bool:
    x, dim = call.args["input"], call.args.get("dim", -1 if "softmax" in call.op else None)
    if dim is None and call.op == "log_softmax":
        dim = default_softmax_dim(x.ndim)
    axes = layouts[x.index].dim_axes
    return 0 not in x.shape and any(axes[d] for d in dims_of(dim, x.ndim) if x.shape)


def _varies_sharded(call: Call, layouts) -> bool:
    """Not of integers, whose mean MindSpore rounds."""
    return "float" in call.args["input"].dtype and _reduces_sharded(call, layouts)


def _reduce_partial(x):
    """A row's total as every rank needs it next: one all-reduce, where op by op it would be scattered and gathered."""
    layout = getattr(x, "_layout", None)
    if layout is None or not layout.partial_axes:
        return x
    return redistribute(x, layout.reduced(), implicit="a composed op")


def variance(name, input, dim=None, correction=None, keepdim=False, **_):
    """`Var`, `Std` and their NumPy forms, whose correction is 0 by default."""
    correction = (0 if name.startswith("Deprecated") else 1) if correction is None else correction
    return (cpu_math.std if name.endswith("Std") else cpu_math.variance)(input, dim, correction, keepdim)



def _top(x, dim):
    """The maximum of `x` along `dim`, which carries no gradient."""
    return _reduce_partial(mint.amax(ops.stop_gradient(x), dim, keepdim=True))


def softmax(name, input, dim=-1, **_):
    """`Softmax` over a sharded dim: only the maxima and the sums travel.

    Of a row of -inf one device makes zeros in float32 over the last dim, and NaN elsewhere.
    """
    dims = dims_of(dim, len(input.shape))
    top, dead = _top(input, dims), None
    if dims == (len(input.shape) - 1,) and input.dtype in (ms.float32, ms.bfloat16):
        dead = top == float("-inf")
        top = top.masked_fill(dead, 0.0)
    e = mint.exp(input - top)
    total = _reduce_partial(mint.sum(e, dims, keepdim=True))
    return e / (total if dead is None else total.masked_fill(dead, 1.0))


def log_softmax(name, input, dim=-1, dtype=None, **_):
    """`LogSoftmax`, `LogSoftmaxExt`."""
    x = input if dtype is None else input.astype(cpu_math.as_dtype(dtype))
    dim = default_softmax_dim(len(x.shape)) if dim is None else dim
    off = x - _top(x, (dim,))
    return off - mint.log(_reduce_partial(mint.sum(mint.exp(off), (dim,), keepdim=True)))


def one_hot(name, index, depth, on=1, off=0, dim=-1, **_):
    """`OneHotExt` without a number of classes: the largest label of all shards says it, and only that one travels."""
    if name != "OneHotExt":
        raise OpRuleError(f"For 'one_hot', the number of classes is {depth}.", "", "Only mint's one_hot counts them itself.",
                          ("pass num_classes", "mint.nn.functional.one_hot(ids, -1)"))
    index = _reduce_partial(index)
    top = _reduce_partial(mint.amax(index))
    return ops.one_hot(index, int(top.item()) + 1, on, off, dim)


def _nll_sharded(call: Call, layouts) -> bool:
    x, t = call.args["input"], call.args["target"]
    if not x.shape or 0 in x.shape:
        return False
    classes = layouts[x.index].dim_axes[0 if x.ndim == 1 else 1]
    batch = any(a for o in (x, t) for a in layouts[o.index].dim_axes)
    return bool(classes) or (batch and reduction_of(call) == "mean")


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


def _norm_needs_sums(call: Call, layouts) -> bool:
    return call.get("p", 2) not in (0, 1, float("inf"), -float("inf")) and _reduces_sharded(call, layouts)


COMPOSED: dict[str, Composed] = {
    "var": Composed(_varies_sharded, variance),
    "var_mean": Composed(_reduces_sharded, lambda name, input, dim=None, correction=1, keepdim=False, **_: (
        cpu_math.std_mean if name == "StdMean" else cpu_math.var_mean)(input, dim, correction, keepdim)),
    "reduce_std": Composed(_reduces_sharded, lambda name, input, dim=None, unbiased=True, keepdim=False, **_:
                           cpu_math.std_mean(input, dim, int(unbiased), keepdim)),
    "vector_norm": Composed(_norm_needs_sums, lambda name, input, p=2.0, dim=None, keepdim=False, dtype=None, **_:
                            cpu_math.vector_norm(input, p, dim, keepdim, dtype)),
    "logsumexp": Composed(_reduces_sharded, lambda name, input, dim, keepdim=False, **_:
                          cpu_math.logsumexp(input, dim, keepdim, _reduce_partial)),
    "one_hot": Composed(lambda call, layouts: call.args["depth"] == -1, one_hot),
    "softmax": Composed(_reduces_sharded, softmax), "log_softmax": Composed(_reduces_sharded, log_softmax),
    "nll_loss": Composed(_nll_sharded, nll_loss),
    "batch_norm": Composed(_batch_norm_moves, batch_norm), "batch_norm_ext": Composed(_batch_norm_moves, batch_norm),
}
