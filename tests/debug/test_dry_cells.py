# SPDX-License-Identifier: Apache-2.0
"""Cells of users in a dry run: what MindSpore's own make of their parameters, and what cells have methods for."""
from __future__ import annotations

import pytest
from mindspore import mint, nn

import ms_dtensor as md
from ms_dtensor import comm
from ms_dtensor.debug import dry_run

pytestmark = pytest.mark.usefixtures("cpu")


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm((8,)), lambda: nn.GroupNorm(2, 8)], ids=["layer", "group"])
@pytest.mark.parametrize("lay_out", [lambda net, mesh: md.distribute_module(net, mesh), md.replicate],
                         ids=["module", "replicate"])
def test_what_is_cast_to_its_own_dtype_stays_a_leaf(norm, lay_out):
    """MindSpore's norms cast their parameters to the input's dtype: in a dry run these became results of that cast."""
    seen = []
    for world in (comm.fake_world(2), dry_run(world=2, device="CPU")):
        with world, comm.record() as events:
            mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            net, x = lay_out(norm(), mesh=mesh), md.ones(4, 8, device_mesh=mesh, placements=[md.Shard(0)])
            _, grads = md.value_and_grad(lambda x, net=net: net(x).sum(), None, net.trainable_params())(x)
            assert all(p._is_leaf for p in net.trainable_params())
        seen.append(([tuple(g.shape) for g in grads], [(e.op, e.bytes) for e in events if e.phase == "backward"]))
    assert seen[0] == seen[1] and seen[0][0] == [(8,), (8,)]


def test_parameters_that_are_kept_whole_are_gathered_again_if_they_were_written():
    """`unshard()`: each forward asks whether kept parameters were changed; the answer is not of what has no data."""
    seen = []
    for world in (comm.fake_world(2), dry_run(world=2, device="CPU")):
        with world:
            mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            net = nn.SequentialCell(mint.nn.Linear(8, 8), mint.nn.Linear(8, 8))
            for cell in (*net, net):
                md.fully_shard(cell, mesh=mesh)
            x = md.ones(4, 8, device_mesh=mesh, placements=[md.Shard(0)])
            with comm.record() as events:
                for cell in net:
                    cell.unshard()
                net(x)
                net(x)
                net[0].weight.fill_(0.5)
                net(x)
                _, grads = md.value_and_grad(lambda x, net=net: net(x).sum(), None, net.trainable_params())(x)
                md.optim.AdamW(net.trainable_params(), 1e-3)(grads)
                net(x)
        seen.append([f"{e.op} {e.bytes} {e.phase}" for e in events])
    assert seen[0] == seen[1]
    gathered = [n for n, event in enumerate(seen[0]) if event.startswith("all_gather")]
    assert gathered[:2] == [0, 1] and len(gathered) == 2 + 1 + 2, "both; what was written; both, once stepped"
