# SPDX-License-Identifier: Apache-2.0
"""All ranks run one program: weights that are kept whole, and steps after a backward that raised. One device's numbers."""
from __future__ import annotations

import sys

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

from ms_dtensor import DFunction, Replicate, Shard, comm, fully_shard, optim, replicate, value_and_grad
from tests.cases import case
from tests.dist.support import equal, refusal
from tests.sharding.support import (
    WAYS,
    Net,
    alike,
    collected,
    data_mesh,
    filled,
    mean_square,
    none_of,
    rows_of,
    sharded,
)
from tests.tiers import sampled


class Wide(nn.Cell):
    """Weights of so many rows and 1024 columns, each of which gets a gradient of its own.

    `seed`: of the order in which they are made, so that their addresses have another order in every process.
    """

    def __init__(self, sizes, seed: int = 0) -> None:
        super().__init__()
        self.count = len(sizes)
        made = {}
        for i in np.random.default_rng(seed).permutation(self.count):
            values = np.random.default_rng(i).normal(0.1 * i, 0.03, (sizes[i], 1024))
            made[int(i)] = Parameter(Tensor(values.astype(np.float32)))
        for i in range(self.count):
            made[i].name = f"w{i}"
            setattr(self, f"w{i}", made[i])

    def construct(self, x):
        parts = [mint.matmul(x * (1 + 0.1 * i), getattr(self, f"w{i}").T).mean(1) * (i + 1) for i in range(self.count)]
        return mint.cat([part.reshape(-1, 1) for part in parts], 1)


def buckets_in_one_order(world, sizes) -> None:
    """Two steps over several buckets of 25 MiB; nothing that ranks do together may follow the order of a set."""
    mesh, rows = data_mesh(world), np.random.default_rng(3).normal(size=(4, 1024)).astype(np.float32)
    seeds = comm.group(range(world.size)).all_gather_object(hash("a set of names"))
    assert sys.flags.hash_randomization and len(set(seeds)) == world.size, "every process has a PYTHONHASHSEED of its own"
    plain = Wide(sizes)
    net = fully_shard(Wide(sizes, world.rank), mesh=mesh, shard_placement_fn=lambda p: Replicate())
    for _ in range(2):
        count = alike(net, plain, mesh, rows=rows)
        assert count["all_reduce", "backward"] == 3, count


@case(2, timeout=120)
def kept_weights_of_equal_sizes_in_several_buckets(world):
    buckets_in_one_order(world, [1024] * 14)


@case(2, timeout=120)
def kept_weights_of_unlike_sizes_in_several_buckets(world):
    buckets_in_one_order(world, [1024 + 128 * (i % 5) for i in range(12)])


class Raising(DFunction):
    """The identity, whose backward raises while it is armed."""

    armed = False
    in_placements, out_placements = (Shard(0),), (Shard(0),)

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if Raising.armed:
            raise ValueError("on purpose")
        return grad * 1


class Guarded(Net):
    """A `Net` with something that may raise before its second cell, counted from the loss."""

    def construct(self, x):
        x = x * self.scale
        for n, i in enumerate(self.order):
            x = self.blocks[i](x)
            if n == len(self.order) - 2:
                x = Raising.apply(x)
        return x


def backward_that_raised(world, way: str, by_hook: bool) -> None:
    """The last cell's gradients have arrived when it raises; then the cells' order is another one."""
    mesh, plain, net = data_mesh(world), filled(Guarded()), filled(Guarded())
    WAYS[way](net, mesh, net.blocks)
    params = net.trainable_params()

    def refuse(*_):
        if Raising.armed:
            raise ValueError("on purpose")
    handle = net.blocks[1][0].register_backward_hook(refuse) if by_hook else None
    for order in sampled(((2, 0, 1), (0, 1, 2), (1, 2, 0), (0, 1)), 2, by_hook):
        net.order = plain.order = (0, 1, 2)
        Raising.armed = True
        try:
            text = refusal(lambda: value_and_grad(mean_square(net), None, params)(rows_of(mesh)), ValueError)
        finally:
            Raising.armed = False
        assert "on purpose" in text
        net.order = plain.order = order
        alike(net, plain, mesh, what=f"{way} {by_hook=} then {order}")
    if handle is not None:
        handle.remove()


def raised(name: str, way: str, by_hook: bool):
    @case(2)
    def run(world):
        backward_that_raised(world, way, by_hook)
    run.__name__ = name
    return run


replicate_after_a_hook_raised = raised("replicate_after_a_hook_raised", "replicate", True)
replicate_after_a_function_raised = raised("replicate_after_a_function_raised", "replicate", False)
unbucketed_after_a_hook_raised = raised("unbucketed_after_a_hook_raised", "bucket_mb=0", True)
zero1_after_a_hook_raised = raised("zero1_after_a_hook_raised", "zero1", True)
zero1_after_a_function_raised = raised("zero1_after_a_function_raised", "zero1", False)
fully_shard_after_a_hook_raised = raised("fully_shard_after_a_hook_raised", "fully_shard", True)
fully_shard_after_a_function_raised = raised("fully_shard_after_a_function_raised", "fully_shard", False)


@case(2)
def kept_weights_after_a_backward_that_raised(world):
    mesh = data_mesh(world)
    keep = sharded(shard_placement_fn=lambda p: Replicate())
    faults: list[str] = []
    for order in ((2, 0, 1), (1, 0, 2), (0, 1)):
        plain, net = filled(Guarded()), filled(Guarded())
        keep(net, mesh)
        Raising.armed = True
        try:
            step = value_and_grad(mean_square(net), None, net.trainable_params())
            refusal(lambda step=step: step(rows_of(mesh)), ValueError)
        finally:
            Raising.armed = False
        net.order = plain.order = order
        collected(faults, str(order), lambda net=net, plain=plain: alike(net, plain, mesh))
    none_of(faults)


@case(2)
def an_optimizer_step_after_a_backward_that_raised(world):
    """What the raising backward left must not reach the parameters, which stay alike on all ranks."""
    mesh, plain, net = data_mesh(world), filled(Guarded()), filled(Guarded())
    replicate(net, mesh=mesh)
    one, many = optim.SGD(plain.trainable_params(), 0.1), optim.SGD(net.trainable_params(), 0.1)
    for step, order in enumerate(((0, 1, 2), (2, 0, 1), (0, 1, 2))):
        net.order = plain.order = order
        if step == 0:
            Raising.armed = True
            try:
                refusal(lambda: value_and_grad(mean_square(net), None, net.trainable_params())(rows_of(mesh)), ValueError)
            finally:
                Raising.armed = False
            continue
        many(value_and_grad(mean_square(net), None, net.trainable_params())(rows_of(mesh))[1])
        one(ms.value_and_grad(mean_square(plain), None, plain.trainable_params())(Tensor(rows_of(mesh).full_tensor()))[1])
        for p, q in zip(net.trainable_params(), plain.trainable_params(), strict=True):
            equal(p, q, f"step {step}: {p.name}")
            everyone = comm.group(range(world.size)).all_gather_object(p.to_local().asnumpy().tolist())
            assert all(x == everyone[0] for x in everyone), f"step {step}: replicas of {p.name} differ"
