# SPDX-License-Identifier: Apache-2.0
"""Micro-batches and parameters that every rank keeps whole (numbers, `Replicate()`): their gradients wait, too."""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

import ms_dtensor as md
from ms_dtensor import Replicate, Shard, distribute_tensor, init_device_mesh, value_and_grad
from tests.cases import case
from tests.sharding.support import ROWS, WAYS, Net, data_mesh, rows_of, sharded, twins
from tests.support import added, counted, crossed, each, equal_each, mean_square
from tests.tiers import sampled

WAITS = {"no sum": (False, True), "no sum over copies": (True, False), "neither": (False, False)}


class Numbers(Net):
    """With a number, which every rank keeps whole, for the whole model and in its last block."""

    def __init__(self) -> None:
        super().__init__()
        self.times = Parameter(Tensor(np.float32(0)), name="times")
        self.uses = True  # whether the forward comes to the number

    def construct(self, x):
        return super().construct(x) * self.times if self.uses else super().construct(x)


def kept(param):
    """A vector is kept, too."""
    return Replicate() if param.name.endswith("bias") else None


def steps(net, plain, x, waits, last_uses=True, main=False):
    """Two steps of three micro-batches; what each gave is added up, or in `main_grad`, and is one device's sum."""
    params, theirs = net.trainable_params(), plain.trainable_params()
    sums = []
    for again in range(2):
        total = wanted = None
        for i in range(3):
            sync, over = (True, True) if i == 2 else waits
            net.set_requires_gradient_sync(sync)
            net.set_requires_all_reduce(over)
            net.uses = plain.uses = i < 2 or last_uses
            with counted() as count:
                grads = value_and_grad(mean_square(net), None, params)(x)[1]
            sums.append(sync and count["all_reduce", "backward"] > 0)
            total = added(total, grads)
            wanted = added(wanted, ms.value_and_grad(mean_square(plain), None, theirs)(Tensor(ROWS))[1])
        if main:
            total = [p.main_grad for p in params]
            net.zero_grad()
        equal_each(total, wanted, params, f"step {again}")
    net.uses = plain.uses = True
    net.set_requires_gradient_sync(True)
    return sums


def kept_ones_wait_for_copies_as_cut_ones_do(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "cut"))
    x = distribute_tensor(Tensor(ROWS), mesh, [Shard(0), Shard(0)], src_data_rank=None)
    of_the_last = ((True, False), (False, False), (True, True))  # whether it uses the number, whether sums are in main_grad

    @each((name, *last) for name, last in crossed(WAITS, of_the_last, 3))
    def check(name, last_uses, main):
        policy = md.MixedPrecisionPolicy(reduce_dtype=ms.float32, apply_grad_on_fp32_main_grad=main)
        plain, net = twins(Numbers, sharded(shard_placement_fn=kept, mp_policy=policy), mesh)
        sums = steps(net, plain, x, WAITS[name], last_uses, main)
        assert sums == [False, False, True] * 2, sums


@case(2)
def one_rank_adds_up_as_many_do(world):
    """On an axis of one rank there is nothing to reduce; micro-batches without synchronisation are added up all the same."""
    mesh = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("tp", "dp"))["dp"]

    @each((way, last) for way in WAYS if way != "neighbours" for last in sampled((True, False), 2, len(way)))
    def check(way, last_uses):
        plain, net = twins(Numbers, way, mesh)
        steps(net, plain, rows_of(mesh), (False, True), last_uses)


@case(2)
def many_that_were_frozen_meanwhile_are_delivered_in_one_order(world):
    """They have no bucket any more and get one each; addresses, by which a set would have them, are a rank's own."""
    mesh = data_mesh(world)
    plain, net = twins(lambda: Net(count=8), "replicate", mesh)
    x, params, theirs = rows_of(mesh), net.trainable_params(), plain.trainable_params()
    step, want = value_and_grad(mean_square(net), None, params), ms.value_and_grad(mean_square(plain), None, theirs)
    for again in range(3):
        net.set_requires_gradient_sync(False)
        step(x)
        net.set_requires_gradient_sync(True)
        for p in params[1:]:
            p.requires_grad = False
        got = value_and_grad(mean_square(net), None, params)(x)[1]
        equal_each(got[1:], want(Tensor(ROWS))[1][1:], params[1:], f"step {again}")
        for p in params[1:]:
            p.requires_grad = True
