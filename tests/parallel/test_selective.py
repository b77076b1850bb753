# SPDX-License-Identifier: Apache-2.0
"""Selective recompute in one process: what runs again, what is kept, what is refused."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor.errors import ConfigError, OpRuleError
from tests.operands import filled
from tests.parallel.test_recompute import backward, recorded

RUNS: list[str] = []


@md.register_rule("noted_tanh", "S(0) -> S(0)", shapes="n m -> n m")
def noted_tanh(x):
    RUNS.append("tanh")
    return mint.tanh(x)


@md.register_rule("noted_square", "S(0) -> S(0)", shapes="n m -> n m")
def noted_square(x):
    RUNS.append("square")
    return x * x


class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Dense(6, 10), nn.Dense(10, 6)
        self.calls = 0

    def construct(self, x, scale=1.0):
        self.calls += 1
        return x + self.down(noted_square(noted_tanh(self.up(x)))) * scale


@pytest.fixture
def mesh():
    return md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))


def net_of(mesh, **how):
    net = md.distribute_module(filled(nn.SequentialCell(Block(), Block())), mesh)
    return md.checkpoint_wrapper(net, **how) if how else net


def gradients(net, mesh, times: int = 1):
    x = md.distribute_tensor(Tensor(np.random.default_rng(9).normal(size=(3, 6)).astype(np.float32)), mesh, [md.Shard(0)])
    for _ in range(times):
        RUNS.clear()
        loss, (of_x, grads) = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), 0, net.trainable_params())(x)
    return [t.full_tensor().asnumpy() for t in (loss, of_x, *grads)]


@pytest.mark.parametrize(("save", "again"), [
    ([], {"tanh", "square"}), (["noted_tanh"], {"square"}), ([noted_square], {"tanh"}),
    ([noted_tanh, "noted_square", nn.Dense(2, 2).matmul], set()), (lambda op, args: op.startswith("noted_t"), {"square"}),
], ids=["nothing", "name", "function", "several", "asked"])
def test_kept_ops_do_not_run_again(mesh, save, again):
    want = gradients(net_of(mesh), mesh)
    for policy in ("full", "every:2"):
        net = net_of(mesh, policy=policy, save=save)
        for got, expected in zip(gradients(net, mesh, 2), want, strict=True):
            assert np.array_equal(got, expected)
        blocks = 2 if policy == "full" else 1
        assert [block.calls for block in net] == [4, 4 if blocks == 2 else 2]
        for op in ("tanh", "square"):
            assert RUNS.count(op) == 2 + blocks * (op in again), op


def test_a_list_as_the_policy_is_what_is_kept(mesh):
    gradients(net_of(mesh, policy=["noted_tanh"]), mesh)
    assert RUNS.count("tanh") == 2 and RUNS.count("square") == 4


def test_modes_of_the_forward_are_those_of_its_second_run(mesh):
    class Mixed(nn.Cell):
        def construct(self, x):
            with md.redistribution_policy("explicit"):
                y = mint.exp(x * 0.1)
            return noted_tanh(noted_square(y + offset))

    offset = Tensor(np.full((3, 6), 0.3, np.float32))
    x = md.distribute_tensor(Tensor(np.random.default_rng(9).normal(size=(3, 6)).astype(np.float32)), mesh, [md.Shard(0)])
    cell, out = Mixed(), []
    for how in (None, {"save": ["noted_tanh"]}):
        if how is not None:
            md.checkpoint_wrapper(cell, **how)

        def loss(x):
            with md.implicit_replication():
                return cell(x).sum()
        RUNS.clear()
        out.append(ms.grad(loss)(x).full_tensor().asnumpy())
    assert np.array_equal(*out) and RUNS == ["square", "tanh", "square"]


def test_nothing_runs_again_where_nothing_is_recorded(mesh):
    net = net_of(mesh, save=[])
    net(md.ones((3, 6), mesh, [md.Shard(0)]))
    assert net[0].calls == 1


def test_refusals(mesh):
    with pytest.raises(ConfigError, match="'save' names no op: 'matmull'"):
        net_of(mesh, save=["matmull"])
    plain = md.checkpoint_wrapper(nn.Dense(6, 6), save=["matmul"])
    with pytest.raises(ConfigError, match="computed on no DTensor"):
        ms.value_and_grad(lambda x: plain(x).sum(), None, plain.trainable_params())(Tensor(np.ones((3, 6), np.float32)))

    class Fickle(Block):
        def construct(self, x):
            self.calls += 1
            return noted_tanh(x) if self.calls % 2 else noted_square(x)
    net = md.checkpoint_wrapper(Fickle(), save=[])
    x = md.ones((3, 6), mesh, [md.Shard(0)])
    with pytest.raises(OpRuleError, match="Fickle did something else when it ran again"):
        ms.grad(lambda x: net(x).sum())(x)
    gradients(net_of(mesh, save=["matmul"]), mesh)


class Gated(nn.Cell):
    def __init__(self, skipped: bool = False):
        super().__init__()
        self.w = Parameter(Tensor(np.linspace(-1, 2, 6).astype(np.float32)), name="w")
        self.skipped = skipped

    def construct(self, x):
        return x if self.skipped else mint.tanh(x * self.w) * x


@pytest.mark.parametrize("save", [None, [], ["mul"], ["tanh"], lambda op, args: True])
def test_a_derivative_of_a_gradient(mesh, save):
    x = md.distribute_tensor(Tensor(np.random.default_rng(9).normal(size=(3, 6)).astype(np.float32)), mesh, [md.Shard(0)])
    seen = []
    for again in (False, True):
        net = md.distribute_module(Gated(), mesh)
        if again:
            md.checkpoint_wrapper(net, save=save)
        inner = ms.grad(lambda x, net=net: (net(x) ** 2).mean())
        _, (of_x, (of_w,)) = ms.value_and_grad(lambda x, inner=inner: (inner(x) ** 2).sum(), 0, net.trainable_params())(x)
        seen.append([of_x.full_tensor().asnumpy(), of_w.full_tensor().asnumpy()])
    assert all(np.array_equal(a, b) and a.any() for a, b in zip(*seen))


def test_a_block_that_is_skipped(mesh):
    want = gradients(net_of(mesh), mesh)
    net = md.checkpoint_wrapper(md.distribute_module(nn.SequentialCell(Gated(True), Gated(True)), mesh), save=["matmul"])
    net.append(net_of(mesh))
    loss, of_x, *grads = gradients(net, mesh)
    assert all(map(np.array_equal, (loss, of_x, *[g for g in grads if g.shape != (6,) or g.any()]), want))


@pytest.mark.parametrize("save", [[mint.tanh], ["linear"], ["matmul"], []])
def test_kept_ops_of_recordings_in_flight(mesh, save):
    rows = [Tensor(np.random.default_rng(i).normal(size=(3, 6)).astype(np.float32)) for i in range(3)]
    seen = []
    for again in (False, True):
        net = net_of(mesh, **({"save": save} if again else {}))
        xs = [md.distribute_tensor(x, mesh, [md.Shard(0)]) for x in rows]
        made = [recorded(lambda x, net=net: (net(x) ** 2).mean(), x) for x in xs]
        for x in xs:  # marks it, for good, as one that has a gradient
            ms.grad(lambda x: x.sum())(x)
        seen.append([g for i in (1, 2, 0) for g in backward(made[i], net.trainable_params())])
    assert all(np.array_equal(a, b) and a.any() for a, b in zip(*seen))


@pytest.mark.parametrize("save", [[mint.tanh], ["redistribute"], ["exp", "redistribute"], []])
def test_what_is_moved_inside_is_moved_alike_in_both_runs(mesh, save):
    class Moving(nn.Cell):
        def construct(self, x):
            return mint.tanh(x) * mint.exp(x)  # of a sum in parts: it is moved once

    cut = md.distribute_tensor(Tensor(np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32)), mesh, [md.Shard(1)])
    w = md.distribute_tensor(Tensor(np.random.default_rng(2).normal(size=(6, 4)).astype(np.float32)), mesh, [md.Shard(0)])
    seen = []
    for cell in (Moving(), md.checkpoint_wrapper(Moving(), save=save)):
        seen.append(ms.grad(lambda x, cell=cell: cell(mint.matmul(x, w)).sum())(cut).full_tensor().asnumpy())
    assert np.array_equal(*seen) and seen[0].any()


def test_what_is_not_kept_is_given_back(mesh):
    """Of memory that was given back the next results are made: how many places were there for 36 of them, in a forward?"""
    places: list[int] = []

    class Wide(nn.Cell):
        def construct(self, x):
            for _ in range(4):
                for op in (mint.exp, lambda x: x * 0.5, mint.tanh):
                    x = op(x)
                    places.append(Tensor.data_ptr(x))
            return x

    x, seen = md.ones((512, 1024), mesh, [md.Shard(0)]), {}
    for name, save in (("none", None), ("tanh", ["tanh"]), ("full", [])):
        net = nn.SequentialCell(*(Wide() for _ in range(3)))
        if save is not None:
            md.checkpoint_wrapper(net, save=save)
        places.clear()
        ms.grad(lambda x, net=net: net(x).sum())(x)
        seen[name] = len({*places[:36]})
    assert seen["full"] < 8 < seen["tanh"] - 3 < 16 < seen["none"] - 7, seen
