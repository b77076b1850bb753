# SPDX-License-Identifier: Apache-2.0
"""SGD, Adafactor, Muon and EMA against float64 NumPy written from the papers, on the host's and the device's branch.

Plain tensors on one process. Layouts are tested where ranks are: `optim/cases_optimizers.py`.
"""
import math
from contextlib import nullcontext

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from model_zoo.llama.config import OptimConfig
from model_zoo.llama.trainer import schedule
from ms_dtensor import distribute_module, init_device_mesh, optim
from ms_dtensor.errors import ConfigError, LayoutError
from ms_dtensor.internals.target import rehearsal
from ms_dtensor.optim import EMA, SGD, Adafactor, AdamW, Muon, clip_grad_norm_, cosine, linear, step_if_finite, wsd

SHAPES = ((3, 5), (7,), (300, 200), (2, 4, 3), ())
STEPS, CLOSE = 4, 2e-6  # float32 of values near 1


def sgd(w, grads, lr, mu=0.0, decay=0.0, nesterov=False):
    buffer = 0.0
    for g in grads:
        g = g + decay * w
        buffer = mu * buffer + g
        w = w - lr * (g + mu * buffer if nesterov else buffer)
    return w


def rms(x):
    return math.sqrt((x * x).mean())


def adafactor(w, grads, lr=1e-2, decay=0.0, eps=(1e-30, 1e-3), d=1.0):
    """Algorithms 4 and 5, with sums of rows and columns, and of relative steps."""
    r = c = v = 0.0
    for t, g in enumerate(grads, 1):
        beta, square = 1 - t ** -0.8, g * g + eps[0]
        if w.ndim < 2:
            v = beta * v + (1 - beta) * square
        else:
            r = beta * r + (1 - beta) * square.sum(-1, keepdims=True)
            c = beta * c + (1 - beta) * square.sum(-2, keepdims=True)
            v = r * c / r.sum(-2, keepdims=True)
        update = g / np.sqrt(v)
        alpha = max(eps[1], rms(w)) * min(lr, 1 / math.sqrt(t))
        w = w * (1 - lr * decay) - alpha * update / max(1.0, rms(update) / d)
    return w


def orthogonalized(x):
    a, b, c = 3.4445, -4.775, 2.0315
    tall, x = x.shape[0] > x.shape[1], x / np.linalg.norm(x)
    x = x.T if tall else x
    for _ in range(5):
        x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
    return x.T if tall else x


def muon(w, grads, lr, decay=0.1, mu=0.95, nesterov=True, scale=None):
    m, n = w.shape
    factor = 0.2 * math.sqrt(max(m, n)) if scale == "match_rms_adamw" else math.sqrt(max(1.0, m / n))
    mean = 0.0
    for g in grads:
        mean = mu * mean + (1 - mu) * g
        w = w * (1 - lr * decay) - lr * factor * orthogonalized((1 - mu) * g + mu * mean if nesterov else mean)
    return w


def drawn(shapes=SHAPES, steps=STEPS, seed=0):
    """Values and, per step, gradients."""
    rng = np.random.default_rng(seed)
    return [[rng.standard_normal(s).astype(np.float32) for s in shapes] for _ in range(steps + 1)]


def stepped(build, dtype="float32", **options):
    start, *steps = drawn(**options)
    kind = getattr(ms, dtype)
    params = [Parameter(Tensor(v).astype(kind), name=f"p{i}") for i, v in enumerate(start)]
    optimizer = build(params)
    for grads in steps:
        optimizer([Tensor(g).astype(kind) for g in grads])
    return [p.astype(ms.float32).asnumpy() for p in params], optimizer


def check(build, reference, shapes=SHAPES, close=CLOSE):
    got, _ = stepped(build, shapes=shapes)
    start, *steps = (list(map(np.float64, a)) for a in drawn(shapes))
    for i, value in enumerate(got):
        want = reference(start[i], [g[i] for g in steps])
        off = np.abs(value - want).max()
        assert value.shape == want.shape and np.allclose(value, want, rtol=close, atol=close), (i, off)
        assert np.abs(value - start[i]).max() > 10 * close, i


@pytest.fixture(params=["host", "device"])
def branch(request):
    with nullcontext() if request.param == "host" else rehearsal("GPU"):
        yield request.param


MATRICES = ((3, 5), (60, 40), (8, 8))
OURS = {"mu": "momentum", "decay": "weight_decay", "scale": "adjust_lr_fn"}  # the papers' words


@pytest.mark.parametrize(("kind", "options"), [
    *((SGD, {"lr": 0.1} | more) for more in ({}, {"mu": 0.9}, {"mu": 0.9, "decay": 0.1}, {"mu": 0.8, "nesterov": True})),
    *((Adafactor, more) for more in ({}, {"lr": 0.5, "decay": 0.1}, {"d": 0.5, "eps": (1e-3, 0.1)})),
    *((Muon, {"lr": 0.1} | more) for more in ({}, {"nesterov": False, "decay": 0.0}, {"scale": "original"},
                                              {"scale": "match_rms_adamw", "mu": 0.8}))],
    ids=lambda x: str(x) if isinstance(x, dict) else x.__name__)
def test_steps_equal_numpy(branch, kind, options):
    reference, shapes, close = {SGD: (sgd, SHAPES, CLOSE), Adafactor: (adafactor, SHAPES, CLOSE),
                                Muon: (muon, MATRICES, 2e-5)}[kind]
    check(lambda ps: kind(ps, **{OURS.get(k, k): v for k, v in options.items()}),
          lambda w, g: reference(w, g, **options), shapes, close)


def test_adafactor_keeps_rows_and_columns_and_survives_a_row_without_gradient(branch):
    param = Parameter(Tensor(np.ones((50, 40), np.float32)), name="w")
    optimizer = Adafactor([param])
    grad = np.ones((50, 40), np.float32)
    grad[3], grad[:, 5] = 0, 0
    optimizer([Tensor(grad)])
    state = optimizer.state_dict()
    assert sum(math.prod(state["w"][kind].shape) for kind in ("rows", "columns", "mean")) == 91
    value = param.asnumpy()
    assert np.isfinite(value).all() and (value[3] == 1).all() and (value[4, 4] < 1)


def test_muon_leaves_the_others_to_adamw(branch):
    schedule, shapes = cosine(STEPS), ((3, 5), (7,), (2, 2, 3), (4, 6))
    got, _ = stepped(lambda ps: Muon([{"params": ps[:3]}, {"params": ps[3:], "use_muon": False, "lr": 0.05}], 0.1,
                                     adamw={"lr": 0.01, "weight_decay": 0.3}, schedule=schedule), shapes=shapes)
    start, *steps = drawn(shapes)
    params = [ms.Parameter(ms.Tensor(v), name=f"p{i}") for i, v in enumerate(start)]
    others, last = AdamW(params[1:3], 0.01, weight_decay=0.3), AdamW(params[3:], 0.05, weight_decay=0.3)
    for step, grads in enumerate(steps):
        others.lr, last.lr = 0.01 * schedule(step), 0.05 * schedule(step)
        others([ms.Tensor(g) for g in grads[1:3]])
        last([ms.Tensor(g) for g in grads[3:]])
    for i in (1, 2, 3):
        assert np.allclose(got[i], params[i].asnumpy(), rtol=1e-6, atol=1e-6), i
    assert np.abs(got[0] - start[0]).max() > 1e-2


OPTIMIZERS = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adafactor": {}, "Muon": {"lr": 0.1}, "AdamW": {"lr": 0.1}}


def build_of(name):
    return lambda ps: getattr(optim, name)(ps, **OPTIMIZERS[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_parameters_of_other_dtypes(name, dtype, branch):
    build, shapes = build_of(name), ((6, 5), (60, 40), (0, 4))
    got, optimizer = stepped(build, dtype, shapes=shapes)
    want, _ = stepped(build, shapes=shapes)
    for g, w in zip(got, want, strict=True):
        assert np.allclose(g, w, atol={"float64": 1e-5, "float16": 5e-3, "bfloat16": 5e-2}[dtype])
    masters = {name for name, state in optimizer.state_dict().items() if "master" in state}
    assert not masters if dtype == "float64" else masters >= {"p0", "p1"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_saved_and_loaded(name):
    build, shapes = build_of(name), ((6, 5), (7,))
    start, *steps = drawn(shapes, 6)

    def run(params, optimizer, steps):
        for grads in steps:
            optimizer([Tensor(g) for g in grads])
        return params
    new = lambda values: [Parameter(Tensor(v), name=f"p{i}") for i, v in enumerate(values)]  # noqa: E731
    params = new(start)
    optimizer = build(params)
    run(params, optimizer, steps[:3])
    saved = {name: {kind: x if kind == "step" else x.copy() for kind, x in state.items()}
             for name, state in optimizer.state_dict().items()}
    values = [p.asnumpy().copy() for p in params]
    want = run(params, optimizer, steps[3:])
    params = new(values)
    optimizer = build(params)
    optimizer.load_state_dict(saved)
    for g, w in zip(run(params, optimizer, steps[3:]), want, strict=True):
        assert np.array_equal(g.asnumpy(), w.asnumpy())
    for wrong in (((6, 4), (7,)), ((6, 5), (7,), (2, 2))):
        with pytest.raises(LayoutError, match="of other parameters"):
            build(new(drawn(wrong)[0])).load_state_dict(saved)
    with pytest.raises(LayoutError, match=r"steps \[3, 4\]"):
        optimizer.load_state_dict({**saved, "p0": {**saved["p0"], "step": 4}})
    with pytest.raises(ValueError, match="several parameters are called"):
        build([Parameter(Tensor(v), name="p") for v in start]).state_dict()


def test_groups_options_and_schedules():
    params = [Parameter(Tensor(np.ones(2, np.float32)), name=n) for n in "abc"]
    optimizer = SGD([{"params": params[:1]}, {"params": params[1:2], "lr": 0.5},
                     {"params": params[2:], "weight_decay": 1.0}], lr=0.1, schedule=linear(2))
    grads = [Tensor(np.ones(2, np.float32))] * 3
    optimizer(grads)
    assert [round(float(p[0]), 4) for p in params] == [0.9, 0.5, 0.8]
    optimizer.lr = 0.2
    optimizer(grads)
    assert [round(float(p[0]), 4) for p in params] == [0.8, 0.25, 0.62]
    optimizer(grads)
    assert [round(float(p[0]), 4) for p in params] == [0.8, 0.25, 0.62], "the schedule has ended at 0"


@pytest.mark.parametrize(("build", "text"), [
    (lambda o, p: o.SGD([]), "is empty"),
    (lambda o, p: o.SGD([p, p]), "twice"),
    (lambda o, p: o.SGD([{"params": [p]}, p]), "mixes"),
    (lambda o, p: o.SGD([{"lr": 0.1}]), "no 'params'"),
    (lambda o, p: o.SGD([{"params": [p], "wieght_decay": 0.1}]), "Is 'weight_decay' meant"),
    (lambda o, p: o.SGD([p], lr=-1.0), "'lr' = -1.0 is out of range"),
    (lambda o, p: o.SGD([{"params": [p], "momentum": 1.0}]), "and below 1"),
    (lambda o, p: o.SGD([p], nesterov=True), "needs a 'momentum'"),
    (lambda o, p: o.Adafactor([p], d=0.0), "greater than 0"),
    (lambda o, p: o.AdamW([p, p]), "twice"),
    (lambda o, p: o.AdamW([{"params": [p], "betas": (0.9, 1.0)}]), r"betas\[1\]' = 1.0 is out of range"),
    (lambda o, p: o.Muon([p], adjust_lr_fn="most"), "none of 'original'"),
    (lambda o, p: o.Muon([{"params": [p], "use_muon": False, "momentum": 0.5}]), "the option 'momentum'"),
    (lambda o, p: o.EMA([p], 1.0), "out of range"),
    (lambda o, p: o.cosine(3, warmup=4), "no room"),
    (lambda o, p: o.SGD([p])([]), "1 parameters but 0 gradients"),
    (lambda o, p: o.EMA([p, p]), "twice"),
    (lambda o, p: o.SGD([p * 1]), "not a Parameter"),
    (lambda o, p: o.AdamW([p], lr=math.nan), "'lr' = nan is out of range"),
    (lambda o, p: o.AdamW([p], lr="x"), "'lr' = 'x' is no number"),
    (lambda o, p: o.Muon([p], ns_steps=0), "'ns_steps' = 0 is out of range"),
    (lambda o, p: o.Adafactor([p], beta2_decay=1.0), "'beta2_decay' = 1.0 is out of range"),
    (lambda o, p: o.Adafactor([p], eps=(1e-30, -1e-3)), r"eps\[1\]' = -0.001 is out of range"),
    (lambda o, p: o.cosine(5)(-1), "steps count from 0"),
    (lambda o, p: o.clip_grad_norm_([p], 1.0, 0.0), "'norm_type' = 0.0 is out of range"),
    (lambda o, p: o.clip_grad_norm_([p], 1.0, math.nan), "'norm_type' = nan is out of range"),
])
def test_refusals(build, text):
    with pytest.raises(ValueError, match=text):
        build(optim, Parameter(Tensor(np.ones((2, 2), np.float32)), name="w"))


@pytest.mark.parametrize("dtype", ["complex64", "int32", "bool_"])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor", "Muon", "EMA"])
def test_what_no_step_can_move_is_refused(name, dtype):
    with pytest.raises(ConfigError, match="the parameter 'w' is not of real numbers"):
        getattr(optim, name)([Parameter(Tensor(np.ones((2, 2), getattr(np, dtype))), name="w")])


def test_adafactor_says_nothing_of_an_empty_matrix(branch):
    params = [Parameter(Tensor(np.ones(shape, np.float32)), name=f"w{shape}") for shape in ((3, 0), (0, 3), (2, 2))]
    with np.errstate(all="raise"):
        Adafactor(params)([Tensor(np.ones(p.shape, np.float32)) for p in params])
    assert (params[2].asnumpy() < 1).all()


@pytest.mark.parametrize("at", [0, -1])
def test_the_extreme_norms(at, branch):
    values = [np.float32([[3, -0.5], [-7, 2]]), np.float32([0.25, 4])]
    for p, want in ((math.inf, 7.0), (-math.inf, 0.25)):
        assert float(clip_grad_norm_(map(Tensor, values), math.inf, p)) == want
        assert float(clip_grad_norm_([Tensor(np.zeros((0, 3), np.float32)), *map(Tensor, values)], math.inf, p)) == want
        for which in (0, 1):
            spoiled = [v.copy() for v in values]
            spoiled[which].reshape(-1)[at] = math.nan
            for q in (p, 2.0, 3.0):
                assert math.isnan(float(clip_grad_norm_(map(Tensor, spoiled), math.inf, q))), (p, q, which)


def test_the_norm_of_large_gradients_is_finite():
    grads = [Tensor(np.full((40, 1000), 1e30, np.float32)), Tensor(np.float32([2.0]))]
    assert clip_grad_norm_(grads, 1.0) == pytest.approx(2e32)
    assert np.allclose(grads[0].asnumpy(), 5e-3)


def test_parameters_from_before_the_model_was_distributed_are_refused():
    net = nn.Dense(2, 2)
    optimizer, ema = SGD(net.trainable_params()), EMA(net.trainable_params())
    distribute_module(net, init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
    grads = [ms.ops.ones_like(p) for p in optimizer.params]
    for use in (lambda: optimizer(grads), ema.update, lambda: ema.swapped().__enter__()):
        with pytest.raises(ConfigError, match="after the model was distributed"):
            use()
    assert optimizer.step == 0


def test_schedules():
    for factor in (cosine(10, warmup=3, low=0.2), linear(10, warmup=3, low=0.2), wsd(10, warmup=3, decay=4, low=0.2)):
        factors = [factor(step) for step in range(12)]
        assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1.0]) and factors[3] == 1.0
        assert all(a >= b for a, b in zip(factors[3:], factors[4:])) and factors[10] == factors[11] == pytest.approx(0.2)
    assert wsd(10, warmup=3, decay=4)(6) == 1.0 and wsd(10, decay=0)(9) == 1.0
    assert cosine(8)(4) == pytest.approx(0.5) and cosine(8)(2) == pytest.approx(0.5 + math.sqrt(0.125))
    assert linear(3, warmup=3)(2) == 1.0


def test_the_recipes_schedule_warms_up_and_decays():
    rates = [schedule(OptimConfig(warmup=4, min_lr_ratio=0.1), 20)(step) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
    assert all(a > b for a, b in zip(rates[4:], rates[5:])) and 0.1 < rates[-1] < 0.12
    assert {schedule(OptimConfig(warmup=0, schedule="constant"), 20)(step) for step in range(25)} == {1.0}
    assert [schedule(OptimConfig(warmup=4), 2)(step) for step in range(2)] == [0.25, 0.5], "ends while it warms up"


def test_schedules_fit_mindspores_optimizers():
    schedule, params = wsd(4, decay=2, warmup=1), [Parameter(Tensor(np.ones(3, np.float32)), name=n) for n in "ab"]
    theirs, ours = nn.SGD(params[:1], [0.1 * schedule(s) for s in range(4)]), SGD(params[1:], 0.1, schedule=schedule)
    for _ in range(4):
        theirs((Tensor(np.ones(3, np.float32)),))
        ours((Tensor(np.ones(3, np.float32)),))
    assert np.allclose(params[0].asnumpy(), params[1].asnumpy()) and not np.allclose(params[0].asnumpy(), 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_mean_is_swapped_in_and_out(branch, dtype):
    (start, *steps), kind = drawn(((4, 5), (70000,), (), (0, 3))), getattr(ms, dtype)
    params = [Parameter(Tensor(v).astype(kind), name=f"p{i}") for i, v in enumerate(start)]
    ema, want = EMA(params, 0.75), [p.astype(ms.float32).asnumpy().astype(np.float64) for p in params]
    for values in steps:
        for i, value in enumerate(values):
            params[i].set_data(Tensor(value).astype(kind))
            want[i] = 0.75 * want[i] + 0.25 * params[i].astype(ms.float32).asnumpy()
        ema.update()
    before = [p.astype(ms.float32).asnumpy() for p in params]
    with pytest.raises(KeyError), ema.swapped():
        for p, w in zip(params, want, strict=True):
            assert np.allclose((p * 1).astype(ms.float32).asnumpy(), w, atol=1e-6 if dtype == "float32" else 1e-2)
        for refused in (ema.update, lambda: ema.swapped().__enter__()):
            with pytest.raises(RuntimeError, match="leave 'swapped' first"):
                refused()
        raise KeyError
    assert all(np.array_equal(p.astype(ms.float32).asnumpy(), b) for p, b in zip(params, before, strict=True))
    other = EMA(params)
    other.load_state_dict(ema.state_dict())
    with other.swapped():
        assert np.allclose(params[0].astype(ms.float32).asnumpy(), want[0], atol=1e-6 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_is_left_out(bad):
    for build in (lambda ps: SGD(ps, 0.1, momentum=0.9), lambda ps: nn.SGD(ps, 0.1, momentum=0.9)):
        params = [Parameter(Tensor(np.ones(3, np.float32)), name=n) for n in "ab"]
        optimizer = build(params)
        norm = step_if_finite(optimizer, [Tensor(np.ones(3, np.float32)), Tensor(np.array([1, bad, 0], np.float32))], 1.0)
        assert not math.isfinite(norm) and all((p.asnumpy() == 1).all() for p in params)
        norm = step_if_finite(optimizer, [Tensor(np.full(3, 2.0, np.float32))] * 2, math.sqrt(6))
        assert norm == pytest.approx(math.sqrt(24)) and all(np.allclose(p.asnumpy(), 0.9) for p in params)
