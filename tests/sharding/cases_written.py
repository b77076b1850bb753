# SPDX-License-Identifier: Apache-2.0
"""Parameters that a step writes: before their unit runs, after it was prefetched, and between two calls of one forward.

One device writes in place: a product that was recorded before keeps the tensor, so the gradient of *its* input is computed
with the new values, whichever of `set_data`, `ops.assign` and `p[:] = v` wrote; `copy_` is seen and refused in the backward.
That is what is wanted here, too: the numbers of the one device, and a refusal where it refuses.
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import fully_shard
from tests.cases import case
from tests.dist.support import equal, refusal
from tests.sharding.support import (
    ROWS,
    WAYS,
    Net,
    alike,
    collected,
    data_mesh,
    filled,
    mean_square,
    none_of,
    own_rows,
    rows_of,
    sharded,
)


def slices(p, value) -> None:
    p[:] = value


WRITERS = {"set_data": lambda p, value: p.set_data(value), "assign_value": lambda p, value: p.assign_value(value),
           "assign": ops.assign, "copy_": lambda p, value: p.copy_(value), "setitem": slices}
LEAVES = ("set_data", "assign_value", "assign", "setitem")  # what one device takes for a trainable parameter, recorded


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


def momentum(world, how: str, unfreeze: bool) -> None:
    mesh, faults = data_mesh(world), []
    for ema in (False, True):
        for way in ("fully_shard", "kept", "neighbours", "zero1"):
            def steps(way=way, ema=ema):
                plain, net = filled(Momentum(how, ema)), filled(Momentum(how, ema))
                WAYS[way](net, mesh, (net.first, net.query, net.key))
                for step in range(4):
                    if unfreeze and step == 1:
                        for p in (*plain.key.get_parameters(), *net.key.get_parameters()):
                            p.requires_grad = True
                    alike(net, plain, mesh, what=f"step {step}")
                    equal(net(own_rows(mesh)), plain(Tensor(ROWS)), f"forward of step {step}")
                    for p, q in zip(net.get_parameters(), plain.get_parameters(), strict=True):
                        equal(p, q, f"step {step}: value of {p.name}")
            collected(faults, f"{way}, {ema=}", steps)
    none_of(faults)


def momentum_case(how: str, unfreeze: bool):
    @case(2)
    def run(world):
        momentum(world, how, unfreeze)
    run.__name__ = f"momentum_encoder_by_{how}{'_trained_later' if unfreeze else ''}"
    return run


for _how in WRITERS:
    _one = momentum_case(_how, False)
    globals()[_one.__name__] = _one
for _how in LEAVES:
    _one = momentum_case(_how, True)
    globals()[_one.__name__] = _one


@case(2)
def momentum_encoder_written_between_the_units_of_a_loss(world):
    """Not in a cell: the loss function itself writes, between two calls of cells that are roots of their own."""
    mesh, faults = data_mesh(world), []
    for how in WRITERS:
        def steps(how=how):
            plain, net = (nn.CellList([filled(Net()), filled(Net(), 50)]) for _ in range(2))
            for n in net:
                sharded()(n, mesh, n.blocks)
            for p in (*plain[1].get_parameters(), *net[1].get_parameters()):
                p.requires_grad = False

            def loss(n):
                def of(x):
                    y = n[0](x)
                    for p in n[1].get_parameters():
                        WRITERS[how](p, ops.stop_gradient(p) * 0.7)
                    return (y * n[1](x)).mean()
                return of
            for step in range(3):
                alike(net, plain, mesh, loss, f"step {step}")
        collected(faults, how, steps)
    none_of(faults)


class Twice(nn.Cell):
    """A cell that is called twice in a forward, and written in between."""

    def __init__(self, how: str, by: str = "value") -> None:
        super().__init__()
        self.how, self.by = how, by
        self.before, self.block = nn.Dense(4, 4), nn.Dense(4, 4)

    def construct(self, x):
        x = mint.tanh(self.before(x))
        y = self.block(x)
        for p in self.block.get_parameters():
            WRITERS[self.how](p, ops.stop_gradient(p) * 1.5 + 0.25)
        return y * self.block(x)


def twice(world, how: str, train: bool, keep: bool = False) -> None:
    mesh, faults = data_mesh(world), []
    ways = {"fully_shard": WAYS["fully_shard"]} if keep else {**WAYS, "units of their own": None}
    for way, wrap in ways.items():
        def steps(way=way, wrap=wrap):
            plain, net = filled(Twice(how)), filled(Twice(how))
            for p in (*plain.block.get_parameters(), *net.block.get_parameters()):
                p.requires_grad = train
            if wrap is None:
                for cell in (net.before, net.block):
                    fully_shard(cell, mesh=mesh, reshard_after_forward=False)
            else:
                wrap(net, mesh, (net.before, net.block))
            if keep:
                net.block.unshard()
            for step in range(3):
                equal(net(own_rows(mesh)), plain(Tensor(ROWS)), f"forward {step}")
                alike(net, plain, mesh, what=f"step {step}")
                for p, q in zip(net.get_parameters(), plain.get_parameters(), strict=True):
                    equal(p, q, f"step {step}: value of {p.name}")
        collected(faults, f"{way}, {'trained' if train else 'frozen'}{', unshard()' * keep}", steps)
    none_of(faults)


@case(2, timeout=120)
def written_between_two_calls_by_set_data(world):
    twice(world, "set_data", True)


@case(2, timeout=120)
def written_between_two_calls_by_set_data_frozen(world):
    twice(world, "set_data", False)


@case(2, timeout=120)
def written_between_two_calls_by_assign(world):
    twice(world, "assign", True)


@case(2, timeout=120)
def written_between_two_calls_by_assign_frozen(world):
    twice(world, "assign", False)


@case(2, timeout=120)
def written_between_two_calls_by_setitem(world):
    twice(world, "setitem", True)


@case(2)
def written_between_two_calls_of_a_cell_that_was_unsharded(world):
    for how in LEAVES:
        for train in (True, False):
            twice(world, how, train, keep=True)


@case(2)
def copy_between_two_calls_is_seen_as_on_one_device(world):
    """One device refuses in the backward, or to write a leaf; never a number, and the next step is right."""
    mesh, faults = data_mesh(world), []
    for train in (True, False):
        plain = filled(Twice("copy_"))
        for p in plain.block.get_parameters():
            p.requires_grad = train
        assert "inplace op" in refusal(lambda plain=plain: ms.grad(mean_square(plain), 0, None)(Tensor(ROWS)), RuntimeError)
        ms.common.api._pynative_executor.set_grad_flag(False)
        for way, wrap in WAYS.items():
            def steps(wrap=wrap, train=train):
                net, right = filled(Twice("copy_")), filled(Twice("set_data"))
                for n in (net, right):
                    for p in n.block.get_parameters():
                        p.requires_grad = train
                wrap(net, mesh, (net.before, net.block))
                refusal(lambda: md.grad(mean_square(net), 0, None)(rows_of(mesh)), Exception)
                net.how = "set_data"
                for p, q in zip(right.get_parameters(), net.get_parameters(), strict=True):
                    p.set_data(q.full_tensor())
                alike(net, right, mesh)
            collected(faults, f"{way}, {'trained' if train else 'frozen'}", steps)
    none_of(faults)


class Assigned(nn.Cell):
    """A trainable leaf that is assigned to in the forward, before it is used and after."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.a = first, nn.Dense(4, 4)
        self.s = Parameter(Tensor(np.arange(1, 5, dtype=np.float32)), name="s")

    def construct(self, x):
        if self.first:
            ops.assign(self.s, self.s * 0.5 + 1)
        y = mint.tanh(self.a(x)) * self.s
        if not self.first:
            ops.assign(self.s, self.s * 0.5 + 1)
        return y


@case(2)
def assign_to_a_trainable_leaf_inside_a_gradient(world):
    mesh, faults = data_mesh(world), []
    for first in (True, False):
        for way, wrap in {**WAYS, "distribute_module": lambda n, mesh, cells: md.distribute_module(n, mesh)}.items():
            def steps(wrap=wrap, first=first):
                plain, net = filled(Assigned(first)), filled(Assigned(first))
                wrap(net, mesh, (net.a,))
                for step in range(3):
                    alike(net, plain, mesh, what=f"step {step}")
                    equal(net.s, plain.s, f"step {step}: what was assigned")
            collected(faults, f"{way}, {first=}", steps)
    none_of(faults)


class Counted(nn.Cell):
    """Writes in place, of its own, in every forward: a number of steps, a running sum, a buffer, an activation."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Dense(4, 4), nn.Dense(4, 4)
        self.seen = Parameter(Tensor(np.arange(4, dtype=np.float32)), name="seen", requires_grad=False)
        self.register_buffer("total", Tensor(np.arange(4, dtype=np.float32)))

    def construct(self, x):
        y = mint.tanh(self.a(x))
        if self.kind == "activation":
            y = y * 2
            y.add_(x)
        elif self.kind == "parameter":
            self.seen.add_(ops.stop_gradient(y).sum(0))
        elif self.kind == "copy_":
            self.seen.copy_(ops.stop_gradient(y).sum(0))
        elif self.kind == "buffer":
            self.total.copy_(self.total * 0.5)
        else:
            self.seen[1:3] = ops.stop_gradient(y).mean(0)[1:3]
        return self.b(y) * (self.total if self.kind == "buffer" else self.seen)


@case(2)
def an_in_place_write_in_the_step(world):
    in_place(world)


@case(4)
def an_in_place_write_in_the_step_of_four(world):
    in_place(world)


def in_place(world) -> None:
    mesh, faults = data_mesh(world), []
    for kind in ("activation", "parameter", "copy_", "buffer", "index"):
        for way, wrap in WAYS.items():
            for cells in (False, True):
                def steps(wrap=wrap, kind=kind, cells=cells):
                    plain, net = filled(Counted(kind)), filled(Counted(kind))
                    wrap(net, mesh, (net.a, net.b) if cells else ())
                    for step in range(3):
                        alike(net, plain, mesh, what=f"step {step}")
                        equal(net.seen, plain.seen, f"step {step}: what was written")
                collected(faults, f"{way} {cells=} {kind}", steps)
    none_of(faults)
