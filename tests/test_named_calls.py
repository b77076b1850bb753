# SPDX-License-Identifier: Apache-2.0
"""A refusal names the call that the user made: not an argument of it, nor what it calls in turn."""
import numpy as np
import pytest
from mindspore import Tensor, nn

import ms_dtensor as md
from ms_dtensor import DTensor, Partial, Replicate, Shard, comm, distribute_module, distribute_tensor, init_device_mesh
from ms_dtensor.errors import DTensorError

PLACEMENTS = ([Shard(7)], [Shard(0), Shard(1)], ["x"], ("dp", "None"), {"x": Shard(0)}, 3, "tp")


def plain(*shape: int) -> Tensor:
    return Tensor(np.ones(shape, np.float32))


def placed(mesh, **options) -> DTensor:
    return distribute_tensor(plain(8, 4), mesh, [Shard(0)], src_data_rank=None, **options)


BY_PLACEMENTS = {
    "distribute_tensor": lambda m, p: distribute_tensor(plain(8, 4), m, p),
    "DTensor": lambda m, p: DTensor(plain(2, 4), m, p),
    "from_local": lambda m, p: DTensor.from_local(plain(2, 4), m, p),
    "redistribute": lambda m, p: placed(m).redistribute(m, p),
    "to_local": lambda m, p: placed(m).to_local(grad_placements=p),
    "full_tensor": lambda m, p: placed(m).full_tensor(grad_placements=p),
    **{name: lambda m, p, name=name: getattr(md, name)((8, 4), m, p)
       for name in ("ones", "zeros", "empty", "rand", "randn")},
    "full": lambda m, p: md.full((8, 4), 2.0, device_mesh=m, placements=p),
}
OTHERS = {
    "init_device_mesh": lambda m: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp",)),
    "distribute_module": lambda m: distribute_module(plain(3), m),
    "distribute_module, partition_fn": lambda m: distribute_module(nn.Dense(2, 2), m, partition_fn=3),
    "distribute_module, output_fn": lambda m: distribute_module(nn.Dense(2, 2), m, output_fn=3),
    "parallelize_module": lambda m: md.parallelize_module(plain(3), m, md.ColwiseParallel()),
    "local_map": lambda m: md.local_map(lambda x: x, [Shard(0)], in_placements=([Shard(7)],))(placed(m)),
    "SequenceParallel": lambda m: md.parallelize_module(
        nn.LayerNorm((4,)), m, md.SequenceParallel(sequence_dim=7), src_data_rank=None)(plain(2, 4)),
}


def refusal(call) -> str:
    with comm.fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        with md.CommDebugMode() as counted, pytest.raises(DTensorError) as caught:
            call(mesh)
        assert counted.get_total_counts() == 0
    return caught.value.attempt


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("name", BY_PLACEMENTS)
def test_placements_are_refused_by_the_call_that_got_them(name, placements):
    assert refusal(lambda mesh: BY_PLACEMENTS[name](mesh, placements)).startswith(f"For '{name}', ")


@pytest.mark.parametrize("name", OTHERS)
def test_others(name):
    assert refusal(OTHERS[name]).startswith(f"For '{name.partition(',')[0]}")


def test_a_partial_or_a_whole_gradient_is_no_fault():
    with comm.fake_world(4):
        x = placed(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))
        assert x.to_local(grad_placements=[Replicate()]).shape == (2, 4)
        assert x.full_tensor(grad_placements=[Partial()]).shape == (8, 4)
