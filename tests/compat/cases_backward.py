# SPDX-License-Identifier: Apache-2.0
"""`recorded` and `backward` against `value_and_grad`: to the bit, with the same communication, and refused where it must be."""
from collections import Counter
from collections.abc import Iterator

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import ColwiseParallel, RowwiseParallel, distribute_tensor, grad, parallelize_module, value_and_grad
from ms_dtensor.compat.backward import enable_mindspore_backward_compat
from ms_dtensor.dispatch.operands import local_alias
from ms_dtensor.dispatch.recording import Recording
from ms_dtensor.errors import DTensorError, OpRuleError
from ms_dtensor.internals.names import no_grad, recording
from tests.cases import case
from tests.fuzz.programs import generate, in_float64, lay_out
from tests.fuzz.reference import differentiated, loss_of
from tests.operands import S, filled
from tests.sharding.support import WAYS, Net, data_mesh, rows_of
from tests.support import counted, each, equal, equal_each, mean_square, refusal, same_on_all_ranks
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


def by_blocks(of, loss) -> Iterator[str]:
    """A forward with two backwards, and another forward, in a block that names its leaves; tells after each backward."""
    for x in of:
        x.requires_grad_()
    with md.recorded(of):
        y = loss()
        md.backward(y, retain_graph=True)
        yield "once"
        md.backward(y)
        yield "retained"
        md.backward(loss())
        yield "accumulated"


def by_methods(of, loss) -> Iterator[str]:
    """The same as PyTorch writes it; leaves are found."""
    with enable_mindspore_backward_compat():
        for x in of:  # as PyTorch has it: it gives the tensor, whose gradient is kept from now on
            assert x.requires_grad_() is x
        y = loss()
        y.backward(retain_graph=True)
        yield "once"
        y.backward()
        yield "retained"
        loss().backward()
        yield "accumulated"


def compared(mesh, seed: int, run) -> list[str]:
    """After which backwards gradients were compared; none if the program is refused, or has none that are not zero."""
    program = in_float64(generate(seed))
    wrt, loss = differentiated(program), loss_of(program)
    try:
        want = grad(loss, wrt)(*lay_out(program, mesh)) if wrt else ()
    except Exception:  # refused, or MindSpore has none; a later program would show what it left
        return []
    want = want if isinstance(want, tuple) else (want,)
    if not any(w.full_tensor().asnumpy().any() for w in want):
        return []
    xs = lay_out(program, mesh)
    of = [xs[i] for i in wrt]
    done, have = [], want
    for way in run(of, lambda: loss(*xs)):
        for i, (x, w) in enumerate(zip(of, have, strict=True)):
            if x.grad is None:  # not reached
                assert run is by_methods and not w.full_tensor().asnumpy().any(), (seed, way, i)
                continue
            assert x.grad.layout is w.layout, (seed, way, i)
            assert np.array_equal(local_alias(x.grad).asnumpy(), local_alias(w).asnumpy(), equal_nan=True), (seed, way, i)
        with no_grad():
            have = [h + w for h, w in zip(have, want)]
        done.append(way)
    return done


def so_many_programs_have_the_same_bits(world, run) -> None:
    wanted, done = len(sampled(range(PROGRAMS), 32)), []

    @each(range(2 * wanted))
    def program(seed):
        if len(done) < 3 * wanted:
            with np.errstate(all="ignore"):
                done.extend(compared(data_mesh(world), seed, run))
    assert Counter(done) == dict.fromkeys(("once", "retained", "accumulated"), wanted)


@case(2, timeout=480)
def random_programs_have_the_same_bits(world):
    so_many_programs_have_the_same_bits(world, by_blocks)


@case(2, timeout=480)
def random_programs_by_tensors_methods_have_the_same_bits(world):
    so_many_programs_have_the_same_bits(world, by_methods)
    assert not hasattr(Tensor, "backward")


@case(2, timeout=240)
def a_loop_by_tensors_methods_is_that_of_value_and_grad(world):
    """Three steps, with accumulation, evaluation between them and another model beside; our optimizers and MindSpore's."""
    mesh, ways = data_mesh(world), {**WAYS, "styles": styled}
    makers = {"ours": lambda params: md.optim.AdamW(params, lr=0.05),
              "mint": lambda params: mint.optim.SGD(params, lr=0.05)}  # its AdamW's fused kernel refuses DTensors

    @each((way, kind) for way in sampled(ways, 2)
          for kind in (sampled(makers, 2, way == "styles") if way in ("fully_shard", "styles") else ("ours",)))
    def steps(way, kind):
        nets = [filled(Net()) for _ in range(2)]
        for net in nets:
            ways[way](net, mesh, net.blocks)
        one, two = (makers[kind](list(net.trainable_params())) for net in nets)
        beside = Parameter(Tensor([1.0, 2.0]), name="beside")
        step = value_and_grad(mean_square(nets[0]), None, list(nets[0].trainable_params()))
        losses, rows = [], [rows_of(mesh), rows_of(mesh) * 0.5]
        for _ in range(3):
            some = [step(x) for x in rows]
            one(tuple(a + b for a, b in zip(*(g for _, g in some))))
            losses.append([loss.item() for loss, _ in some])
        with enable_mindspore_backward_compat() as state:
            assert state.on and enable_mindspore_backward_compat() is state
            for wanted in losses:
                for x, want in zip(rows, wanted):
                    loss = mean_square(nets[1])(x)
                    (beside * 3).sum().backward()
                    loss.backward()
                    assert loss.item() == want
                two.step()
                two.zero_grad()
                assert all(p.grad is None for p in nets[1].trainable_params())
                nets[1](rows[0]).sum()  # recorded, and dropped
        assert not state.on and not recording()
        assert beside.grad.asnumpy().tolist() == [18.0, 18.0]
        assert bits(nets[0].trainable_params()) == bits(nets[1].trainable_params())


@case(2, timeout=120)
def what_tensors_methods_refuse(world):
    """And what stays after it: nothing, and a loop that goes on."""
    mesh = data_mesh(world)
    own = Pair(mesh)
    x = distribute_tensor(Tensor(np.random.default_rng(5).normal(size=(2, 4)).astype(np.float32)), mesh, [S(0)])
    ours, theirs = md.optim.SGD([own.w], lr=1.0), mint.optim.SGD([own.w], lr=1.0)
    want = value_and_grad(own, None, [own.w])(x)[1][0]
    x = x * 1  # an input of a gradient stays a leaf
    with enable_mindspore_backward_compat():
        assert own.w.grad is None and own.w.is_leaf and own.w.requires_grad and not x.requires_grad
        for call, words in ((lambda: own(x).backward(create_graph=True), "create_graph"), (ours.step, "no parameter has a gradient"),
                            (theirs.step, "have no '.grad'"), (lambda: (own.w * x).backward(), "begins at one number"),
                            (lambda: x.sum().backward(), "leads to it"), (lambda: own(x).detach().backward(), "leads to it"),
                            (lambda: value_and_grad(own, None, [own.w])(x), "inside of a 'Recording'"),
                            (lambda: own(x).backward(0.5), "'gradient' is a tensor, but got 0.5"),
                            (lambda: setattr(own.w, "grad", own.plain), "A DTensor's gradient is a DTensor"),
                            (lambda: setattr(own.w, "grad", own.w[0]), "in its shape"),
                            (lambda: setattr(own.w, "grad", own.w.astype(ms.int32)), "of floats"),
                            (lambda: setattr(own.plain, "grad", own.w), "a plain tensor's plain"),
                            (lambda: setattr(own.w, "grad", 0), "in its shape")):
            text = same_on_all_ranks(world, refusal(call, DTensorError))
            assert words in text, text
        own.w.grad = own.w
        del own.w.grad
        assert own.w.grad is None and own.plain.grad is None
        own(x).backward()
        assert bits([own.w.grad]) == bits([want]) and own.unused.grad is None and own.plain.grad is None
        before = own.w.full_tensor().asnumpy()
        ours.step()
        equal(own.w, before - want.full_tensor().asnumpy())
        assert ours.step == 1 and ours.state_dict()["w"]["step"] == 1
        ours.zero_grad()
    for name in ("backward", "grad", "detach", "requires_grad", "is_leaf"):
        assert name not in Tensor.__mro__[-2].__dict__
    assert not hasattr(theirs, "zero_grad")


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
    mesh, ways = data_mesh(world), {**WAYS, "styles": styled, "recompute": recomputed}

    @each(sampled(ways, 2, 1))
    def steps(way):
        net = filled(Net())
        ways[way](net, mesh, net.blocks)
        params = list(net.trainable_params())
        step = value_and_grad(mean_square(net), None, params)
        step(rows_of(mesh))
        with counted() as wanted:
            loss, want = step(rows_of(mesh))
        for _ in range(2):
            with counted(wanted), md.recorded(net):
                mine = mean_square(net)(rows_of(mesh))
                md.backward(mine)
            assert mine.item() == loss.item()
            assert bits(taken(net)) == bits(want)
        for _ in range(2):  # accumulated
            with md.recorded(net):
                md.backward(mean_square(net)(rows_of(mesh)))
        assert bits(taken(net)) == bits([g + g for g in want])
        with md.recorded(net):  # two losses of one forward, and of two
            y = net(rows_of(mesh))
            md.backward((y ** 2).mean() + y.sum())
            md.backward(net(rows_of(mesh)).sum())
        both = value_and_grad(lambda x: mean_square(net)(x) + net(x).sum() * 2, None, params)(rows_of(mesh))[1]
        equal_each(taken(net), both, params)
        assert not recording()
        assert bits(step(rows_of(mesh))[1]) == bits(want), "an ordinary step after it"


class Pair(nn.Cell):
    def __init__(self, mesh):
        super().__init__()
        values = np.random.default_rng(3).normal(size=(2, 4)).astype(np.float32)
        self.w = Parameter(distribute_tensor(Tensor(values), mesh, [S(0)]), name="w")
        self.unused = Parameter(distribute_tensor(Tensor(values), mesh, [S(1)]), name="unused")
        self.plain = Parameter(Tensor(values), name="plain")

    def construct(self, x):
        return (mint.tanh(self.w * x) ** 2).sum()


@case(2, timeout=120)
def hooks_inputs_cotangents_and_what_is_not_reached(world):
    mesh = data_mesh(world)
    net, seen = Pair(mesh), []
    x = distribute_tensor(Tensor(np.random.default_rng(4).normal(size=(2, 4)).astype(np.float32)), mesh, [S(1)])
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
    net.w.grad = None
    with md.recorded([net.w]):
        y = net.w * net.w
        md.backward(y, gradient=y.detach().astype(ms.float64))  # as in PyTorch it takes the dtype of what it is of
    equal(net.w.grad, 2 * net.w.full_tensor() ** 3, "a cotangent of another dtype")
    for half in (None, Tensor(0.5), Tensor(0.5, ms.bfloat16)):  # of 16 bits, for which a CPU has no kernel that makes ones
        short = x.astype(ms.bfloat16)
        short.requires_grad_()
        with md.recorded([short]):
            md.backward((short * short).sum(), half)
        equal(short.grad.astype(ms.float32), short.astype(ms.float32) * (2 if half is None else 1), "of 16 bits")
    for twice in ({"inputs": [net.plain, net.plain]}, {}):  # named twice is one leaf
        net.plain.grad = None
        with md.recorded([net.plain, net.plain]):
            md.backward((net.plain ** 2).sum(), gradient=Tensor(0.5), **twice)
        assert np.array_equal(net.plain.grad.asnumpy(), net.plain.asnumpy())


@case(2, timeout=120)
def a_leaf_is_written_under_no_grad_inside_of_a_block(world):
    mesh = data_mesh(world)
    net = Pair(mesh)
    x = distribute_tensor(Tensor(np.random.default_rng(6).normal(size=(2, 4)).astype(np.float32)), mesh, [S(1)])
    wanted = net.w.full_tensor().asnumpy() * 0.5
    with md.recorded(net):
        with counted() as count:
            assert "is a leaf" in refusal(lambda: net.w.mul_(0.5), OpRuleError)
            with no_grad():
                net.w.mul_(0.5)
        md.backward(net(x))
    assert not count and np.array_equal(net.w.full_tensor().asnumpy(), wanted)
    assert bits(taken(net)[:1]) == bits([value_and_grad(net, None, [net.w])(x)[1][0]])


@case(2, timeout=120)
def what_has_no_backward_is_refused_alike(world):
    mesh = data_mesh(world)
    net = filled(Net())
    WAYS["fully_shard"](net, mesh, net.blocks)
    own = Pair(mesh)
    x = distribute_tensor(Tensor(np.random.default_rng(5).normal(size=(2, 4)).astype(np.float32)), mesh, [S(0)])

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
                            (inside(lambda: md.backward(own(x), gradient=Tensor(1j))), "Its gradient is real"),
                            (inside(within), "inside of a 'Recording'"),
                            (inside(inside(lambda: None)), "A block records by itself"),
                            (inside(lambda: Recording.of(own, x)), "It is recorded by itself"),
                            (lambda: md.recorded([x]).__enter__(), "Gradients are kept of parameters")):
            text = same_on_all_ranks(world, refusal(call, DTensorError))
            assert words in text, text
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
