# SPDX-License-Identifier: Apache-2.0
"""What a forward writes under `fully_shard` and under a policy; numbers as inputs; runs and gradients that are dropped."""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import ms_dtensor as md
from ms_dtensor import MixedPrecisionPolicy, Replicate, fully_shard, init_device_mesh, parallelize_module, replicate
from tests.cases import case
from tests.dist.cases_fully_shard import ROWS, Net, cut_up, filled, fsdp, loss_of, mine, same_step
from tests.dist.support import equal, mesh_2d


class Counting(nn.Cell):
    """Gives a parameter another value in every forward, before it is used."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a = how, nn.Dense(5, 7)
        self.s = Parameter(Tensor(np.arange(7, dtype=np.float32)), name="s", requires_grad=how == "trained")

    def construct(self, x):
        new = self.s * 2 + 1
        if self.how == "copy_":
            self.s.copy_(new)
        elif self.how == "assign":
            ops.assign(self.s, new)
        elif self.how == "setitem":
            self.s[:] = new
        elif self.how == "assign_value":
            self.s.assign_value(new)
        else:
            self.s.set_data(new)
        return self.a(x) * self.s


@case(4)
def whatever_a_forward_writes_with_reaches_the_shards(world):
    for mesh in (fsdp(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "cut"))):
        for how in ("copy_", "assign", "setitem", "set_data", "assign_value", "trained"):
            net = fully_shard(filled(Counting(how)), mesh=mesh)
            held, was = net.s, net.s.full_tensor().asnumpy()
            net(mine(mesh))
            equal(net.s, 2 * was + 1, how)
            loss, _ = md.value_and_grad(loss_of(net), None, net.trainable_params())(mine(mesh))
            equal(net.s, 4 * was + 3, how)
            assert net.s is held
            plain = filled(Counting("set_data"))
            plain.s.set_data(Tensor(2 * was + 1))
            equal(loss, loss_of(plain)(Tensor(ROWS)), how)
            net.s.set_data(Tensor(np.ones(net.s.local_shape, np.float32)))  # outside, it is a parameter's own again
            equal(net.s, np.ones(7, np.float32))


@case(4)
def statistics_are_kept_in_their_own_dtype(world):
    """In 16 bits each forward would round them; a copy of them would be written, and forgotten."""
    class Normed(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.bn, self.two = nn.Dense(5, 6), nn.BatchNorm1d(6), nn.Dense(6, 3)

        def construct(self, x):
            return self.two(self.bn(self.one(x)))
    rows = np.random.default_rng(1).normal(2.0, 3.0, (8, 5)).astype(np.float32)
    mesh, plain, policy = fsdp(), filled(Normed()).set_train(), MixedPrecisionPolicy(ms.bfloat16, ms.float32)
    for cut in (replicate, fully_shard):
        net = cut(filled(Normed()).set_train(), mesh=mesh, mp_policy=policy)
        was = net.bn.moving_mean.full_tensor().asnumpy().copy()
        for _ in range(3):
            net(mine(mesh, rows))
        for kind in ("moving_mean", "moving_variance"):
            p = getattr(net.bn, kind)
            got = p.full_tensor().asnumpy()
            assert p.dtype == ms.float32 and not np.array_equal(got, ms.Tensor(got).astype(ms.bfloat16).float().asnumpy())
        if cut is replicate:
            for _ in range(3):
                plain(Tensor(rows))
        equal(net.bn.moving_mean, plain.bn.moving_mean, rtol=5e-3)
        assert np.abs(net.bn.moving_mean.full_tensor().asnumpy() - was).max() > 0.3


class Scaled(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.up = Parameter(Tensor(np.arange(6, dtype=np.float32)), name="a"), nn.Dense(5, 6)

    def construct(self, heat):
        return self.a * heat


@case(4)
def numbers_as_inputs(world):
    two, mesh = Tensor(2.0), mesh_2d()
    want = np.arange(6, dtype=np.float32) * 2
    for cut in (fully_shard, replicate):
        for styled in (False, True):
            net = nn.SequentialCell(Scaled())
            if styled:
                parallelize_module(net, mesh["tp"], {"0.up": md.ColwiseParallel(), "0": md.PrepareModuleInput(
                    input_layouts=Replicate(), desired_input_layouts=Replicate())})
            equal(cut(net, mesh=mesh["dp"])(two), want, str(styled))


@case(4)
def a_run_whose_result_is_not_used(world):
    """MindSpore gives the backward of a recomputed cell the inputs of its last forward, which may have none."""
    class Twice(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.SequentialCell(nn.Dense(5, 5), nn.Tanh())

        def construct(self, x):
            y = self.block(x)
            z = self.block(y + 1)
            self.block(x * 3)
            return y + z
    mesh, plain = fsdp(), filled(Twice())
    for cut in (lambda net: net, lambda net: fully_shard(net, mesh=mesh), lambda net: replicate(net, mesh=mesh)):
        net = filled(Twice())
        net.block.recompute()
        cut(net)
        if not isinstance(net.block[0].weight, md.DTensor):
            got, want = (ms.value_and_grad(loss_of(n), None, n.trainable_params())(Tensor(ROWS)) for n in (net, plain))
            for g, w in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
                equal(g, w)
        else:
            same_step(net, plain, mesh)
        assert not net.block._recompute_cell.args, "nobody will ask for these"


@case(4)
def micro_batches_that_were_broken_off_are_forgotten(world):
    mesh, plain = fsdp(), filled(Net())
    net = cut_up(filled(Net()), mesh)
    net.set_requires_gradient_sync(False)
    md.value_and_grad(loss_of(net), None, net.trainable_params())(mine(mesh))
    net.set_requires_gradient_sync(True)
    net.forget_gradients()
    same_step(net, plain, mesh)
