# SPDX-License-Identifier: Apache-2.0
"""Real ranks: MindSpore's optimizers step DTensor parameters like one device does, and communicate nothing."""
from __future__ import annotations

import math
from contextlib import nullcontext

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor import distribute_tensor
from ms_dtensor.errors import ConfigError
from ms_dtensor.internals.target import rehearsal
from ms_dtensor.optim import AdamW, clip_grad_norm_
from ms_dtensor.tensor.distribute import distribute_parameter
from tests.cases import case
from tests.dist.operands import R, S, data, mesh_2d
from tests.dist.support import array, counted, each_once, equal, refusal, same_on_all_ranks
from tests.tiers import sampled

SHAPES = ((6, 5), (5,), (5, 3))
LAYOUTS = ([S(0), R], [R, S(0)], [S(1), S(0)])  # uneven shards among them
STEPS = 3

OPTIMIZERS = {
    "nn.Adam": lambda ps: nn.Adam(ps, learning_rate=0.05, weight_decay=0.01),
    "nn.Adam(amsgrad)": lambda ps: nn.Adam(ps, learning_rate=0.05, use_amsgrad=True),
    "nn.AdamWeightDecay": lambda ps: nn.AdamWeightDecay(ps, learning_rate=0.05, weight_decay=0.1),
    "nn.SGD": lambda ps: nn.SGD(ps, learning_rate=0.1, momentum=0.9, weight_decay=0.01),
    "nn.Momentum": lambda ps: nn.Momentum(ps, learning_rate=0.1, momentum=0.9),
    "experimental SGD": lambda ps: ms.experimental.optim.SGD(ps, lr=0.1, momentum=0.9),
    "experimental Adam": lambda ps: ms.experimental.optim.Adam(ps, lr=0.05),
    "experimental AdamW": lambda ps: ms.experimental.optim.AdamW(ps, lr=0.05, weight_decay=0.1),
}


def _parameters(mesh=None):
    rng = np.random.default_rng(3)
    plain = [Parameter(Tensor(rng.normal(size=s).astype(np.float32)), name=f"p{i}") for i, s in enumerate(SHAPES)]
    if mesh is None:
        return plain
    return [distribute_parameter(p, mesh, placed) for p, placed in zip(plain, LAYOUTS)]


def _inputs(mesh=None):
    x = Tensor(np.random.default_rng(4).normal(size=(4, 6)).astype(np.float32))
    return x if mesh is None else distribute_tensor(x, mesh, [S(0), R])


def _train(build, parameters, x, value_and_grad):
    """Parameters after a few steps, and what the optimizer alone communicated."""
    optimizer = build(parameters)

    def loss(x):
        hidden = mint.tanh(mint.matmul(x, parameters[0]) + parameters[1])
        return (mint.matmul(hidden, parameters[2]) ** 2).sum()
    step = value_and_grad(loss, None, list(parameters))
    total = 0
    for _ in range(STEPS):
        _, grads = step(x)
        with counted() as count:
            optimizer(tuple(grads))
        total += sum(count.values())
    return parameters, total


def _check(name, build, value_and_grad):
    mesh = mesh_2d()
    wanted, = each_once(lambda: list(map(array, _train(build, _parameters(), _inputs(), ms.value_and_grad)[0])))
    got, communicated = _train(build, _parameters(mesh), _inputs(mesh), value_and_grad)
    assert communicated == 0, (name, communicated)
    for g, w, layout, start in zip(got, wanted, LAYOUTS, _parameters()):
        assert isinstance(g, md.DTensor) and list(g.placements) == layout, name
        equal(g, w, name, rtol=1e-4)  # Adam divides by roots of small squares
        assert np.abs(array(w) - array(start)).max() > 1e-3, f"{name} did not move"


@case(world_size=4, timeout=240)
def optimizers_step_with_local_gradients(world):
    for name, build in sampled(OPTIMIZERS.items(), 8):
        _check(name, build, ms.value_and_grad)


@case(world_size=4, timeout=240)
def optimizers_step_with_dtensor_gradients(world):
    for name, build in sampled(reversed(OPTIMIZERS.items()), 8):
        _check(name, build, md.value_and_grad)


EMPTY = {
    "nn.Adagrad": lambda ps: nn.Adagrad(ps, learning_rate=0.1, weight_decay=0.1),
    "nn.AdamOffload": lambda ps: nn.AdamOffload(ps, learning_rate=0.05),
    "nn.Adadelta": lambda ps: nn.Adadelta(ps, learning_rate=1.0, epsilon=1e-2),
    "nn.FTRL": lambda ps: nn.FTRL(ps, learning_rate=0.1),
    "experimental RMSprop": lambda ps: ms.experimental.optim.RMSprop(ps, lr=0.05),
}


@case(world_size=4, timeout=240)
def optimizers_step_where_a_shard_is_empty(world, grid):
    start = [data(30, 1, 5), data(31, 3, 4)]
    layouts = [S(0), R], [S(0), S(0)]  # dp=1 has nothing of the first, one rank nothing of the second

    def train(params, build, lay):
        optimizer = build(params)
        for step in range(STEPS):
            optimizer(tuple(lay(data(40 + 2 * step + i, *t.shape), i) for i, t in enumerate(start)))
        return params
    for name, build in sampled(EMPTY.items(), 4):
        want, = each_once(lambda build=build: list(map(array, train(
            [Parameter(t.copy(), name=f"p{i}") for i, t in enumerate(start)], build, lambda t, i: t))))
        params = [distribute_parameter(Parameter(t, name=f"p{i}"), grid, layouts[i]) for i, t in enumerate(start)]
        with counted() as count:
            got = train(params, build, lambda t, i: distribute_tensor(t, grid, layouts[i], src_data_rank=None))
        assert not count, (name, count)
        for g, w, t in zip(got, want, start):
            assert g.local_shape == g.layout.local_shape(), (name, g)
            equal(g, w, name, rtol=1e-4)
            assert np.abs(array(w) - array(t)).max() > 1e-3, f"{name} did not move"


def our_adamw_steps_and_the_norm_is_the_global_one(world, grid):
    _check("AdamW", lambda ps: AdamW(ps, lr=0.05, weight_decay=0.1), ms.value_and_grad)
    grads = [distribute_tensor(Tensor(np.full(s, 2.0, np.float32)), grid, p) for s, p in zip(SHAPES, LAYOUTS)]
    assert abs(float(clip_grad_norm_(grads, 1e9)) - 2 * np.sqrt(30 + 5 + 15)) < 1e-4


def a_norm_of_large_or_spoiled_gradients_is_one_devices_on_every_rank(world, grid):
    x = data(3, 6, 5).asnumpy()
    spoiled = x.copy()
    spoiled[5, 4] = np.nan  # of the last rank
    for placements in (*LAYOUTS, [S(0), S(1)]):
        grads = [distribute_tensor(Tensor(v), grid, placements, src_data_rank=None) for v in (x, spoiled)]
        for p in (math.inf, -math.inf, 2.0, 3.0):
            for device in (False, True):
                with rehearsal("GPU") if device else nullcontext():
                    norms = [float(clip_grad_norm_(grads[:n], math.inf, p)) for n in (1, 2)]
                equal(norms[0], np.linalg.norm(x.reshape(-1), p), f"{p} {placements}")
                assert math.isnan(norms[1]), (p, placements, device)
    grad = distribute_tensor(Tensor(x * np.float32(1e30)), grid, [S(0), R])
    equal(clip_grad_norm_([grad], 1.0), np.linalg.norm(x.astype(np.float64)) * 1e30)
    equal(grad, x / np.linalg.norm(x))


def seeds_that_differ_are_refused_on_all_ranks(world, grid):
    x = data(3, 6, 5)
    y = distribute_tensor(x, grid, [S(0), R], src_data_rank=None)
    for draw in (lambda: md.randn((5, 3), grid, [S(0), R]), lambda: mint.nn.functional.dropout(y, 0.5),
                 lambda: md.init.normal_(md.empty((5, 3), device_mesh=grid))):
        ms.set_seed(70 + world.rank)  # what many a script does with NumPy's
        text = same_on_all_ranks(world, refusal(draw, ConfigError))
        assert "rank 3: seed 73" in text, text
    ms.set_seed(70)
    with counted({("all_gather_object", "forward"): 1}):
        for _ in range(3):
            md.randn((5, 3), grid, [S(0), R])
