# SPDX-License-Identifier: Apache-2.0
"""All ranks run one program: weights that are kept whole, and steps after a backward that raised. One device's numbers."""
from __future__ import annotations

import sys

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

from ms_dtensor import DFunction, Replicate, Shard, comm, fully_shard, optim, value_and_grad
from tests.cases import case, cases
from tests.sharding.support import Net, alike, data_mesh, rows_of, sharded, twins
from tests.support import each, equal_values, mean_square, refusal
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


@cases(2, {"kept_weights_of_equal_sizes_in_several_buckets": ([1024] * 14,),
           "kept_weights_of_unlike_sizes_in_several_buckets": ([1024 + 128 * (i % 5) for i in range(12)],)}, timeout=120)
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


def raising_step(net, mesh) -> None:
    """A step whose backward raises."""
    Raising.armed = True
    try:
        step = value_and_grad(mean_square(net), None, net.trainable_params())
        assert "on purpose" in refusal(lambda: step(rows_of(mesh)), ValueError)
    finally:
        Raising.armed = False


@cases(2, {"replicate_after_a_hook_raised": ("replicate", True), "replicate_after_a_function_raised": ("replicate", False),
           "unbucketed_after_a_hook_raised": ("bucket_mb=0", True),
           "zero1_after_a_hook_raised": ("zero1", True), "zero1_after_a_function_raised": ("zero1", False),
           "fully_shard_after_a_hook_raised": ("fully_shard", True),
           "fully_shard_after_a_function_raised": ("fully_shard", False)})
def backward_that_raised(world, way: str, by_hook: bool) -> None:
    """The last cell's gradients have arrived when it raises; then the cells' order is another one."""
    mesh = data_mesh(world)
    plain, net = twins(Guarded, way, mesh)

    def refuse(*_):
        if Raising.armed:
            raise ValueError("on purpose")
    handle = net.blocks[1][0].register_backward_hook(refuse) if by_hook else None
    for order in sampled(((2, 0, 1), (0, 1, 2), (1, 2, 0), (0, 1)), 2, by_hook):
        net.order = (0, 1, 2)
        raising_step(net, mesh)
        net.order = plain.order = order
        alike(net, plain, mesh, what=f"{way} {by_hook=} then {order}")
    if handle is not None:
        handle.remove()


@case(2)
def kept_weights_after_a_backward_that_raised(world):
    mesh = data_mesh(world)

    @each(("201", "102", "01"))
    def steps(order):
        plain, net = twins(Guarded, sharded(shard_placement_fn=lambda p: Replicate()), mesh, "")
        raising_step(net, mesh)
        net.order = plain.order = tuple(map(int, order))
        alike(net, plain, mesh)


@case(2)
def an_optimizer_step_after_a_backward_that_raised(world):
    """What the raising backward left must not reach the parameters, which stay alike on all ranks."""
    mesh = data_mesh(world)
    plain, net = twins(Guarded, "replicate", mesh)
    one, many = optim.SGD(plain.trainable_params(), 0.1), optim.SGD(net.trainable_params(), 0.1)
    raising_step(net, mesh)
    for order in ((2, 0, 1), (0, 1, 2)):
        net.order = plain.order = order
        many(value_and_grad(mean_square(net), None, net.trainable_params())(rows_of(mesh))[1])
        one(ms.value_and_grad(mean_square(plain), None, plain.trainable_params())(Tensor(rows_of(mesh).full_tensor()))[1])
        equal_values(net, plain, f"after {order}")
        for p in net.trainable_params():
            everyone = comm.group(range(world.size)).all_gather_object(p.to_local().asnumpy().tolist())
            assert all(x == everyone[0] for x in everyone), f"after {order}: replicas of {p.name} differ"
