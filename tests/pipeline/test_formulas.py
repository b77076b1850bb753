# SPDX-License-Identifier: Apache-2.0
"""P2: the simulated span, idle time and memory are those of the closed formulas, exactly, in units of a rank's whole share.

F = I = W = 1 and B = 2 are the times of all v stages of a rank together; a stage takes 1/v of them. Where stages are cut is
as cheap as every way to cut can be, asked of all of them.
"""
import random
from itertools import combinations_with_replacement

import numpy as np
import pytest
from mindspore import nn

import ms_dtensor as md
from ms_dtensor.errors import ConfigError
from ms_dtensor.pipeline import Actions, dualpipe_v, gpipe, interleaved, one_f_one_b, simulate, zb_h1, zbv
from ms_dtensor.pipeline.builders import BUILDERS
from ms_dtensor.pipeline.split import balanced

SIZES = [(p, m) for p in (2, 4, 8) for m in range(1, 4 * p + 1)]
RIPE = {  # idle time of a rank, and the most forwards held by rank r
    "gpipe": (lambda p, m: 3 * (p - 1), lambda p, m, r: m),
    "1f1b": (lambda p, m: 3 * (p - 1), lambda p, m, r: min(p - r, m)),
    "interleaved": (lambda p, m: 3 * (p - 1) / 2, lambda p, m, r: min(2 * (p - r - 1) + p + 1, 2 * m)),
    "zbh1": (lambda p, m: p - 1 + max(0, p - m), lambda p, m, r: min(p, m)),
    "zbv": (lambda p, m: max((p - 1) / 2, 2 * p - 1 - m), lambda p, m, r: min(2 * p, 2 * m, m + 1 + r)),
    "dualpipev": (lambda p, m: (p - 1) / 2 + min(p - 1, max(0, 2 * p - m)) + max(0, p - m),
                  lambda p, m, r: min(2 * p + 1, 2 * m, m + 1 + r)),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_span_idle_and_memory_are_the_formulas(name):
    idle, held = RIPE[name]
    for p, m in SIZES:
        if name == "interleaved" and m % p:
            continue
        timeline = simulate(BUILDERS[name](p, m))
        assert timeline.span == 3 * m + idle(p, m), (p, m)
        assert timeline.idle == (idle(p, m),) * p, (p, m)
        assert timeline.held == tuple(held(p, m, r) for r in range(p)), (p, m)


def test_figures_of_eight_ranks_and_sixteen_microbatches():
    spans = {name: simulate(make(8, 16)).span for name, make in BUILDERS.items()}
    assert spans == {"gpipe": 69, "1f1b": 69, "interleaved": 58.5, "zbh1": 55, "zbv": 51.5, "dualpipev": 51.5}


@pytest.mark.parametrize("p", (2, 4, 8))
def test_zbv_waits_for_nothing_from_2p_less_1_microbatches_on(p):
    assert simulate(zbv(p, 2 * p - 2)).span == 3 * (2 * p - 2) + max(1, (p - 1) / 2)
    assert max(simulate(zbv(p, 2 * p - 2)).local_idle) == 1
    assert simulate(zbv(p, 2 * p - 1)).span == 3 * (2 * p - 1) + (p - 1) / 2
    assert set(simulate(zbv(p, 2 * p - 1)).local_idle) == {0.0}


def test_formulas_with_other_costs():
    rng = random.Random(0)
    for _ in range(100):
        p, m, v = rng.choice((2, 3, 4)), rng.randrange(1, 9), rng.choice((1, 2, 4))
        costs = {kind: rng.choice((1, 2, 3, 0.5)) for kind in "FIW"}
        f, i, w = costs.values()
        whole = f + i + w
        for make in (gpipe, one_f_one_b):
            assert simulate(make(p, m), costs).span == (m + p - 1) * whole
        assert simulate(interleaved(p, m * p, v), costs).span == m * p * whole + (p - 1) * whole / v
        if m >= p and w <= min(f, i):
            assert simulate(zb_h1(p, m), costs).span == m * whole + (p - 1) * (f + i - w)


def test_deepseeks_formula_counts_a_pair_as_one_block():
    """F = I = W: (p - 1)(F&B + B - 3W) if a forward's result leaves at the end of the pair; here it leaves before."""
    for p in (2, 4, 8):
        order = dualpipe_v(p, 2 * p + 1)
        done: dict = {}
        at, clock = [0] * p, [0.0] * p
        while sum(at) < sum(map(len, order.ranks)):
            for r in range(p):
                while at[r] < len(order.ranks[r]):
                    parts = order.ranks[r][at[r]].parts
                    needs = [n for a in parts for n in a.inputs(2 * p) if n not in [b.result for b in parts]]
                    if not done.keys() >= set(needs):
                        break
                    clock[r] = max([clock[r], *(done[n] for n in needs)]) + sum(1 + (a.kind == "B") for a in parts)
                    done.update({a.result: clock[r] for a in parts})
                    at[r] += 1
        f = w = 1
        b = 2
        assert max(clock) - 2 * (2 * p + 1) * (f + b) == (p - 1) * ((f + b) + b - 3 * w)


# -- other costs -----------------------------------------------------------------------------------------------------------
def test_a_slow_stage_sets_the_pace_and_messages_add_up():
    assert simulate(gpipe(2, 3), {(1, "F"): 5}).span == 1 + 3 * 5 + 3 * 2 + 2
    assert simulate(gpipe(2, 1), hop=0.25).span == 6 + 2 * 0.25
    assert simulate(zbv(2, 1), hop=0.25).span == simulate(zbv(2, 1)).span + 4 * 0.25  # none at the turn of the V
    assert simulate(one_f_one_b(1, 4), hop=9.0).span == 12
    assert simulate(gpipe(2, 2), {"B": 1}).span == 3 * 2 == simulate(gpipe(2, 2), {"I": 0.5, "W": 0.5}).span
    assert simulate(gpipe(1, 1), {(0, "I"): 4}).span == 1 + 4 + 1


def test_products_and_forwards_are_counted_apart():
    timeline = simulate(Actions.parse("0F0,0F1,0I0,0I1,0W0,0W1"))
    assert (timeline.held, timeline.held_forwards, timeline.held_products) == ((2,), (2,), (2,))
    assert simulate(zb_h1(4, 8)).held_forwards == (4, 3, 2, 1) and simulate(zb_h1(4, 8)).held_products == (1, 2, 3, 4)


def score(cells, parts):
    """(the dearest, the largest) of these runs."""
    return tuple(max(sum(c[k] for c in cells if c[0] in part) for part in parts) for k in (1, 2))


@pytest.mark.parametrize("seed", range(40))
def test_the_dearest_costs_least_and_then_the_largest_has_least(seed):
    rng = np.random.default_rng(seed)
    n, count = int(rng.integers(1, 8)), int(rng.integers(1, 6))
    costs = rng.integers(0, 5, n) if seed % 2 else rng.random(n)
    cells = [(f"c{i}", float(costs[i]), float(rng.integers(0, 9))) for i in range(n)]
    paths = [path for path, *_ in cells]
    every = []
    for cuts in combinations_with_replacement(range(n + 1), count - 1):
        marks = [0, *cuts, n]
        every.append(score(cells, [paths[a:b] for a, b in zip(marks, marks[1:])]))
    got = balanced(cells, count)
    assert len(got) == count and [p for part in got for p in part] == paths
    assert np.allclose(score(cells, got), min((round(c, 9), size) for c, size in every), rtol=0, atol=1e-8)


def test_an_embedding_costs_no_time():
    """Three blocks of 16 beside a table of 32, and one beside a head of 32; by elements it would be two and two."""
    net = nn.SequentialCell(nn.Embedding(8, 4), *(nn.Dense(4, 4) for _ in range(4)), nn.Dense(4, 8))
    stages = md.pipeline.pipeline(net, md.init_device_mesh("cpu", (1,), mesh_dim_names=("pp",)), n_stages=2)
    assert [sum(isinstance(c, nn.Dense) for c in stage.module.cells()) for stage in stages] == [3, 2]


def test_a_layer_with_many_experts_is_cut_nowhere():
    """Eight experts are the longest list, and stand beside each other."""
    class Mixture(nn.Cell):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Dense(4, 8), nn.CellList([nn.Dense(4, 4) for _ in range(8)])

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.first, self.layers, self.last = nn.Dense(4, 4), nn.CellList([Mixture() for _ in range(5)]), nn.Dense(4, 8)

    stages = md.pipeline.pipeline(Net(), md.init_device_mesh("cpu", (1,), mesh_dim_names=("pp",)), n_stages=2)
    assert [[isinstance(layer, Mixture) for layer in s.module.layers] for s in stages] == [[True] * 3 + [False] * 2,
                                                                                         [False] * 3 + [True] * 2]


def test_a_plan_of_the_model_fits_each_stage(capsys):
    """What it says of cells of other stages, or of those inside of them, is passed over; a typing error is not."""
    net = nn.SequentialCell(nn.SequentialCell(nn.Dense(4, 4)), nn.SequentialCell(nn.Dense(4, 4)), nn.Dense(4, 8))
    mesh = md.init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "tp"))
    first, last = md.pipeline.pipeline(net, mesh["pp"], split=["2"])
    for stage, there in ((first, ["0.0.weight", "1.0.weight"]), (last, ["2.weight"])):
        md.parallelize_module(stage.module, mesh["tp"], {p: md.ColwiseParallel() for p in ("[01].0", "2")})
        cut = [n for n, p in stage.module.parameters_and_names() if isinstance(p, md.DTensor) and n.endswith("weight")]
        assert cut == there, cut
    with pytest.raises(ConfigError, match=r"'1\.up' matches no cell"):
        md.parallelize_module(first.module, mesh["tp"], {"1.up": md.ColwiseParallel()})
