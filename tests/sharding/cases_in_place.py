# SPDX-License-Identifier: Apache-2.0
"""In-place writes in a step: of activations, of statistics, of parameters that the loss has used. One device's numbers."""
from __future__ import annotations

import itertools

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

import ms_dtensor as md
from tests.cases import case, cases
from tests.operands import Built, filled, weight
from tests.sharding.support import ROWS, WAYS, alike, data_mesh, rows_of, twins
from tests.support import each, equal
from tests.tiers import sampled


class Counted(nn.Cell):
    """Writes in place, of its own, in every forward: an activation, a running value, a buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Dense(4, 4), nn.Dense(4, 4)
        self.seen = Parameter(Tensor(np.arange(4, dtype=np.float32)), name="seen", requires_grad=False)
        self.register_buffer("total", Tensor(np.arange(4, dtype=np.float32)))

    def construct(self, x):
        y = mint.tanh(self.a(x))
        if self.kind == "activation":
            y = y * 2
            y[:, 1:3] = x[:, :2]
        elif self.kind == "whole activation":
            z = y * 2
            z.copy_(y * x)
            y = z * y
        elif self.kind == "parameter":
            ops.assign(self.seen, self.seen * 0.5 + ops.stop_gradient(y).sum(0))
        elif self.kind == "copy_":
            self.seen.copy_(ops.stop_gradient(y).sum(0))
        elif self.kind == "buffer":
            self.total.copy_(self.total * 0.5)
        else:
            self.seen[1:3] = ops.stop_gradient(y).mean(0)[1:3]
        return self.b(y) * (self.total if self.kind == "buffer" else self.seen)


@case((2, 4))
def an_in_place_write_in_the_step(world):
    mesh = data_mesh(world)
    kinds = "activation", "whole activation", "parameter", "copy_", "buffer", "index"

    @each(sampled(itertools.product(kinds, WAYS, ("", "a b")), 7 if world.size == 2 else 11))
    def steps(kind, way, cells):
        plain, net = twins(lambda: Counted(kind), way, mesh, cells)
        for step in range(3):
            alike(net, plain, mesh, what=f"step {step}")
            equal(net.seen, plain.seen, f"step {step}: what was written")


def weighted() -> nn.Cell:
    """Weights of 3 elements, of which a fourth rank holds none, and how much each matters: frozen, written in the step."""
    net = Built(lambda c, x: mint.tanh(c.a(x)) * c.w, a=nn.Dense(4, 3), w=weight(3), matters=weight(3))
    net.matters.requires_grad = False
    return net


def by_set_data(p, value) -> None:
    p.set_data(value)


def by_index(p, value) -> None:
    p[:] = value


@cases(4, {"assigned_after_its_use": ("before", ops.assign, 0),
           "assigned_after_its_use_behind_the_cell": ("after", ops.assign, 1),
           "set_data_after_its_use": ("after", by_set_data, 2),
           "indexed_after_its_use": ("after", by_index, 0)})
def penalty_written_after_its_use(world, use: str, write, first: int) -> None:
    """A penalty on weights by frozen factors that the same step renews, beside the model's cell (elastic weights)."""
    mesh = data_mesh(world)

    def loss(n, kept=lambda p: p):
        def of(x):
            if use == "before":
                extra = (n.w * n.matters).sum()
                y = n(x)
            else:
                y = n(x)
                extra = (n.w * kept(n.matters) * n.w).sum()
            write(n.matters, n.matters * 0.5 + 0.5)
            return (y ** 2).mean() + extra
        return of
    for way in sampled(WAYS, 3, first):
        copied, (plain, net) = filled(weighted()), twins(weighted, way, mesh, "a")
        for step in range(3):
            what = f"{way}, {use}: step {step}"
            if write is not by_set_data:
                alike(net, plain, mesh, loss, what)
            else:  # one device computes a part of it with what was written after the use; here some ranks do, some do not
                own, (of_w,) = (ms.value_and_grad(loss(n, kept), None, [n.w])(Tensor(ROWS))[1] for n, kept in (
                    (copied, lambda p: p * 1), (plain, lambda p: p)))
                got = md.value_and_grad(loss(net), None, [net.w])(rows_of(mesh))[1][0].full_tensor().asnumpy()
                off = np.minimum(*(np.abs(got - w.asnumpy()) for w in (own[0], of_w)))
                assert off.max() < 2e-5 * np.abs(got).max(), (what, got, own, of_w)
            equal(net.matters, plain.matters, f"{what}: what it has written")
