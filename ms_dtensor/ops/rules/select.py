# SPDX-License-Identifier: Apache-2.0
"""Chooses, axis by axis, the cheapest legal case of a call; pure.

Axes are decided one after another, in mesh order, so no product over axes is ever enumerated. Cost of a case on an
axis: what it takes to bring each operand's placement on that axis to the case's, in seconds of the cost model; ties
go to fewer collectives, then to fewer changed operands, then to the order in which the rule lists its cases.
Invariant: the choice depends on layouts and static arguments only, so every rank makes the same one.
"""
from __future__ import annotations

from dataclasses import dataclass

from ...core.layout import Layout
from ...core.placements import Partial, Placement
from ...errors import OpRuleError
from ...redistribute.cost import CostModel, costs, nbytes
from .spec import REPLICATE, Call, Case, OpSpec


@dataclass(frozen=True, slots=True)
class Choice:
    """Target layout of each operand, axes on which each shows its varying face, and placements + order of each result."""

    targets: tuple[Layout, ...]
    own: tuple[tuple[int, ...], ...]
    outs: tuple[tuple[tuple[Placement, ...], tuple[int, ...], tuple[int, ...]], ...]
    cases: tuple[Case, ...]


def choose(call: Call, spec: OpSpec, layouts: tuple[Layout, ...], keep: bool = False) -> Choice:
    """The cheapest legal case per axis.

    Args:
        call: the call.
        spec: what its rule says.
        layouts: of the operands.
        keep: the first operand is written: it stays where it is, and the result is there too.

    Raises:
        OpRuleError: an operand is Partial with a reduction that cannot be finished (never for the built-in ones), or
            a written operand cannot stay.
    """
    mesh = layouts[0].mesh
    whole = Case((REPLICATE,) * len(layouts), (REPLICATE,) * len(spec.shapes))
    cases = (*spec.cases, whole) if whole not in spec.cases else spec.cases
    chosen: list[Case] = []
    model = costs(mesh.device_type)
    sizes = [nbytes(x.local_shape((0,) * mesh.ndim), x.dtype) for x in layouts]
    split: dict[tuple[int, int], int] = {}  # (operand, dim) -> into how many shards, by the axes decided so far
    for axis in range(mesh.ndim):
        n = mesh.shape[axis]
        best, best_cost = None, None
        for i, case in enumerate(cases):
            if any(extent % (split.get((o, d), 1) * n) for o, d, extent in case.even):
                continue
            if keep and not case.ins[0] == case.outs[0] == layouts[0].placements[axis]:
                continue
            cost = _cost(case, layouts, sizes, axis, n, model)
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
            if p.is_shard():
                split[o, p.dim] = split.get((o, p.dim), 1) * n
    order = layouts[0].order if keep else _order(layouts, chosen)
    targets = tuple(x.with_placements([c.ins[o] for c in chosen], order) for o, x in enumerate(layouts))
    own = tuple(tuple(a for a, c in enumerate(chosen)
                      if c.ins[o].is_replicate() and any(not p.is_replicate() for p in c.ins))
                for o in range(len(layouts)))
    outs = tuple((tuple(c.outs[j] for c in chosen), order, shape) for j, shape in enumerate(spec.shapes))
    return Choice(targets, own, outs, tuple(chosen))


def _cost(case: Case, layouts, sizes, axis: int, n: int, model: CostModel):
    seconds, collectives, changed = 0.0, 0, 0
    for layout, size, want in zip(layouts, sizes, case.ins):
        have = layout.placements[axis]
        if have is want or have == want:
            continue
        if want.is_partial():
            return None
        changed += 1
        after = size * n if have.is_shard() and not want.is_shard() else \
            size // n if want.is_shard() and not have.is_shard() else size
        kind = _MOVE[_code(have), _code(want)]
        collectives += kind != "cut"
        seconds += model.seconds(kind, n, size, after)
    return seconds, collectives, changed


_MOVE = {("S", "R"): "all_gather", ("P", "R"): "all_reduce", ("P", "S"): "reduce_scatter", ("S", "S"): "all_to_all",
         ("R", "S"): "cut"}


def _code(p: Placement) -> str:
    return "P" if isinstance(p, Partial) else "R" if p.is_replicate() else "S"


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
