# SPDX-License-Identifier: Apache-2.0
"""`Recording`: forwards whose backwards come in any order, bit for bit those of `ms.grad`; on ranks: tests/sharding."""
from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor.dispatch.recording import Recording
from ms_dtensor.errors import ConfigError, MixedOperandError, OpRuleError
from ms_dtensor.internals import probes
from ms_dtensor.internals.names import Function, no_grad, recording

pytestmark = pytest.mark.usefixtures("cpu")
RNG = np.random.default_rng(7)


def drawn(*shape: int) -> Tensor:
    return Tensor(RNG.normal(size=shape).astype(np.float32))


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.unused = Parameter(drawn(4, 4), name="w"), Parameter(drawn(3), name="unused")

    def construct(self, x, n=1):
        return mint.tanh(mint.matmul(x, self.w)) * n


def same(got, want) -> None:
    want = want.full_tensor() if isinstance(want, md.DTensor) else want
    got = got.full_tensor() if isinstance(got, md.DTensor) else got
    np.testing.assert_array_equal(got.asnumpy(), want.asnumpy())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("distributed", [False, True])
def test_backwards_come_in_any_order(order, distributed):
    net, xs, dys = Net(), [drawn(2, 4) for _ in range(3)], [drawn(2, 4) for _ in range(3)]
    want = [ms.grad(lambda x, dy=dy: (net(x, 2) * dy).sum(), 0, list(net.trainable_params()))(x) for x, dy in zip(xs, dys)]
    if distributed:
        mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        net = md.distribute_module(net, mesh)
        xs, dys = ([md.distribute_tensor(t, mesh, [md.Shard(0)]) for t in ts] for ts in (xs, dys))
    seen: list = []
    handle = net.w.register_hook(lambda g: seen.append(1))
    made = [Recording.of(net, x, 2) for x in xs]
    for i in order:
        (dx,), (dw, zeros) = made[i].backward(dys[i], net.trainable_params())
        same(dx, want[i][0])
        same(dw, want[i][1][0])
        same(zeros, want[i][1][1])
        assert isinstance(dw, md.DTensor) is distributed and not recording()
    handle.remove()
    assert len(seen) == 3, "a hook runs once a backward"


@pytest.mark.parametrize("units", [md.distribute_module, md.replicate, md.fully_shard])
def test_a_hook_that_raised_can_be_removed(units):
    """Plain MindSpore does not find a parameter's hook any more once one has raised: it stays for ever."""
    net, x, mesh = Net(), drawn(2, 4), md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    want = ms.grad(lambda x: net(x).sum(), None, [net.w])(x)[0]
    net = units(net, mesh) if units is md.distribute_module else units(net, mesh=mesh)
    x = md.distribute_tensor(x, mesh, [md.Shard(0)])

    def raising(grad):
        raise ValueError("of the hook")
    kept, handle = net.w.register_hook(lambda g: g * 2), net.w.register_hook(raising)
    for _ in range(2):
        with pytest.raises(ValueError, match="of the hook"):
            ms.grad(lambda x: net(x).sum(), None, [net.w])(x)
    handle.remove()
    handle.remove()
    same(ms.grad(lambda x: net(x).sum(), None, [net.w])(x)[0], want * 2)
    kept.remove()
    same(ms.grad(lambda x: net(x).sum(), None, [net.w])(x)[0], want)


def test_what_is_given_stays_as_it_is():
    """An identity gives the cotangent itself; and no gradient flows to where an input came from."""
    mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    x, dy = (md.distribute_tensor(drawn(4), mesh, [md.Shard(0)]) for _ in range(2))
    said = dy.layout
    made = Recording.of(lambda x, ids: (x, ids), x, Tensor([1, 2]))
    assert made.outputs[1].dtype == ms.int64
    (dx,), _ = made.backward((dy, Tensor([0, 0])))
    same(dx, dy)
    assert dy.layout is said and not x._requires_grad


def test_a_loss_needs_no_cotangent_and_only_what_is_asked_for_comes():
    net, x = Net(), drawn(2, 4)
    made = Recording.of(lambda x: (net(x) ** 2).mean(), x)
    (dx,), none = made.backward()
    same(dx, ms.grad(lambda x: (net(x) ** 2).mean())(x))
    assert none == []


class Cube(md.DFunction):
    """Of first order: elsewhere an nn.Cell's bprop, which a recording cannot run."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return 3 * x * x * grad


def test_functions_of_ones_own_are_recorded():
    xs = [drawn(2, 4), drawn(2, 4)]
    made = [Recording.of(lambda x: (Cube.apply(x) ** 2).sum(), x) for x in xs]
    for one, x in zip(made, xs):
        (dx,), _ = one.backward()
        same(dx, ms.grad(lambda x: (Cube.apply(x) ** 2).sum())(x))


class Slower(nn.Cell):
    """A cell with a gradient of its own, of which one argument is no tensor."""

    def construct(self, x, n=2):
        return mint.tanh(x) * n

    def bprop(self, x, n, out, dout):
        return dout * 0.5 - out, None


@pytest.mark.parametrize("distributed", [False, True])
def test_a_cell_with_a_bprop_is_recorded(distributed):
    net, slower, xs = Net(), Slower(), [drawn(2, 4), drawn(2, 4)]

    def loss(x):
        return (slower(net(x), n=3) ** 2).sum()
    want = [ms.grad(loss, 0, [net.w])(x) for x in xs]
    if distributed:
        mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        net, xs = md.distribute_module(net, mesh), [md.distribute_tensor(x, mesh, [md.Shard(0)]) for x in xs]
    made = [Recording.of(loss, x) for x in xs]
    for one, (x, w) in zip(made, want):
        (dx,), (dw,) = one.backward(params=[net.w])
        same(dx, x)
        same(dw, w[0])


def test_it_runs_once():
    made = Recording.of(Net(), drawn(2, 4))
    made.drop()
    with pytest.raises(OpRuleError, match="nothing left of the forward"):
        made.backward()


class Raises(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("on purpose")


def test_one_that_raises_leaves_the_others():
    net, x = Net(), drawn(2, 4)
    want = ms.grad(lambda x: net(x).sum(), 0)(x)
    made = Recording.of(lambda x: net(x).sum(), x)
    with pytest.raises(ZeroDivisionError):
        Recording.of(lambda x: net(x) * (1 / 0), x)
    with pytest.raises(ValueError, match="on purpose"):
        Recording.of(lambda x: Raises.apply(net(x)).sum(), x).backward()
    assert not recording()
    same(made.backward()[0][0], want)
    same(ms.grad(lambda x: net(x).sum(), 0)(x), want)


def test_gradients_inside_are_refused_and_so_are_recordings_where_nothing_is():
    net, x = Net(), drawn(2, 4)
    md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    with pytest.raises(OpRuleError, match="inside of a 'Recording'"):
        Recording.of(lambda x: ms.grad(lambda y: net(y).sum())(x).sum(), x)
    with pytest.raises(OpRuleError, match="cannot be recorded here"):
        ms.grad(lambda x: Recording.of(net, x).outputs.sum())(x)
    with no_grad(), pytest.raises(OpRuleError, match="cannot be recorded here"):
        Recording.of(net, x)
    mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    made = Recording.of(lambda x: x * 2, md.distribute_tensor(x, mesh, [md.Shard(0)]))
    with pytest.raises(MixedOperandError, match="does not fit the output"):
        made.backward(drawn(2, 4))


def test_a_mindspore_without_the_engine_is_refused(monkeypatch):
    monkeypatch.setattr(probes, "run_backward", None)
    probes.check_recordings.cache_clear()
    try:
        with pytest.raises(ConfigError, match="For 'Recording', MindSpore .* does not behave") as told:
            Recording.of(Net(), drawn(2, 4))
        assert "backwards_come_in_any_order" in str(told.value)
    finally:
        probes.check_recordings.cache_clear()
