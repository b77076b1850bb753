# SPDX-License-Identifier: Apache-2.0
"""Plans cost what brute force finds, and give right results: a part of them, all at night; bounded memory, quick."""
import itertools
import random
from functools import lru_cache
from math import ceil

import numpy as np
import pytest

from ms_dtensor import DeviceMesh, Layout, Partial, Replicate, Shard
from ms_dtensor.debug.verify.oracle import assemble, same, split
from ms_dtensor.redistribute.boxes import transfers
from ms_dtensor.redistribute.cost import DEFAULT
from ms_dtensor.redistribute.plan import _state, cost, plan
from ms_dtensor.redistribute.search import Search
from tests.calls import calls
from tests.pure.test_plan import RNG, arrives, execute, layouts, mesh_of

R, S, P = Replicate(), Shard, Partial()
_EVERY = {1: 1, 2: 5, 3: 61}  # by number of axes; coprime to the numbers of layouts, so that all kinds turn up
ROUNDING = 1e-9  # sums of the same terms in another order; a move more or less is 1e-3 and up
_TINY = [(8,), (5,), (8, 6), (7, 5), (4, 6, 8), (5, 3, 2)]
_LARGE = [(4096,), (1001,), (2048, 4096), (1001, 37), (64, 128, 256), (33, 500, 7)]  # bytes matter more than messages
MESHES = ((2,), (4,), (2, 2), (2, 3), (2, 2, 2))
SHAPES = {mesh: _TINY + _LARGE for mesh in MESHES}
EXECUTED = {mesh: [(8,), (5,), (8, 6), (7, 5), (4, 6, 2), (5, 3, 2)] for mesh in MESHES}


def pairs(mesh_shape, shape, every: int, ops=("sum",)):
    """Each `every`-th (source, target), reductions of one kind and of two."""
    mesh = mesh_of(mesh_shape)
    targets = list(layouts(mesh, shape))
    sources = list(layouts(mesh, shape, ops))
    for i, (src, dst) in enumerate(itertools.product(sources, targets)):
        if i % every == 0 and src is not dst:
            yield src, dst


def check_costs(mesh_shape, shape, every: int = 1, ops=("sum",)) -> tuple[int, float]:
    """Number of pairs compared with the oracle, and the largest relative difference in cost."""
    oracles: dict = {}
    count, worst = 0, 0.0
    for src, dst in pairs(mesh_shape, shape, every, ops):
        kinds = tuple(p.reduce_op if p.is_partial() else None for p in src.placements)
        if kinds not in oracles:
            oracles[kinds] = Oracle(mesh_shape, shape, 8, kinds)
        wanted = oracles[kinds].cost(state_of(src), state_of(dst))
        gap = abs(cost(plan(src, dst)) - wanted) / wanted
        count, worst = count + 1, max(worst, gap if gap > ROUNDING else 0.0)
    return count, worst


def check_results(mesh_shape, shape, every: int = 1, ops=("sum",)) -> tuple[int, list[str]]:
    """Number of pairs executed on NumPy shards, and those whose result is not the target's cut of the whole array."""
    rng = np.random.default_rng(0)
    whole = rng.normal(size=shape)
    count, wrong, parts = 0, [], {}
    for src, dst in pairs(mesh_shape, shape, every, ops):
        if src not in parts:
            parts = {src: split(whole, src, rng)}
        values = parts[src]
        for move in plan(src, dst):
            values = execute(move, values)
        value, unequal = assemble(values, dst)
        shapes = all(v.shape == dst.local_shape(at) for at, v in values.items())
        if not shapes or unequal or not same(whole, value):
            wrong.append(f"{src} -> {dst}: {plan(src, dst)}")
        count += 1
    return count, wrong


@pytest.mark.parametrize("check, shapes, in_three_dims", [(check_costs, SHAPES, 11), (check_results, EXECUTED, 37)],
                         ids=["costs", "results"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_no_plan_costs_more_than_brute_force_or_gives_another_result(mesh, check, shapes, in_three_dims):
    for shape in shapes[mesh]:
        every = _EVERY[len(mesh)] * (in_three_dims if len(mesh) == len(shape) == 3 else 1)
        count, wrong = check(mesh, shape, every)
        assert count and not wrong, shape


@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("check, shapes", [(check_costs, SHAPES), (check_results, EXECUTED)], ids=["costs", "results"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_plan_of_a_small_mesh(mesh, check, shapes):
    for shape in shapes[mesh]:
        count, wrong = check(mesh, shape)
        assert count and not wrong, shape


def test_reductions_of_two_kinds_are_planned_as_well():
    count, worst = check_costs((2, 3), (64, 96), 3, ("sum", "max"))
    assert count > 90 and worst == 0


@pytest.mark.parametrize("mesh, shapes", [((2, 2), [(8, 6), (4096,), (5, 0, 3)]), ((2, 1, 3), [(8, 6), (512, 4096)]),
                                          ((2, 3, 4), [(8, 6), (4096, 512), (5, 300, 300)]),
                                          ((4, 8, 8, 16), [(512, 4096, 8192), (64, 1000, 300)])], ids=str)
def test_all_states_at_once_give_what_best_first_gives(mesh, shapes):
    """On up to four axes against A*, whose moves are those the oracle has checked."""
    rng, grid = random.Random(1), mesh_of(mesh)
    placed = [R, P, S(0), S(1), S(2)]
    for i in range(24):
        shape = shapes[i % len(shapes)]
        able = placed[:2 + len(shape)]
        ends = [Layout(grid, [rng.choice(allowed) for _ in mesh], shape, order=rng.sample(range(len(mesh)), len(mesh)))
                for allowed in (able, [R, *able[2:]])]
        start, goal = map(_state, ends)
        if start == goal:
            continue
        search = Search(mesh, shape, 4, start, goal, DEFAULT)
        prices = []
        for path in (search.best_first(float("inf")), search.on_graph()):
            before, seconds = start, 0.0
            for step, after in path:
                assert step.kind == "exchange" or (step, after) in list(search.steps(before))
                ranks = int(np.prod([mesh[a] for a in step.axes]))
                sizes = search.bytes(before[0]), search.bytes(after[0])
                seconds += DEFAULT.seconds(step.kind, ranks, *sizes, search.messages)
                before = after
            assert before == goal
            prices.append(seconds)
        assert prices[1] == pytest.approx(prices[0], rel=1e-9), ends


def test_no_step_holds_more_than_the_larger_end():
    def held(layout):
        return np.prod(layout.local_shape((0,) * layout.mesh.ndim))
    for src, dst in pairs((2, 2, 2), (64, 33), 29):
        for move in plan(src, dst):
            assert held(move.dst) <= max(held(src), held(dst)), (src, dst, plan(src, dst))


def kinds(mesh, src, dst, shape, order=None):
    moves = plan(Layout(mesh, src, shape), Layout(mesh, dst, shape, order=order))
    return [(m.kind, m.axes) for m in moves]


def test_replicated_ranks_share_the_work_of_a_large_reduction():
    mesh = mesh_of((8, 4))
    assert kinds(mesh, [P, R], [R, R], (4096, 4096)) == [("cut", (1,)), ("all_reduce", (0,)), ("all_gather", (1,))] or \
        kinds(mesh, [P, R], [R, R], (4096, 4096)) == [("cut", (1,)), ("reduce_scatter", (0,)), ("all_gather", (1, 0))]
    assert kinds(mesh, [P, R], [R, R], (8, 8)) == [("all_reduce", (0,))]


def test_axes_of_one_rank_cost_nothing():
    mesh = mesh_of((1, 4))
    assert kinds(mesh, [S(0), S(1)], [R, S(1)], (8, 8)) == [("cut", ())]
    assert kinds(mesh, [P, S(1)], [S(0), R], (8, 8)) == [("all_gather", (1,))]


def test_an_exchange_keeps_summands_apart():
    mesh, shape = mesh_of((2, 2, 2)), (9, 4)
    src = Layout(mesh, [S(0), S(0), P], shape)
    dst = Layout(mesh, [S(0), S(0), P], shape, order=(1, 0, 2))
    assert all(other % 2 == rank % 2 for rank in range(8) for other, _ in transfers(src, dst, rank).sends)
    arrives(src, dst, RNG.normal(size=shape))


def test_five_axes_and_65536_ranks_are_planned_by_few_calls():
    mesh = DeviceMesh("cpu", np.arange(65536).reshape(4, 8, 8, 16, 16))
    src = Layout(mesh, [P, S(0), S(0), R, S(1)], (131072, 16384))
    dst = Layout(mesh, [S(0), S(1), S(0), S(1), R], (131072, 16384))
    found = []
    assert calls(lambda: found.extend(plan(src, dst))) < 120_000
    assert found


def test_a_rank_of_65536_knows_its_part_of_an_exchange_by_few_calls():
    mesh = DeviceMesh("cpu", np.arange(65536).reshape(4, 8, 8, 16, 16))
    other = DeviceMesh("cpu", np.arange(65536)[::-1].reshape(256, 256))
    src = Layout(mesh, [S(0), S(1), S(0), R, S(1)], (131072, 16384))
    dst = Layout(other, [S(1), S(0)], (131072, 16384))
    mesh.coordinate_of(0), other.coordinate_of(0)  # where each rank is, once per mesh
    tables = []
    assert calls(lambda: tables.append(transfers(src, dst, 4711))) < 10_000
    table, = tables
    need = np.prod(dst.local_shape(other.coordinate_of(4711)))
    got = [box for _, box in table.receives] + ([table.keeps] if table.keeps else [])
    assert sum(np.prod([hi - lo for lo, hi in box]) for box in got) == need


# -- a brute-force oracle: all states, all single moves between any two of them, Bellman-Ford; no code is shared ------------
# It does not generate moves, as the planner does: it looks at every pair of states and says which single move, if any,
# takes one to the other. So a move the planner forgets is not forgotten here.
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
