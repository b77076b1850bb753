# SPDX-License-Identifier: Apache-2.0
"""Units of one description: what a rank wrapped by itself is no part of the text that ranks compare."""
from __future__ import annotations

import mindspore as ms

import ms_dtensor as md
from tests.cases import case
from tests.dist.operands import Built, data
from tests.dist.support import equal


@case(2)
def a_sum_over_tp_is_made_after_stages_of_unlike_numbers_of_cells(world):
    stages = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    mesh = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def wrapped(of):
        net = md.distribute_module(Built(lambda c, x: x * c.w.to_local(), w=ms.Parameter(data(1, 4), name="w")), of)
        return md.fully_shard(net, mesh=of["dp"], local_inputs=True)
    for _ in range(1 + world.rank):
        wrapped(stages["dp"])
    net, xs = wrapped(mesh), [data(5 + r, 3, 4) for r in range(2)]
    with md.recorded(net):
        md.backward(net(xs[world.rank]).sum())
    equal(net.w.grad, sum(x.asnumpy() for x in xs).sum(0))
