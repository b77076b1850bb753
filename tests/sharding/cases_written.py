# SPDX-License-Identifier: Apache-2.0
"""Parameters that a step writes: before their unit runs, after it was prefetched, and between two calls of one forward.

One device writes in place. A product that was recorded before keeps the tensor, not its values: the value, and the
gradient of the weight, are those of each call; that of the *input* of the first call is computed with the new values,
whichever of `set_data`, `ops.assign` and `p[:] = v` wrote. Here that is right, or each call's own. `copy_` is seen, and
refused there.
"""
from __future__ import annotations

import contextlib
import itertools

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.graph.api import _pynative_executor

import ms_dtensor as md
from ms_dtensor import distribute_tensor, fully_shard
from tests.cases import case, cases
from tests.operands import Built, filled
from tests.sharding.support import ROWS, WAYS, Net, alike, data_mesh, own_rows, replicated, rows_of, sharded, twins
from tests.support import crossed, each, equal, equal_each, equal_values, mean_square, refusal, set_trained
from tests.tiers import sampled


def slices(p, value) -> None:
    p[:] = value


WRITERS = {"set_data": lambda p, value: p.set_data(value), "assign_value": lambda p, value: p.assign_value(value),
           "assign": ops.assign, "copy_": lambda p, value: p.copy_(value), "setitem": slices}
LEAVES = ("set_data", "assign_value", "assign", "setitem")  # what one device takes for a trainable parameter, recorded


def what_a_recorded_forward_computes_of_an_uneven_parameter_may_be_set_and_stepped(world):
    """`assign` takes no view, and what needs no gradient has to be none, also where a rank's shard is empty."""
    mesh = data_mesh(world)
    plain, net = twins(lambda: nn.Dense(4, 3), "fully_shard", mesh, "")

    def step(cell, x):
        def loss(x):
            cell.weight.set_data(ops.stop_gradient(cell.weight) * 0.5 + 0.125)
            return (cell(x) ** 2).mean()
        value, grads = ms.value_and_grad(loss, None, cell.trainable_params())(x)
        md.optim.SGD(cell.trainable_params(), 0.5)(grads)
        return value
    equal(step(net, rows_of(mesh)), step(plain, Tensor(ROWS)), "loss")
    equal_values(net, plain)


class Momentum(nn.Cell):
    """Two encoders; the second one's weights follow the first one's in every forward, before it runs (MoCo)."""

    def __init__(self, how: str, ema: bool = True) -> None:
        super().__init__()
        self.how, self.ema, self.first = how, ema, nn.Dense(4, 4)
        self.query, self.key = nn.Dense(4, 4), nn.Dense(4, 4)
        for p in self.key.get_parameters():
            p.requires_grad = False

    def construct(self, x):
        x = mint.tanh(self.first(x))
        q = mint.tanh(self.query(x))
        for k, p in zip(self.key.get_parameters(), self.query.get_parameters()):
            value = 0.75 * ops.stop_gradient(k) + 0.25 * ops.stop_gradient(p) if self.ema else ops.stop_gradient(k) * 0.5
            WRITERS[self.how](k, value)
        return q * self.key(x)


MOMENTUM = {f"momentum_encoder_by_{how}{'_trained_later' * unfreeze}": (how, unfreeze)
            for unfreeze, ways in ((False, WRITERS), (True, LEAVES)) for how in ways}


@cases(2, MOMENTUM)
def momentum(world, how: str, unfreeze: bool) -> None:
    mesh = data_mesh(world)

    @each(crossed((False, True), ("fully_shard", "kept", "zero1", "neighbours"), 2))
    def steps(ema, way):
        plain, net = twins(lambda: Momentum(how, ema), way, mesh, "first query key")
        for step in range(4):
            if unfreeze and step == 1:
                set_trained(True, plain.key, net.key)
            alike(net, plain, mesh, what=f"step {step}")
            equal(net(own_rows(mesh)), plain(Tensor(ROWS)), f"forward of step {step}")
            equal_values(net, plain, f"step {step}: value")


@case(2)
def momentum_encoder_of_kept_weights_in_another_dtype(world):
    """A copy stands in the place of each, and follows what is written to the weight itself."""
    mesh, policy = data_mesh(world), md.MixedPrecisionPolicy(ms.float64, ms.float64, ms.float32)

    @each(WRITERS)
    def steps(how):
        plain, net = twins(lambda: Momentum(how), replicated(mp_policy=policy), mesh, "")
        for step in range(2):
            alike(net, plain, mesh, what=f"step {step}", rtol=1e-4)
            equal_values(net, plain, f"step {step}: value")


@case(2)
def momentum_encoder_written_between_the_units_of_a_loss(world):
    """Not in a cell: the loss function itself writes, between two calls of cells that are roots of their own."""
    mesh = data_mesh(world)

    @each(WRITERS)
    def steps(how):
        plain, net = (nn.CellList([filled(Net()), filled(Net(), 50)]) for _ in range(2))
        for n in net:
            sharded()(n, mesh, n.blocks)
        set_trained(False, plain[1], net[1])

        def loss(n):
            def of(x):
                y = n[0](x)
                for p in n[1].get_parameters():
                    WRITERS[how](p, ops.stop_gradient(p) * 0.7)
                return (y * n[1](x)).mean()
            return of
        for step in range(3):
            alike(net, plain, mesh, loss, f"step {step}")


class Twice(nn.Cell):
    """A cell that is called twice in a forward, and written in between; `again`: the second call is another cell's."""

    def __init__(self, how: str, again: bool = False) -> None:
        super().__init__()
        self.how, self.before, self.block = how, nn.Dense(4, 4), nn.Dense(4, 4)
        if again:
            self.again = nn.Dense(4, 4)

    def construct(self, x):
        x = mint.tanh(self.before(x))
        y = self.block(x)
        if hasattr(self, "again"):
            return y * self.again(x)
        if self.how:
            for p in self.block.get_parameters():
                WRITERS[self.how](p, written(ops.stop_gradient(p)))
        return y * self.block(x)


def written(p):
    """What a forward writes in place of `p`."""
    return p * 1.5 + 0.25


def as_if_each_call_kept_its_own(plain, x):
    """Value and gradients of a `Twice` whose second call is that of a cell with the written values."""
    other = Twice("", again=True)
    for p, q in zip(other.get_parameters(), [*plain.get_parameters(), *plain.block.get_parameters()], strict=True):
        p.set_data(q.value() * 1)
        p.requires_grad = q.requires_grad
    for p in other.again.get_parameters():
        p.set_data(written(p.value() * 1))
    value, (dx, grads) = ms.value_and_grad(mean_square(other), 0, other.trainable_params())(x)
    of = dict(zip((p.name for p in other.trainable_params()), grads, strict=True))
    return value, dx, [of[p.name] + of[p.name.replace("block", "again")] if p.name.startswith("block") else of[p.name]
                       for p in plain.trainable_params()]


def step_between(net, plain, mesh, what: str) -> None:
    """Value and parameters as on one device; what goes on to the input from the first call: by its own values or, as there,
    by the written ones, but all of it by the same."""
    own, renewed = as_if_each_call_kept_its_own(plain, Tensor(ROWS)), Twice(plain.how and "assign")
    for p, q in zip(renewed.get_parameters(), plain.get_parameters(), strict=True):
        p.set_data(q.value() * 1)
        p.requires_grad = q.requires_grad
    _, (new_dx, new_grads) = ms.value_and_grad(mean_square(renewed), 0, renewed.trainable_params())(Tensor(ROWS))
    value, (dx, grads) = ms.value_and_grad(mean_square(plain), 0, plain.trainable_params())(Tensor(ROWS))
    got, (got_dx, got_grads) = md.value_and_grad(mean_square(net), 0, net.trainable_params())(rows_of(mesh))
    equal(own[0], value, "one device's value")
    equal(got, value, f"{what}: value")
    for p, g, w in zip(net.trainable_params(), got_grads, grads, strict=True):
        if p.name.startswith("block"):
            equal(g, w, f"{what}: gradient of {p.name}")
    named = ("the input", *net.trainable_params())
    for wanted in ((own[1], *own[2]), (new_dx, *new_grads)):
        with contextlib.suppress(AssertionError):
            return equal_each((got_dx, *got_grads), wanted, named)
    equal_each((got_dx, *got_grads), (dx, *grads), named, f"{what}: gradient")


def frozen_block(make, trained: bool):
    """Makes models whose `block` is trained or not."""
    def made():
        net = make()
        set_trained(trained, net.block)
        return net
    return made


@cases(2, {f"written_between_two_calls_by_{how}{'' if train else '_frozen'}": (how, train) for how, train in (
    ("set_data", True), ("set_data", False), ("assign", True), ("assign", False), ("setitem", True))}, timeout=120)
def twice(world, how: str, train: bool, keep: bool = False, only: str = "") -> None:
    mesh = data_mesh(world)

    def of_their_own(net, mesh, cells) -> None:
        for cell in cells:
            fully_shard(cell, mesh=mesh, reshard_after_forward=False)

    @each([only] if only else [*WAYS, of_their_own])
    def steps(way):
        plain, net = twins(frozen_block(lambda: Twice(how), train), way, mesh, "before block")
        if keep:
            net.block.unshard()
        for step in range(3):
            step_between(net, plain, mesh, f"step {step}")
            x = rows_of(mesh) if way is of_their_own else own_rows(mesh)
            equal(net(x), plain(Tensor(ROWS)), f"forward {step}")
            equal_values(net, plain, f"step {step}: value")


@case(2)
def written_between_two_calls_of_a_cell_that_was_unsharded(world):
    @each(crossed(LEAVES, (True, False), 2))
    def steps(how, train):
        twice(world, how, train, True, "fully_shard")


@case(4, timeout=120)
def written_between_two_calls_while_neighbours_keep_a_part(world):
    """Of more ranks than the two that are all there are elsewhere: what was kept of the first call is not the second's."""
    @each((how, train) for shift, how in sampled(enumerate(LEAVES), 2) for train in sampled((True, False), 2, shift // 2))
    def steps(how, train):
        twice(world, how, train, only="neighbours")


@case(2)
def copy_between_two_calls_gives_no_other_number(world):
    """One device refuses it, frozen in the backward, trained at once. Here likewise, or right, and so is the next step."""
    mesh = data_mesh(world)

    @each(crossed((True, False), WAYS, 2))
    def steps(train, way):
        plain, net = twins(frozen_block(lambda: Twice("copy_"), train), way, mesh, "before block")
        want = as_if_each_call_kept_its_own(plain, Tensor(ROWS))
        try:
            got, (dx, grads) = md.value_and_grad(mean_square(net), 0, net.trainable_params())(rows_of(mesh))
        except (RuntimeError, md.errors.DTensorError):
            _pynative_executor.set_grad_flag(False)
        else:
            equal_each((got, dx, *grads), (want[0], want[1], *want[2]), ("value", "the input", *net.trainable_params()))
        net.how = plain.how = ""
        for p, q in zip(plain.get_parameters(), net.get_parameters(), strict=True):
            p.set_data(q.full_tensor())
        alike(net, plain, mesh, what="the next step")


class Follows(nn.Cell):
    """A frozen matrix that follows the rows, and is written before it is read, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(4, 4)
        self.seen = Parameter(Tensor(np.zeros((4, 4), np.float32)), name="seen", requires_grad=False)

    def construct(self, x):
        x = self.up(x)
        self.seen.copy_(ops.stop_gradient(self.seen * 0.5 + mint.matmul(x.T, x) * 0.25))
        return mint.matmul(mint.tanh(mint.matmul(x, self.seen)), self.seen)


@case(2)
def copy_inside_of_a_cell_that_is_called_twice(world):
    """One device refuses the first call's backward; a cell that is called once is right, also where it is recomputed."""
    mesh = data_mesh(world)

    @each(crossed(("fully_shard", "kept", "zero1"), (False, True), 1))
    def steps(way, again):
        plain, net = twins(Follows, way, mesh, "")
        if again:
            md.checkpoint_wrapper(net)
        for _ in range(2):
            alike(net, plain, mesh)
            equal_values(net, plain)

        def twice(x):
            return ((net(x) + net(x * 2)) ** 2).mean()
        said = refusal(lambda: md.value_and_grad(twice, None, net.trainable_params())(rows_of(mesh)))
        _pynative_executor.set_grad_flag(False)
        assert "the backward needs parameter 'seen', which was written since" in said, said


def running() -> nn.Cell:
    """Running statistics, which are added."""
    mean = Parameter(Tensor(np.arange(1, 5, dtype=np.float32)), requires_grad=False)
    return Built(lambda c, x: c.d(x) + c.moving_mean, d=nn.Dense(4, 4), moving_mean=mean)


@case(2)
def statistics_written_between_a_forward_and_its_backward(world):
    """An addition keeps no operand, so one device lets `copy_` write then."""
    mesh = data_mesh(world)

    def loss(net):
        def run(x):
            y = net(x)
            net.moving_mean.copy_(net.moving_mean * 0.5 + 1)
            return (y ** 2).mean()
        return run

    @each(WAYS)
    def steps(way):
        plain, net = twins(running, way, mesh, "d")
        for step in range(2):
            alike(net, plain, mesh, loss, what=f"step {step}")
            equal(net.moving_mean, plain.moving_mean, f"step {step}: what was written")


class Assigned(nn.Cell):
    """A trainable leaf that is assigned to in the forward, before it is used and after."""

    def __init__(self, first: bool, how: str = "assign") -> None:
        super().__init__()
        self.first, self.how, self.copied, self.a = first, how, False, nn.Dense(4, 4)
        self.s = Parameter(Tensor(np.arange(1, 5, dtype=np.float32)), name="s")

    def write(self):
        if self.how == "assign":
            ops.assign(self.s, self.s * 0.5 + 1)
        else:
            self.s.set_data(ops.stop_gradient(self.s) * 0.5 + 1)

    def construct(self, x):
        if self.first:
            self.write()
        y = mint.tanh(self.a(x)) * (self.s * 1 if self.copied else self.s)
        if not self.first:
            self.write()
        return y


@case(2)
def assign_to_a_trainable_leaf_inside_a_gradient(world):
    mesh = data_mesh(world)

    def distributed(net, mesh, cells):
        return md.distribute_module(net, mesh)

    @each(crossed((True, False), [*WAYS, distributed], 2))
    def steps(first, way):
        plain, net = twins(lambda: Assigned(first), way, mesh, "a")
        for step in range(3):
            before = plain.s.asnumpy().copy()
            try:
                alike(net, plain, mesh, what=f"step {step}")
            except AssertionError:  # one device computes a part with what was assigned after the use
                for n in (plain, net):
                    n.s.set_data(distribute_tensor(Tensor(before), mesh, n.s.placements) if n is net and isinstance(
                        n.s, md.DTensor) else Tensor(before))
                plain.copied = True
                alike(net, plain, mesh, what=f"step {step}, of the values used")
            equal(net.s, plain.s, f"step {step}: what was assigned")


@case(2)
def assign_to_a_copy_in_another_dtype(world):
    """Under mixed precision a copy stands in the slot, a view of what autograd knows: a write must reach its memory."""
    alone = md.init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("tp", "dp"))["dp"]
    policy = md.MixedPrecisionPolicy(ms.float16, ms.float32, ms.float32)

    @each(itertools.product((data_mesh(world), alone), (md.replicate, md.fully_shard), ("assign", "set_data")))
    def steps(mesh, wrap, how):
        plain, net = filled(Assigned(True, how)), filled(Assigned(True, how))
        wrap(net, mesh=mesh, mp_policy=policy)
        ms.value_and_grad(lambda x: plain(x).sum(), None, plain.trainable_params())(Tensor(ROWS))
        got = md.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())(own_rows(mesh))[0]
        assert np.allclose(net.s.full_tensor().asnumpy(), plain.s.asnumpy(), rtol=1e-3), "what was assigned"
        plain.first = False
        assert abs(float(got.full_tensor()) / float(plain(Tensor(ROWS)).sum()) - 1) < 1e-2, "the forward read it"


class Frozen(nn.Cell):
    """Frozen weights, and an operation of which MindSpore keeps constants; `weights` are no `nn.LayerNorm`'s."""

    def __init__(self, op, *weights) -> None:
        super().__init__()
        self.op, self.count = op, len(weights)
        for i, w in enumerate(weights):
            setattr(self, f"w{i}", Parameter(Tensor(w.astype(np.float32)), requires_grad=False))
        self.d = nn.Dense(64, 64)  # of pages of memory, which go with the unit's

    def construct(self, x):
        return self.d(self.op(x, *(getattr(self, f"w{i}") for i in range(self.count))))


def normed(x, g, b):
    return ops.LayerNorm(1, 1)(x, g, b)[0]


KEEPING: dict[str, tuple] = {
    "norm": (normed, np.full((2, 64), 1.25), np.full((2, 64), 0.5)),
    "norm of local tensors": (md.local_map(normed, [md.Shard(0)], in_placements=([md.Shard(0)], *[[md.Replicate()]] * 2)),
                              np.full((2, 64), 0.75), np.full((2, 64), 0.5)),
    "norm of views": (lambda x, g, b: normed(x, g.reshape(2, 64), b.T), np.full(128, 1.25), np.full((64, 2), 0.5)),
    "convolution": (lambda x, w: ops.conv2d(x.reshape(-1, 64, 1, 1), w).reshape(-1, 2, 64),
                    np.random.default_rng(1).normal(0, 0.2, size=(64, 64, 1, 1))),
    "power": (lambda x, e: ops.pow(ops.abs(x) + 0.5, e), np.linspace(0.5, 1.5, 128).reshape(2, 64))}


@case(2)
def frozen_weights_of_what_keeps_them(world):
    """MindSpore takes a constant again for one of the same values, of a unit whose memory has gone: of blocks alike."""
    mesh = data_mesh(world)
    rows = np.random.default_rng(0).normal(size=(8, 2, 64)).astype(np.float32)

    @each((name, *way) for name in KEEPING for way in enumerate((*WAYS, "local", "local, the root, too")))
    def step(name, number, way):
        op, *weights = KEEPING[name]
        weights = [w * (1 + number / 16) for w in weights]  # of no other way
        plain, net = (nn.SequentialCell(*[Frozen(op, *weights) for _ in range(3)]) for _ in range(2))
        for cell in (*plain, *net):
            filled(cell.d)
        if way in WAYS:
            WAYS[way](net, mesh, list(net))
            alike(net, plain, mesh, lambda n: lambda x: (n(x) ** 2).mean(), rows=rows)
            return
        for cell in (*net, net) if "root" in way else net:
            fully_shard(cell, mesh=mesh, local_inputs=True)
        mine = own_rows(mesh, rows)
        for _ in range(2):
            dx, grads = md.value_and_grad(lambda x: (net(x) ** 2).mean(), 0, net.trainable_params())(mine)[1]
            wanted, want = ms.grad(lambda x: (plain(x) ** 2).mean(), 0, plain.trainable_params())(Tensor(rows))
            equal(dx / 2, own_rows(mesh, wanted.asnumpy()), "the input")  # of the mean of half as many rows
            equal_each(grads, want, plain.trainable_params())
