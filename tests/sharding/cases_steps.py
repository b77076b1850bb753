# SPDX-License-Identifier: Apache-2.0
"""`fully_shard` from step to step: what stays gathered, what is owed, what raised, what changed or was written in between."""
import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import ms_dtensor as md
from ms_dtensor import MixedPrecisionPolicy, comm, fully_shard, init_device_mesh, optim, parallelize_module, replicate
from ms_dtensor.errors import ConfigError, DTensorError, LayoutError, MixedOperandError
from ms_dtensor.parallel import CPUOffloadPolicy, OffloadPolicy
from tests.operands import Built, R
from tests.rehearsal.session import rehearsed
from tests.sharding.cases_fully_shard import ASKED, ROWS, Net, both, cut_up, filled, fsdp, loss_of, mine, same_step
from tests.support import counted, equal, refusal, refused_alike, same_on_all_ranks
from tests.tiers import sampled


def neighbours_keep_the_parameters_between_forward_and_backward(world):
    mesh, plain = fsdp(), filled(Net())
    net, all_ = cut_up(filled(Net()), mesh, reshard_after_forward=2), cut_up(filled(Net()), mesh)
    for order in ((0, 1, 2), (0, 1, 2), (1, 1, 0, 1)):
        plain.order = net.order = all_.order = order
        with comm.record() as events:
            count = same_step(net, plain, mesh)
        wanted = same_step(all_, plain, mesh)
        assert count == wanted, (count, wanted)
        gathered = [(e.phase, e.axes) for e in events if e.op == "all_gather"][:7]
        if order == (0, 1, 2):
            assert gathered == [("forward", ("dp",))] * 4 + [("backward", ("near",))] * 3, gathered
    plain.order = net.order = (0, 1, 2)
    net.set_reshard_after_forward(False)
    count = same_step(net, plain, mesh)
    assert ("all_gather", "backward") not in count, count
    one = cut_up(filled(Net()), mesh, reshard_after_forward=1)
    assert ("all_gather", "backward") not in same_step(one, plain, mesh)
    both = cut_up(filled(Net()), md.init_device_mesh("cpu", (1, 4), mesh_dim_names=("copies", "cut")), reshard_after_forward=2)
    same_step(both, plain, mesh)


def what_neighbours_keep_is_not_used_for_the_next_step(world):
    mesh, net, plain = both(reshard_after_forward=2)
    md.value_and_grad(loss_of(net), None, [net.head.weight])(mine(mesh))  # its backward does not reach the blocks
    for n in (net, plain):
        for p in n.get_parameters():
            p.set_data(p * 1.5)
    net.blocks[1].unshard()
    equal(net(mine(mesh)), plain(Tensor(ROWS)))
    net.blocks[1].reshard()
    same_step(net, plain, mesh)


def kept_parameters_are_gathered_again_when_they_were_changed(world):
    """Also where the gathering is under way while an optimizer steps."""
    # steps that keep gradients small: after one of 0.1 they are 1e4, and last bits, which differ by machine, decide
    for build, under_way in sampled(itertools.product((lambda ps: optim.AdamW(ps, 0.1), lambda ps: nn.SGD(ps, 1e-3)),
                                                      (True, False)), 3):
        mesh, net, plain = both()
        one, many = build(plain.trainable_params()), build(net.trainable_params())
        grads = md.value_and_grad(loss_of(net), None, net.trainable_params())(mine(mesh))[1]
        wanted = ms.value_and_grad(loss_of(plain), None, plain.trainable_params())(Tensor(ROWS))[1]
        for block in net.blocks:
            block.unshard(async_op=under_way)
        many(tuple(grads))
        one(tuple(wanted))
        with counted() as count:
            equal(net(mine(mesh)), plain(Tensor(ROWS)))
        assert count["all_gather", "forward"] == 4 + 1, count  # one is `equal`'s
        same_step(net, plain, mesh)
        with counted() as count:
            net(mine(mesh))
        assert count["all_gather", "forward"] == 1 and count["all_reduce", "forward"] == 3, count
        p, q = net.blocks[0].norm.beta, plain.blocks[0].norm.beta  # 6 elements: a rank's shard is empty
        for x in (p, q):
            x.set_data(x + 1)
        same_step(net, plain, mesh)


def two_forwards_before_a_gradient(world):
    mesh = fsdp()

    def twice(n):
        return lambda x: (n(x) ** 2).mean() + (n(x * 2) * n(x)).mean()
    for how in sampled(({}, {"reshard_after_forward": False}, {"reshard_after_forward": 2}), 3, 1):
        plain, net = filled(Net()), cut_up(filled(Net()), mesh, **how)
        for _ in range(2):
            same_step(net, plain, mesh, twice)
        equal(net(mine(mesh)), plain(Tensor(ROWS)))
        same_step(net, plain, mesh)


def a_step_that_raises_forgets_what_was_gathered_up(world):
    mesh, net, plain = both()
    step = md.value_and_grad(loss_of(net), None, net.trainable_params())

    armed = []

    def refuse(*_):
        if armed:
            raise ValueError("on purpose")

    def raising(register, sync):
        net.set_requires_gradient_sync(False)
        step(mine(mesh))
        net.set_requires_gradient_sync(sync)
        armed.append(True)
        place = register(refuse)
        assert "on purpose" in refusal(lambda: step(mine(mesh)), ValueError)
        armed.clear()  # MindSpore does not take back a parameter's hook that has raised
        place.remove()
    up = net.blocks[1].up
    want = ms.value_and_grad(loss_of(plain), None, plain.trainable_params())(Tensor(ROWS))[1]
    for shift, register in enumerate((up.register_forward_hook, up.register_backward_hook, up.weight.register_hook)):
        for sync in sampled((False, True), 2, shift):
            raising(register, sync)
            total = None
            for i in range(2):
                net.set_requires_gradient_sync(i == 1)
                grads = step(mine(mesh))[1]
                total = grads if total is None else [a + b for a, b in zip(total, grads)]
            for p, g, w in zip(net.trainable_params(), total, want, strict=True):
                equal(g, 2 * w, p.name)
    same_step(net, plain, mesh)


def another_set_of_parameters_is_refused(world):
    mesh, net, plain = both()
    dense = net.blocks[1].up
    given, params = dense.weight, dict(dense._params)
    for change in (lambda: setattr(dense, "weight", Parameter(Tensor(np.ones((10, 6), np.float32)), name="new")),
                   lambda: dense._params.pop("weight"), lambda: setattr(dense, "weight", None)):
        change()
        with counted() as count:
            text = refusal(lambda: net.blocks[1](mine(mesh, np.ones((8, 6), np.float32))), ConfigError)
        assert "were replaced or taken out" in text and count.pop(ASKED, None) in (1, None) and not count, (text, count)
        same_on_all_ranks(world, text)
        dense._params.clear()
        dense._params.update(params)
        dense.__dict__["weight"] = given
        same_step(net, plain, mesh)
    net.head.insert_param_to_cell("extra", Parameter(Tensor(np.ones(3, np.float32)), name="extra"))
    text = refusal(lambda: md.value_and_grad(loss_of(net), None, net.trainable_params())(mine(mesh)), LayoutError)
    assert "plain: extra" in text
    same_on_all_ranks(world, text)


def a_cell_that_is_run_while_it_runs_is_refused(world):
    mesh, plain = fsdp(), filled(Net())
    for cut in (cut_up, lambda net, mesh: md.replicate(net, mesh=mesh, zero1=True)):
        net = cut(filled(Net()), mesh)
        hook = net.head.register_forward_hook(lambda cell, x, y, net=net: net(mine(mesh)) and None)
        for run in (lambda net=net: net(mine(mesh)), lambda net=net: same_step(net, plain, mesh)):
            text = same_on_all_ranks(world, refusal(run, ConfigError))
            assert "Net was run again before it returned" in text and "replaced" not in text, text
        hook.remove()
        outside = net.register_forward_hook(lambda cell, x, y, net=net: outside.remove() or net(mine(mesh)))
        same_step(net, plain, mesh)


def parameters_left_over_are_refused(world):
    mesh, plain, net = fsdp(), filled(Net()), filled(Net())
    for block in net.blocks:
        md.fully_shard(block, mesh=mesh)
    md.fully_shard(net.head, mesh=mesh)
    text = refusal(lambda: md.value_and_grad(loss_of(net), None, net.trainable_params())(mine(mesh)), LayoutError)
    assert "inner.weight, inner.bias" in text and "fully_shard(model" in text
    same_on_all_ranks(world, text)
    md.fully_shard(net, mesh=mesh)
    same_step(net, plain, mesh)
    net = filled(Net())
    for block in net.blocks:
        md.fully_shard(block, mesh=mesh)
    refusal(lambda: net(mine(mesh)), MixedOperandError)  # the head's plain weights


def an_optimizer_from_before_is_refused(world):
    mesh, net, plain = fsdp(), filled(Net()), filled(Net())
    old = [build(net.trainable_params()) for build in (
        lambda ps: optim.AdamW(ps), lambda ps: optim.SGD(ps, 0.1), lambda ps: nn.Momentum(ps, 0.1, 0.9),
        lambda ps: ms.experimental.optim.SGD(ps, 0.1), lambda ps: nn.AdamWeightDecay(ps, 0.1))]
    cut_up(net, mesh)
    grads = md.value_and_grad(loss_of(net), None, net.trainable_params())(mine(mesh))[1]
    for optimizer in old:
        refused_alike(world, lambda optimizer=optimizer: optimizer(tuple(grads)), DTensorError)
    same_step(net, plain, mesh)


def offloading_is_what_a_cpu_does_anyway(world):
    mesh, plain = fsdp(), filled(Net())
    for policy in (CPUOffloadPolicy(), OffloadPolicy(), None):
        same_step(cut_up(filled(Net()), mesh, offload_policy=policy), plain, mesh)
    with rehearsed():
        device = md.init_device_mesh("npu", (4,), mesh_dim_names=("dp",))
        assert "for CPUs only" in refusal(lambda: cut_up(filled(Net()), device, offload_policy=CPUOffloadPolicy()), ConfigError)


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
    def thrice(c, x):
        y = c.block(x)
        z = c.block(y + 1)
        c.block(x * 3)
        return y + z

    def made():
        return filled(Built(thrice, block=nn.SequentialCell(nn.Dense(5, 5), nn.Tanh())))
    mesh, plain = fsdp(), made()
    for cut in (lambda net: net, lambda net: fully_shard(net, mesh=mesh), lambda net: replicate(net, mesh=mesh)):
        net = made()
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
