# SPDX-License-Identifier: Apache-2.0
"""Chooses, axis by axis, the cheapest legal case of a call; pure.

Axes are decided one after another, in mesh order, so no product over axes is ever enumerated. Cost of a case on an
axis: what it takes to bring each operand's placement on that axis to the case's, in seconds of the cost model; ties
go to fewer collectives, then to fewer changed operands, then to the order in which the rule lists its cases.
A case's `S(d)` matches any way of cutting dim d: where an operand is cut in a way of its own, each case is also tried
with that way in all its operands and results, after the plain one. A `FusedShard` is no run of rows, so it stays only
where the local form works row by row and nowhere asks which rows they are.
Invariant: the choice depends on layouts and static arguments only, so every rank makes the same one.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from ...core.layout import Layout
from ...core.placements import Placement, Shard
from ...errors import OpRuleError
from ...redistribute.cost import CostModel, costs, nbytes, shard_bytes
from .spec import REPLICATE, Call, Case, OpSpec


class Result(NamedTuple):
    """The layout of a result, before anyone knows its dtype; `shape` is None where only the local result tells."""

    placements: tuple[Placement, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Choice:
    """The layout each operand must have, axes on which each is varying, the results, and the case of each axis."""

    targets: tuple[Layout, ...]
    own: tuple[tuple[int, ...], ...]
    outs: tuple[Result, ...]
    cases: tuple[Case, ...]


def choose(call: Call, spec: OpSpec, layouts: tuple[Layout, ...], keep: bool = False, no_gather: bool = False) -> Choice:
    """The cheapest legal case per axis.

    Args:
        call: the call.
        spec: what its rule says.
        layouts: of the operands.
        keep: the first operand is written: it stays where it is, and the result is there too.
        no_gather: to gather a sharded dim of logits is the last resort, however little there is to move. So is to cut
            another dim in the place of one of size 1: of a batch of one row attention gathers it, which is refused then.

    Raises:
        OpRuleError: an operand is not whole where the result's shape depends on data, or a dim is cut that must not be;
            one is Partial with a reduction that cannot be finished (never for the built-in ones), or a written operand
            cannot stay.
    """
    mesh = layouts[0].mesh
    if spec.by_data and not all(x.is_whole() for x in layouts):
        raise OpRuleError(f"For '{call.op}', an operand is not whole on every rank.",
                          "\n".join(x.describe() for x in layouts),
                          "The shape of the result depends on data, and a rank knows a part of it.",
                          _WHOLE)
    cut = [d for d in spec.uncut if any(mesh.shape[a] > 1 for a in layouts[0].dim_axes[d])]
    if cut:
        free = [d for d in range(len(layouts[0].shape)) if d not in spec.uncut]
        raise OpRuleError(f"For '{call.op}', dim {cut[0]} is worked on, and it is cut.", layouts[0].describe(),
                          "Each number of the result depends on all numbers along the dim, so one rank has to hold them; "
                          "to gather them is left to you.",
                          (*(f"x.redistribute(...) to Shard({d}) in its place: dim {d} is not worked on" for d in free[:1]),
                           "x.redistribute(placements=[Replicate()] * mesh.ndim), if the whole fits on a rank"))
    whole = Case((REPLICATE,) * len(layouts), (REPLICATE,) * len(spec.shapes))
    cases = (*spec.cases, whole) if whole not in spec.cases else spec.cases
    chosen: list[Case] = []
    model = costs(mesh.device_type)
    sizes = [shard_bytes(x) for x in layouts]
    split: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}  # (operand, dim) -> how many shards, and parts
    fused = any(p.parts for x in layouts for p in x.placements)
    for axis in range(mesh.ndim):
        n = mesh.shape[axis]
        best, best_cost = None, None
        special = {p.with_dim(0): None for x in layouts if (p := x.placements[axis]).__class__ is not Shard and p.is_shard()}
        # a rule's own case by parts is for who is cut so; nothing is moved to it: plain cuts go the ways they went before
        offered = [c for c in cases if all(not p.parts or p == x.placements[axis] for p, x in zip(c.ins, layouts))]
        ways = (*offered, *(c.cut_like(p) for p in special for c in offered if not p.parts or _row_by_row(spec, c)))
        for i, case in enumerate(ways if special else offered):
            if fused and not _fits(case, layouts, spec, split, n):
                continue
            if any(extent % (split.get((o, d), (1, ()))[0] * n) for o, d, extent in case.even):
                continue
            if keep and not case.ins[0] == case.outs[0] == layouts[0].placements[axis]:
                continue
            cost = _cost(case, layouts, sizes, axis, n, model, no_gather)
            if cost is not None and (best_cost is None or (*cost, i) < best_cost):
                best, best_cost = case, (*cost, i)
        if best is None and keep:
            raise OpRuleError(f"For in-place '{call.op}', the target would have to change its placement.",
                              ", ".join(x.describe() for x in layouts), "An in-place op leaves its target where it is; "
                              f"on axis {mesh.mesh_dim_names[axis]!r} no case does.",
                              ("redistribute the target first", "work out of place"))
        if best is None:
            raise OpRuleError(f"For '{call.op}', no case fits on axis {mesh.mesh_dim_names[axis]!r}.",
                              ", ".join(x.describe() for x in layouts))
        chosen.append(best)
        for o, p in enumerate(best.ins):
            if p.is_shard() and n > 1:
                split[o, p.dim] = split.get((o, p.dim), (1, ()))[0] * n, p.parts
    order = layouts[0].order if keep else _order(layouts, chosen)
    targets = tuple(x.with_placements([c.ins[o] for c in chosen], order) for o, x in enumerate(layouts))
    own = tuple(tuple(a for a, c in enumerate(chosen)
                      if c.ins[o].is_replicate() and o not in c.invariant and any(not p.is_replicate() for p in c.ins))
                for o in range(len(layouts)))
    outs = tuple(Result(tuple(c.outs[j] for c in chosen), order, shape) for j, shape in enumerate(spec.shapes))
    return Choice(targets, own, outs, tuple(chosen))


def _row_by_row(spec: OpSpec, case: Case) -> bool:
    return (spec.local is None or spec.any_rows) and spec.winners is None and not case.even


def _fits(case: Case, layouts, spec: OpSpec, split, n: int) -> bool:
    """Whether a dim that is cut part by part stays one that its parts fill, and that no other axis cuts otherwise."""
    for o, p in enumerate(case.ins):
        if p.parts and layouts[o].shape[p.dim] != sum(p.parts):
            return False
        before, by = split.get((o, p.dim), (1, ())) if p.is_shard() and n > 1 else (1, p.parts)
        if before > 1 and by != p.parts or before > 1 and any(m % (before * n) for m in p.parts):
            return False
    return all(not p.parts or shape is not None and shape[p.dim] == sum(p.parts) for p, shape in zip(case.outs, spec.shapes))


def _cost(case: Case, layouts, sizes, axis: int, n: int, model: CostModel, no_gather: bool):
    seconds, collectives, changed = 0.0, 0, 0
    for layout, size, want in zip(layouts, sizes, case.ins):
        have = layout.placements[axis]
        if have is want or have == want:
            continue
        if want.is_partial():
            return None
        changed += 1
        if no_gather and n > 1 and have.is_shard() and (
                gathers(layout, have.dim) or layout.shape[have.dim] == 1 and want.is_shard()):
            seconds = inf
        after = size * n if have.is_shard() and not want.is_shard() else \
            size // n if want.is_shard() and not have.is_shard() else size
        kind = _MOVE[have._letter + want._letter]
        collectives += kind != "cut"
        seconds += model.seconds(kind, n, size, after)
    return seconds, collectives, changed


def gathers(layout: Layout, dim: int) -> bool:
    """Whether to make a dim whole is to gather logits: any dim but the first of a float tensor may be their classes."""
    return dim > 0 and layout.shape[dim] > 1 and "float" in layout.dtype


_WHOLE = ("x.redistribute(placements=[Replicate()] * mesh.ndim), then the result is the same on every rank",
          "work on shapes that are known: where(mask, x, 0), masked_fill, topk, count_nonzero",
          "x.full_tensor(), to work on plain tensors")
_MOVE = {"SR": "all_gather", "PR": "all_reduce", "PS": "reduce_scatter", "SS": "all_to_all", "RS": "cut"}


def _order(layouts, chosen) -> tuple[int, ...]:
    """Axis order for all operands and results: that of the largest operand whose multiply split dims stay put."""
    default = tuple(range(layouts[0].mesh.ndim))
    best = None
    for o, layout in enumerate(layouts):
        several = [axes for axes in layout.dim_axes if len(axes) > 1]
        stays = all(chosen[a].ins[o] == layout.placements[a] for axes in several for a in axes)
        if several and stays:
            weight = nbytes(layout.shape, layout.dtype)
            if best is None or weight > best[0]:
                best = weight, layout.order
    return default if best is None else best[1]
