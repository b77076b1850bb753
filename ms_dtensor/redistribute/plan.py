# SPDX-License-Identifier: Apache-2.0
"""The planner: the cheapest sequence of single moves that takes one layout to another. Pure search, no tensors.

A state is (which axes shard each dim, in order; which axes are partial). The single moves are

1. all_gather      the innermost axes of a dim stop sharding it
2. all_reduce      partial axes of one reduction become replicated
3. reduce_scatter  partial axes of one reduction become the innermost shards of a dim
4. all_to_all      the innermost axes of one dim become the innermost of another
5. cut             replicated axes become the innermost shards of a dim; nothing is sent
6. exchange        any shards to any shards, by point-to-point slices: other axis orders, other meshes

Adjacent axes move as one flattened group. Dijkstra over states, first among those that need no more memory than the
larger endpoint, then, if there is no such path, among all. Invariant: `plan(a, b)` is a function of its arguments, so
all ranks agree on it without talking. Run by `execute.py`.
"""
from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ..errors import RedistributeError
from ..layout import Layout
from ..mesh import chunk_bounds
from ..placements import REPLICATE, Partial, Shard
from .cost import DEFAULT, CostModel, nbytes, sent_bytes


@dataclass(frozen=True, slots=True)
class Move:
    """One collective or local cut: over `axes` (outermost first), from layout `src` to layout `dst`."""

    kind: str
    axes: tuple[int, ...]
    src: Layout
    dst: Layout
    src_dim: int | None = None
    dst_dim: int | None = None
    reduce_op: str | None = None

    def bytes(self) -> float:
        """Bytes the largest shard's rank sends."""
        n = prod(self.src.mesh.shape[a] for a in self.axes)
        return sent_bytes(self.kind, n, _layout_bytes(self.src), _layout_bytes(self.dst))

    def __repr__(self):
        names = "*".join(self.src.mesh.mesh_dim_names[a] for a in self.axes) or "all"
        return f"{self.kind}({names}): {self.src} -> {self.dst}"


def plan(src: Layout, dst: Layout, model: CostModel = DEFAULT) -> tuple[Move, ...]:
    """Cheapest moves from `src` to `dst` (empty if they are the same).

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
    return _plan(src, dst, model)


@lru_cache(maxsize=8192)
def _plan(src: Layout, dst: Layout, model: CostModel) -> tuple[Move, ...]:
    check_reachable(src, dst)
    if src.mesh != dst.mesh:
        whole = src.with_placements([REPLICATE if p.is_partial() else p for p in src.placements], src.order)
        return (*plan(src, whole, model), Move("exchange", (), whole, dst))
    start, goal = _state(src), _state(dst)
    limit = max(_layout_bytes(src), _layout_bytes(dst))
    search = _Search(src, dst, model)
    path = search.run(start, goal, limit)
    if path is None:
        path = search.run(start, goal, None)
    layouts = [src, *(search.layout(state) for _, state in path)]
    layouts[-1] = dst
    return tuple(Move(step.kind, step.axes, a, b, step.src_dim, step.dst_dim, step.reduce_op)
                 for (step, _), a, b in zip(path, layouts, layouts[1:]))


def check_reachable(src: Layout, dst: Layout, who: str = "redistribute") -> None:
    """Raises RedistributeError if no plan can exist."""
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise RedistributeError(f"For '{who}', source and target are different tensors.", f"{src} -> {dst}")
    wanted = {(dst.mesh.mesh_dim_names[a], dst.placements[a].reduce_op) for a in dst.partial_axes}
    have = {(src.mesh.mesh_dim_names[a], src.placements[a].reduce_op) for a in src.partial_axes}
    if not wanted <= have or (wanted and src.mesh != dst.mesh):
        axis, op = sorted(wanted - have or wanted)[0]
        raise RedistributeError(f"For '{who}', the target is Partial({op!r}) on axis {axis!r}, the source is not.",
                                f"{src.describe()} -> {dst}", "A value can be reduced, not un-reduced.",
                                (f"ask for Replicate() or Shard(dim) on axis {axis!r}",
                                 "from_local(..., [Partial()]) builds a partial value from summands"))


def _state(layout: Layout):
    return layout.dim_axes, tuple((a, layout.placements[a].reduce_op) for a in layout.partial_axes)


def _layout_bytes(layout: Layout) -> int:
    return nbytes(layout.local_shape((0,) * layout.mesh.ndim), layout.dtype)


@dataclass(frozen=True, slots=True)
class _Step:
    kind: str
    axes: tuple[int, ...]
    src_dim: int | None = None
    dst_dim: int | None = None
    reduce_op: str | None = None


class _Search:
    """Dijkstra over states of one tensor on one mesh."""

    def __init__(self, src: Layout, dst: Layout, model: CostModel):
        self.mesh, self.shape, self.dtype, self.model = src.mesh, src.shape, src.dtype, model
        self.goal_dims = dst.dim_axes
        self._bytes: dict = {}

    def layout(self, state) -> Layout:
        dims, partial = state
        placed = [REPLICATE] * self.mesh.ndim
        for d, axes in enumerate(dims):
            for a in axes:
                placed[a] = Shard(d)
        for a, op in partial:
            placed[a] = Partial(op)
        return Layout(self.mesh, placed, self.shape, self.dtype, [a for axes in dims for a in axes])

    def bytes(self, state) -> int:
        dims = state[0]
        n = self._bytes.get(dims)
        if n is None:
            local = []
            for size, axes in zip(self.shape, dims):
                for a in axes:
                    size = chunk_bounds(size, self.mesh.shape[a])[0][1]
                local.append(size)
            n = self._bytes[dims] = nbytes(local, self.dtype)
        return n

    def run(self, start, goal, limit):
        best, queue, tick = {start: (0.0, 0)}, [((0.0, 0), 0, start, ())], itertools.count(1)
        while queue:
            cost, _, state, path = heapq.heappop(queue)
            if state == goal:
                return path
            if cost > best[state]:
                continue
            for step, after in self.steps(state, goal):
                size = self.bytes(after)
                if limit is not None and size > limit:
                    continue
                ranks = prod(self.mesh.shape[a] for a in step.axes)
                messages = self.mesh.size() if step.kind == "exchange" else 1
                seconds = self.model.seconds(step.kind, ranks, self.bytes(state), size, messages)
                total = (cost[0] + seconds, cost[1] + (step.kind != "cut"))
                if after not in best or total < best[after]:
                    best[after] = total
                    heapq.heappush(queue, (total, next(tick), after, (*path, (step, after))))
        return None

    def steps(self, state, goal) -> Iterator:
        dims, partial = state
        free = [a for a in range(self.mesh.ndim) if all(a not in x for x in dims) and a not in dict(partial)]
        for d, axes in enumerate(dims):
            for k in range(1, len(axes) + 1):
                moved = axes[-k:]
                kept = _put(dims, d, axes[:-k])
                yield _Step("all_gather", moved, d), (kept, partial)
                for e in range(len(dims)):
                    if e != d:
                        yield (_Step("all_to_all", moved, d, e), (_put(kept, e, kept[e] + moved), partial))
        wanted = dict(goal[1])
        for op in sorted({op for _, op in partial}):
            axes = [a for a, o in partial if o == op and a not in wanted]
            for k in range(1, len(axes) + 1):
                for moved in itertools.combinations(axes, k):
                    rest = tuple(p for p in partial if p[0] not in moved)
                    yield _Step("all_reduce", moved, reduce_op=op), (dims, rest)
                    for e in range(len(dims)):
                        ordered = self._goal_order(moved, e)
                        yield (_Step("reduce_scatter", ordered, None, e, op),
                               (_put(dims, e, dims[e] + ordered), rest))
        for e, axes in enumerate(self.goal_dims):
            able = tuple(a for a in axes if a in free)
            for k in range(1, len(able) + 1):
                for moved in itertools.combinations(able, k):
                    yield _Step("cut", moved, None, e), (_put(dims, e, dims[e] + moved), partial)
        if partial == goal[1] and dims != goal[0]:
            yield _Step("exchange", ()), goal

    def _goal_order(self, axes, dim) -> tuple[int, ...]:
        rank = {a: i for i, a in enumerate(self.goal_dims[dim])}
        return tuple(sorted(axes, key=lambda a: (rank.get(a, len(rank)), a)))


def _put(dims, d, axes):
    return (*dims[:d], tuple(axes), *dims[d + 1:])
