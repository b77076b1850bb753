# SPDX-License-Identifier: Apache-2.0
"""What happens inside a unit of `fully_shard`: cells that run again, numbers, empty shards, other dtypes; and arguments."""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor import DTensor, MixedPrecisionPolicy, Shard, checkpoint_wrapper, fully_shard, replicate
from ms_dtensor.errors import ConfigError
from ms_dtensor.internals.names import no_grad
from tests.cases import case
from tests.dist.cases_fully_shard import ASKED, ROWS, Block, Net, filled, fsdp, loss_of, mine, same_step
from tests.dist.support import counted, equal, refusal, same_on_all_ranks


class Tied(nn.Cell):
    """Two projections with one weight, between a frozen one and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.one, self.two = nn.Dense(5, 5), nn.Dense(5, 5), nn.Dense(5, 5)
        self.two.weight = self.one.weight
        self.heat = Parameter(Tensor(0.7, ms.float32), name="heat")
        for p in self.frozen.get_parameters():
            p.requires_grad = False

    def construct(self, x):
        return self.two(mint.tanh(self.one(mint.tanh(self.frozen(x))))) * self.heat


def whole(net, mesh, **how):
    return fully_shard(net, mesh=mesh, **how)


def divided(net, mesh, **how):
    return replicate(net, mesh=mesh, zero1=True, **how)


@case(4)
def cells_of_a_larger_unit_run_again(world):
    mesh = fsdp()
    for cut in (whole, divided):
        for before in (True, False):
            plain, net = filled(Net()), filled(Net())
            if before:
                checkpoint_wrapper(net.blocks)
                checkpoint_wrapper(net.blocks[1].up)
            cut(net, mesh)
            if not before:
                checkpoint_wrapper(net.blocks, "every:2")
            for _ in range(2):
                count = same_step(net, plain, mesh)
                count.pop(ASKED, None)
                assert count["reduce_scatter", "backward"] == 1 and sum(count.values()) == (3 if cut is whole else 2), count
            for order in ((1, 1, 0), (2,), ()):
                plain.order = net.order = order
                same_step(net, plain, mesh)


@case(4)
def tied_frozen_and_single_numbers_run_again(world):
    mesh = fsdp()
    for cut in (whole, divided):
        for kids in (("one",), ("two",), ("one", "two"), ("frozen", "one")):
            plain, net = filled(Tied()), cut(filled(Tied()), mesh)
            for kid in kids:
                checkpoint_wrapper(getattr(net, kid))
            same_step(net, plain, mesh)
            equal(net(mine(mesh)), plain(Tensor(ROWS)))


@case(4)
def what_runs_again_computes_in_the_policys_dtype(world):
    mesh, policy = fsdp(), MixedPrecisionPolicy(ms.float16, ms.float32)
    for cut in (whole, divided):
        plain, net = cut(filled(Tied()), mesh, mp_policy=policy), cut(filled(Tied()), mesh, mp_policy=policy)
        for kid in (net.frozen, net.one, net.two):
            checkpoint_wrapper(kid)
        assert net(mine(mesh)).dtype == ms.float16
        want = md.value_and_grad(loss_of(plain), None, plain.trainable_params())(mine(mesh))[1]
        got = md.value_and_grad(loss_of(net), None, net.trainable_params())(mine(mesh))[1]
        for p, g, w in zip(net.trainable_params(), got, want, strict=True):
            assert g.dtype == ms.float32
            equal(g, w, p.name, 1e-3)


@case(4)
def what_is_read_unrecorded_is_recorded_later(world):
    mesh, plain, net = fsdp(), filled(Tied()), replicate(filled(Tied()), mesh=fsdp())

    def loss(n):
        def of(x):
            h = n.frozen(x)
            w = n.one.weight * 2
            with no_grad():
                seen = mint.matmul(h, w).sum()
            return (mint.matmul(h, w) ** 2).mean() + seen * 0
        return of
    want = ms.value_and_grad(loss(plain), None, [plain.one.weight])(Tensor(ROWS))
    rows = md.distribute_tensor(Tensor(ROWS), mesh, [Shard(0)])
    got = md.value_and_grad(loss(net), None, [net.one.weight])(rows)
    equal(got[1][0], want[1][0])


@case(4)
def numbers_are_kept_by_every_rank(world):
    mesh = fsdp()
    for cut in (whole, divided):
        plain, net = filled(Tied()), cut(filled(Tied()), mesh)
        assert isinstance(net.heat, DTensor) and net.heat.placements[0].is_replicate(), net.heat
        same_step(net, plain, mesh)


@case(4)
def empty_shards_of_bfloat16(world):
    class Five(nn.Cell):
        def __init__(self, dtype) -> None:
            super().__init__()
            self.v = Parameter(Tensor(np.ones((5, 6), np.float32)).astype(dtype), name="v")

        def construct(self, x):
            return mint.matmul(x, self.v)
    mesh, rows = fsdp(), Tensor(np.asarray(ROWS))
    want = ms.value_and_grad(lambda x: (mint.matmul(x, Tensor(np.ones((5, 6), np.float32))) ** 2).mean(), 0)(rows)[0]
    for cut in (whole, divided):
        for dtype, policy in ((ms.bfloat16, None), (ms.float32, MixedPrecisionPolicy(ms.bfloat16)),
                              (ms.float32, MixedPrecisionPolicy(ms.bfloat16, ms.float32))):
            net = cut(Five(dtype), mesh, mp_policy=policy)
            x = mine(mesh).astype(ms.bfloat16)
            value, grads = md.value_and_grad(lambda x, net=net: (net(x).astype(ms.float32) ** 2).mean(), None, [net.v])(x)
            equal(value, want, "value", 2e-2)
            assert grads[0].dtype == dtype and grads[0].shape == (5, 6)
            md.optim.AdamW([net.v])(grads)


@case(4)
def another_dtype_is_refused(world):
    mesh = fsdp()
    for cut in (whole, divided):
        net = cut(filled(Net()), mesh)
        net(mine(mesh))
        net.head.weight.set_dtype(ms.float16)
        with counted() as count:
            text = refusal(lambda net=net: net(mine(mesh)), ConfigError)
        assert "head.weight" in text and "another dtype" in text and not count, (text, count)
        same_on_all_ranks(world, text)


@case(4)
def arguments_of_other_kinds(world):
    mesh, net = fsdp(), Block(5, 6)
    for what, call in (
            ("'module' does not take", lambda: fully_shard([net], mesh=mesh)),
            ("'mesh' does not take None", lambda: fully_shard(net, mesh=None)),
            ("'mp_policy' does not take 'bf16'", lambda: fully_shard(net, mesh=mesh, mp_policy="bf16")),
            ("'ignored_params' does not take 'up.weight'", lambda: fully_shard(net, mesh=mesh, ignored_params=["up.weight"])),
            ("gave 1 for parameter", lambda: fully_shard(net, mesh=mesh, shard_placement_fn=lambda p: 1)),
            ("is no floating-point dtype", lambda: MixedPrecisionPolicy(ms.int32)),
            ("is no floating-point dtype", lambda: MixedPrecisionPolicy(None, "float16")),
            ("'no' is no bool", lambda: fully_shard(Block(5, 6), mesh=mesh).set_requires_gradient_sync("no"))):
        with counted() as count:
            text = refusal(call, ConfigError)
        assert what in text, (what, text)
        assert not count or "bool" in what, (what, count)
