# SPDX-License-Identifier: Apache-2.0
"""What a gradient that raised has left of a unit: no memory, no sums under way, nothing owed."""
from __future__ import annotations

import mindspore as ms
from mindspore import Tensor

import ms_dtensor as md
from ms_dtensor import init_device_mesh, value_and_grad
from ms_dtensor.parallel.sharding.call import units_of
from ms_dtensor.parallel.sharding.unit import State
from tests.cases import case
from tests.rehearsal.session import rehearsed
from tests.sharding.cases_ranks_alike import Guarded, Raising, raising_step
from tests.sharding.support import ROWS, Net, alike, data_mesh, rows_of, sharded, twins
from tests.support import crossed, each, equal_each, mean_square, refusal


def refuse(*_):
    raise ValueError("on purpose")


@case(2)
def memory_is_given_back_by_who_raises(world):
    """Not by the next forward, which may never come, or be that of other cells."""
    mesh = data_mesh(world)

    @each(crossed(("fully_shard", "kept", "neighbours", "zero1"), (True, False), 1))
    def steps(way, forward):
        plain, net = twins(Guarded, way, mesh)
        alike(net, plain, mesh)
        if forward:
            hook = net.blocks[1][0].register_forward_hook(refuse)
            step = value_and_grad(mean_square(net), None, net.trainable_params())
            assert "on purpose" in refusal(lambda: step(rows_of(mesh)), ValueError)
            hook.remove()
        else:
            raising_step(net, mesh)
        assert all(unit.state is State.SHARDED and not unit.entered for unit in units_of(net))
        alike(net, plain, mesh)


@case(2)
def on_devices_sums_under_way_are_forgotten(world):
    """There gradients that have arrived are completed when the backward ends, which is another one then."""
    with rehearsed(clock=False):
        mesh, shorter = data_mesh(world, "npu"), md.MixedPrecisionPolicy(ms.bfloat16, ms.float32)

        added_up = md.MixedPrecisionPolicy(apply_grad_on_fp32_main_grad=True)

        @each({"fully_shard": sharded(), "shorter": sharded(mp_policy=shorter), "main": sharded(mp_policy=added_up),
               "kept": sharded(shard_placement_fn=lambda p: md.Replicate())}.items())
        def steps(name, way):
            def gradients(net):
                params = net.trainable_params()
                got = value_and_grad(mean_square(net), None, params)(rows_of(mesh))[1]
                return [g.full_tensor() for g in ([p.main_grad for p in params] if name == "main" else got)]
            net, never = (twins(Guarded, way, mesh)[1] for _ in range(2))
            raising_step(net, mesh)
            net.order = never.order = (2, 0, 1)
            equal_each(gradients(net), gradients(never), net.trainable_params(), rtol=0)


def sums_over_the_axis_that_cuts_are_forgotten(world):
    """They wait for those over the copies."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "cut"))
    plain, net = twins(Net, "fully_shard", mesh)
    step = value_and_grad(mean_square(net), None, net.trainable_params())
    net.set_requires_all_reduce(False)
    step(rows_of(mesh))
    hook = net.blocks[0][0].register_backward_hook(refuse)
    assert "on purpose" in refusal(lambda: step(rows_of(mesh)), ValueError)
    hook.remove()
    net.set_requires_all_reduce(True)
    alike(net, plain, mesh)


@case(2)
def weights_without_a_forward_of_their_cells_leave_nothing_either(world):
    """A penalty on the weights alone, whose backward raises when their gradients have arrived, or are owed."""
    mesh = data_mesh(world)

    @each(crossed(("replicate", "bucket_mb=0"), (True, False), 1))
    def steps(way, sync):
        plain, net = twins(Net, way, mesh)
        params = net.trainable_params()

        def penalty(cell):  # what is made first has its backward last
            return lambda x: (Raising.apply(x) * 0.5).sum() + (cell.blocks[0][0].weight ** 2).sum() + (cell.scale ** 3).sum()
        step = value_and_grad(penalty(net), 0, params)
        net.set_requires_gradient_sync(sync)
        Raising.armed = True
        try:
            assert "on purpose" in refusal(lambda: step(rows_of(mesh)), ValueError)
        finally:
            Raising.armed = False
        net.set_requires_gradient_sync(True)
        _, (_, want) = ms.value_and_grad(penalty(plain), 0, plain.trainable_params())(Tensor(ROWS))
        equal_each(step(rows_of(mesh))[1][1], want, params)
        alike(net, plain, mesh)


@case(2)
def ranks_may_raise_at_different_places(world):
    """Of `replicate`, whose forward does not communicate: what each has read till then is not compared any more."""
    mesh = data_mesh(world)
    plain, net = twins(Net, "replicate", mesh)
    hook = net.blocks[world.rank].register_forward_hook(refuse)
    step = value_and_grad(mean_square(net), None, net.trainable_params())
    assert "on purpose" in refusal(lambda: step(rows_of(mesh)), ValueError)
    hook.remove()
    alike(net, plain, mesh)
