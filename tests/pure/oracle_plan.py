# SPDX-License-Identifier: Apache-2.0
"""A brute-force oracle for plans: all states, all single moves between any two of them, Bellman-Ford. No code shared.

It does not generate moves, as the planner does: it looks at every pair of states and says which single move, if any,
takes one to the other. So a move the planner forgets is not forgotten here.
"""
import itertools
from functools import lru_cache
from math import ceil

import numpy as np

ALPHA, BETA, GAMMA = 20e-6, 1 / 5e9, 1 / 20e9
CUT, GATHER, REDUCE, SCATTER, ALL_TO_ALL, EXCHANGE = range(6)


def all_states(axes: int, ndim: int, ops: tuple[str | None, ...]) -> list:
    """Every (dims, partial set): an axis shards a dim at some depth, is replicated, or still partial if it was."""
    out = []
    for where in itertools.product(range(-2, ndim), repeat=axes):  # -2 partial, -1 replicated
        if any(w == -2 and ops[a] is None for a, w in enumerate(where)):
            continue
        partial = frozenset(a for a, w in enumerate(where) if w == -2)
        per_dim = [[a for a, w in enumerate(where) if w == d] for d in range(ndim)]
        out.extend((dims, partial) for dims in itertools.product(*map(itertools.permutations, per_dim)))
    return out


def single_move(s, t, ops):
    """(kind, axes) of the one move that takes state `s` to `t`, or None; an exchange is not looked at here."""
    (a_dims, a_part), (b_dims, b_part) = s, t
    changed = [d for d in range(len(a_dims)) if a_dims[d] != b_dims[d]]
    lost = [(d, a_dims[d][len(b_dims[d]):]) for d in changed if a_dims[d][:len(b_dims[d])] == b_dims[d]]
    gained = [(d, b_dims[d][len(a_dims[d]):]) for d in changed if b_dims[d][:len(a_dims[d])] == a_dims[d]]
    if len(lost) + len(gained) != len(changed):
        return None
    reduced = a_part - b_part
    if b_part - a_part:
        return None
    if reduced:
        if len({ops[a] for a in reduced}) > 1:
            return None
        if not changed:
            return REDUCE, tuple(reduced)
        if len(gained) == 1 and not lost and set(gained[0][1]) == reduced:
            return SCATTER, tuple(reduced)
        return None
    if len(lost) == 1 and not gained:
        return GATHER, lost[0][1]
    if len(gained) == 1 and not lost:
        return CUT, gained[0][1]
    if len(gained) == 1 and len(lost) == 1 and gained[0][1] == lost[0][1]:
        return ALL_TO_ALL, lost[0][1]
    return None


@lru_cache(maxsize=64)
def graph(axes: int, ndim: int, ops: tuple[str | None, ...]):
    """States with their numbers, and all moves as (from, to, kind, axes) arrays."""
    states = all_states(axes, ndim, ops)
    number = {s: i for i, s in enumerate(states)}
    moves = []
    for (i, s), (j, t) in itertools.product(enumerate(states), repeat=2):
        if i == j:
            continue
        found = single_move(s, t, ops)
        if found:
            moves.append((i, j, found[0], sum(1 << a for a in found[1])))
        if s[1] == t[1] and s[0] != t[0]:
            moves.append((i, j, EXCHANGE, 0))
    return states, number, np.array(moves).T if moves else np.zeros((4, 0), int)


class Oracle:
    """Cheapest costs between any two states of a tensor; `ops[a]` is the reduction of axis `a` where it may be partial."""

    def __init__(self, mesh_shape, shape, itemsize, ops):
        self.mesh_shape = mesh_shape
        self.states, self.number, (self.frm, self.to, self.kind, masks) = graph(len(mesh_shape), len(shape), ops)
        self._known: dict = {}
        self.size = np.array([self._bytes(dims, shape, itemsize) for dims, _ in self.states], float)
        ranks = np.array([np.prod([n for a, n in enumerate(mesh_shape) if mask >> a & 1]) for mask in
                          range(1 << len(mesh_shape))], float)[masks]
        before, after = self.size[self.frm], self.size[self.to]
        sent = np.select([self.kind == k for k in range(6)],
                         [0 * before, before * (ranks - 1), 2 * before * (ranks - 1) / ranks, before * (ranks - 1) / ranks,
                          before * (ranks - 1) / ranks, after])
        self.fixed = np.where((self.kind == CUT) | (self.kind == EXCHANGE), 0, ALPHA) + BETA * sent + GAMMA * after

    def _bytes(self, dims, shape, itemsize):
        for size, axes in zip(shape, dims):
            for a in axes:
                size = ceil(size / self.mesh_shape[a])
            itemsize *= size
        return itemsize

    def cost(self, start, goal) -> float:
        """Seconds of the cheapest path that never needs more memory than the larger end."""
        i, j = self.number[start], self.number[goal]
        key = i, max(self.size[i], self.size[j]), self._messages(start, goal)
        best = self._known.get(key)  # goals of one limit and one price of an exchange share their paths
        if best is None:
            best = self._known[key] = self._cheapest(*key)
        return float(best[j])

    def _cheapest(self, i, limit, messages):
        seconds = self.fixed + np.where(self.kind == EXCHANGE, ALPHA * messages, 0)
        use = (self.size <= limit)[self.to]
        frm, to, seconds = self.frm[use], self.to[use], seconds[use]
        best = np.full(len(self.states), np.inf)
        best[i] = 0
        while True:
            new = best.copy()
            np.minimum.at(new, to, best[frm] + seconds)
            if (new == best).all():
                return best
            best = new

    def _messages(self, start, goal) -> int:
        """Ranks over the axes that are not at the same place, counted from outside, in both."""
        def place(state, a):
            if a in state[1]:
                return "partial"
            return next(((d, axes[:axes.index(a) + 1]) for d, axes in enumerate(state[0]) if a in axes), None)
        return int(np.prod([n for a, n in enumerate(self.mesh_shape) if place(start, a) != place(goal, a)]))


def state_of(layout):
    """A layout as the oracle's state."""
    return tuple(layout.dim_axes), frozenset(layout.partial_axes)
