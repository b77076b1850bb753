# SPDX-License-Identifier: Apache-2.0
"""Nothing in a step, or in laying a model out, grows faster than its parameters and cells: calls of functions, counted."""
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import ms_dtensor as md
from ms_dtensor import ColwiseParallel, comm
from tests.calls import calls

FEW, MANY = 50, 200


class Scaled(nn.Cell):
    def __init__(self, n: int) -> None:
        super().__init__()
        for i in range(n):
            self.insert_param_to_cell(f"w{i}", Parameter(Tensor(np.full(4, 1 + i % 7 / 1000, np.float32)), name=f"w{i}"))

    def construct(self, x):
        for p in list(self._params.values()):
            x = x * p
        return x


def dense(n: int) -> nn.Cell:
    return nn.SequentialCell(*(nn.Dense(4, 4, has_bias=False) for _ in range(n)))


def plan(n: int, mesh):
    md.parallelize_module(dense(n), mesh, {str(i): ColwiseParallel() for i in range(n)})


def sharded(n: int, mesh):
    net = dense(n)
    for cell in net:
        md.fully_shard(cell, mesh=mesh)
    return md.fully_shard(net, mesh=mesh)


def stepped(net, mesh):
    step = md.value_and_grad(lambda x: (net(x) ** 2).mean(), None, net.trainable_params())
    optimizer = md.optim.AdamW(net.trainable_params())
    x = md.distribute_tensor(ops.ones((2, 4)), mesh, [md.Shard(0)], src_data_rank=None)

    def run():
        _, grads = step(x)
        md.optim.clip_grad_norm_(list(zip(net.trainable_params(), grads)), 1.0)
        optimizer(grads)
    run()  # plans are made once
    return run


WORK = {
    "parallelize_module, exact patterns": lambda n, mesh: (lambda: plan(n, mesh)),
    "fully_shard, block by block": lambda n, mesh: (lambda: sharded(n, mesh)),
    "a step of replicate": lambda n, mesh: stepped(md.replicate(Scaled(n), mesh=mesh), mesh),
    "a step of fully_shard, one unit": lambda n, mesh: stepped(md.fully_shard(Scaled(n), mesh=mesh), mesh),
    "a step of fully_shard, many units": lambda n, mesh: stepped(sharded(n, mesh), mesh),
}


@pytest.mark.parametrize("what", WORK)
def test_work_grows_with_the_model_and_not_with_its_square(what):
    with comm.fake_world(2):
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        few, many = (calls(WORK[what](n, mesh)) for n in (FEW, MANY))
    assert many < 1.3 * (MANY / FEW) * few, (few, many)
