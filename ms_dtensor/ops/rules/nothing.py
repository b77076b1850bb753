# SPDX-License-Identifier: Apache-2.0
"""What a rank runs of a call, and what it makes of it where there is nothing to compute: dims or shards without elements.

MindSpore 2.10's CPU kernels answer a reduction or contraction over no elements with uninitialised memory, another on
each rank, and so do the backwards of calls without results. Such a call runs on stand-ins, its results are filled with
the neutral element of what it computes, and its gradients are zeros. An extreme of nothing is refused, as by MindSpore.
"""
from __future__ import annotations

from math import inf, isnan, nan, prod

from ...core.layout import Layout
from ...core.placements import REPLICATE
from ...errors import OpRuleError
from .loss import reduction_of
from .spec import Call, EmptyShard, Local, LocalCall, OpSpec, kind

_DIVIDES = frozenset(("div", "floor_divide", "remainder", "fmod"))
_NEUTRAL = {"sum": 0, "avg": 0, "max": -inf, "min": inf, "prod": 1}
_OF_NOTHING = {
    **dict.fromkeys(("sum", "nansum", "count_nonzero", "matmul", "einsum", "trace", "lp_norm", "any"), 0),
    **dict.fromkeys(("mean", "var", "var_mean", "reduce_std", "sparse_softmax_cross_entropy"), nan),
    "prod": 1, "all": 1, "equal": 1, "logsumexp": -inf,
}
_NO_ANSWER = frozenset("max min first_max first_min max_dim argmax argmax_classic argmax_method extreme_with_index "
                       "median median_classic".split())
_LOSSES = frozenset("mse_loss l1_loss smooth_l1_loss soft_margin_loss binary_cross_entropy bce_with_logits kl_div "
                    "kl_div_classic nll_loss".split())

Fills = tuple[tuple[tuple[int, ...], float | None], ...]


def local_part(call: Call, spec: OpSpec, at: Local) -> tuple[LocalCall | None, EmptyShard | None]:
    """What the rank at a coordinate runs, and what it makes of it where its shards are empty."""
    if spec.shape_only:
        at = Local(tuple(x.with_placements([REPLICATE] * x.mesh.ndim) if i in spec.shape_only else x
                         for i, x in enumerate(at.ins)), at.outs, at.coordinate)
    empty, results = None, results_of_nothing(call, at)
    # a kernel can reduce one element, and differentiate that
    extended = results is not None and (call.op in _OF_NOTHING or any(prod(x.shape) for x in at.outs))
    sharded = results is None
    results = empty_results(at) if sharded else results
    if results is not None:
        at = Local(at.ins, at.outs, at.first(range(at.ins[0].mesh.ndim)))
        whole = int(call.op in _DIVIDES)  # elsewhere an integer may be an index, and there is always a first row
        shapes = [tuple(max(n, 1) if extended else n for n in at.in_shape(i)) for i in range(len(at.ins))]
        made = tuple((shape, 1 if kind(x.dtype) > 1 else whole) for shape, x in zip(shapes, at.ins))
        promised = tuple(at.out_shape(i) for i in range(len(at.outs))) if sharded else None
        empty = EmptyShard(made, results, promised)
    return (None if spec.local is None else spec.local(at)), empty


def has_empty_shard(layout: Layout) -> bool:
    """Whether some rank holds no element of a tensor that has some."""
    return bool(prod(layout.shape)) and any(0 in extents for extents in _local_extents(layout))


def has_thin_shard(layout: Layout) -> bool:
    """Whether some rank holds one index, or none, of a dim that has several: there any order of dims is contiguous."""
    return any(n > 1 and min(extents) < 2 for n, extents in zip(layout.shape, _local_extents(layout)))


def _local_extents(layout: Layout):
    for extent, axes in zip(layout.shape, layout.dim_axes):
        extents = {extent}
        for a in axes:
            extents = {hi - lo for n in extents for lo, hi in layout.placements[a].bounds(n, layout.mesh.shape[a])}
        yield extents


def empty_results(at: Local) -> Fills | None:
    """(local shape, fill value) per result where this rank has nothing to compute, else None.

    That is where sharding left an operand without elements, or the rank is outside the mesh: each result is empty too, or
    this rank's share of a reduction, its neutral element. One replicated beside empty ones depends on no element.
    """
    if at.coordinate is None:
        return tuple(((0,) * len(layout.shape), 0) for layout in at.outs)
    if not at.is_empty(at.coordinate):
        return None
    out = []
    for layout in at.outs:
        shape = layout.local_shape(at.coordinate)
        kinds = {layout.placements[a].reduce_op for a in layout.partial_axes}
        whole = bool(prod(shape)) and not kinds
        if whole and not layout.is_replicated():
            return None
        out.append((shape, None if whole else _NEUTRAL[min(kinds, default="sum")]))
    return None if all(value is None for _, value in out) else tuple(out)


def results_of_nothing(call: Call, at: Local) -> Fills | None:
    """The same where one device has nothing to compute either, or has it from operands without elements.

    Raises:
        OpRuleError: an extreme of nothing, or an integer mean of it.
    """
    shapes = [layout.local_shape(at.coordinate) for layout in at.outs]
    if call.operands and not any(prod(layout.shape) for layout in at.outs):
        return tuple((shape, 0) for shape in shapes)
    if all(prod(x.shape) for x in call.operands):
        return None
    value = _of_nothing(call)
    integer = "int" in call.operands[0].dtype
    if call.op in _NO_ANSWER or value is not None and (value == inf or (integer and isnan(value))):
        raise OpRuleError(f"For '{call.op}', there is nothing to take it of.", "\n".join(x.describe() for x in at.ins),
                          "A dim that it reduces has no elements; it has no neutral element.", "check the global shape")
    return None if value is None else tuple((shape, value) for shape in shapes)


def _of_nothing(call: Call) -> float | None:
    """What the op gives for no elements; None: it works without them, inf: there is no answer."""
    if call.op in _LOSSES:
        made = call.args.get("attrs", {}).get("reduction")
        return {"sum": 0, "none": None}.get(made or reduction_of(call), nan)
    if call.op == "vector_norm":
        return 0 if 0 <= float(call.get("p", 2)) < inf else inf
    if call.op == "linear":
        return 0 if call.get("bias") is None else None
    return _OF_NOTHING.get(call.op)
