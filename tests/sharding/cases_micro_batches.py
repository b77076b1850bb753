# SPDX-License-Identifier: Apache-2.0
"""Micro-batches whose gradients are reduced once a step, whatever the last one runs; the sum is one device's."""
from __future__ import annotations

import itertools

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from ms_dtensor import MixedPrecisionPolicy, fully_shard, replicate, value_and_grad
from tests.cases import case
from tests.dist.support import counted, equal
from tests.sharding.support import ROWS, SHARDED, WAYS, Net, collected, data_mesh, filled, none_of, rows_of
from tests.tiers import sampled


def summed(net, plain, mesh, losses, what: str = "", roots=None):
    """Gradients of a step of micro-batches, one loss each, and of a next step, which owes nothing; the last one's counts."""
    parts = [ROWS * (1 + 0.5 * i) for i in range(len(losses))]
    params, theirs = plain.trainable_params(), net.trainable_params()
    counts = []
    for again in range(2):
        total, wanted = None, None
        for i, (loss, rows) in enumerate(zip(losses, parts)):
            for root in roots or (net,):
                root.set_requires_gradient_sync(i == len(losses) - 1)
            want = ms.value_and_grad(loss(plain), None, params)(Tensor(rows))[1]
            with counted() as count:
                grads = value_and_grad(loss(net), None, theirs)(rows_of(mesh, rows))[1]
            counts.append(count)
            wanted = want if wanted is None else [a + b for a, b in zip(wanted, want)]
            total = grads if total is None else [a + b for a, b in zip(total, grads)]
        for p, g, w in zip(theirs, total, wanted, strict=True):
            equal(g, w, f"{what} step {again}: {p.name}")
    want = ms.value_and_grad(losses[0](plain), None, params)(Tensor(ROWS))[1]
    grads = value_and_grad(losses[0](net), None, theirs)(rows_of(mesh))[1]
    for p, g, w in zip(theirs, grads, want, strict=True):
        equal(g, w, f"{what} the step after: {p.name}")
    return counts


class Pair(nn.Cell):
    """Returns two tensors, the first of which a loss may leave alone; `order` says which blocks run."""

    def __init__(self) -> None:
        super().__init__()
        self.order, self.first, self.second = (0, 1, 2), nn.Dense(4, 4), nn.Dense(4, 4)
        self.blocks = nn.CellList([nn.Dense(4, 4) for _ in range(3)])

    def construct(self, x):
        y = mint.tanh(self.second(x))
        for i in self.order:
            y = mint.tanh(self.blocks[i](y))
        return self.first(x), y


def ordered(order, use: str):
    def make(net):
        def loss(x):
            net.order = order
            y, z = net(x)
            return {"both": lambda: (y * z).mean(), "first": lambda: (y ** 2).mean(), "second": lambda: (z ** 2).mean(),
                    "stopped": lambda: (ops.stop_gradient(y) * z).mean()}[use]()
        return loss
    return make


@case(2)
def a_cell_is_skipped_in_the_last_one(world):
    mesh, faults = data_mesh(world), []
    ways = (*SHARDED, "zero1", "replicate", "bucket_mb=0")
    for use, last, way in sampled(itertools.product(("both", "first", "second", "stopped"), ((0, 1), (1,), ()), ways), 11):
        def steps(way=way, last=last, use=use):
            plain, net = filled(Pair()), filled(Pair())
            WAYS[way](net, mesh, (*net.blocks, net.first, net.second))
            summed(net, plain, mesh, [ordered((0, 1, 2), "both"), ordered((2, 1), use), ordered(last, use)])
        collected(faults, f"{way}, {use}, last {last}", steps)
    none_of(faults)


@case(2)
def a_cell_that_is_a_root_of_its_own_is_skipped_in_the_last_one(world):
    mesh, faults = data_mesh(world), []

    def both(net):
        return lambda x: (net[1](mint.tanh(net[0](x))) ** 2).mean()

    def one(net):
        return lambda x: (net[0](x) ** 2).mean()
    for shift, (way, wrap) in sampled(enumerate(WAYS.items()), 2):
        for losses in sampled(((both, one), (both, both, one), (one, both, one)), 3, shift):
            def steps(wrap=wrap, losses=losses):
                plain, net = (nn.CellList([filled(nn.Dense(4, 4)), filled(Net(), 7)]) for _ in range(2))
                wrap(net[0], mesh, ())
                wrap(net[1], mesh, net[1].blocks)
                summed(net, plain, mesh, losses, roots=net)
            collected(faults, f"{way}, {[f.__name__ for f in losses]}", steps)
    none_of(faults)


class Gated(nn.Cell):
    """A cell that runs, and whose parameters reach the loss or not."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.a, self.b = "open", nn.Dense(4, 4), nn.Dense(4, 4)

    def construct(self, x):
        y, z = mint.tanh(self.a(x)), mint.tanh(self.b(x))
        return y * (z if self.gate == "open" else ops.stop_gradient(z)) if self.gate != "unused" else y


def gated(gate: str):
    def make(net):
        def loss(x):
            net.gate = gate
            return (net(x) ** 2).mean()
        return loss
    return make


@case(2)
def a_cell_ran_but_none_of_its_parameters_reaches_the_loss_of_the_last_one(world):
    mesh, faults = data_mesh(world), []
    for shift, last in enumerate(("stopped", "unused")):
        for way, wrap in sampled(WAYS.items(), 2, shift):
            def steps(wrap=wrap, last=last):
                plain, net = filled(Gated()), filled(Gated())
                wrap(net, mesh, (net.a, net.b))
                summed(net, plain, mesh, [gated("open"), gated(last), gated(last)])
            collected(faults, f"{way}, {last}", steps)
    none_of(faults)


class Added(nn.Cell):
    """Two parameters of which autograd hands out one gradient, the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Dense(4, 4), nn.Dense(4, 4), nn.Dense(4, 4)

    def construct(self, x):
        return mint.matmul(x, self.a.weight + self.b.weight) + self.c(x)


@case(2)
def sums_of_parameters_whose_gradient_is_one_tensor(world):
    mesh, faults = data_mesh(world), []
    wide = MixedPrecisionPolicy(reduce_dtype=ms.float64)
    ways = {**WAYS, "wide": lambda net, mesh, inner: fully_shard(net, mesh=mesh, mp_policy=wide),
            "wide kept": lambda net, mesh, inner: replicate(net, mesh=mesh, mp_policy=wide)}
    for way, wrap in ways.items():
        def steps(wrap=wrap):
            plain, net = filled(Added()), filled(Added())
            wrap(net, mesh, ())
            summed(net, plain, mesh, [lambda net: lambda x: (net(x) ** 2).mean()] * 4)
        collected(faults, way, steps)
    none_of(faults)


@case(2)
def one_reduction_a_step_under_replicate(world):
    mesh, faults = data_mesh(world), []
    for shift, how in enumerate(({}, {"bucket_mb": 0}, {"zero1": True})):
        for m in sampled((2, 4), 2, shift):
            def steps(how=how, m=m):
                plain, net = filled(Net()), filled(Net())
                replicate(net, mesh=mesh, **how)
                counts = summed(net, plain, mesh, [lambda n: lambda x: (n(x) ** 2).mean()] * m)
                kind = "reduce_scatter" if "zero1" in how else "all_reduce"
                sums = [count[kind, "backward"] for count in counts]
                once = 7 if how == {"bucket_mb": 0} else 1
                assert sums == ([0] * (m - 1) + [once]) * 2, sums
            collected(faults, f"{how} m={m}", steps)
    none_of(faults)


@case(2)
def forgotten_gradients_of_a_replicated_cell(world):
    mesh, plain = data_mesh(world), filled(Net())
    net = replicate(filled(Net()), mesh=mesh)
    loss = lambda n: lambda x: (n(x) ** 2).mean()  # noqa: E731
    net.set_requires_gradient_sync(False)
    grads = value_and_grad(loss(net), None, net.trainable_params())(rows_of(mesh))[1]
    for p, g in zip(net.trainable_params(), grads, strict=True):
        equal(g, np.zeros(p.shape, np.float32), f"handed out meanwhile: {p.name}")
    net.forget_gradients()
    net.set_requires_gradient_sync(True)
    summed(net, plain, mesh, [loss])


def llama(parallel, micro_batches: int):
    """Gradients of one step of the recipe and what it communicated in the backward."""
    from model_zoo.llama.config import Config, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
    from model_zoo.llama.data import Text
    from model_zoo.llama.parallelize import make_mesh
    from model_zoo.llama.trainer import Trainer
    cfg = Config(model=ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=40, vocab_size=37),
                 parallel=parallel or ParallelConfig(),
                 train=TrainConfig(steps=2, batch=8, seq=12, micro_batches=micro_batches), optim=OptimConfig())
    text = Text(*(np.random.default_rng(n).integers(0, 37, 4000).astype(np.uint8) for n in (1, 2)))
    trainer = Trainer(cfg, text, None if parallel is None else make_mesh("cpu", parallel))
    with counted() as count:
        loss, grads = trainer.gradients(*trainer.batch(0))
    return loss, grads, count


@case(2, timeout=120)
def the_recipes_data_parallel_trainer_reduces_once_a_step(world):
    from model_zoo.llama.config import ParallelConfig
    loss, wanted, _ = llama(None, 1)
    for micro_batches in (1, 4):
        got, grads, count = llama(ParallelConfig(dp=2, tp=1, loss_parallel=False), micro_batches)
        equal(got, loss, "loss")
        for i, (g, w) in enumerate(zip(grads, wanted, strict=True)):
            equal(g, w, f"gradient {i}", 1e-4)
        assert count["all_reduce", "backward"] == 1, (micro_batches, count)


@case(2)
def parameters_that_are_unfrozen_later(world):
    """Buckets are of what is trained now, so it is reduced once a step, too."""
    mesh, faults = data_mesh(world), []
    for way in ("replicate", "bucket_mb=0", "zero1"):
        def steps(way=way):
            plain, net = filled(Net()), filled(Net())
            for n in (plain, net):
                n.blocks[1][0].weight.requires_grad = False
            WAYS[way](net, mesh, net.blocks)
            for trained in (False, True, False):
                for n in (plain, net):
                    n.blocks[1][0].weight.requires_grad = trained
                    n.blocks[0][0].bias.requires_grad = not trained
                losses = [lambda n: lambda x: (n(x) ** 2).mean(), lambda n: lambda x: (n(x) ** 3).mean()]
                first, last = summed(net, plain, mesh, losses, f"{trained=}")[-2:]
                sums = [c["all_reduce", "backward"] + c["reduce_scatter", "backward"] for c in (first, last)]
                assert sums[0] == 0 and 0 < sums[1] <= (7 if way == "bucket_mb=0" else 5), sums
        collected(faults, way, steps)
    none_of(faults)


@case(2)
def a_parameter_is_frozen_in_the_last_one(world):
    """MindSpore takes no gradient of what is frozen when the backward begins; what earlier ones owe of it is not lost."""
    mesh, faults = data_mesh(world), []

    def trained(net, now: bool) -> None:
        net.blocks[0][0].weight.requires_grad = net.blocks[1][0].bias.requires_grad = now

    def first(net):
        def loss(x):
            trained(net, True)
            return (net(x) ** 2).mean()
        return loss

    def last(net):
        def loss(x):
            before = (net(x) ** 3).mean()
            trained(net, False)
            return before + (net(x) ** 2).mean()
        return loss
    for way in (*SHARDED, "zero1", "replicate", "bucket_mb=0"):
        def steps(way=way):
            plain, net = filled(Net()), filled(Net())
            WAYS[way](net, mesh, net.blocks)
            counts = summed(net, plain, mesh, [first, last])
            sums = [c["all_reduce", "backward"] + c["reduce_scatter", "backward"] for c in counts]
            assert sums[0] == sums[2] == 0 < sums[1] == sums[3], sums
        collected(faults, way, steps)
    none_of(faults)
