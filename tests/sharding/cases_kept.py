# SPDX-License-Identifier: Apache-2.0
"""Micro-batches and parameters that every rank keeps whole (numbers, `Replicate()`): their gradients wait, too."""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

import ms_dtensor as md
from ms_dtensor import Replicate, Shard, distribute_tensor, fully_shard, init_device_mesh, value_and_grad
from tests.cases import case
from tests.dist.support import counted, equal
from tests.sharding.support import ROWS, WAYS, Net, collected, filled, none_of
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
    def loss(of):
        return lambda x: (of(x) ** 2).mean()
    params, theirs = net.trainable_params(), plain.trainable_params()
    sums = []
    for again in range(2):
        total, wanted = [0] * len(params), [0] * len(params)
        for i in range(3):
            sync, over = (True, True) if i == 2 else waits
            net.set_requires_gradient_sync(sync)
            net.set_requires_all_reduce(over)
            net.uses = plain.uses = i < 2 or last_uses
            with counted() as count:
                grads = value_and_grad(loss(net), None, params)(x)[1]
            sums.append(sync and count["all_reduce", "backward"] > 0)
            total = [a + b for a, b in zip(total, grads)]
            want = ms.value_and_grad(loss(plain), None, theirs)(Tensor(ROWS))[1]
            wanted = [a + b for a, b in zip(wanted, want)]
        if main:
            total = [p.main_grad for p in params]
            net.zero_grad()
        for p, g, w in zip(params, total, wanted, strict=True):
            equal(g, w, f"step {again}: {p.name}")
    net.uses = plain.uses = True
    net.set_requires_gradient_sync(True)
    return sums


@case(4)
def kept_ones_wait_for_copies_as_cut_ones_do(world):
    mesh, faults = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "cut")), []
    x = distribute_tensor(Tensor(ROWS), mesh, [Shard(0), Shard(0)], src_data_rank=None)
    for shift, (name, waits) in enumerate(WAITS.items()):
        for last_uses, main in sampled(((True, False), (False, False), (True, True)), 3, shift):
            def check(waits=waits, last_uses=last_uses, main=main):
                plain, net = filled(Numbers()), filled(Numbers())
                policy = md.MixedPrecisionPolicy(reduce_dtype=ms.float32, apply_grad_on_fp32_main_grad=main)
                for cell in (*net.blocks, net):
                    fully_shard(cell, mesh=mesh, shard_placement_fn=kept, mp_policy=policy)
                sums = steps(net, plain, x, waits, last_uses, main)
                assert sums == [False, False, True] * 2, sums
            collected(faults, f"{name}, the last one uses it: {last_uses}, main: {main}", check)
    none_of(faults)


@case(2)
def one_rank_adds_up_as_many_do(world):
    """On an axis of one rank there is nothing to reduce; micro-batches without synchronisation are added up all the same."""
    mesh, faults = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("tp", "dp"))["dp"], []
    x = distribute_tensor(Tensor(ROWS), mesh, [Shard(0)], src_data_rank=None)
    for way, wrap in WAYS.items():
        if way == "neighbours":
            continue
        for last_uses in sampled((True, False), 2, len(way)):
            def check(wrap=wrap, last_uses=last_uses):
                plain, net = filled(Numbers()), filled(Numbers())
                wrap(net, mesh, net.blocks)
                steps(net, plain, x, (False, True), last_uses)
            collected(faults, f"{way}, the last one uses it: {last_uses}", check)
    none_of(faults)


@case(2)
def many_that_were_frozen_meanwhile_are_delivered_in_one_order(world):
    """They have no bucket any more and get one each; addresses, by which a set would have them, are a rank's own."""
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",))
    plain, net = filled(Net(count=8)), WAYS["replicate"](filled(Net(count=8)), mesh)
    x = distribute_tensor(Tensor(ROWS), mesh, [Shard(0)], src_data_rank=None)
    params, theirs = net.trainable_params(), plain.trainable_params()
    for again in range(3):
        net.set_requires_gradient_sync(False)
        value_and_grad(lambda x: (net(x) ** 2).mean(), None, params)(x)
        want = ms.value_and_grad(lambda x: (plain(x) ** 2).mean(), None, theirs)(Tensor(ROWS))[1]
        net.set_requires_gradient_sync(True)
        for p in params[1:]:
            p.requires_grad = False
        got = value_and_grad(lambda x: (net(x) ** 2).mean(), None, params)(x)[1]
        for p, g, w in zip(params[1:], got[1:], want[1:], strict=True):
            p.requires_grad = True
            equal(g, w, f"step {again}: {p.name}")
