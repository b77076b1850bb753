# SPDX-License-Identifier: Apache-2.0
"""Real ranks: the norm of gradients is one device's on any layout; seeds that differ are refused."""
import math
from contextlib import nullcontext

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

import ms_dtensor as md
from ms_dtensor import distribute_tensor
from ms_dtensor.errors import ConfigError
from ms_dtensor.internals.target import rehearsal
from ms_dtensor.optim import clip_grad_norm_
from tests.dist.operands import R, S, data
from tests.dist.support import counted, equal, refusal, same_on_all_ranks

SHAPES = ((6, 5), (5,), (5, 3))
LAYOUTS = ([S(0), R], [R, S(0)], [S(1), S(0)])  # uneven shards among them


def the_norm_is_the_global_one(world, grid):
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
