# SPDX-License-Identifier: Apache-2.0
"""`checkpoint_wrapper` in one process: whose gradients a recomputed cell gives, with a mesh and without; and its copies."""
import copy
import gc
import warnings
from contextlib import contextmanager

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore._c_expression import run_backward

import ms_dtensor as md
from ms_dtensor.compat.hyper_parallel import checkpoint_exclude_wrapper
from ms_dtensor.dispatch import patches
from ms_dtensor.dispatch.operands import local_alias
from ms_dtensor.dispatch.patches import recomputed
from ms_dtensor.dispatch.recording import handed_out
from ms_dtensor.errors import ConfigError, OpRuleError
from ms_dtensor.internals.names import executor

ROWS = np.random.default_rng(5).normal(size=(4, 6)).astype(np.float32)


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Dense(6, 5), nn.Dense(5, 3)
        for i, p in enumerate(self.get_parameters()):
            p.set_data(Tensor(np.random.default_rng(i).normal(size=p.shape).astype(np.float32)))

    def construct(self, x):
        return self.down(ops.tanh(self.up(x)))


def gradients(net, params=None):
    grads = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, params or list(net.get_parameters()))(Tensor(ROWS))[1]
    return [(g.full_tensor() if isinstance(g, md.DTensor) else g).asnumpy() for g in grads]


def check(net, plain, rtol=2e-5):
    for g, w in zip(gradients(net), gradients(plain), strict=True):
        assert np.allclose(g, w, rtol, atol=1e-6)
    assert all(w.any() for w in gradients(plain))


def one_rank():
    return md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))


SPREAD = {
    "no mesh": lambda net: net, "replicate": lambda net: md.replicate(net, mesh=one_rank()),
    "fully_shard": lambda net: md.fully_shard(net, mesh=one_rank()),
    "of the cell": lambda net: (md.fully_shard(net.up, mesh=one_rank()), md.fully_shard(net, mesh=one_rank()))[1],
    "zero1": lambda net: md.replicate(net, mesh=one_rank(), zero1=True)}
AGAIN = {"wrapped": lambda net: md.checkpoint_wrapper(net.up), "all": md.checkpoint_wrapper,
         "selective": lambda net: md.checkpoint_wrapper(net.up, save=["matmul"]),
         "mindspore": lambda net: net.up.recompute()}


def pairs(ways):
    """Ways to run again with ways to spread; what is kept of an op needs DTensors."""
    return pytest.mark.parametrize(("again", "spread"), [
        pytest.param(again, spread, id=f"{again}-{spread}") for spread in SPREAD for again in ways
        if (again, spread) != ("selective", "no mesh")])


@pytest.mark.parametrize("first", ["wrapped first", "spread first"])
@pairs(AGAIN)
def test_a_parameter_unfrozen_later_gets_its_gradient(spread, again, first):
    if spread == "no mesh":
        patches.uninstall()  # as at the start of a process
    net, plain = Net(), Net()
    if again == "mindspore":
        md.zeros((1,), one_rank())  # the library's patches are in place
    net.up.weight.requires_grad = net.up.bias.requires_grad = False
    if first == "wrapped first":
        AGAIN[again](net)
        net = SPREAD[spread](net)
    else:
        net = SPREAD[spread](net)
        AGAIN[again](net)
    for frozen in (("up.weight", "up.bias"), ("up.bias",), ()):
        for n in (net, plain):
            for name, p in n.parameters_and_names():
                p.requires_grad = name not in frozen
        for g, w in zip(gradients(net), gradients(plain), strict=True):
            assert np.allclose(g, w, rtol=2e-5, atol=1e-6), frozen
    assert all(w.any() for w in gradients(plain))


def test_a_parameter_put_in_later_gets_its_gradient():
    net, plain = md.checkpoint_wrapper(Net()), Net()
    for n in (net, plain):
        n.up.weight = Parameter(Tensor(np.random.default_rng(9).normal(size=(5, 6)).astype(np.float32)), name="up.weight")
    check(net, plain)


def test_what_is_frozen_between_forward_and_backward_changes_nothing_of_the_rest():
    net, plain = md.checkpoint_wrapper(Net()), Net()
    for n in (net, plain):
        n.down.register_forward_hook(lambda cell, x, y, n=n: setattr(n.up.bias, "requires_grad", False))
    for g, w, p in zip(gradients(net), gradients(plain), plain.get_parameters(), strict=True):
        assert p is plain.up.bias or np.allclose(g, w, rtol=2e-5, atol=1e-6)


@pairs(AGAIN)
def test_a_copy_recomputes_its_own_parameters(spread, again):
    net, plain = SPREAD[spread](Net()), Net()
    AGAIN[again](net)
    check(net, plain)
    twin = copy.deepcopy(net)
    for p, q in zip(twin.get_parameters(), plain.get_parameters(), strict=True):
        p.set_data(p * 2)
        q.set_data(q * 2)
    check(twin, plain)
    check(net, Net())


# -- any way of recording ----------------------------------------------------------------------------------------------
def recorded(function, *args):
    """What a function gives, recorded by hand."""
    executor.set_grad_flag(True)
    try:
        return function(*args)
    finally:
        executor.set_grad_flag(False)


def backward(loss, params):
    grads = run_backward((local_alias(loss),), (ops.ones_like(local_alias(loss)),), False, False, tuple(params), True,
                         accumulate_grad=False)
    return [local_alias(g).asnumpy() for g in handed_out(params, list(grads))]


WAYS = {**AGAIN, "not reentrant": lambda net: net.up.recompute(use_reentrant=False)}


@pairs(WAYS)
def test_recordings_in_flight_and_a_gradient_between_them(spread, again):
    plain, net = Net(), SPREAD[spread](Net())
    WAYS[again](net)
    rows = [Tensor(ROWS * (i + 1)) for i in range(3)]
    made = [recorded(lambda x: (net(x) ** 2).mean(), x) for x in rows]
    check(net, plain)
    for i in (1, 2, 0):
        want = ms.value_and_grad(lambda x: (plain(x) ** 2).mean(), None, plain.trainable_params())(rows[i])[1]
        for g, w in zip(backward(made[i], net.trainable_params()), want, strict=True):
            assert np.allclose(g, w.asnumpy(), rtol=2e-5, atol=1e-6) and g.any()


@pytest.mark.parametrize("again", ["wrapped", "mindspore", "not reentrant"])
def test_every_door_of_gradients(again):
    net, plain = Net(), Net()
    md.checkpoint_wrapper(nn.Dense(1, 1))  # the library's patches are in place
    WAYS[again](net)

    def trained(net):
        cell = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), 0.1))
        cell.set_train()(Tensor(ROWS), Tensor(ROWS[:, :3]))
        return [p.asnumpy() for p in net.get_parameters()]
    doors = {"grad": lambda net: [ms.grad(lambda x: (net(x) ** 2).mean())(Tensor(ROWS)).asnumpy()],
             "by list": lambda net: [g.asnumpy() for g in ops.GradOperation(get_by_list=True)(
                 lambda x: (net(x) ** 2).mean(), net.trainable_params())(Tensor(ROWS))],
             "vjp": lambda net: [ms.vjp(net, Tensor(ROWS))[1](Tensor(ROWS[:, :3]))[0].asnumpy()],
             "twice": lambda net: [ms.grad(lambda x: (ms.grad(lambda x: (net(x) ** 2).mean())(x) ** 2).sum())(
                 Tensor(ROWS)).asnumpy()], "training cell": trained}
    for name, door in doors.items():
        for g, w in zip(door(net), door(plain), strict=True):
            assert np.allclose(g, w, rtol=2e-5, atol=1e-6) and w.any(), name


def test_a_forward_without_a_backward_is_freed_with_its_graph():
    def alive():
        gc.collect()
        return sum(type(x) is recomputed._Forward for x in gc.get_objects())
    net = md.checkpoint_wrapper(nn.SequentialCell(Net().up, nn.Tanh()))
    made = [recorded(net, Tensor(ROWS)) for _ in range(3)]
    assert alive() == 6
    del made[0]
    assert alive() == 4
    backward(made[0], net.trainable_params())
    made.clear()
    assert alive() == 0


# -- what is the same in both runs -------------------------------------------------------------------------------------
class Counted(nn.Cell):
    """Running statistics, a number that is written and read, a buffer that is written, a frozen weight that is not."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Dense(6, 5), nn.BatchNorm1d(5), nn.Dense(5, 3)
        self.count = Parameter(Tensor(1.0), name="count", requires_grad=False)
        self.register_buffer("seen", Tensor(np.ones(3, np.float32)))
        for i, p in enumerate(self.trainable_params()):
            p.set_data(Tensor(np.random.default_rng(i).normal(size=p.shape).astype(np.float32)))
        self.alone, self.function, self.beside = True, False, None
        self.set_train()

    def construct(self, x):
        if self.function:
            def rest(x, depth=1):  # reaches itself
                return rest(x, 0) if depth else self.norm(self.up(x))
            return ms.recompute(lambda x: ops.tanh(self.down(rest(x))), x, use_reentrant=False)
        if self.beside is not None:
            return ops.tanh(self.down(self.beside(self.up(x))))
        if not self.alone:
            return ops.tanh(self.down(self.norm(self.up(x))))
        ops.assign_add(self.count, Tensor(0.5))
        y = self.down(self.norm(self.up(x))) * self.count
        self.seen.copy_(ops.stop_gradient(self.seen * 1.5))
        return ops.tanh(y)


NORM = None


class Beside(nn.Cell):
    """Calls a cell that is none of its own, by a list or as a global."""

    def __init__(self, others):
        super().__init__()
        self.others = others

    def construct(self, x):
        return self.others[0](x) if self.others else NORM(x)


def state(net):
    return {name: (x.full_tensor() if isinstance(x, md.DTensor) else x).asnumpy().copy()
            for _, c in net.cells_and_names() for name, x in (*c._params.items(), *c._buffers.items())
            if name in ("count", "seen", "moving_mean", "moving_variance")}


@pytest.mark.parametrize("spread", ["no mesh", "replicate", "fully_shard", "of the cell", "zero1"])
@pytest.mark.parametrize("again", ["all", "of norm", "mindspore", "of a function", "of a cell beside", "of a global"])
def test_what_a_forward_writes_is_written_once(spread, again, monkeypatch):
    net, plain = Counted(), Counted()
    if spread != "no mesh" or again.startswith("of a "):  # numbers that a cell makes itself are plain
        for n in (net, plain):
            n.alone = False
    net.function = again == "of a function"
    monkeypatch.setitem(globals(), "NORM", net.norm)
    net.beside = {"of a cell beside": Beside([net.norm]), "of a global": Beside([])}.get(again)
    net = SPREAD[spread](net)
    {"all": md.checkpoint_wrapper, "of norm": lambda net: md.checkpoint_wrapper(net.norm),
     "mindspore": lambda net: net.recompute(), "of a function": lambda net: net,
     "of a cell beside": lambda net: md.checkpoint_wrapper(net.beside),
     "of a global": lambda net: md.checkpoint_wrapper(net.beside)}[again](net)
    for train in (True, True, False, True):
        net.set_train(train)
        plain.set_train(train)
        for g, w in zip(gradients(net, net.trainable_params()), gradients(plain, plain.trainable_params()), strict=True):
            assert np.allclose(g, w, rtol=2e-5, atol=1e-6)
        for name, value in state(plain).items():
            assert np.allclose(state(net)[name], value, rtol=1e-6), name
    assert not np.allclose(state(plain)["moving_mean"], 0)


def test_what_is_frozen_between_recording_and_backward():
    net, plain = md.checkpoint_wrapper(Net()), Net()
    made = [recorded(lambda x, n=n: (n(x) ** 2).mean(), Tensor(ROWS)) for n in (net, plain)]
    net.up.weight.requires_grad = plain.up.weight.requires_grad = False
    got, want = (backward(loss, n.trainable_params()) for loss, n in zip(made, (net, plain)))
    assert all(np.array_equal(g, w) and w.any() for g, w in zip(got, want, strict=True))
    assert not net.up.weight.requires_grad


def test_what_is_put_into_an_attribute_is_told_once():
    class Noting(Net):
        def construct(self, x):
            self.features = self.up(x)
            return self.down(self.features)
    net, plain = md.checkpoint_wrapper(Noting()), Noting()
    with pytest.warns(UserWarning, match=r"Noting\.features will be set a second time"):
        check(net, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(net, plain)


def tensors() -> list[Tensor]:
    return [y for y in gc.get_objects() if issubclass(type(y), Tensor)]


def test_what_an_argument_was_moved_from_goes():
    """A move's result remembers it. A first block's input, which waits for the backward, held an embedding of all tokens."""
    values = np.random.default_rng(4).normal(size=(2, 14, 6)).astype(np.float32)
    seen, others = [], tensors()  # not even the shape is asked of those: one may wait for what never comes
    known = set(map(id, others))

    def whole() -> int:
        gc.collect()
        return sum(y.shape == (14, 6) for y in tensors() if id(y) not in known)

    with md.comm.fake_world(2):
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        block = md.checkpoint_wrapper(md.distribute_module(Net(), mesh))

        def loss(x):
            x = x.sum(0).redistribute(placements=[md.Shard(0)])
            out = block(x)
            del x
            seen.append(whole())
            return out.sum()
        md.value_and_grad(loss)(md.DTensor.from_local(Tensor(values), mesh, [md.Partial()]))
    assert seen == [1], "the block's argument, by its whole shape"


def test_a_distributed_argument_that_is_written():
    net = md.checkpoint_wrapper(md.distribute_module(Net(), one_rank()))

    def loss(x):
        x = x * 1.5
        out = net(x)
        x.copy_(x * 3)
        return (out ** 2).mean()
    with pytest.raises(OpRuleError, match="an argument of Net was written to since it ran"):
        md.value_and_grad(loss)(md.distribute_tensor(Tensor(ROWS), one_rank(), [md.Shard(0)]))


def test_a_gradient_inside_is_refused_in_its_own_words():
    class Force(Net):
        def construct(self, x):
            return ms.grad(lambda x: super(Force, self).construct(x).sum())(x)
    for made in (lambda: Force(), lambda: md.replicate(Force(), mesh=one_rank())):
        assert any(g.any() for g in gradients(made()))
        with pytest.raises(OpRuleError, match="a gradient was asked for inside of Force"):
            gradients(md.checkpoint_wrapper(made()))


def test_an_argument_that_is_written():
    class Writing(Net):
        def construct(self, x):
            x[0:1] = x[0:1] * 2
            return super().construct(x)

    def grads(net, after=lambda x: None):
        def loss(x):
            x = x * 1.5
            y = net(x)
            after(x)
            return (y ** 2).mean()
        return [g.asnumpy() for g in ms.value_and_grad(loss, 0, net.trainable_params())(Tensor(ROWS))[1][1]]
    assert all(map(np.array_equal, grads(md.checkpoint_wrapper(Writing())), grads(Writing())))
    with pytest.raises(OpRuleError, match="an argument of Net was written to since it ran"):
        grads(md.checkpoint_wrapper(Net()), lambda x: x.copy_(x * 3))


@pytest.mark.parametrize("kind", ["auto", "inside", "whole"])
def test_mixed_precision_of_the_forward_is_that_of_its_second_run(kind):
    class Mixed(Net):
        def construct(self, x):
            return self.down(ops.tanh(self.up(x)).astype(ms.float32)).astype(ms.float32)
    seen = []
    for again in (False, True):
        net = Mixed()
        if kind == "auto":
            net = ms.amp.auto_mixed_precision(net, "auto", ms.float16)
        else:
            (net if kind == "whole" else net.up).to_float(ms.float16)
        if again:
            md.checkpoint_wrapper(net.up)
        seen.append(gradients(net))
    assert all(map(np.array_equal, *seen))


def test_options_of_the_form_that_is_not_reentrant():
    entered = []

    @contextmanager
    def noted(name):
        entered.append(name)
        yield
        entered.append(f"-{name}")
    net, plain = Net(), Net()
    net.up.recompute(use_reentrant=False, context_fn=lambda: (noted("first"), noted("second")))
    check(net, plain)
    assert entered == ["first", "-first", "second", "-second"]
    net.down.recompute(output_recompute=True)
    with pytest.warns(UserWarning, match="'output_recompute' does nothing"):
        check(net, plain)


def test_functions_run_again():
    class Split(Net):
        def construct(self, x):
            return self.down(ms.recompute(lambda x: ops.tanh(self.up(x)), x, use_reentrant=False))
    check(Split(), Net())
    for laid_out in (md.replicate, md.fully_shard):
        check(laid_out(Split(), mesh=one_rank()), Net())


@pytest.mark.parametrize("spread", ["no mesh", "replicate", "fully_shard", "of the cell", "zero1", "mixed"])
def test_a_gradient_inside_of_a_forward_leaves_what_that_reads(spread):
    """The cell that runs again stands where the forward's own tensors stood, in memory that its backward's end gave back."""
    class Sloped(Net):
        def construct(self, x):
            slope = ms.grad(lambda x: (ops.tanh(self.up(x)) ** 2).sum())(x)
            return self.down(ops.tanh(self.up(x + slope)))
    policy = md.MixedPrecisionPolicy(ms.float64, ms.float64, ms.float32)
    net, plain = md.checkpoint_wrapper(Sloped(), lambda path, cell: path == "up"), Sloped()
    net = md.replicate(net, mesh=one_rank(), mp_policy=policy) if spread == "mixed" else SPREAD[spread](net)
    out, want = net(Tensor(ROWS)), plain(Tensor(ROWS))
    assert np.allclose(out.asnumpy() if spread == "no mesh" else out.full_tensor().asnumpy(), want.asnumpy(), 1e-4, 1e-5)
    check(net, plain, 1e-2)


def test_a_list_of_blocks_is_refused_by_what_it_is():
    with pytest.raises(ConfigError, match="must be a Cell, but got list(.|\n)*pass the CellList of blocks"):
        md.checkpoint_wrapper([nn.Dense(4, 4)])


class CountedDense(nn.Dense):
    """Counts how often it ran."""

    runs = 0

    def construct(self, x):
        self.__dict__["runs"] = self.runs + 1
        return super().construct(x)


class Told(nn.Cell):
    """Three cells in a row and a function between."""

    def __init__(self):
        super().__init__()
        self.up, self.middle, self.down = CountedDense(6, 5), CountedDense(5, 5), CountedDense(5, 3)
        self.acted = 0
        for i, p in enumerate(self.get_parameters()):
            p.set_data(Tensor(np.random.default_rng(i).normal(size=p.shape).astype(np.float32)))

    def act(self, x):
        self.acted += 1
        return ops.tanh(x) * x

    def construct(self, x):
        return self.down(self.middle(self.act(self.up(x))))


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("what", ["function", "cell", "both", "first", "last"])
def test_what_is_excluded_runs_once(spread, what):
    net, plain = Told(), Told()
    chosen = {"function": ["act"], "cell": ["middle"], "both": ["act", "middle"], "first": ["up"], "last": ["down"]}[what]
    for name in chosen:
        if name == "act":
            object.__setattr__(net, "act", checkpoint_exclude_wrapper(net.act))
        else:
            assert checkpoint_exclude_wrapper(getattr(net, name)) is getattr(net, name)
    net = SPREAD[spread](net)
    md.checkpoint_wrapper(net)
    want, got = gradients(plain), gradients(net)
    for g, w in zip(got, want, strict=True):
        assert np.allclose(g, w, rtol=2e-5, atol=1e-6) and w.any()
    runs = {"act": net.acted, **{name: getattr(net, name).runs for name in ("up", "middle", "down")}}
    assert runs == {name: 1 + (name not in chosen) for name in runs}
    assert all(np.array_equal(a, b) for a, b in zip(gradients(net), got)), "again, from nothing that was left"


def test_what_is_excluded_and_random_is_what_it_was():
    net, plain = Told(), Told()
    for one in (net, plain):
        object.__setattr__(one, "act", lambda x: ops.dropout(x, 0.5, True))
    object.__setattr__(net, "act", checkpoint_exclude_wrapper(net.act))
    after = nn.Dropout(p=0.5)
    object.__setattr__(net, "middle", nn.SequentialCell(net.middle, after)), net.set_train()
    object.__setattr__(plain, "middle", nn.SequentialCell(plain.middle, nn.Dropout(p=0.5))), plain.set_train()
    md.checkpoint_wrapper(net)
    results = []
    for one in (net, plain):
        ms.set_seed(3), ms.manual_seed(3)
        results.append(gradients(one, list(one.up.get_parameters()) + list(one.down.get_parameters())))
    assert all(np.allclose(a, b, rtol=2e-5, atol=1e-6) and b.any() for a, b in zip(*results, strict=True))


def test_what_is_excluded_may_not_be_called_more_often_the_second_time():
    net = Told()
    act, seen = checkpoint_exclude_wrapper(lambda x: x * 2), []

    def twice(x):
        seen.append(1)
        return act(act(x)) if len(seen) == 2 else act(x)
    object.__setattr__(net, "act", twice)
    md.checkpoint_wrapper(net)
    with pytest.raises(OpRuleError, match="something else when it ran again"):
        gradients(net)
    executor.clear_res()
