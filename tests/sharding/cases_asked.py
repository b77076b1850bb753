# SPDX-License-Identifier: Apache-2.0
"""A gradient of some of a unit's parameters: of the others none is computed, so nothing that it would need is missed.

One autograd node has the gradients of a whole unit, and autograd runs what leads to a node. One device runs what leads to
the parameters that were asked for.
"""
from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import checkpoint_wrapper
from ms_dtensor.errors import OpRuleError
from ms_dtensor.internals.names import Function
from tests.cases import case
from tests.dist.support import counted, equal
from tests.sharding.support import ROWS, WAYS, Mul, alike, collected, data_mesh, filled, none_of, rows_of
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
    class Loss(nn.Cell):
        def construct(self, x):
            return both(net)(x)
    return ms.grad(Loss(), None, params)(x)


ASKING = {"value_and_grad": by_value_and_grad, "GradOperation": by_grad_operation, "a cell's grad": by_cell}


@case(2)
def of_what_is_not_asked_for_nothing_is_computed(world):
    mesh, faults = data_mesh(world), []
    plain = filled(Followed())
    want = by_value_and_grad(plain, list(plain.query.get_parameters()), Tensor(ROWS))
    assert plain.passed == 0
    for shift, (asking, gradients) in enumerate(ASKING.items()):
        for way, wrap in sampled(WAYS.items(), 2, shift):
            def step(gradients=gradients, wrap=wrap):
                net = filled(Followed())
                wrap(net, mesh)
                with counted() as count:
                    grads = gradients(net, list(net.query.get_parameters()), rows_of(mesh))
                for g, w, p in zip(grads, want, net.query.get_parameters(), strict=True):
                    equal(g, w, p.name)
                assert net.passed == 0, "what leads to 'first' has run backward"
                # of two calls; a bucket is one for both
                reduced = count["reduce_scatter", "backward"], count["all_reduce", "backward"]
                assert reduced in ((2, 0), (0, 1), (0, 2)), reduced
                for p, q in zip(net.get_parameters(), plain.get_parameters(), strict=True):
                    equal(p, q, f"value of {p.name}")
            collected(faults, f"{asking}, {way}", step)
    none_of(faults)


@case(2)
def what_runs_again_has_the_gradients_of_its_first_run(world):
    """Recomputed, and a unit of its own: its second run is in the backward, when another forward's request is over."""
    mesh, faults = data_mesh(world), []
    for way, wrap in sampled(WAYS.items(), 2):
        def steps(wrap=wrap):
            plain, net = (filled(nn.SequentialCell(nn.Dense(4, 4), nn.Tanh(), nn.Dense(4, 4))) for _ in range(2))
            for n in (plain, net):
                checkpoint_wrapper(n[2])
            wrap(net, mesh, [net[2]])
            for at in (0, 2):
                params, theirs = ([n[at].weight] for n in (net, plain))
                want = ms.value_and_grad(both(plain), None, theirs)(Tensor(ROWS))[1]
                equal(ms.value_and_grad(both(net), None, params)(rows_of(mesh))[1][0], want[0], f"weight of {at}")
            alike(net, plain, mesh, what="all of them")
        collected(faults, way, steps)
    none_of(faults)


@case(2)
def who_asks_only_afterwards_gets_all(world):
    """`vjp`, a block, and a cell after `set_grad()` say it when the forward is over; inside of another gradient, too."""
    mesh = data_mesh(world)
    plain, net = (filled(nn.SequentialCell(nn.Dense(4, 4), nn.Tanh(), nn.Dense(4, 4))) for _ in range(2))
    WAYS["fully_shard"](net, mesh)
    params, theirs, x = net.trainable_params(), plain.trainable_params(), rows_of(mesh)
    want = ms.value_and_grad(both(plain), None, theirs)(Tensor(ROWS))[1]

    def same(grads, what: str) -> None:
        for g, w, p in zip(grads, want, params, strict=True):
            equal(g, w, f"{what}: {p.name}")
    same(ms.vjp(both(net), x, weights=params)[1](Tensor(1.0))[1], "vjp")
    with md.recorded(params):
        md.backward(both(net)(x))
    same([p.grad for p in params], "backward")

    class Loss(nn.Cell):
        def construct(self, x):
            return both(net)(x)
    loss = Loss().set_grad()
    loss(x)
    same(ops.GradOperation(get_by_list=True)(loss, params)(x), "set_grad")

    inner = []

    def hook(grad):
        inner.append(ms.vjp(both(net), x, weights=params)[1](Tensor(1.0))[1])
    other = ms.Parameter(Tensor([1.0]))
    other.register_hook(hook)
    ms.grad(lambda p: p.sum(), None, [other])(other)
    same(inner[0], "in a hook of another gradient")

    cell = WAYS["fully_shard"](filled(Mul()), mesh)

    def outer(x):  # a derivative of the inner gradient is refused, and never zero
        return sum((g * g).sum() for g in ms.vjp(both(cell), x, weights=cell.trainable_params())[1](Tensor(1.0))[1])
    try:
        ms.grad(outer)(x)
    except OpRuleError as e:
        assert "a derivative of a parameter's gradient" in str(e), e
    else:
        raise AssertionError("no refusal")
