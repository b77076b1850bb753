# SPDX-License-Identifier: Apache-2.0
"""Which (source, target) pairs are planned, and how a plan is compared."""
from __future__ import annotations

import itertools

import numpy as np

from ms_dtensor.debug.verify.oracle import assemble, same, split
from ms_dtensor.redistribute.plan import cost, plan
from tests.pure.oracle_plan import Oracle, state_of
from tests.pure.test_plan import execute, layouts, mesh_of

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
