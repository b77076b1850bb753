# SPDX-License-Identifier: Apache-2.0
"""Plain tensors that a model makes inside a step: refused, or replicated where that was asked for; never taken for rows.

Rows are what comes into the outermost wrapped cell from outside. So the numbers, and the refusals, are the same whichever
cells of a model are wrapped, and by which of the ways.
"""
from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from ms_dtensor import implicit_replication
from ms_dtensor.errors import MixedOperandError
from tests.cases import case, cases
from tests.operands import Built, filled, weight
from tests.sharding.support import ROWS, SHARDED, WAYS, data_mesh, own_rows, rows_of, same_step, twins
from tests.support import crossed, each, equal, refusal, same_on_all_ranks
from tests.tiers import sampled

MASK = np.array([0.5, 2.0, -1.0, 1.5], np.float32)


class Masked(nn.Cell):
    """`x * w * m.sum()`, where `m` comes in whatever form."""

    def __init__(self) -> None:
        super().__init__()
        self.w = Parameter(Tensor(np.zeros(4, np.float32)), name="w")

    def construct(self, x, m=None, scale=None):
        m = m if scale is None else scale
        if isinstance(m, dict):
            m = m["m"]
        if isinstance(m, tuple | list):
            m = m[0]
        return x * self.w * m.sum()


PASSED: dict[str, Callable] = {"argument": lambda b, x, m: b(x, m), "keyword": lambda b, x, m: b(x, scale=m),
                               "tuple": lambda b, x, m: b(x, (m,)), "dict": lambda b, x, m: b(x, {"m": m}),
                               "list in a keyword": lambda b, x, m: b(x, scale=[m])}
MADE: dict[str, Callable] = {"Tensor": lambda: Tensor(MASK), "computed": lambda: Tensor(MASK) * 2 + ops.ones(4, ms.float32),
                             "of one row": lambda: Tensor(MASK.reshape(1, 4)), "of the rows' number": lambda: Tensor(
                                 np.arange(1.0, 9.0, dtype=np.float32)), "arange": lambda: ops.arange(1, 5).float()}


class Parent(nn.Cell):
    """Makes a plain tensor and gives it to its block, beside what the block before it returned."""

    def __init__(self, passed: str = "argument", made: str = "Tensor") -> None:
        super().__init__()
        self.passed, self.made, self.a, self.b = PASSED[passed], MADE[made], nn.Dense(4, 4), Masked()

    def construct(self, x):
        return self.passed(self.b, mint.tanh(self.a(x)), self.made())


WRAPPED = {"root": lambda net, mesh, wrap: wrap(net, mesh, ()),
           "units": lambda net, mesh, wrap: wrap(net, mesh, (net.a, net.b)),
           "inner": lambda net, mesh, wrap: (wrap(net.b, mesh, ()), wrap(net, mesh, ()))}


def variations():
    yield from ((passed, "Tensor") for passed in PASSED)
    yield from (("argument", made) for made in MADE if made != "Tensor")


def parents(which: str, way: str, mesh, make: Callable = Parent) -> tuple[nn.Cell, nn.Cell]:
    """One of one device, and one of which these cells are wrapped."""
    plain, net = filled(make()), filled(make())
    WRAPPED[which](net, mesh, WAYS[way])
    return plain, net


@cases(2, {"made_by_a_model_of_which_the_root_is_wrapped": ("root",),
           "made_by_a_model_whose_cells_are_units": ("units", SHARDED),
           "made_by_a_model_of_which_the_block_and_the_root_are_wrapped": ("inner",)}, timeout=120)
def made_inside(world, which: str, ways=WAYS) -> None:
    """Replicated where that was asked for: the one device's numbers. Refused where it was not, on all ranks alike."""
    mesh = data_mesh(world)

    @each((way, *passed, asked) for passed, way in crossed(variations(), ways, len(ways)) for asked in (True, False))
    def check(way, passed, made, asked):
        plain, net = parents(which, way, mesh, lambda: Parent(passed, made))
        for x in (own_rows(mesh), rows_of(mesh)) if asked or which != "units" else ():  # into an outermost cell go rows
            if asked:
                with implicit_replication():
                    same_step(net, plain, x)
            else:
                equal(net(x), plain(Tensor(ROWS)))  # a number, all that is made of it, may mix



@case(2)
def a_plain_tensor_that_meets_a_dtensor_inside(world):
    """Refused wherever it meets one, whichever cells are wrapped; replicated where that was asked for."""
    mesh = data_mesh(world)

    def made():
        net = Parent()
        net.b = Built(lambda c, x, m: x * c.w * m, w=weight(4))  # element by element
        return net

    @each((which, way) for which, way in crossed(WRAPPED, WAYS, 2) if which != "units" or way in SHARDED)
    def steps(which, way):
        plain, net = parents(which, way, mesh, made)
        if which != "units":
            same_on_all_ranks(world, refusal(lambda: net(rows_of(mesh)), MixedOperandError))
        with implicit_replication():
            same_step(net, plain, rows_of(mesh))


@case(2)
def rows_come_into_the_outermost_wrapped_cell(world):
    """Plain rows of a batch, in whatever form they come, where inner cells are wrapped, too; told once a call."""
    def two():
        return Built(lambda c, x, y: mint.tanh(c.a(x)) * c.b(y), a=nn.Dense(4, 4), b=nn.Dense(4, 4))
    mesh = data_mesh(world)
    other = np.random.default_rng(8).normal(size=(8, 4)).astype(np.float32)

    @each(sampled(WAYS, 2, 1))
    def steps(way):
        plain, net = twins(two, way, mesh, "a b")

        def loss(n):
            return lambda x: (n(x, y=Tensor(other) if n is plain else own_rows(mesh, other)) ** 2).mean()
        count = same_step(net, plain, own_rows(mesh), loss)
        assert count["all_gather_object", "forward"] == 1, count


@case(2)
def a_tensor_beside_a_dtensor_in_one_call_from_outside(world):
    """Into the outermost cell, plain tensors are rows also where another argument is a DTensor already."""
    def product():
        return Built(lambda c, x, y: mint.tanh(c.a(x)) * y, a=nn.Dense(4, 4))
    mesh = data_mesh(world)
    for way in WAYS:
        plain, net = twins(product, way, mesh, "")
        equal(net(rows_of(mesh), own_rows(mesh, ROWS * 2)), plain(Tensor(ROWS), Tensor(ROWS * 2)))


@case(2)
def wrapped_cells_without_a_root_agree_with_one_that_has_it(world):
    """A loss of two wrapped cells: what the loss function itself makes is outside of both, and so are rows."""
    mesh = data_mesh(world)
    for wrap in WAYS.values():
        plain, net = (nn.CellList([filled(nn.Dense(4, 4)), filled(nn.Dense(4, 4), 5)]) for _ in range(2))
        for cell in net:
            wrap(cell, mesh, ())
        same_step(net, plain, own_rows(mesh), lambda n: lambda x: (n[0](x) * n[1](x * 2)).mean())
