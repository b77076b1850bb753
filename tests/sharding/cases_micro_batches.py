# SPDX-License-Identifier: Apache-2.0
"""Micro-batches whose gradients are reduced once a step, whatever the last one runs; the sum is one device's."""
from __future__ import annotations

import contextlib
import itertools

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

import ms_dtensor as md
from model_zoo.llama.config import Config, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from model_zoo.llama.data import Text
from model_zoo.llama.parallelize import make_mesh
from model_zoo.llama.trainer import Trainer
from ms_dtensor import MixedPrecisionPolicy, Shard, distribute_tensor, value_and_grad
from tests.cases import case
from tests.operands import Built, filled
from tests.rehearsal.session import rehearsed
from tests.sharding.support import ROWS, SHARDED, WAYS, Net, data_mesh, replicated, rows_of, sharded, twins
from tests.support import added, array, counted, crossed, each, equal, equal_each, mean_square
from tests.tiers import sampled


def summed(net, plain, mesh, losses, what: str = "", roots=None):
    """Gradients of a step of micro-batches, one loss each, and of a next step, which owes nothing; the last one's counts."""
    params, theirs = plain.trainable_params(), net.trainable_params()
    counts = []
    for again in range(2):
        got = wanted = None
        for i, loss in enumerate(losses):
            rows = ROWS * (1 + 0.5 * i)
            for root in roots or (net,):
                root.set_requires_gradient_sync(i == len(losses) - 1)
            wanted = added(wanted, ms.value_and_grad(loss(plain), None, params)(Tensor(rows))[1])
            with counted() as count:
                got = value_and_grad(loss(net), None, theirs)(rows_of(mesh, rows))[1]
            counts.append(count)
            assert i == len(losses) - 1 or not any(array(g).any() for g in got), f"{what}: handed out meanwhile"
        equal_each(got, wanted, theirs, f"{what} step {again}")
    want = ms.value_and_grad(losses[0](plain), None, params)(Tensor(ROWS))[1]
    equal_each(value_and_grad(losses[0](net), None, theirs)(rows_of(mesh))[1], want, theirs, f"{what} the step after")
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
    mesh = data_mesh(world)
    ways = (*SHARDED, "zero1", "replicate", "bucket_mb=0")

    @each(sampled(itertools.product(("both", "first", "second", "stopped"), ((0, 1), (1,), ()), ways), 11))
    def steps(use, last, way):
        plain, net = twins(Pair, way, mesh, "blocks first second")
        summed(net, plain, mesh, [ordered((0, 1, 2), "both"), ordered((2, 1), use), ordered(last, use)])


@case(2)
def a_cell_that_is_a_root_of_its_own_is_skipped_in_the_last_one(world):
    mesh = data_mesh(world)

    def both(net):
        return lambda x: (net[1](mint.tanh(net[0](x))) ** 2).mean()

    def one(net):
        return mean_square(net[0])

    @each((way, losses) for shift, way in sampled(enumerate(WAYS), 2)
          for losses in sampled(([both, one], [both, both, one], [one, both, one]), 3, shift))
    def steps(way, losses):
        plain, net = (nn.CellList([filled(nn.Dense(4, 4)), filled(Net(), 7)]) for _ in range(2))
        WAYS[way](net[0], mesh, ())
        WAYS[way](net[1], mesh, net[1].blocks)
        summed(net, plain, mesh, losses, roots=net)


def gate() -> nn.Cell:
    """A cell that runs, and whose parameters reach the loss or not."""
    def construct(c, x):
        y, z = mint.tanh(c.a(x)), mint.tanh(c.b(x))
        return y * (z if c.gate == "open" else ops.stop_gradient(z)) if c.gate != "unused" else y
    return Built(construct, gate="open", a=nn.Dense(4, 4), b=nn.Dense(4, 4))


def gated(gate: str):
    def make(net):
        def loss(x):
            net.gate = gate
            return mean_square(net)(x)
        return loss
    return make


@case(2)
def a_cell_ran_but_none_of_its_parameters_reaches_the_loss_of_the_last_one(world):
    mesh = data_mesh(world)

    @each(crossed(("stopped", "unused"), WAYS, 2))
    def steps(last, way):
        plain, net = twins(gate, way, mesh, "a b")
        summed(net, plain, mesh, [gated("open"), gated(last), gated(last)])


def summed_up() -> nn.Cell:
    """Two parameters of which autograd hands out one gradient, the same tensor."""
    return Built(lambda c, x: mint.matmul(x, c.a.weight + c.b.weight) + c.c(x),
                 a=nn.Dense(4, 4), b=nn.Dense(4, 4), c=nn.Dense(4, 4))


@case(2)
def sums_of_parameters_whose_gradient_is_one_tensor(world):
    mesh = data_mesh(world)
    wide = MixedPrecisionPolicy(reduce_dtype=ms.float64)
    ways = {**WAYS, "wide": sharded(mp_policy=wide), "wide kept": replicated(mp_policy=wide)}

    @each(ways)
    def steps(way):
        plain, net = twins(summed_up, ways[way], mesh, "")
        summed(net, plain, mesh, [mean_square] * 4)


class Tied(nn.Cell):
    """The first unit's weight is the last one's, too, past its unit, and in the loss's way by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Dense(4, 4) for _ in range(4))
        self.c.weight, self.d.weight = self.a.weight, self.b.weight

    def construct(self, x):
        return self.d(mint.tanh(self.c(mint.tanh(self.b(mint.tanh(self.a(x)))))))


def with_sum_of_weights(net):
    """Of the two that are tied autograd hands out one gradient, the same tensor."""
    return lambda x: mean_square(net)(x) + ((net.a.weight + net.b.weight) ** 2).mean()


def sum_of_weights(net):
    return lambda x: ((net.a.weight + net.b.weight) ** 3).mean() + (x ** 2).mean()


@case(2)
def a_weight_that_several_units_have(world):
    """What it is given past its unit is there with the last one, as the unit's own: nobody has to add up by hand."""
    line, grid = data_mesh(world), md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "cut"))
    with rehearsed(clock=False):
        npu = data_mesh(world, "npu")

    @each(sampled(itertools.product((*SHARDED, "hybrid", "device"), ("used", "unused in the last", "alone")), 2))
    def steps(way, last):
        mesh = {"hybrid": grid, "device": npu}.get(way, line)
        losses = {"used": [with_sum_of_weights] * 3, "unused in the last": [with_sum_of_weights, mean_square],
                  "alone": [mean_square, sum_of_weights]}[last]
        with rehearsed(clock=False) if way == "device" else contextlib.nullcontext():
            plain, net = twins(Tied, way if way in SHARDED else "fully_shard", mesh, "a b c d")
            summed(net, plain, mesh, losses, f"{way}, {last}")


@case(2)
def hooks_of_a_weight_that_several_units_have_run_on_all_ranks(world):
    """A loss of a micro-batch reaches one rank's rows of it only."""
    plain, net = twins(Tied, "fully_shard", data_mesh(world), "a b c d")
    params, theirs, seen = plain.trainable_params(), net.trainable_params(), []
    net.set_requires_gradient_sync(False)
    value_and_grad(lambda: (net.a.weight[:2] ** 2).mean(), None, theirs)()
    net.a.weight.register_hook(lambda grad: seen.append(array(grad)))
    net.set_requires_gradient_sync(True)
    got = value_and_grad(lambda: (net.b.weight ** 2).mean(), None, theirs)()[1]
    want = ms.value_and_grad(lambda: (plain.a.weight[:2] ** 2).mean() + (plain.b.weight ** 2).mean(), None, params)()[1]
    equal_each(got, want, theirs)
    assert [bool(grad.any()) for grad in seen] == [True], seen  # once, with what was owed; not with zeros before


@case(2)
def a_weight_that_several_units_have_waits_for_the_copies(world):
    mesh = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "cut"))
    plain, net = twins(Tied, "fully_shard", mesh, "a b c d")
    params, theirs = plain.trainable_params(), net.trainable_params()
    x = distribute_tensor(Tensor(ROWS), mesh, [Shard(0)] * 2, src_data_rank=None)
    for last in (False, True):
        net.set_requires_all_reduce(last)
        got = value_and_grad(mean_square(net), None, theirs)(x)[1]
    want = ms.value_and_grad(lambda x: 2 * mean_square(plain)(x), None, params)(Tensor(ROWS))[1]
    equal_each(got, want, theirs)


@case(2)
def a_weight_that_several_units_have_in_main_grad(world):
    mesh = data_mesh(world)
    policy = MixedPrecisionPolicy(reduce_dtype=ms.float32, apply_grad_on_fp32_main_grad=True)
    plain, net = twins(Tied, sharded(mp_policy=policy), mesh, "a b c d")
    theirs = net.trainable_params()
    for sync in (True, False, True):
        net.set_requires_gradient_sync(sync)
        got = value_and_grad(mean_square(net), None, theirs)(rows_of(mesh))[1]
        assert not any(array(g).any() for g in got)
    want = ms.value_and_grad(lambda x: 3 * mean_square(plain)(x), None, plain.trainable_params())(Tensor(ROWS))[1]
    equal_each([p.main_grad for p in theirs], want, theirs)


@case(2)
def one_reduction_a_step_under_replicate(world):
    mesh = data_mesh(world)

    @each(crossed(("replicate", "bucket_mb=0", "zero1"), (2, 4), 2))
    def steps(way, m):
        plain, net = twins(Net, way, mesh, "")
        counts = summed(net, plain, mesh, [mean_square] * m)
        sums = [count["reduce_scatter" if way == "zero1" else "all_reduce", "backward"] for count in counts]
        assert sums == ([0] * (m - 1) + [7 if way == "bucket_mb=0" else 1]) * 2, sums


@case(2)
def micro_batches_that_were_broken_off_are_forgotten(world):
    mesh = data_mesh(world)

    @each(("fully_shard", "replicate"))
    def steps(way):
        plain, net = twins(Net, way, mesh)
        net.set_requires_gradient_sync(False)
        params = net.trainable_params()
        grads = value_and_grad(mean_square(net), None, params)(rows_of(mesh))[1]
        equal_each(grads, [np.zeros(p.shape, np.float32) for p in params], params, "handed out meanwhile")
        net.forget_gradients()
        net.set_requires_gradient_sync(True)
        summed(net, plain, mesh, [mean_square])


def llama(parallel, micro_batches: int):
    """Gradients of one step of the recipe and what it communicated in the backward."""
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
    loss, wanted, _ = llama(None, 1)
    for micro_batches in (1, 4):
        got, grads, count = llama(ParallelConfig(dp=2, tp=1, loss_parallel=False), micro_batches)
        equal(got, loss, "loss")
        equal_each(grads, wanted, range(len(wanted)), "gradient", 1e-4)
        assert count["all_reduce", "backward"] == 1, (micro_batches, count)


@case(2)
def parameters_that_are_unfrozen_later(world):
    """Buckets are of what is trained now, so it is reduced once a step, too."""
    mesh = data_mesh(world)

    def made():
        net = Net()
        net.blocks[1][0].weight.requires_grad = False
        return net

    @each(("replicate", "bucket_mb=0", "zero1"))
    def steps(way):
        plain, net = twins(made, way, mesh)
        for trained in (False, True, False):
            for n in (plain, net):
                n.blocks[1][0].weight.requires_grad = trained
                n.blocks[0][0].bias.requires_grad = not trained
            losses = [mean_square, lambda n: lambda x: (n(x) ** 3).mean()]
            first, last = summed(net, plain, mesh, losses, f"{trained=}")[-2:]
            sums = [c["all_reduce", "backward"] + c["reduce_scatter", "backward"] for c in (first, last)]
            assert sums[0] == 0 and 0 < sums[1] <= (7 if way == "bucket_mb=0" else 5), sums


@case(2)
def a_parameter_is_frozen_in_the_last_one(world):
    """MindSpore takes no gradient of what is frozen when the backward begins; what earlier ones owe of it is not lost."""
    mesh = data_mesh(world)

    def trained(net, now: bool) -> None:
        net.blocks[0][0].weight.requires_grad = net.blocks[1][0].bias.requires_grad = now

    def first(net):
        def loss(x):
            trained(net, True)
            return mean_square(net)(x)
        return loss

    def last(net):
        def loss(x):
            before = (net(x) ** 3).mean()
            trained(net, False)
            return before + mean_square(net)(x)
        return loss

    @each((*SHARDED, "zero1", "replicate", "bucket_mb=0"))
    def steps(way):
        plain, net = twins(Net, way, mesh)
        counts = summed(net, plain, mesh, [first, last])
        sums = [c["all_reduce", "backward"] + c["reduce_scatter", "backward"] for c in counts]
        assert sums[0] == sums[2] == 0 < sums[1] == sums[3], sums
