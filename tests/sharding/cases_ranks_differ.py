# SPDX-License-Identifier: Apache-2.0
"""Ranks run different programs: always a `CollectiveMismatch` on all ranks, which shows what differs; never a number.

Each case ends with the ranks in step: what they make at one meeting is refused at that meeting, on all of them.
"""
from __future__ import annotations

import re

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn
from mindspore.graph.api import _pynative_executor

from ms_dtensor import MixedPrecisionPolicy, comm, replicate, value_and_grad
from ms_dtensor.errors import CollectiveMismatch
from tests.cases import case, cases
from tests.operands import Built, filled
from tests.sharding.support import WAYS, Net, data_mesh, rows_of
from tests.support import mean_square, refusal, same_on_all_ranks
from tests.tiers import sampled

CALL = re.compile(r"rank (\d+): (.*) at (\S+):(\d+)")


def named(world, run, names) -> str:
    """All ranks refuse with one text that has a line of each rank, unlike calls, and the name of what they are about."""
    text = refusal(run, CollectiveMismatch)
    _pynative_executor.set_grad_flag(False)  # an error in a backward leaves it on
    same_on_all_ranks(world, text)
    calls = {int(rank): (what, line) for rank, what, _, line in CALL.findall(text)}
    assert set(calls) == set(range(world.size)), text
    assert len({what for what, _ in calls.values()}) > 1, f"the calls look alike: {text}"
    assert any(name in text for name in names), f"neither of {names} is named: {text}"
    return text


def apart(world, net, mesh, orders, names, forward: bool = False) -> None:
    """After two steps in which prefetch and buckets have learnt, rank 0 has an order of cells, and the others another."""
    x, step = rows_of(mesh), value_and_grad(mean_square(net), None, net.trainable_params())
    for _ in range(2):
        step(x)
    net.order = orders[world.rank > 0]
    named(world, (lambda: net(x)) if forward else (lambda: step(x)), names)
    assert comm.group(range(world.size)).all_gather_object("on") == ["on"] * world.size


def differing(world, way: str, orders: str, forward: bool) -> None:
    mesh, net = data_mesh(world), filled(Net())
    WAYS[way](net, mesh, net.blocks)
    apart(world, net, mesh, ORDERS[orders], ("blocks", "0.weight", "SequentialCell"), forward)


ORDERS = {"swapped": ((0, 1, 2), (1, 0, 2)), "skipped": ((0, 1, 2), (0, 2)), "skipped last": ((0, 1, 2), (0, 1)),
          "skipped first": ((0, 1, 2), (1, 2)), "another instead": ((0, 1), (0, 2)), "twice": ((0, 1), (0, 1, 1))}


BY_BUCKETS = ("swapped", "skipped", "skipped last", "skipped first", "another instead")  # twice: nothing is sent for it
DIFFERING = {2: [*((way, orders, False) for way in ("replicate", "bucket_mb=0", "zero1") for orders in BY_BUCKETS),
                 *(("fully_shard", orders, forward) for orders in ORDERS for forward in (True, False)),
                 *(("kept", orders, False) for orders in ("swapped", "another instead"))],
             4: [*((way, "another instead", False) for way in ("replicate", "bucket_mb=0", "neighbours")),
                 ("fully_shard", "swapped", True)]}
for size, rows in DIFFERING.items():
    cases(size, {re.sub(r"\W+", "_", f"{way} {orders} {'forward' if forward else 'step'} of {size}"): (way, orders, forward)
                 for way, orders, forward in rows})(differing)
class InOrder(nn.Cell):
    """Two cells, in the order that `order` says."""

    def construct(self, x):
        for key in self.order:
            x = getattr(self, key)(x)
        return x


class Apart(InOrder):
    """Two models of one shape, that ranks call in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.order = filled(Net(count=1, order=(0,))), filled(Net(count=1, order=(0,)), 40), "ab"
        for name, p in self.parameters_and_names():
            p.name = name


@cases(2, {"replicated_models_in_another_order": ("replicate",), "zero1_models_in_another_order": ("zero1",),
           "fully_sharded_models_in_another_order": ("fully_shard",), "kept_models_in_another_order": ("kept",)})
def models_apart(world, way: str) -> None:
    mesh, net = data_mesh(world), Apart()
    for cell in (net.a, net.b):
        WAYS[way](cell, mesh, ())
    apart(world, net, mesh, ("ab", "ba"), ("a.", "b.", "Net"))


def gain(name: str) -> nn.Cell:
    w = Parameter(Tensor(np.linspace(0.5, 1.5, 4).astype(np.float32)), name=f"{name}.w")
    return Built(lambda c, x: mint.tanh(x * c.w), w=w)


class Gains(InOrder):
    """One parameter each. MindSpore hands out zeros for one that is not reached, last, where it would come anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.order = gain("a"), gain("b"), "ab"


@case(2)
def a_gradient_that_one_rank_does_not_reach_or_reaches_twice(world):
    for order in ("b", "aab", "a"):
        for how in ({}, {"bucket_mb": 0}, {"mp_policy": MixedPrecisionPolicy(param_dtype=ms.float16)}):
            mesh, net = data_mesh(world), Gains()
            replicate(net, mesh=mesh, **how)
            apart(world, net, mesh, ("ab", order), ("a.w",))


@case((2, 4))
def what_differs_is_in_the_message_though_ranks_go_on(world):
    """A rank that catches the error makes its next call while the other still reads what was called: here the same one."""
    group = comm.group(range(world.size))
    for k in sampled(range(500), 5):
        sizes = (3, 4) if world.rank != k % world.size else (4, 3)
        texts = [refusal(lambda n=n: group.all_reduce(Tensor(np.ones(n, np.float32))), CollectiveMismatch) for n in sizes]
        for text in texts:
            calls = {what for _, what, _, _ in CALL.findall(text)}
            assert len(calls) == 2, f"round {k}: the calls look alike: {text}"
