# SPDX-License-Identifier: Apache-2.0
"""The planner: the cheapest sequence of single moves that takes one layout to another. Pure search, no tensors.

A state is (which axes shard each dim, in order; which axes are partial). The single moves are

1. all_gather      the innermost axes of a dim stop sharding it
2. all_reduce      partial axes of one reduction become replicated
3. reduce_scatter  partial axes of one reduction, in any order, become the innermost shards of a dim
4. all_to_all      the innermost axes of one dim become the innermost of another, in the same order
5. cut             replicated axes, in any order, become the innermost shards of a dim; nothing is sent
6. exchange        any shards to any shards, by point-to-point slices: other axis orders, other meshes
7. reorder         rows of a dim that is whole take the order in which a `FusedShard` cuts them, or leave it; nothing is sent

Several axes move as one flattened group. Of all paths that never need more memory than the larger endpoint, `search.py`
finds a cheapest one under `cost.py`; replicated axes may share the work of a reduction. Axes of one rank take no part.
Invariant: `plan(a, b)` is a function of its arguments, so all ranks agree on it without talking. Run by `execute.py`.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from ..core.layout import Layout
from ..core.placements import REPLICATE, Partial, Placement, Shard
from ..errors import RedistributeError
from .cost import CostModel, costs, nbytes, sent_bytes, shard_bytes
from .search import Search, State, Step, moved_axes


@dataclass(frozen=True, slots=True)
class Move:
    """One collective or local cut: over `axes` (outermost first), from layout `src` to layout `dst`."""

    kind: str
    axes: tuple[int, ...]
    src: Layout
    dst: Layout
    src_dim: Any = None  # an int, of the kinds that have it
    dst_dim: Any = None
    reduce_op: str | None = None

    @property
    def ranks(self) -> int:
        """Size of the group the collective runs over."""
        return prod(self.src.mesh.shape[a] for a in self.axes)

    def bytes(self) -> float:
        """Bytes the largest shard's rank sends."""
        return sent_bytes(self.kind, self.ranks, shard_bytes(self.src), shard_bytes(self.dst))

    def __repr__(self):
        names = "*".join(self.src.mesh.mesh_dim_names[a] for a in self.axes) or "all"
        return f"{self.kind}({names}): {self.src} -> {self.dst}"


def plan(src: Layout, dst: Layout, model: CostModel | None = None) -> tuple[Move, ...]:
    """Cheapest moves from `src` to `dst` (empty if they are the same).

    Args:
        src: layout to leave.
        dst: layout to reach.
        model: costs; default those in force for the device type, see `cost.costs`.

    Raises:
        RedistributeError: `dst` is another tensor, or Partial where `src` is not.

    Example:
        >>> from ms_dtensor import DeviceMesh, Layout, Shard, Partial
        >>> from ms_dtensor.redistribute.plan import plan
        >>> mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        >>> plan(Layout(mesh, [Partial()], (8, 4)), Layout(mesh, [Shard(1)], (8, 4)))
        (reduce_scatter(tp): f32[8, 4]{sum: tp} -> f32[8, 4@tp],)
    """
    if src is dst:
        return ()
    return _plan(src, dst, model or costs(src.mesh.device_type))


@lru_cache(maxsize=8192)
def _plan(src: Layout, dst: Layout, model: CostModel) -> tuple[Move, ...]:
    check_reachable(src, dst)
    for axes, p in src.fused:
        if src.mesh != dst.mesh or (axes, p) not in dst.fused:
            whole = _with(src, axes, REPLICATE)
            return (Move("all_gather", axes, src, whole, p.dim), Move("reorder", axes, src, whole), *plan(whole, dst, model))
    for axes, p in dst.fused:
        if src.mesh != dst.mesh or (axes, p) not in src.fused:
            whole = _with(dst, axes, REPLICATE)
            return (*plan(src, whole, model), Move("reorder", axes, whole, dst), Move("cut", axes, whole, dst, None, p.dim))
    if src.mesh != dst.mesh:
        whole = src.reduced()
        return (*plan(src, whole, model), Move("exchange", (), whole, dst))
    if _special(src) or _special(dst):
        return _by_exchange(src, dst)
    start, goal = _state(src), _state(dst)
    path = Search(src.mesh.shape, src.shape, nbytes((), src.dtype), start, goal, model).run() if start != goal else \
        [(Step("cut", ()), goal)]  # they differ on axes of one rank only
    layouts = [src, *(_layout(src, state) for _, state in path)]
    layouts[-1] = dst
    return tuple(Move(step.kind, step.axes, a, b, step.src_dim, step.dst_dim, step.reduce_op)
                 for (step, _), a, b in zip(path, layouts, layouts[1:]))


def _by_exchange(src: Layout, dst: Layout) -> tuple[Move, ...]:
    """Collectives put chunks in the order of ranks; of shards that are cut in another way only boxes are known."""
    moves = []
    reduced = [a for a in src.partial_axes if not dst.placements[a].is_partial()]
    for op in sorted({src.placements[a].reduce_op for a in reduced}):
        axes = tuple(a for a in reduced if src.placements[a].is_partial(op))
        rest = src.with_placements([REPLICATE if a in axes else p for a, p in enumerate(src.placements)], src.order)
        moves.append(Move("all_reduce", axes, src, rest, reduce_op=op))
        src = rest
    return tuple(moves) if src is dst else (*moves, Move("exchange", (), src, dst))


@lru_cache(maxsize=8192)
def relabels(src: Layout, dst: Layout) -> bool:
    """Whether the two differ at most on axes of one rank: every rank holds the same either way."""
    return src.mesh == dst.mesh and src.shape == dst.shape and _state(src) == _state(dst) and _special(src) == _special(dst)


def remembered():
    """The counters of the cache of plans, as `functools.lru_cache` gives them."""
    return _plan.cache_info()


def cost(moves: tuple[Move, ...], model: CostModel | None = None) -> float:
    """Seconds of a plan under the model."""
    if not moves:
        return 0.0
    model = model or costs(moves[0].src.mesh.device_type)
    messages = exchange_messages(moves[0].src, moves[-1].dst)
    return sum(model.seconds(m.kind, m.ranks, shard_bytes(m.src), shard_bytes(m.dst), messages) for m in moves)


def exchange_messages(src: Layout, dst: Layout) -> int:
    """Messages an exchange between these is charged for: one per rank of the axes on which they differ."""
    if src.mesh != dst.mesh:
        return max(src.mesh.size(), dst.mesh.size())
    return prod(src.mesh.shape[a] for a in moved_axes(_state(src), _state(dst)))


def check_reachable(src: Layout, dst: Layout) -> None:
    """Raises RedistributeError if no plan can exist."""
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise RedistributeError("For 'redistribute', source and target are different tensors.", f"{src} -> {dst}")
    if (src.mesh.varies or dst.mesh.varies) and (src.mesh != dst.mesh or src.mesh.varies != dst.mesh.varies):
        raise RedistributeError(
            "For 'redistribute', one of the meshes is another set of ranks on other ranks.",
            f"{src.describe()} -> {dst.describe()}",
            "A sub-mesh is one of several blocks of its root; each rank sees its own and would plan another move.",
            ("redistribute on the root, with Replicate() or Shard(dim) on each of its axes",
             "DTensor.from_local(x.to_local(), sub_mesh, placements) takes what this rank holds as a tensor of its block",
             "DeviceMesh(device_type, ranks) spells a mesh out that is the same on all ranks"))
    wanted = {(dst.mesh.mesh_dim_names[a], dst.placements[a].reduce_op) for a in dst.partial_axes}
    have = {(src.mesh.mesh_dim_names[a], src.placements[a].reduce_op) for a in src.partial_axes}
    if not wanted <= have or (wanted and src.mesh != dst.mesh):
        axis, op = sorted(wanted - have or wanted)[0]
        raise RedistributeError(f"For 'redistribute', the target is Partial({op!r}) on axis {axis!r}, the source is not.",
                                f"{src.describe()} -> {dst}", "A value can be reduced, not un-reduced.",
                                (f"ask for Replicate() or Shard(dim) on axis {axis!r}",
                                 "from_local(..., [Partial()]) builds a partial value from summands"))


def _state(layout: Layout) -> State:
    n = layout.mesh.shape
    return (tuple(tuple(a for a in axes if n[a] > 1) for axes in layout.dim_axes),
            tuple((a, layout.placements[a].reduce_op) for a in layout.partial_axes if n[a] > 1))


def _special(layout: Layout) -> list[tuple[int, Placement]]:
    """Axes whose shards are cut in another way than `Shard`'s, and how."""
    return [(a, p) for a, p in enumerate(layout.placements)
            if p.is_shard() and p.__class__ is not Shard and layout.mesh.shape[a] > 1]


def _with(layout: Layout, axes: Sequence[int], placement: Placement) -> Layout:
    return layout.with_placements([placement if a in axes else p for a, p in enumerate(layout.placements)], layout.order)


def _layout(like: Layout, state: State) -> Layout:
    dims, partial = state
    placed: list[Placement] = [REPLICATE] * like.mesh.ndim
    for d, axes in enumerate(dims):
        for a in axes:
            placed[a] = Shard(d)
    for a, op in partial:
        placed[a] = Partial(op)
    return like.with_placements(placed, [a for axes in dims for a in axes])
