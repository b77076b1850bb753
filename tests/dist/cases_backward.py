# SPDX-License-Identifier: Apache-2.0
"""`recorded` and `backward` against `value_and_grad`: to the bit, with the same communication, and refused where it must be."""
from __future__ import annotations

import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import ColwiseParallel, RowwiseParallel, Shard, distribute_tensor, grad, parallelize_module, value_and_grad
from ms_dtensor.dispatch.recording import Recording
from ms_dtensor.errors import DTensorError, OpRuleError
from ms_dtensor.internals.names import recording
from tests.cases import case
from tests.dist.support import counted, equal, refusal, same_on_all_ranks
from tests.fuzz.programs import generate, in_float64, lay_out
from tests.fuzz.reference import differentiated, loss_of
from tests.sharding.support import WAYS, Net, collected, data_mesh, filled, none_of, rows_of
from tests.tiers import sampled

PROGRAMS = 200


def bits(gradients) -> list[bytes]:
    return [(g.to_local() if isinstance(g, md.DTensor) else g).asnumpy().tobytes() for g in gradients]


def taken(net) -> list:
    """The gradients that are kept, which are let go."""
    out = [p.grad for p in net.trainable_params()]
    for p in net.trainable_params():
        p.grad = None
    return out


def one_program(mesh, seed: int) -> bool:
    """Whether the program has a gradient; one backward, and two of a forward that is kept."""
    program = in_float64(generate(seed))
    wrt, loss = differentiated(program), loss_of(program)
    if not wrt:
        return False
    try:
        want = grad(loss, wrt)(*lay_out(program, mesh))
    except Exception:  # refused, or MindSpore has none; a later program would show what it left
        return False
    want = want if isinstance(want, tuple) else (want,)
    with np.errstate(all="ignore"):
        for times in (1, 2):
            xs = lay_out(program, mesh)
            of = [xs[i] for i in wrt]
            for x in of:
                x.requires_grad_()
            with md.recorded(of):
                y = loss(*xs)
                for left in range(times - 1, -1, -1):
                    md.backward(y, retain_graph=left > 0)
            wanted = want if times == 1 else [w + w for w in want]
            assert [x.grad.layout for x in of] == [w.layout for w in wanted]
            for i, (x, w) in enumerate(zip(of, wanted)):
                assert np.array_equal(x.grad.to_local().asnumpy(), w.to_local().asnumpy(), equal_nan=True), (seed, times, i)
    return True


@case(2, timeout=240)
def random_programs_have_the_same_bits(world):
    faults: list[str] = []
    ran = []
    for seed in sampled(range(PROGRAMS), 8):
        collected(faults, f"program {seed}", lambda seed=seed: ran.append(one_program(data_mesh(world), seed)))
    none_of(faults)
    assert sum(ran) > len(ran) // 2


def styled(net, mesh, cells=()):
    parallelize_module(net, mesh, {"blocks.0.0": ColwiseParallel(use_local_output=False),
                                   "blocks.1.0": RowwiseParallel(use_local_output=False)})
    md.distribute_module(net, mesh)


def recomputed(net, mesh, cells=()):
    for cell in net.blocks:
        md.checkpoint_wrapper(cell)
    return WAYS["fully_shard"](net, mesh, cells)


@case(2, timeout=240)
def ways_of_data_and_tensor_parallelism_have_the_same_bits_and_communication(world):
    mesh, faults = data_mesh(world), []
    for way, wrap in {**WAYS, "styles": styled, "recompute": recomputed}.items():
        def steps(wrap=wrap):
            net = filled(Net())
            wrap(net, mesh, net.blocks)
            params = list(net.trainable_params())
            step = value_and_grad(lambda x: (net(x) ** 2).mean(), None, params)
            step(rows_of(mesh))
            with counted() as wanted:
                loss, want = step(rows_of(mesh))
            for _ in range(2):
                with counted() as count, md.recorded(net):
                    mine = (net(rows_of(mesh)) ** 2).mean()
                    md.backward(mine)
                assert count == wanted and mine.item() == loss.item()
                assert bits(taken(net)) == bits(want)
            for _ in range(2):  # accumulated
                with md.recorded(net):
                    md.backward((net(rows_of(mesh)) ** 2).mean())
            assert bits(taken(net)) == bits([g + g for g in want])
            with md.recorded(net):  # two losses of one forward, and of two
                y = net(rows_of(mesh))
                md.backward((y ** 2).mean() + y.sum())
                md.backward(net(rows_of(mesh)).sum())
            both = value_and_grad(lambda x: (net(x) ** 2).mean() + net(x).sum() * 2, None, params)(rows_of(mesh))[1]
            for p, g, w in zip(params, taken(net), both):
                equal(g, w, p.name, 2e-5)
            assert not recording()
            assert bits(step(rows_of(mesh))[1]) == bits(want), "an ordinary step after it"
        collected(faults, way, steps)
    none_of(faults)


class Pair(nn.Cell):
    def __init__(self, mesh):
        super().__init__()
        values = np.random.default_rng(3).normal(size=(2, 4)).astype(np.float32)
        self.w = Parameter(distribute_tensor(Tensor(values), mesh, [Shard(0)]), name="w")
        self.unused = Parameter(distribute_tensor(Tensor(values), mesh, [Shard(1)]), name="unused")
        self.plain = Parameter(Tensor(values), name="plain")

    def construct(self, x):
        return (mint.tanh(self.w * x) ** 2).sum()


@case(2, timeout=120)
def hooks_inputs_cotangents_and_what_is_not_reached(world):
    mesh = data_mesh(world)
    net, seen = Pair(mesh), []
    x = distribute_tensor(Tensor(np.random.default_rng(4).normal(size=(2, 4)).astype(np.float32)), mesh, [Shard(1)])
    want = value_and_grad(net, None, [net.w])(x)[1][0]
    handle = net.w.register_hook(lambda g: seen.append(g.full_tensor().asnumpy()))
    with md.recorded(net):
        md.backward(net(x))
    handle.remove()
    assert len(seen) == 1 and np.array_equal(seen[0], want.full_tensor().asnumpy())
    assert bits([net.w.grad]) == bits([want]) and not net.unused.grad.full_tensor().asnumpy().any()
    assert not net.plain.grad.asnumpy().any() and not isinstance(net.plain.grad, md.DTensor)
    taken(net)
    x.requires_grad_()
    with md.recorded(net):
        y = mint.tanh(net.w * x)
        md.backward(y, gradient=y.detach() if hasattr(y, "detach") else ops.stop_gradient(y), inputs=[x])
    assert net.w.grad is None
    equal(x.grad, grad(lambda t: (mint.tanh(net.w * t) ** 2).sum() / 2)(x), "a cotangent of its own")
    with md.recorded([net.plain]):
        md.backward((net.plain ** 2).sum(), gradient=Tensor(0.5))
    assert np.array_equal(net.plain.grad.asnumpy(), net.plain.asnumpy())


@case(2, timeout=120)
def what_has_no_backward_is_refused_alike(world):
    mesh = data_mesh(world)
    net = filled(Net())
    WAYS["fully_shard"](net, mesh, net.blocks)
    own = Pair(mesh)
    x = distribute_tensor(Tensor(np.ones((2, 4), np.float32)), mesh, [Shard(0)])

    def inside(call, of=own):
        def run():
            with md.recorded(of):
                call()
        return run

    def twice():
        loss = own(x)
        md.backward(loss)
        md.backward(loss)

    def shared():
        y = mint.tanh(own.w * x)
        md.backward(y.sum())
        md.backward((y ** 2).sum())

    def kept():
        md.backward((net(rows_of(mesh)) ** 2).mean(), retain_graph=True)

    def within():
        value_and_grad(own, None, [own.w])(x)

    late = []
    inside(lambda: late.append(own(x)))()
    with counted() as count:
        for call, words in ((lambda: md.backward(own(x)), "it goes when the block ends"),
                            (lambda: md.backward(late[0]), "it goes when the block ends"),
                            (inside(twice), "went with its first backward"),
                            (inside(shared), "another loss's backward"),
                            (inside(lambda: md.backward(x.sum())), "leads to it"),
                            (inside(lambda: md.backward(own.w * x)), "begins at one number"),
                            (inside(lambda: md.backward(own(x), inputs=[x])), "Gradients are kept of parameters"),
                            (inside(lambda: md.backward(own.w * x, gradient=Tensor(np.ones((2, 3), np.float32)))), "shape"),
                            (inside(lambda: md.backward(own.w * x, gradient=Tensor(np.ones((2, 4), np.float32)))), "does not"),
                            (inside(within), "inside of a 'Recording'"),
                            (inside(inside(lambda: None)), "A block records by itself"),
                            (inside(lambda: Recording.of(own, x)), "It is recorded by itself"),
                            (lambda: md.recorded([x]).__enter__(), "Gradients are kept of parameters")):
            text = refusal(call, DTensorError)
            assert words in text, text
            same_on_all_ranks(world, text)
            assert not recording()
    assert {op for op, _ in count} <= {"all_gather_object", "all_reduce"}, count
    text = refusal(inside(kept, net), OpRuleError)
    assert "reduce a gradient once" in text, text
    try:
        inside(lambda: 1 / 0)()
    except ZeroDivisionError:
        pass
    assert not recording()
    want = value_and_grad(own, None, [own.w])(x)[1][0]
    taken(own)
    inside(lambda: md.backward(own(x)))()
    assert bits([own.w.grad]) == bits([want]), "after all that was refused"
