# SPDX-License-Identifier: Apache-2.0
"""A* over the states a tensor passes on its way to another layout. Pure integers and tuples; `plan.py` wraps it.

A state is `(dims, partial)`: the axes that shard each dim, outermost first, and the `(axis, reduction)` pairs still to
be reduced. `Search.steps` lists the single moves. The estimate of what remains counts what no plan can avoid: one
collective for each dim or reduction that an axis must leave, and the bytes an average rank must receive. Invariant: it
never exceeds the true cost under the model, so the first path to reach the goal is a cheapest one.
"""
from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ..core.placements import longest_chunk
from .cost import CostModel
from .graph import graph_of

State = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, str], ...]]
_SAFE = 1 - 1e-9  # rounding must not lift the estimate above the true cost
_PATIENCE = 500  # moves to look at one by one, about 4 ms, before all are looked at in vector operations


@dataclass(frozen=True, slots=True)
class Step:
    """One move, without layouts."""

    kind: str
    axes: tuple[int, ...]
    src_dim: int | None = None
    dst_dim: int | None = None
    reduce_op: str | None = None


class Search:
    """The cheapest path between two states of one tensor on one mesh.

    Args:
        mesh_shape: ranks per axis.
        shape: of the global tensor.
        itemsize: bytes per element.
        start: state to leave.
        goal: state to reach; what is partial there is partial in `start`.
        model: costs.
    """

    def __init__(self, mesh_shape: Sequence[int], shape: Sequence[int], itemsize: int, start: State, goal: State,
                 model: CostModel):
        self.n, self.shape, self.itemsize, self.model = mesh_shape, shape, itemsize, model
        self.start, self.goal = start, goal
        self.kept = frozenset(goal[1])
        self._lengths: dict = {}
        self._left: dict = {}
        self.limit = max(self.bytes(start[0]), self.bytes(goal[0]))  # no state on the way may be larger
        self.messages = prod(mesh_shape[a] for a in moved_axes(start, goal))
        self.goal_bytes = self.bytes(goal[0])
        split = [a for axes in goal[0] for a in axes]
        self._mean = prod(shape) * itemsize / prod(mesh_shape[a] for a in split)  # of all ranks' target shards
        whole = set(range(len(mesh_shape))) - set(split) - {a for a, _ in goal[1]}
        self._holders = prod(mesh_shape[a] for a in whole)  # of each element, in the end

    def length(self, d: int, axes: tuple[int, ...]) -> int:
        """The longest shard of dim `d`."""
        key = d, axes
        n = self._lengths.get(key)
        if n is None:
            n = self._lengths[key] = longest_chunk(self.shape[d], prod([self.n[a] for a in axes]))
        return n

    def bytes(self, dims) -> int:
        """Of the largest shard."""
        out = self.itemsize
        for d, axes in enumerate(dims):
            out *= self.length(d, axes) if axes else self.shape[d]
        return out

    def run(self) -> list[tuple[Step, State]]:
        """Steps and the states they lead to; no state on the way needs more memory than the larger end."""
        return self.best_first(_PATIENCE) or self.on_graph() or self.best_first(float("inf")) or []

    def best_first(self, patience: float) -> list[tuple[Step, State]] | None:
        """A*; None if that many moves were looked at in vain."""
        best = {self.start: (0.0, 0)}  # state -> (seconds, moves) of the cheapest path to it so far
        came: dict[State, tuple[State, Step]] = {}
        done: set[tuple[State, float]] = set()
        # by estimated total, then moves; the tick keeps heapq from comparing states
        queue, tick = [(self.left(self.start), 0, 0, self.start)], itertools.count(1)
        bound, looked = float("inf"), 0  # bound: cost of the best path to the goal so far
        while queue:
            _, moves, _, state = heapq.heappop(queue)
            if state == self.goal:
                return self._path(came)
            seconds, fewest = best[state]  # an entry that a better path has overtaken is skipped
            if moves > fewest or (state, seconds) in done:
                continue
            done.add((state, seconds))
            if looked > patience:
                return None
            before = self.bytes(state[0])
            for step, after in self.steps(state):
                looked += 1
                size = self.bytes(after[0])
                if size > self.limit:
                    continue
                ranks = prod([self.n[a] for a in step.axes])
                total = seconds + self.model.seconds(step.kind, ranks, before, size, self.messages)
                known = best.get(after)
                if known is not None and known <= (total, moves + 1):
                    continue
                estimate = total + self.left(after)
                if estimate > bound:
                    continue
                if after == self.goal:
                    bound = total
                best[after] = total, moves + 1
                came[after] = state, step
                heapq.heappush(queue, (estimate, moves + 1, next(tick), after))
        raise AssertionError(f"no path from {self.start} to {self.goal}")  # reducing, then an exchange, always is one

    def _path(self, came) -> list[tuple[Step, State]]:
        out, state = [], self.goal
        while state != self.start:
            previous, step = came[state]
            out.append((step, state))
            state = previous
        return out[::-1]

    def on_graph(self) -> list[tuple[Step, State]] | None:
        """The same by `graph.Graph`; None if that would be too large."""
        axes = [a for a, n in enumerate(self.n) if n > 1]
        graph = graph_of(len(axes), len(self.shape))
        if graph is None:
            return None
        pending = [p for p in self.start[1] if p not in self.kept]
        ops = [sum(1 << axes.index(a) for a, o in pending if o == op) for op in sorted({o for _, o in pending})]
        kind_of = dict(self.start[1])

        def number(state):
            where = [-1] * len(axes)
            depth = [0] * len(axes)
            for d, split in enumerate(state[0]):
                for i, a in enumerate(split):
                    where[axes.index(a)], depth[axes.index(a)] = d, i
            for a, _ in state[1]:
                where[axes.index(a)] = -2
            return graph.number(where, depth)

        def state_of(i):
            where, depth = graph.where[i], graph.depth[i]
            split = [sorted(np.flatnonzero(where == d), key=depth.__getitem__) for d in range(len(self.shape))]
            return (tuple(tuple(axes[j] for j in order) for order in split),
                    tuple((a, kind_of[a]) for j, a in enumerate(axes) if where[j] == -2))
        path = graph.shortest(number(self.start), number(self.goal), [self.n[a] for a in axes], self.shape, self.itemsize,
                              self.model, self.messages, ops)
        out, before = [], self.start
        for kind, bits, i in path:
            after = state_of(i)
            out.append((_step(kind, {a for j, a in enumerate(axes) if bits >> j & 1}, before, after, kind_of), after))
            before = after
        return out

    # -- what remains ---------------------------------------------------------------------------------------------
    def left(self, state: State) -> float:
        """Seconds that any path from `state` to the goal takes at least."""
        value = self._left.get(state)
        if value is None:
            value = self._left[state] = self._estimate(state) * _SAFE
        return value

    def _estimate(self, state: State) -> float:
        if state == self.goal:
            return 0.0
        dims, partial = state
        model = self.model
        leave = sum(axes != want[:len(axes)] for axes, want in zip(dims, self.goal[0]))  # dims that only a collective mends
        pending = [p for p in partial if p not in self.kept]
        collectives = min(leave, self.messages) + len({op for _, op in pending})
        if not collectives:
            return model.gamma * self.goal_bytes
        if pending:  # each element: all but one of its summands are received once, all but one of its results too
            parts = prod([self.n[a] for a, _ in pending])
            receive = self._mean * (parts + self._holders - 2) / self._holders
        else:
            common = self.itemsize  # at best a rank holds this much of its target already ...
            for d, (axes, want) in enumerate(zip(dims, self.goal[0])):
                common *= min(self.length(d, axes), self.length(d, want))
            used = [a for axes in dims for a in axes]
            # ... and all ranks together no more than the copies there are
            have = prod([s for a, s in enumerate(self.n) if a not in used]) / prod([self.n[a] for a, _ in self.kept])
            receive = max(self._mean - common, self._mean * (1 - have / self._holders), 0)
        return model.alpha * collectives + model.beta * receive + model.gamma * self.goal_bytes

    # -- moves ----------------------------------------------------------------------------------------------------
    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        """Every single move from `state`; see `plan.py` for what each means."""
        dims, partial = state
        for d, axes in enumerate(dims):
            for k in range(1, len(axes) + 1):
                moved = axes[-k:]
                kept = _put(dims, d, axes[:-k])
                yield Step("all_gather", moved, d), (kept, partial)
                for e in range(len(dims)):
                    if e != d:
                        yield Step("all_to_all", moved, d, e), (_put(kept, e, kept[e] + moved), partial)
        pending = [p for p in partial if p not in self.kept]
        for op in sorted({op for _, op in pending}):
            summed = [a for a, o in pending if o == op]
            for k in range(1, len(summed) + 1):
                for moved in itertools.combinations(summed, k):
                    rest = tuple(p for p in partial if p[0] not in moved)
                    yield Step("all_reduce", moved, reduce_op=op), (dims, rest)
                    for ordered in itertools.permutations(moved):
                        for e in range(len(dims)):
                            yield (Step("reduce_scatter", ordered, None, e, op),
                                   (_put(dims, e, dims[e] + ordered), rest))
        used = {a for axes in dims for a in axes} | {a for a, _ in partial}
        free = [a for a in range(len(self.n)) if self.n[a] > 1 and a not in used]
        for k in range(1, len(free) + 1):
            for moved in itertools.permutations(free, k):
                for e in range(len(dims)):
                    yield Step("cut", moved, None, e), (_put(dims, e, dims[e] + moved), partial)
        if not pending and dims != self.goal[0]:
            yield Step("exchange", ()), self.goal


def moved_axes(start: State, goal: State) -> tuple[int, ...]:
    """Axes on which two states differ; within a dim, the axes from the first difference inwards.

    Ranks that agree on all other axes hold and need the same slices, so an exchange stays among these.
    """
    out = {a for a, _ in set(start[1]) ^ set(goal[1])}
    for have, want in zip(start[0], goal[0]):
        same = 0
        while same < min(len(have), len(want)) and have[same] == want[same]:
            same += 1
        out.update(have[same:], want[same:])
    return tuple(sorted(out))


def _step(kind: str, moved: set[int], before: State, after: State, kind_of: dict) -> Step:
    """The step of this kind that takes one state to the other."""
    if kind == "exchange":
        return Step(kind, ())
    leaves = next((d for d, axes in enumerate(before[0]) if moved & set(axes)), None)
    enters = next((d for d, axes in enumerate(after[0]) if moved & set(axes)), None)
    split = before[0][leaves] if leaves is not None else after[0][enters] if enters is not None else sorted(moved)
    ordered = tuple(a for a in split if a in moved)
    reduces = kind in ("all_reduce", "reduce_scatter")
    return Step(kind, ordered, leaves, enters, kind_of[ordered[0]] if reduces else None)


def _put(dims, d, axes):
    return (*dims[:d], axes, *dims[d + 1:])
