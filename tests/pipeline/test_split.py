# SPDX-License-Identifier: Apache-2.0
"""Where stages are cut: as cheap as every way to cut can be, asked of all of them."""
from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np
import pytest
from mindspore import nn

import ms_dtensor as md
from ms_dtensor.errors import ConfigError
from ms_dtensor.pipeline.split import balanced


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
