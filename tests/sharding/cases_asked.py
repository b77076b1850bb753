# SPDX-License-Identifier: Apache-2.0
"""A gradient of some of a unit's parameters: of the others none is computed, so nothing that it would need is missed.

One autograd node has the gradients of a whole unit, and autograd runs what leads to a node. One device runs what leads to
the parameters that were asked for.
"""
from __future__ import annotations

from contextlib import nullcontext

import mindspore as ms
from mindspore import Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import checkpoint_wrapper
from ms_dtensor.errors import LayoutError
from ms_dtensor.internals.names import Function
from ms_dtensor.parallel.sharding.call import units_of
from tests.cases import case
from tests.operands import Built, filled
from tests.rehearsal.session import rehearsed
from tests.sharding.support import ROWS, WAYS, Mul, alike, data_mesh, rows_of, twins
from tests.support import counted, crossed, each, equal, equal_each, equal_values, refusal
from tests.tiers import sampled


class Passed(Function):
    """Counts the backwards that come through it."""

    @staticmethod
    def forward(ctx, x, cell):
        ctx.cell = cell
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.cell.passed += 1
        return grad, None


class Followed(nn.Cell):
    """What stands between `first` and the loss is frozen and written in each forward: MoCo's momentum encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.query, self.key, self.passed = nn.Dense(4, 4), nn.Dense(4, 4), nn.Dense(4, 4), 0
        for p in self.key.get_parameters():
            p.requires_grad = False

    def construct(self, x):
        x = mint.tanh(self.first(x))
        if isinstance(x, md.DTensor):
            x = md.DTensor.from_local(Passed.apply(x.to_local(), self), x.device_mesh, x.placements, shape=x.shape)
        else:
            x = Passed.apply(x, self)
        for k, p in zip(self.key.get_parameters(), self.query.get_parameters()):
            k.copy_(0.75 * ops.stop_gradient(k) + 0.25 * ops.stop_gradient(p))
        return mint.tanh(self.query(ops.stop_gradient(x))) * self.key(x)


def both(net):
    """A loss of two forwards, so that the first one's key is written before its backward."""
    return lambda x: (net(x) ** 2).mean() + net(x * 0.5).mean()


def by_value_and_grad(net, params, x):
    return ms.value_and_grad(both(net), None, params)(x)[1]


def by_grad_operation(net, params, x):
    return ops.GradOperation(get_by_list=True)(both(net), ms.ParameterTuple(params))(x)


def by_cell(net, params, x):
    return ms.grad(Built(lambda c, x: both(net)(x)), None, params)(x)


@case(2)
def of_what_is_not_asked_for_nothing_is_computed(world):
    mesh, plain = data_mesh(world), filled(Followed())
    want = by_value_and_grad(plain, list(plain.query.get_parameters()), Tensor(ROWS))
    assert plain.passed == 0

    @each(crossed((by_value_and_grad, by_grad_operation, by_cell), WAYS, 2))
    def step(gradients, way):
        _, net = twins(Followed, way, mesh, "")
        asked = list(net.query.get_parameters())
        with counted() as count:
            grads = gradients(net, asked, rows_of(mesh))
        equal_each(grads, want, asked)
        assert net.passed == 0, "what leads to 'first' has run backward"
        # of two calls; a bucket is one for both
        reduced = count["reduce_scatter", "backward"], count["all_reduce", "backward"]
        assert reduced in ((2, 0), (0, 1), (0, 2)), reduced
        equal_values(net, plain)


class Outer(nn.Cell):
    """Two layers, the second of which may run again."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.low, self.high = nn.Dense(4, 4), nn.Dense(4, 4)
        if again:
            checkpoint_wrapper(self.high)

    def construct(self, x):
        return self.high(mint.tanh(self.low(x)))


@case(2)
def what_runs_again_has_the_gradients_of_its_first_run(world):
    """Recomputed, and a unit of its own: its second run is in the backward, when another forward's request is over."""
    mesh = data_mesh(world)

    @each(sampled(WAYS, 2))
    def steps(way):
        plain, net = twins(lambda: Outer(again=True), way, mesh, "high")
        for name in ("low", "high"):
            params, theirs = ([getattr(n, name).weight] for n in (net, plain))
            want = ms.value_and_grad(both(plain), None, theirs)(Tensor(ROWS))[1]
            equal_each(ms.value_and_grad(both(net), None, params)(rows_of(mesh))[1], want, params)
        alike(net, plain, mesh, what="all of them")


@case(2)
def who_asks_only_afterwards_gets_all(world):
    """`vjp`, a block, and a cell after `set_grad()` say it when the forward is over; inside of another gradient, too."""
    mesh = data_mesh(world)
    plain, net = twins(Outer, "fully_shard", mesh, "")
    params, theirs, x = net.trainable_params(), plain.trainable_params(), rows_of(mesh)
    want = ms.value_and_grad(both(plain), None, theirs)(Tensor(ROWS))[1]
    equal_each(ms.vjp(both(net), x, weights=params)[1](Tensor(1.0))[1], want, params, "vjp")
    with md.recorded(params):
        md.backward(both(net)(x))
    equal_each([p.grad for p in params], want, params, "backward")

    loss = Built(lambda c, x: both(net)(x)).set_grad()
    loss(x)
    equal_each(ops.GradOperation(get_by_list=True)(loss, params)(x), want, params, "set_grad")

    inner = []

    def hook(grad):
        inner.append(ms.vjp(both(net), x, weights=params)[1](Tensor(1.0))[1])
    other = ms.Parameter(Tensor([1.0]))
    other.register_hook(hook)
    ms.grad(lambda p: p.sum(), None, [other])(other)
    equal_each(inner[0], want, params, "in a hook of another gradient")

    cell = WAYS["fully_shard"](filled(Mul()), mesh)

    def outer(x):  # a derivative of the inner gradient is refused, and never zero
        return sum((g * g).sum() for g in ms.vjp(both(cell), x, weights=cell.trainable_params())[1](Tensor(1.0))[1])
    assert "a derivative of a parameter's gradient" in refusal(lambda: ms.grad(outer)(x))


def steep(net):
    """A loss with a penalty on the gradient of what `net` makes of rows, as critics and energies have (WGAN-GP, R1)."""
    def loss(x):
        slope = ms.grad(lambda t: mint.tanh(net(t)).sum())(x)
        return (slope * slope * slope).sum() + net(x * 0.5).sum()  # a forward of the same cell between the two backwards
    return loss


@case(2)
def a_penalty_on_the_gradient_of_the_input_reaches_all_weights(world):
    """The inner backward's ops read whole parameters in the outer one, before any hook: these stay till that is over."""
    mesh, gathers = data_mesh(world), {}

    @each([(way, cells) for way in WAYS for cells in ("", "low high")])
    def steps(way, cells):
        plain, net = twins(Outer, way, mesh, cells)
        for what in ("first", "second"):
            count = alike(net, plain, mesh, steep, f"{what} step", rtol=1e-4)
        assert not any(unit.whole for unit in units_of(net))  # and nothing of it stays
        gathers[way, cells] = count["all_gather", "forward"], count["all_gather", "backward"]
    assert gathers["fully_shard", ""] == (1, 1) and gathers["fully_shard", "low high"] == (2, 2), gathers
    assert gathers["zero1", ""] == gathers["kept", ""] == (1, 0), gathers  # of three forwards and backwards


@case(2)
def a_penalty_on_a_frozen_critic(world):
    """No gradient of a parameter comes: the inner backward leaves the unit by its inputs, and the outer one comes back."""
    @each([(device, way, cells) for device in ("cpu", "npu") for way, cells in (("fully_shard", ""), ("kept", "low high"))])
    def steps(device, way, cells):
        with rehearsed(clock=False) if device == "npu" else nullcontext():
            mesh = data_mesh(world, device)
            plain, net = twins(Outer, way, mesh, cells)
            for p in (*plain.get_parameters(), *net.get_parameters()):
                p.requires_grad = False
            equal(ms.grad(steep(net))(rows_of(mesh)), ms.grad(steep(plain))(Tensor(ROWS)), "rows")
            assert not any(unit.whole for unit in units_of(net))


@case(2)
def on_devices_units_that_share_memory_refuse_the_penalty(world):
    """There units take rooms in turn, and what reads a room in the outer backward does not ask for it."""
    with rehearsed(clock=False):
        mesh = data_mesh(world, "npu")

        @each([("fully_shard", ""), ("kept", ""), ("kept", "low high"), ("zero1", "")])
        def steps(way, cells):
            plain, net = twins(Outer, way, mesh, cells)
            alike(net, plain, mesh, steep, rtol=1e-4)
            assert not any(unit.whole for unit in units_of(net))
        plain, net = twins(Outer, "fully_shard", mesh, "low high")
        said = refusal(lambda: alike(net, plain, mesh, steep), LayoutError)
        assert "derivative of a gradient" in said and "reshard_after_forward=False" in said, said
        alike(net, plain, mesh, both, rtol=1e-4)


@case(2)
def by_list_of_a_function_without_weights_whose_result_is_plain(world):
    """Whose gradient is whose is not known there, so what is no gradient would be handed out as one."""
    @each(WAYS)
    def check(way):
        plain, net = twins(lambda: Built(lambda c, x: c.blocks(x), blocks=Mul()), way, data_mesh(world))
        x = rows_of(data_mesh(world))

        def loss(t):
            return (net(t) ** 2).mean().full_tensor()
        told = refusal(lambda: ops.GradOperation(get_by_list=True)(loss)(x), LayoutError)
        assert "its result is plain" in told and "net.trainable_params()" in told
        want = ops.GradOperation(get_by_list=True)(lambda t: (plain(t) ** 2).mean(), plain.trainable_params())(Tensor(ROWS))
        equal_each(ops.GradOperation(get_by_list=True)(loss, net.trainable_params())(x), want, plain.trainable_params(), way)
