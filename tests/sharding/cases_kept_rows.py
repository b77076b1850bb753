# SPDX-License-Identifier: Apache-2.0
"""On a device the backward gathers the row that the forward has packed, unless a shard was written since.

All are compared, bit for bit, with what a unit gives that packs for each gathering by itself; and without writes with one
device. What is written between a unit's forward and its backward is what that backward reads.
"""
from __future__ import annotations

import contextlib
import gc
import weakref
from unittest import mock

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor.comm.packing import write
from ms_dtensor.dispatch.operands import local_alias
from ms_dtensor.dispatch.recording import Recording
from ms_dtensor.internals.names import NoFallbackGuard, no_grad
from ms_dtensor.parallel.sharding.block import Block
from ms_dtensor.parallel.sharding.call import units_of
from tests.cases import case
from tests.operands import Built, filled, weight
from tests.rehearsal.session import rehearsed
from tests.sharding.support import data_mesh, rows_of
from tests.support import counted, each, mean_square
from tests.tiers import sampled

POLICY = md.MixedPrecisionPolicy(ms.bfloat16, ms.float32)
X = np.random.default_rng(11).normal(size=(8, 4)).astype(np.float32)


class Product(md.DFunction):
    """`x * w`, which saves the weight itself: the backward reads what lies there then."""

    in_placements = ([md.Shard(0)], [md.Replicate()])
    out_placements = [md.Shard(0)]

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, mint.sum((grad * x).float(), 0).astype(w.dtype)  # a CPU adds up no bfloat16


def scaled() -> nn.Cell:
    return Built(lambda c, x: mint.tanh(Product.apply(x, c.w)) * c.scale, w=weight(4), scale=weight(4))


class Between(nn.Cell):
    """Blocks in the order that `order` says; calls `between` with the first when that and the second one have run."""

    def __init__(self, order=(0, 1, 2)) -> None:
        super().__init__()
        self.order, self.between = order, None
        self.blocks = nn.CellList([scaled() for _ in range(3)])
        self.scale = Parameter(Tensor(np.zeros(4, np.float32)), name="scale")

    def construct(self, x):
        x = x * self.scale
        for n, i in enumerate(self.order):
            x = self.blocks[i](x)
            if n == 1 and self.between is not None:
                self.between(self.blocks[0])
        return x


def sharded(mesh, order=(0, 1, 2), policy=POLICY, **how) -> Between:
    net = filled(Between(order))
    for block in net.blocks:
        md.fully_shard(block, mesh=mesh, mp_policy=policy, **how)
    return md.fully_shard(net, mesh=mesh, mp_policy=policy, **how)


def step_of(net, mesh, x=X):
    """Value, gradients, and how often a row was packed, forward and backward."""
    packed, row = [], Block.row
    with mock.patch.object(Block, "row", autospec=True, side_effect=lambda *a: (packed.append(a[0].of), row(*a))[1]), \
            counted() as count:
        value, (dx, grads) = md.value_and_grad(mean_square(net), 0, net.trainable_params())(rows_of(mesh, x))
    assert count["all_gather", "forward"] and count["reduce_scatter", "backward"], count
    return [value, dx, *grads], len(packed), count["all_gather", "forward"] + count["all_gather", "backward"]


@contextlib.contextmanager
def packing_anew():
    with mock.patch.object(Block, "stale", lambda self: True):
        yield


def uncounted():
    """As where MindSpore does not count what an optimizer's kernel writes."""
    writes = Block._writes
    return mock.patch.object(Block, "_writes", lambda self: [counts[:2] for counts in writes(self)])


def same(got, want, what: str) -> None:
    """Bit for bit."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        a, b = (x.full_tensor().asnumpy() for x in (a, b))
        assert np.array_equal(a, b), f"{what}: {i}: {np.abs(a - b).max()}"


def kept(net) -> list[Block]:
    """Whose row stays, but for what is on its way."""
    return [block for unit in units_of(net) for block in unit.blocks if block._left is not None and block._work is None]


@case(2, timeout=60)
def a_step_packs_each_unit_once(world):
    """Those of float32 twice, as that is one kernel; the outermost one is not gathered again."""
    with rehearsed(clock=False):
        mesh = data_mesh(world, "npu")
        for policy, packs, rtol in ((POLICY, 4, 0.05), (None, 7, 1e-5)):
            net, plain = sharded(mesh, policy=policy), filled(Between())
            want, (dx, grads) = ms.value_and_grad(mean_square(plain), 0, plain.trainable_params())(Tensor(X))
            for step in range(2):
                got, packed, gathered = step_of(net, mesh)
                assert (packed, gathered) == (packs, 7), (policy, step, packed, gathered)
                for i, (g, w) in enumerate(zip(got, [want, dx, *grads], strict=True)):
                    scale = max(np.abs(w.asnumpy()).max(), 1e-6)
                    assert np.abs(g.full_tensor().asnumpy() - w.asnumpy()).max() <= rtol * scale, (policy, i)
                assert not kept(net), "a row that the backward has gathered is kept"


@case(2, timeout=60)
def a_forward_alone_keeps_nothing(world):
    """Evaluation, and a recording, whose backward may come after writes that nobody sees; kept ones need no row."""
    with rehearsed(clock=False):
        mesh = data_mesh(world, "npu")
        net = sharded(mesh)
        net.between = lambda block: seen.append(len(kept(net)))
        seen: list[int] = []
        net(rows_of(mesh, X))
        assert seen == [0] and not kept(net), "evaluation"
        recording = Recording.of(net, rows_of(mesh, X))
        assert seen == [0, 0] and not kept(net), "a recording"
        recording.drop()
        step_of(net, mesh)
        assert seen[2:] == [2], "a gradient"
        for kind in ({"reshard_after_forward": False}, {"reshard_after_forward": 1}):
            other, seen = sharded(mesh, **kind), []
            other.between = lambda block, other=other, seen=seen: seen.append(len(kept(other)))
            step_of(other, mesh)
            assert seen == [0] and not kept(other), kind


WRITES = {
    "set_data": lambda p: p.set_data(ops.stop_gradient(p) * 3 + 1),
    "assign_value": lambda p: p.assign_value(ops.stop_gradient(p) * 3 + 1),
    "assign": lambda p: ops.assign(p, ops.stop_gradient(p) * 3 + 1),
    "setitem": lambda p: p.__setitem__(slice(None), ops.stop_gradient(p) * 3 + 1),
    "a local tensor": lambda p: of_a_local_tensor(p),
}
OPTIMIZERS = {**{name: getattr(md.optim, name) for name in ("AdamW", "SGD", "Adafactor", "Muon")},
              "nn.Momentum": lambda params, lr: nn.Momentum(params, lr, 0.9), "nn.AdamWeightDecay": nn.AdamWeightDecay}


def of_a_local_tensor(p) -> None:
    with no_grad(), NoFallbackGuard():
        write(local_alias(p), local_alias(p) * 3 + 1)


def by_optimizer(make):
    def step(block) -> None:
        with no_grad():
            params = block.trainable_params()
            ones = (Tensor(np.ones(p.local_shape, np.float32)) for p in params)
            make(params, 0.5)(tuple(md.DTensor.from_local(x, p.device_mesh, p.placements) for p, x in zip(params, ones)))
    return step


def by_each(how):
    def step(block) -> None:
        with no_grad():
            for p in block.trainable_params():
                how(p)
    return step


@case(2, timeout=120)
def written_between_forward_and_backward(world):
    """The input's gradient, and the next step, are as if nothing had been kept; and others than without the write."""
    with rehearsed(clock=False):
        mesh = data_mesh(world, "npu")
        untouched = step_of(sharded(mesh), mesh)[0][1].full_tensor().asnumpy()
        writes = {**{name: by_each(how) for name, how in WRITES.items()},
                  **{name: by_optimizer(make) for name, make in OPTIMIZERS.items()}}

        @each(sampled(writes, 3, 1))  # a write, a local tensor's, two optimizers
        def check(name):
            found = []
            for anew in (contextlib.nullcontext, packing_anew):
                with anew(), uncounted() if name in OPTIMIZERS else contextlib.nullcontext():
                    net = sharded(mesh)
                    net.between = writes[name]
                    one, packed, _ = step_of(net, mesh)
                    net.between = None
                    found.append([*one, *step_of(net, mesh)[0], *net.trainable_params()])
                assert packed == (5 if anew is contextlib.nullcontext else 7), packed
            same(*found, "as if packed anew")
            assert not np.array_equal(found[0][1].full_tensor().asnumpy(), untouched), "the backward has read what was"


@case(2, timeout=60)
def forwards_in_flight(world):
    """Recordings, with a write between; a cell that runs twice; micro-batches, with an optimizer's step after them."""
    with rehearsed(clock=False):
        mesh = data_mesh(world, "npu")

        def recordings(net):
            runs = [Recording.of(net, rows_of(mesh, X * k)) for k in (1, 2)]
            by_optimizer(md.optim.SGD)(net.blocks[0])
            out = []
            for run in reversed(runs):
                (dx,), grads = run.backward(rows_of(mesh, X).astype(ms.bfloat16), net.trainable_params())
                out += [dx, *grads]
            return out

        def twice(net):
            return step_of(net, mesh)[0]

        def micro_batches(net):
            params, out, optimizer = net.trainable_params(), [], md.optim.AdamW(net.trainable_params(), 0.1)
            for _ in range(2):
                net.set_requires_gradient_sync(False)
                first = step_of_parts(net, mesh, X)
                net.set_requires_gradient_sync(True)
                total = [a + b for a, b in zip(first, step_of_parts(net, mesh, 2 * X))]
                optimizer(total)
                out += [*total, *params]
            return out
        for what, order in ((recordings, (0, 1, 2)), (twice, (0, 1, 0, 1)), (micro_batches, (0, 1, 2))):
            got = what(sharded(mesh, order))
            with packing_anew():
                want = what(sharded(mesh, order))
            same(got, want, what.__name__)


def step_of_parts(net, mesh, x) -> list:
    return list(md.value_and_grad(mean_square(net), None, net.trainable_params())(rows_of(mesh, x))[1])


@case(2, timeout=60)
def a_row_goes_with_what_it_was_for(world):
    """A forward that raises, ranks that leave a step, `reshard`, the next forward; the memory is given back, too."""
    with rehearsed(clock=False):
        mesh = data_mesh(world, "npu")
        net = sharded(mesh)

        def at(then):
            def between(block) -> None:
                seen.append(weakref.ref(kept(net)[0]._left[1]))
                then()
            net.between = between
            with contextlib.suppress(RuntimeError):
                step_of(net, mesh)

        def fail():
            raise RuntimeError("a forward that ends")
        seen: list[weakref.ref] = []
        for then in (fail, lambda: (units_of(net)[1].reshard(forced=True), fail()),
                     lambda: ([unit.give_up() for unit in units_of(net)], fail())):
            at(then)
            gc.collect()
            assert not kept(net) and all(ref() is None for ref in seen), then
        net.between = None
        same(step_of(net, mesh)[0], step_of(sharded(mesh), mesh)[0], "the next step")
        for block in (block for unit in units_of(net) for block in unit.blocks):
            block._left = (block.group, Tensor(np.zeros(3, np.float32)))
        net(rows_of(mesh, X))
        assert not kept(net), "a forward begins"


@case(2)
def rows_that_no_backward_asks_for(world):
    """A frozen teacher's, of which the loss is detached: they end with the gradient."""
    with rehearsed(clock=False):
        mesh = data_mesh(world, "npu")
        net, teacher = sharded(mesh), sharded(mesh)
        loss, wanted = mean_square(net), net.trainable_params()
        for p in teacher.trainable_params():
            p.requires_grad = False
        md.value_and_grad(lambda x: loss(x + ops.stop_gradient(teacher(x)).float() * 0), None, wanted)(rows_of(mesh, X))
        assert not kept(teacher) and not kept(net)


@case(2)
def a_parameter_that_was_frozen_first(world):
    """It can be cut while it is frozen; trained later, its gradient is that of one that was never frozen."""
    with rehearsed(clock=False):
        mesh = data_mesh(world, "npu")
        net, never = filled(Between()), sharded(mesh)
        for p in (net.blocks[0].w, net.blocks[1].scale):
            p.requires_grad = False
        for cell in (*net.blocks, net):
            md.fully_shard(cell, mesh=mesh, mp_policy=POLICY)
        frozen, _, _ = step_of(net, mesh)
        want, _, _ = step_of(never, mesh)
        trained = {p.name for p in net.trainable_params()}
        left = [g for p, g in zip(never.trainable_params(), want[2:], strict=True) if p.name in trained]
        same(frozen, [*want[:2], *left], "frozen")
        for p in net.get_parameters():
            p.requires_grad = True
        same(step_of(net, mesh)[0], want, "trained since")
