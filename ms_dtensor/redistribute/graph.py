# SPDX-License-Identifier: Apache-2.0
"""All states and moves as arrays: the search of hard cases in a few vector operations. Pure NumPy.

Which states there are and which moves join them depends only on the numbers of axes and dims, so that graph is built
once; a tensor, a mesh and a cost model merely weigh its edges. Bellman-Ford, one sweep per move of the path, then finds
what `search.Search` would find in thousands of steps: 65,536 ranks on five axes in about 10 ms. Invariant: the same
moves as `Search.steps`, the same costs; ties go to fewer moves.
"""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from math import comb, perm

import numpy as np

from ..core.placements import longest_chunk
from .cost import CostModel, sent_bytes

KINDS = ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "cut")
_REDUCING = (2, 3)
_FREE, _PARTIAL = -1, -2
_LARGEST = 40_000  # states; more would need seconds and much memory to list


class Graph:
    """States of a tensor of `ndim` dims on `axes` axes, each axis at a depth of a dim, free, or partial.

    A state is also one number with a digit per axis, `(where + 2) * axes + depth`: to move axes is to add a difference,
    and the new state's row is found by bisection. Example, 2 axes and 1 dim: both in dim 0, axis 1 outermost, is
    `where (0, 0)`, `depth (1, 0)`, digits 5 and 4, in base 6 the number 5 + 4 * 6.
    """

    def __init__(self, axes: int, ndim: int):
        self.axes, self.ndim = axes, ndim
        where, depth = self._all_states()
        self._base = ((ndim + 2) * axes) ** np.arange(axes)
        codes = self._code(where, depth)
        by_code = np.argsort(codes)
        self.where, self.depth, self._codes = where[by_code], depth[by_code], codes[by_code]
        self.partial = (self.where == _PARTIAL) @ (1 << np.arange(axes))
        self._length = np.stack([(self.where == d).sum(1) for d in range(ndim)]) if ndim else np.zeros((0, len(codes)), int)
        self._found: list = []  # moves: rows left, rows reached, kind, axes as bits
        self._shrink()
        self._place(_FREE, "cut")
        self._place(_PARTIAL, "reduce_scatter")
        self._reduce()
        frm, to, kind, mask = (np.concatenate(x) for x in zip(*self._found))
        order = np.argsort(to, kind="stable")
        self._edges = frm[order], to[order], (kind.astype(np.int16) << axes | mask)[order]
        self._reachable: dict = {}
        del self._found, self._length

    def _all_states(self):
        """Where each axis is and how deep: axis after axis is left free or partial, or slipped into a dim at any depth."""
        where, depth = np.zeros((1, 0), np.int8), np.zeros((1, 0), np.int8)
        for _ in range(self.axes):
            new = [(where, depth, source, 0) for source in (_FREE, _PARTIAL)]
            for d in range(self.ndim):
                for at in range(where.shape[1] + 1):
                    rows = (where == d).sum(1) >= at
                    w, p = where[rows], depth[rows]
                    new.append((w, p + ((w == d) & (p >= at)), d, at))
            where, depth = (np.concatenate([np.pad(x[i], ((0, 0), (0, 1)), constant_values=x[i + 2]) for x in new])
                            for i in (0, 1))
        return where, depth

    def _digit(self, where, depth=0):
        return (where - _PARTIAL) * self.axes + depth

    def _code(self, where, depth):
        return self._digit(where.astype(np.int64), depth) @ self._base

    def _add(self, kind, rows, codes, mask):
        to = np.searchsorted(self._codes, codes)
        self._found.append((rows.astype(np.int32), to.astype(np.int32), np.full(len(rows), KINDS.index(kind), np.int8),
                            mask.astype(np.uint8)))

    def _shrink(self):
        """all_gather and all_to_all: the innermost `k` axes of dim `d` leave it."""
        for d in range(self.ndim):
            for k in range(1, self.axes + 1):
                rows = np.flatnonzero(self._length[d] >= k)
                depth, kept = self.depth[rows], (self._length[d][rows] - k)[:, None]
                moved = (self.where[rows] == d) & (depth >= kept)
                mask, base = moved @ (1 << np.arange(self.axes)), moved * self._base
                left = self._codes[rows] - (base * self._digit(d, depth)).sum(1)
                self._add("all_gather", rows, left + base.sum(1) * self._digit(_FREE), mask)
                for e in range(self.ndim):
                    if e != d:
                        below = self._length[e][rows][:, None]
                        self._add("all_to_all", rows, left + (base * self._digit(e, depth - kept + below)).sum(1), mask)

    def _place(self, source, kind):
        """cut and reduce_scatter: axes that are all `source`, in any order, become the innermost of a dim."""
        for rows, members in self._having(source):
            for k in range(1, len(members) + 1):
                orders = np.array(list(itertools.permutations(members, k)))
                base = self._base[orders]
                inner, mask = (base * np.arange(k)).sum(1), np.tile((1 << orders).sum(1), len(rows))
                for e in range(self.ndim):
                    gain = (self._digit(e, self._length[e][rows]) - self._digit(source))[:, None] * base.sum(1) + inner
                    self._add(kind, np.repeat(rows, len(orders)), (self._codes[rows][:, None] + gain).ravel(), mask)

    def _reduce(self):
        """all_reduce: any of the partial axes become free."""
        for rows, members in self._having(_PARTIAL):
            for k in range(1, len(members) + 1):
                sets = np.array(list(itertools.combinations(members, k)))
                gain = (self._digit(_FREE) - self._digit(_PARTIAL)) * self._base[sets].sum(1)
                self._add("all_reduce", np.repeat(rows, len(sets)), (self._codes[rows][:, None] + gain).ravel(),
                          np.tile((1 << sets).sum(1), len(rows)))

    def _having(self, source):
        """(states, axes) for each set of axes that are `source` in some states, and no others there."""
        sets = (self.where == source) @ (1 << np.arange(self.axes))
        for bits in range(1, 1 << self.axes):
            rows = np.flatnonzero(sets == bits)
            if len(rows):
                yield rows, [a for a in range(self.axes) if bits >> a & 1]

    def edges(self, partial: int):
        """Moves among states with no other partial axes than these: (from, to, kind and axes as one number) by target."""
        out = self._reachable.get(partial)
        if out is None:
            inside = (self.partial & ~partial) == 0
            use = np.flatnonzero(inside[self._edges[0]])
            out = self._reachable[partial] = tuple(x[use].astype(np.intp) for x in self._edges)  # as indexing wants them
        return out

    def number(self, where: Sequence[int], depth: Sequence[int]) -> int:
        """Index of a state."""
        return int(np.searchsorted(self._codes, self._code(np.array([where]), np.array([depth])))[0])

    def shortest(self, start: int, goal: int, mesh_shape: Sequence[int], shape: Sequence[int], itemsize: int,
                 model: CostModel, messages: int, ops: Sequence[int]) -> list[tuple[str, int, int]]:
        """The cheapest path as (kind, set of axes as bits, state reached) per move.

        Args:
            start: state to leave.
            goal: state to reach.
            mesh_shape: ranks per axis.
            shape: of the tensor.
            itemsize: bytes per element.
            model: costs.
            messages: what an exchange is charged for.
            ops: per reduction, the set of axes (as bits) that may be reduced by it.
        """
        size = np.full(len(self.where), itemsize, np.float64)
        ranks = np.array(mesh_shape)
        for d, n in enumerate(shape):
            size *= longest_chunk(n, np.where(self.where == d, ranks, 1).prod(1))
        fits = size <= max(size[start], size[goal])
        sets = np.arange(1 << self.axes)
        reducible = np.zeros(len(sets), bool)
        for op in ops:
            reducible |= (sets & ~op) == 0
        usable = np.ones((len(KINDS), len(sets)), bool)
        usable[_REDUCING, :] = reducible
        group = [int(ranks[[a for a in range(self.axes) if s >> a & 1]].prod()) for s in sets]
        sent = model.beta * np.array([[sent_bytes(k, n, 1, 1) for n in group] for k in KINDS])
        alpha = np.repeat([model.alpha * (k != "cut") for k in KINDS], len(sets))
        frm, to, what = self.edges(int(self.partial[start]))
        use = np.flatnonzero(fits.take(to))  # few states fit: the other conditions are asked of those only
        use = use[fits.take(frm.take(use)) & usable.ravel().take(what.take(use))]
        frm, to, what = frm.take(use), to.take(use), what.take(use)
        weight = alpha.take(what) + sent.ravel().take(what) * size.take(frm) + (model.gamma * size).take(to)
        exchange = model.seconds("exchange", 1, 0, size[goal], messages)
        reduced = np.flatnonzero(fits & (self.partial == self.partial[goal]))
        first = np.flatnonzero(np.diff(to, prepend=-1))
        targets = to[first]
        best = np.full(len(size), np.inf)
        best[start] = 0
        layers = [best]  # layers[k]: cheapest cost of each state by at most k moves
        while True:
            new = best.copy()
            if len(targets):
                new[targets] = np.minimum(best[targets], np.minimum.reduceat(best.take(frm) + weight, first))
            new[goal] = min(new[goal], best[reduced].min() + exchange)
            better = new < best
            if not better.any():
                break
            best = new
            layers.append(best)
            if best[better].min() >= best[goal]:  # costs only grow from here
                break
        close = best[goal] * (1 + 1e-12)  # fewest moves at that cost; then back from the goal, an edge that explains it
        at, path = goal, []
        level = next(k for k, layer in enumerate(layers) if layer[goal] <= close)
        while at != start:
            before, here = layers[level - 1], layers[level][at]
            level -= 1
            if before[at] == here:
                continue
            into = np.flatnonzero((to == at) & (before[frm] + weight == here))
            if len(into):
                kind, axes = divmod(int(what[into[0]]), len(sets))
                path.append((KINDS[kind], axes, at))
                at = int(frm[into[0]])
            else:
                path.append(("exchange", 0, at))
                at = int(reduced[before[reduced].argmin()])
        return path[::-1]


@lru_cache(maxsize=8)
def graph_of(axes: int, ndim: int) -> Graph | None:
    """The graph for this many axes and dims, or None if it would be too large."""
    return Graph(axes, ndim) if _states(axes, ndim) <= _LARGEST else None


@lru_cache(maxsize=64)
def _states(axes: int, ndim: int) -> int:
    """How many states there are: k axes in order, cut into `ndim` groups, the others free or partial."""
    if not ndim:
        return 2 ** axes
    return sum(perm(axes, k) * comb(k + ndim - 1, ndim - 1) * 2 ** (axes - k) for k in range(axes + 1))
