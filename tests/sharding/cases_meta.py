# SPDX-License-Identifier: Apache-2.0
"""Models made without values, laid out, and filled where their shards are: `DeviceCtx("meta")`, `to_empty()`."""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

import ms_dtensor as md
from ms_dtensor import ColwiseParallel, RowwiseParallel, fully_shard, init_device_mesh, parallelize_module, replicate
from ms_dtensor.errors import ConfigError
from ms_dtensor.internals.names import no_grad
from tests.cases import case
from tests.sharding.support import Net, own_rows, same_step, sharded
from tests.support import counted, each, refusal


def styled(net, mesh, cells=()):
    parallelize_module(net, mesh["tp"], {"blocks.0.0": ColwiseParallel(use_local_output=False),
                                         "blocks.1.0": RowwiseParallel(use_local_output=False)})
    md.distribute_module(net, mesh["tp"])
    return sharded()(net, mesh["dp"], cells)


def kept(net, mesh, cells=()):
    return fully_shard(net, mesh=mesh["dp"], replicate_params=[net.scale, net.blocks[0][0].bias])


WAYS = {"fully_shard": lambda net, mesh, cells: sharded()(net, mesh["dp"], cells), "kept": kept, "styles": styled,
        "replicate": lambda net, mesh, cells: replicate(net, mesh=mesh["dp"]),
        "zero1": lambda net, mesh, cells: replicate(net, mesh=mesh["dp"], zero1=True)}


def filled_in_place(net):
    """Each shard draws its part of what one device would draw."""
    md.manual_seed(5)
    with no_grad():
        for p in net.get_parameters():
            p.normal_(mean=0.3, std=0.5)
    return net


@case((2, 4), timeout=240)
def models_without_values_are_laid_out_and_filled_in_place(world):
    mesh = init_device_mesh("cpu", (world.size // 2, 2) if world.size > 2 else (2, 1), mesh_dim_names=("dp", "tp"))

    @each(WAYS)
    def check(way):
        real, wrap = Net(), WAYS[way]
        filled_in_place(wrap(real, mesh, real.blocks))
        with counted() as count, ms.DeviceCtx("meta"):
            net = Net()
            wrap(net, mesh, net.blocks)
            assert all(p.device == "meta" for p in net.get_parameters())
        assert not count, count
        params = list(net.get_parameters())
        rows = own_rows(mesh["dp"])
        if way != "styles":
            assert "have no values" in refusal(lambda: net(rows), ConfigError)
        net.to_empty()
        assert all(a is b for a, b in zip(params, net.get_parameters()))
        assert [p.layout for p in params] == [p.layout for p in real.get_parameters()]
        filled_in_place(net)
        plain = Net()
        for p, q, r in zip(params, real.get_parameters(), plain.get_parameters(), strict=True):
            assert p.to_local().asnumpy().tobytes() == q.to_local().asnumpy().tobytes(), p.name
            r.set_data(p.full_tensor())
        for _ in range(2):
            same_step(net, plain, rows)


@case(2)
def probes_and_groups_do_not_mind_a_meta_context(world):
    from ms_dtensor.internals import probes
    with ms.DeviceCtx("meta"):
        for probe in (*probes.PROBES, probes._backwards_come_in_any_order):
            probes._ask(probe, "ms_dtensor")
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        lines = md.distribute_tensor(Tensor(np.arange(6.0, dtype=np.float32)), mesh, [md.Shard(0)])
        assert lines.device == "meta" and lines.layout.local_shape() == (3,)
        cell = nn.Dense(4, 2)
    given = Tensor(np.arange(6.0, dtype=np.float32))
    with ms.DeviceCtx("meta"):
        laid = md.distribute_tensor(given, mesh, [md.Shard(0)])  # it has values, and keeps them
    assert laid.to_local().asnumpy().tolist() == given.asnumpy()[world.rank * 3:][:3].tolist()
    assert cell.weight.device == "meta"
