# SPDX-License-Identifier: Apache-2.0
"""What users of PyTorch's FSDP2 ask for, by its names: prefetch, methods as forwards, lists of cells, handles, logs."""
from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor import Shard, comm, distribute_tensor, fully_shard, init_device_mesh, replicate, value_and_grad
from ms_dtensor.errors import ConfigError, LayoutError
from tests.cases import case, cases
from tests.operands import filled
from tests.sharding.support import ROWS, WAYS, Net, alike, data_mesh, own_rows, rows_of, same_step, sharded, twins
from tests.support import added, counted, each, equal, equal_each, mean_square, refused_alike, same_on_all_ranks
from tests.tiers import sampled


def gathers(run, phase: str = "forward") -> list:
    """The sizes of what was gathered, in order."""
    with comm.record() as events:
        run()
    return [e.shape for e in events if e.op == "all_gather" and e.phase == phase]


def unlike() -> Net:
    """Cells whose units have sizes of their own, so that a record tells them apart."""
    net = Net(count=4, order=(0, 1, 2, 3))
    for i, block in enumerate(net.blocks):
        block.append(nn.Dense(4, 4 + 4 * i))
        block.append(nn.Dense(4 + 4 * i, 4))
    return filled(net)


def prefetching(mesh):
    """A model of one device, one that prefetches as it is told, and one as usual."""
    plain, net = twins(unlike, "fully_shard", mesh)
    return plain, net, twins(unlike, "fully_shard", mesh)[1]


@case(2)
def forward_prefetch(world):
    """Numbers and counts stay; the named cells are gathered before the one that runs next otherwise."""
    mesh = data_mesh(world)
    plain, net, usual = prefetching(mesh)
    net.blocks[0].set_modules_to_forward_prefetch([net.blocks[2], net.blocks[1]])
    for step in range(3):
        count = alike(net, plain, mesh, what=f"step {step}")
        assert count == alike(usual, plain, mesh), count
    x = rows_of(mesh)
    got, order = gathers(lambda: net(x)), gathers(lambda: usual(x))
    assert sorted(got) == sorted(order) and got.index(order[3]) < got.index(order[2]), (got, order)
    for wrong in ([nn.Dense(4, 4)], "blocks", [3]):
        text = refused_alike(world, lambda wrong=wrong: net.blocks[0].set_modules_to_forward_prefetch(wrong), ConfigError)
        assert "set_modules_to_forward_prefetch" in text, text
    net.blocks[0].set_modules_to_forward_prefetch([])
    alike(net, plain, mesh)


@case(2)
def backward_prefetch(world):
    mesh = data_mesh(world)
    plain, net, usual = prefetching(mesh)
    net.blocks[3].set_modules_to_backward_prefetch([net.blocks[2], net.blocks[0]])
    for _ in range(3):
        got, order = (gathers(lambda n=n: alike(n, plain, mesh), "backward") for n in (net, usual))
    assert sorted(got) == sorted(order), (got, order)
    first, second = order[2], order[3]  # blocks 1 and 0 usually
    assert got.index(second) < got.index(first), (got, order)
    text = refused_alike(world, lambda: net.blocks[0].set_modules_to_backward_prefetch([nn.Dense(4, 4)]), ConfigError)
    assert "set_modules_to_backward_prefetch" in text, text


@case(2)
def prefetched_cells_that_do_not_run(world):
    """What is prefetched and not used is given back; what is written meanwhile is seen."""
    mesh = data_mesh(world)
    plain, net = twins(Net, "fully_shard", mesh)
    net.blocks[0].set_modules_to_forward_prefetch([net.blocks[2]])
    for order in ((0, 1, 2), (0, 1), (0,), (0, 1, 2), (1, 2)):
        plain.order = net.order = order
        alike(net, plain, mesh, what=str(order))
        for p in (*plain.get_parameters(), *net.get_parameters()):
            p.set_data(p * 1.1)


class Language(nn.Cell):
    """A model whose users call methods of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Dense(4, 4), nn.Dense(4, 4)

    def construct(self, x):
        return self.head(self.encode(x))

    def encode(self, x, *, scale=1.0):
        """Features of a batch."""
        return mint.tanh(self.inner(x)) * scale

    def generate(self, x):
        for _ in range(3):
            x = self.encode(x) + self.head.weight.sum()
        return x


@case(2)
def a_method_registered_as_forward(world):
    mesh = data_mesh(world)

    @each((("fully_shard", ""), ("fully_shard", "inner"), ("zero1", ""), ("kept", "")))
    def steps(way, cells):
        plain, net = twins(Language, way, mesh, cells)
        md.register_fsdp_forward_method(net, "encode")
        md.register_fsdp_forward_method(net, "generate")
        assert net.encode.__doc__ == "Features of a batch.", net.encode.__doc__
        alike(net, plain, mesh, lambda n: lambda x: (n.encode(x, scale=0.5) ** 2).mean(), "encode")
        alike(net, plain, mesh, lambda n: lambda x: (n.generate(x) ** 2).mean(), "generate")
        alike(net, plain, mesh, what="construct, which calls it")
        equal(net.encode(own_rows(mesh)), plain.encode(Tensor(ROWS)), "plain rows")
    whole = fully_shard(filled(Language()), mesh=mesh)
    text = refused_alike(world, lambda: md.register_fsdp_forward_method(whole, "decode"), ConfigError)
    assert "decode" in text and "register_fsdp_forward_method" in text, text
    net = filled(Language())  # not sharded: nothing changes, as in PyTorch
    md.register_fsdp_forward_method(net, "encode")
    equal(net.encode(Tensor(ROWS)), filled(Language()).encode(Tensor(ROWS)))


@case(2)
def a_list_of_cells_as_one_unit(world):
    """One gather before the first of them, one reduction after the last; each may run in its own place, or not at all."""
    mesh = data_mesh(world)
    plain, net = filled(Net()), filled(Net())
    given = [net.blocks[0], net.blocks[2]]
    assert fully_shard(given, mesh=mesh) is given
    fully_shard(net, mesh=mesh)

    @each((order,) for order in ((0, 1, 2), (2, 1, 0), (0, 2), (1, 0), (1,), (0, 0, 2), (0, 1, 2)))
    def steps(order):
        plain.order = net.order = order
        count = alike(net, plain, mesh)
        assert count["reduce_scatter", "backward"] <= 1 + max(order.count(0), order.count(2), 1), count
    with counted() as count:
        net(rows_of(mesh))
    assert count["all_gather", "forward"] == 2, count
    for wrong in ([], [net, 3], (net.blocks[1], net.blocks[1])):
        refused_alike(world, lambda wrong=wrong: fully_shard(wrong, mesh=mesh), (ConfigError, LayoutError))


@case(2)
def unshard_with_a_handle(world):
    mesh = data_mesh(world)
    plain, net = twins(Net, "fully_shard", mesh)
    x = rows_of(mesh)
    for wait in (True, False):
        with counted() as count:
            handle = net.blocks[1].unshard(async_op=True)
            if wait:
                handle.wait()
                handle.wait()  # a second one does nothing
        assert count["all_gather", "forward"] == 1, count
        with counted() as count:
            got = net(x)
        assert count["all_gather", "forward"] == 3, count  # the other two and the root
        equal(got, plain(Tensor(ROWS)))
        alike(net, plain, mesh)
        net.blocks[1].reshard()
    assert net.blocks[1].unshard() is None and net.blocks[1].unshard(async_op=False) is None
    for n in (plain, net):
        n.blocks[1][0].weight.set_data(n.blocks[1][0].weight * 2)
    alike(net, plain, mesh, what="changed since")
    net.blocks[1].reshard()


@cases(4, {"copies_are_summed_in_the_last_micro_batch_only": (((True, False), (True, False), (True, True)), 2),
           "copies_and_cuts_each_synchronised_in_their_own_time": (
               ((False, False), (True, False), (False, False), (True, True)), 1)})
def micro_batches_over_copies(world, waits, steps: int) -> None:
    """Reduce-scatter within the cut axis, and all-reduce over the copies, each where it is asked for; the last sums all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "cut"))
    plain, net = twins(Net, "fully_shard", mesh)
    x, params = distribute_tensor(Tensor(ROWS), mesh, [Shard(0), Shard(0)], src_data_rank=None), net.trainable_params()
    step = value_and_grad(mean_square(net), None, params)
    want = ms.value_and_grad(mean_square(plain), None, plain.trainable_params())(Tensor(ROWS))[1]
    for _ in range(steps):
        total = None
        for sync, over in waits:
            net.set_requires_gradient_sync(sync)
            net.set_requires_all_reduce(over)
            with counted() as count:
                grads = step(x)[1]
            sums = count["reduce_scatter", "backward"], count["all_reduce", "backward"] > 0
            assert sums == (4 * sync, sync and over), (sync, over, count)
            total = added(total, grads)
        equal_each(total, [w * len(waits) for w in want], params)
    equal_each(step(x)[1], want, params, "nothing is left over")
    text = refused_alike(world, lambda: net.set_requires_all_reduce(1), ConfigError)
    assert "set_requires_all_reduce" in text, text


@case(2)
def replicate_leaves_ignored_modules_alone(world):
    mesh = data_mesh(world)

    @each(({}, {"bucket_mb": 0}, {"zero1": True}))
    def steps(how):
        net, plain = filled(Net()), filled(Net())
        left = net.blocks[1]
        replicate(left, mesh=mesh)
        held = list(left.get_parameters())
        replicate(net, mesh=mesh, ignored_modules=(left,), **how)
        assert all(a is b for a, b in zip(held, left.get_parameters(), strict=True)), "replaced"
        alike(net, plain, mesh)
    net = filled(Net())
    replicate(net, mesh=mesh, ignored_modules=[net.blocks[1]])
    assert not isinstance(net.blocks[1][0].weight, md.DTensor) and isinstance(net.blocks[0][0].weight, md.DTensor)
    text = refused_alike(world, lambda: replicate(filled(Net()), mesh=mesh, ignored_modules=[3]), ConfigError)
    assert "ignored_modules" in text, text


@dataclass
class Batch:
    """What goes in and comes out, with something that is no tensor."""

    x: Tensor
    inner: dict
    name: str = "batch"


class OfBatches(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Dense(4, 4), nn.Dense(4, 4)
        self.s = Parameter(Tensor(np.zeros(4, np.float32)), name="s")

    def construct(self, batch):
        assert batch.name == "batch"
        y = mint.tanh(self.a(batch.x))
        return Batch(y, {"z": [self.b(y) * batch.inner["m"][0] * self.s]})


class Carrying(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = OfBatches(), OfBatches()

    def construct(self, batch):
        got = self.first(batch)
        return self.second(Batch(got.inner["z"][0], {"m": [got.x]}))


@case(2)
def tensors_in_dataclasses(world):
    """Plain ones are rows, as in tuples; those that come out bring the gradient back to their cell."""
    mesh = data_mesh(world)

    def value(out):
        return (out.x ** 2).mean() + other(out)

    def other(out):
        return (out.inner["z"][0] ** 2).mean()

    @each(sampled(itertools.product(WAYS, (value, other), (own_rows, rows_of)), 5))
    def steps(way, of, rows):
        plain, net = twins(Carrying, way, mesh, "first second")

        def loss(n):
            m = ROWS * 0.5 + 1
            return lambda x: of(n(Batch(x, {"m": [Tensor(m) if n is plain else rows(mesh, m)]})))
        for _ in range(2):
            same_step(net, plain, rows(mesh), loss)


@case(2)
def a_log_line_of_each_event(world):
    """At DEBUG one line for each of a unit's events: which unit, which event, how many bytes. Above it none."""
    mesh, net = data_mesh(world), filled(Net())
    sharded()(net, mesh, net.blocks)
    lines: list[str] = []
    logger = logging.getLogger("ms_dtensor")

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())
    handler, level = Keep(), logger.level
    step = value_and_grad(lambda x: (net(x) ** 2).mean(), None, net.trainable_params())
    x = rows_of(mesh)
    step(x)
    logger.addHandler(handler)
    try:
        logger.setLevel(logging.INFO)
        step(x)
        assert not lines, lines
        logger.setLevel(logging.DEBUG)
        step(x)
        step(x)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    weights = 20 * 4  # of a block: [4, 4] and [4], float32
    for event in ("unshard", "reshard", "reduce"):
        of = [line for line in lines if event in line and "blocks.1" in line]
        assert of and all(f"{weights}" in line and "byte" in line for line in of), (event, lines)
    assert any("prefetch" in line for line in lines), lines
    same_on_all_ranks(world, "\n".join(lines))
