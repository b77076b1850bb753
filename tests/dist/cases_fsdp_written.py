# SPDX-License-Identifier: Apache-2.0
"""What a forward writes under `fully_shard` and under a policy; numbers as inputs; runs and gradients that are dropped."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import ms_dtensor as md
from ms_dtensor import MixedPrecisionPolicy, fully_shard, init_device_mesh, parallelize_module, replicate
from ms_dtensor.errors import LayoutError
from tests.dist.cases_fully_shard import ROWS, filled, fsdp, loss_of, mine, same_step
from tests.dist.operands import Built, R
from tests.dist.support import equal
from tests.tiers import sampled


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


def whatever_a_forward_writes_with_reaches_the_shards(world):
    for turn, mesh in enumerate((fsdp(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "cut")))):
        for how in sampled(("copy_", "assign", "setitem", "set_data", "assign_value", "trained"), 2, turn):
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


def statistics_are_kept_in_their_own_dtype(world):
    """In 16 bits each forward would round them; a copy of them would be written, and forgotten."""
    def normed():
        return filled(Built(lambda c, x: c.two(c.bn(c.one(x))), one=nn.Dense(5, 6), bn=nn.BatchNorm1d(6),
                           two=nn.Dense(6, 3))).set_train()
    rows = np.random.default_rng(1).normal(2.0, 3.0, (8, 5)).astype(np.float32)
    mesh, plain, policy = fsdp(), normed(), MixedPrecisionPolicy(ms.bfloat16, ms.float32)
    for cut in (replicate, fully_shard):
        net = cut(normed(), mesh=mesh, mp_policy=policy)
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


def numbers_as_inputs(world, grid):
    two = Tensor(2.0)
    want = np.arange(6, dtype=np.float32) * 2
    for cut in (fully_shard, replicate):
        for styled in (False, True):
            net = nn.SequentialCell(Built(lambda c, heat: c.a * heat, up=nn.Dense(5, 6),
                                         a=Parameter(Tensor(np.arange(6, dtype=np.float32)), name="a")))
            if styled:
                parallelize_module(net, grid["tp"], {"0.up": md.ColwiseParallel(), "0": md.PrepareModuleInput(
                    input_layouts=R, desired_input_layouts=R)})
            equal(cut(net, mesh=grid["dp"])(two), want, str(styled))


def a_run_whose_result_is_not_used(world):
    """Each backward of a recomputed cell has the inputs of its own forward; the last one may have no backward."""
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
            equal((got[0], *got[1]), (want[0], *want[1]))
        else:
            same_step(net, plain, mesh)


class Keeping(nn.Cell):
    """Keeps what it was lent, and writes through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Dense(5, 7)
        self.s = Parameter(Tensor(np.arange(7, dtype=np.float32)), name="s", requires_grad=False)
        self.writes = False

    def construct(self, x):
        self.whole, self.turned = self.a.weight, self.a.weight.T
        if self.writes:
            part = self.s[1:6]
            part[2:] = part[2:] + 3
        return self.a(x) * self.s


def what_is_kept_past_its_cell_is_refused(world):
    """Its memory is gone: it read as zeros, and the loss that used it was another one."""
    mesh, plain = fsdp(), filled(Keeping())
    net = fully_shard(filled(Keeping()), mesh=mesh)
    loss, grads = md.value_and_grad(loss_of(net), None, net.trainable_params())(mine(mesh))
    want, plain_grads = ms.value_and_grad(loss_of(plain), None, plain.trainable_params())(Tensor(ROWS))
    equal(loss, want)
    equal(grads, plain_grads, "gradient")
    for run in (lambda: net(mine(mesh)), lambda: None):
        run()
        for kept in (net.whole, net.turned):
            for use in (lambda x: x.sum(), lambda x: ops.relu(x), lambda x: x.to_local()):
                with pytest.raises(LayoutError, match="used after its cell has returned"):
                    use(kept)
    net.unshard()
    equal(net.turned, plain.a.weight.asnumpy().T)
