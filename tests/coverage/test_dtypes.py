# SPDX-License-Identifier: Apache-2.0
"""A slice of the matrix of forms and dtypes, and that it finds what it is for; all: `python -m ms_dtensor verify --dtypes`.

bfloat16 DTensors on a CPU mesh: every op runs, in float32, and rounds once; so do gradients.
"""
import mindspore as ms
import mindspore.mint.nn.functional as F
import numpy as np
import pytest
from mindspore import Tensor, mint, ops

import ms_dtensor as md
from ms_dtensor import Replicate, Shard
from ms_dtensor.comm import fake_world
from ms_dtensor.debug.verify import Report
from ms_dtensor.dispatch.dispatcher import clear_cache
from ms_dtensor.ops.local import CPU
from ms_dtensor.ops.rules import RULES, index, names
from ms_dtensor.ops.rules.names import PRIMITIVES
from ms_dtensor.tools.forms import dtypes
from ms_dtensor.tools.forms.dtypes import AGREES, DTYPES, NEITHER, OURS, ask, by_keyword, reason
from ms_dtensor.tools.forms.form import Form
from ms_dtensor.tools.forms.samples import arrays
from tests.coverage.test_forms import FORMS

ADD = Form("mint.add", lambda x: x + x, arrays((4, 3)))
SLICE = [pytest.param(family, f, id=f.name) for family in FORMS
         for f in [f for f in FORMS[family] if f.raises is None][3::80]]


@pytest.mark.parametrize(("family", "form"), SLICE)
def test_no_hole_without_a_reason(family, form):
    for row, (group, each) in dtypes.rows(form).items():
        for dtype in each:
            mark = ask(form, group, dtype, family != "forms_random", Report())
            assert len(mark) == 1 or reason(row, dtype), (row, dtype, mark)
    assert by_keyword(form, set()) == []


def test_the_marks():
    assert [ask(ADD, "float32", dtype, True, Report()) for dtype in ("int8", "float32", "complex64")] == [AGREES] * 3
    only_ours = Form("mint.cumsum", lambda x: mint.cumsum(x, 0), arrays((4, 3)))  # which has no kernel
    assert ask(only_ours, "float32", "float32", True, Report()) == OURS
    nobodys = Form("ops.cholesky", ops.cholesky, lambda rng: (np.eye(3, dtype="f"),))
    assert ask(nobodys, "float32", "int8", True, Report()) == NEITHER


def test_a_dtype_without_a_rule_is_told(monkeypatch):
    monkeypatch.delitem(PRIMITIVES, "TensorMove")  # `x.copy()` of integers, as it was
    copy = Form("x.copy()", lambda x: x.copy(), arrays((4, 3)))
    marks = [ask(copy, "float32", dtype, True, Report()) for dtype in DTYPES]
    assert {d for d, mark in zip(DTYPES, marks) if "no rule" in mark} == {"int32", "int64", "uint32", "uint64"}


def test_a_sum_of_truth_values_is_told(monkeypatch):
    look = Form("ops.gather", lambda x, i: ops.gather(x, i, 0), lambda rng: (rng.random((4, 3), "f"), np.array([1, 3])))
    assert ask(look, "float32", "bool", True, Report()) == AGREES
    monkeypatch.setattr(index, "summand", lambda dtype: md.Partial())  # as it was, and no rank adds them up
    assert "truth values" in ask(look, "float32", "bool", True, Report())


def test_another_dtype_or_number_is_told(monkeypatch):
    monkeypatch.setitem(CPU, "Exp", lambda x: mint.exp(x.astype(ms.float32)))
    exp = Form("mint.exp", mint.exp, arrays((4, 3)))
    assert "result 0 is float32" in ask(exp, "float32", "float64", True, Report())
    monkeypatch.setitem(CPU, "Exp", lambda x: mint.tanh(x))
    assert "value of result 0" in ask(exp, "float32", "float16", True, Report())  # whose plan is not made yet


def test_what_is_wrong_on_shards_only_is_told(monkeypatch):
    rule = RULES["cumsum"]
    pointwise = RULES["exp"]
    monkeypatch.setitem(RULES, "cumsum", lambda call: (pointwise if "int" in call.operands[0].dtype else rule)(call))
    cumsum = Form("ops.cumsum", lambda x: ops.cumsum(x, 0), arrays((4, 3)))
    assert ask(cumsum, "float32", "float64", True, Report()) == AGREES
    assert "cumsum [[4, 3]] (i64[4@" in ask(cumsum, "float32", "int64", True, Report())


def test_a_keyword_that_no_rule_knows_is_told(monkeypatch):
    power = Form("x.pow", lambda x: x.pow(2), arrays((4, 3)))
    assert by_keyword(power, set()) == []
    clear_cache()
    monkeypatch.delitem(names.ALIASES, "exponent")
    assert "PowTensorScalar(x, exponent)" in by_keyword(power, set())[0]


def test_keywords_in_another_order_reach_what_writes():
    with fake_world(1):
        mesh = md.init_device_mesh("cpu", (1,))
        x, y, index = (md.distribute_tensor(Tensor(v), mesh, None) for v in (
            np.ones((2, 3), "f"), np.full((2, 3), 2.0, "f"), np.array([[0, 1, 0]])))
        x.add_(alpha=3, other=y)
        assert np.array_equal(x.to_local().asnumpy(), np.full((2, 3), 7.0, "f"))
        x.scatter_(src=y, index=index, dim=0)
        assert x.to_local().asnumpy().tolist() == [[2, 7, 2], [7, 2, 7]]


VALUES = np.random.default_rng(0).normal(size=(4, 3)).astype("f")
VALUES[0, 0], VALUES[1, 1], VALUES[2, 2] = np.inf, -np.inf, 0.0


@pytest.mark.parametrize("call", (
    lambda x: x.sub(y=x * 2), lambda x: x.pow(exponent=2), lambda x: x.remainder(divisor=1.5), lambda x: x.isclose(x2=x + 0),
    lambda x: (x > 0).logical_or(other=x < 0), lambda x: (x > 0).logical_and(y=x < 1),
    lambda x: x.where(condition=x > 0, y=-x),
    lambda x: x.matmul(tensor2=ops.ones_like(x).T), lambda x: ops.threshold(x, 0.1, 5.0), lambda x: x.isposinf(),
    ops.isneginf, lambda x: ops.count_nonzero(x, 1), lambda x: x[:, Tensor(np.array([0, 2], "int8"))]))
def test_calls_that_were_refused(call):
    with fake_world(2):
        mesh = md.init_device_mesh("cpu", (2,))
        out = call(md.distribute_tensor(Tensor(VALUES), mesh, [Shard(0)]))
        assert out.placements == (Shard(0),)
        with np.errstate(invalid="ignore"):
            assert np.allclose(out.to_local().asnumpy(), call(Tensor(VALUES)).asnumpy()[:2], equal_nan=True)


def test_a_reason_that_explains_nothing_is_told():
    others = "".join(dtypes.HOLES.keys() - {"a", *dtypes.BY_CHANCE})
    assert dtypes.unused({"mint.add": AGREES * 15, "x.any()": others}) == {"a"}


def test_a_batched_product_takes_its_factors_by_keyword():
    a = arrays((2, 3, 4), (2, 3, 5), (2, 5, 4))
    assert by_keyword(Form("x.baddbmm", lambda x, y, z: x.baddbmm(y, z), a), set()) == []


ULP = 2.0**-8
RNG = np.random.default_rng(0)
X, Y, W, T = (RNG.normal(size=s).astype(np.float32) for s in ((4, 6), (4, 6), (5, 6), (7, 6)))
IDS = Tensor(np.array([1, 5, 1, 0], np.int32))

OPS = {
    "matmul": lambda x, y, w, t: mint.matmul(x, mint.transpose(w, 0, 1)),
    "linear": lambda x, y, w, t: F.linear(x, w),
    "sum": lambda x, y, w, t: x.sum(-1),
    "mean": lambda x, y, w, t: mint.mean(x, 0, keepdim=True),
    "max": lambda x, y, w, t: mint.amax(x, 1),
    "exp": lambda x, y, w, t: mint.exp(x),
    "softmax": lambda x, y, w, t: mint.softmax(x, -1),
    "log_softmax": lambda x, y, w, t: F.log_softmax(x, -1),
    "silu": lambda x, y, w, t: F.silu(x),
    "gelu": lambda x, y, w, t: F.gelu(x),
    "where": lambda x, y, w, t: mint.where(x > y, x, y),
    "compare": lambda x, y, w, t: (x >= y).astype(ms.float32),
    "mul scalar": lambda x, y, w, t: x * 1.5,
    "masked_fill": lambda x, y, w, t: x.masked_fill(y > 0, -1.0),
    "layer_norm": lambda x, y, w, t: F.layer_norm(x, (6,)),
    "rms_norm": lambda x, y, w, t: ops.rms_norm(x, t[0])[0],
    "rsqrt": lambda x, y, w, t: mint.rsqrt(mint.abs(x)),
    "gather": lambda x, y, w, t: ops.gather(t, IDS_ON(x), 0),
    "embedding": lambda x, y, w, t: F.embedding(IDS_ON(x), t),
    "slice": lambda x, y, w, t: x[1:3, :4],
    "cat": lambda x, y, w, t: mint.cat([x, y], 1),
    "stack": lambda x, y, w, t: mint.stack([x, y]),
    "reshape": lambda x, y, w, t: x.reshape(2, 12),
    "expand": lambda x, y, w, t: mint.broadcast_to(x[None], (3, 4, 6)),
    "tril": lambda x, y, w, t: mint.tril(x),
    "clone": lambda x, y, w, t: x.clone(),
    "einsum": lambda x, y, w, t: mint.einsum("ij,kj->ik", x, w),
}


def IDS_ON(x):  # noqa: N802
    """The index list beside x: plain, or replicated on its mesh."""
    return IDS if type(x) is Tensor else md.distribute_tensor(IDS, x.device_mesh, [Replicate()])


@pytest.mark.parametrize("name", OPS)
def test_rounds_once(name):
    fn = OPS[name]
    rounded = [Tensor(v).astype(ms.bfloat16).astype(ms.float32).asnumpy() for v in (X, Y, W, T)]
    with fake_world(1):
        mesh = md.init_device_mesh("cpu", (1,))

        def placed(dtype):
            return [md.distribute_tensor(Tensor(v).astype(dtype), mesh, [Shard(0)]) for v in rounded]
        seed = None

        def run(dtype):
            nonlocal seed
            out = fn(*placed(dtype))
            if seed is None:
                seed = np.random.default_rng(1).normal(size=out.shape).astype(np.float32)
            weight = md.distribute_tensor(Tensor(seed), mesh, [Replicate()])
            _, grads = md.value_and_grad(lambda *xs: (fn(*xs).float() * weight).sum(), (0, 1, 2, 3))(*placed(dtype))
            return out, [g.to_local().astype(ms.float32).asnumpy() for g in grads]
        (low, low_grads), (high, high_grads) = run(ms.bfloat16), run(ms.float32)
        assert low.dtype == (ms.float32 if name == "compare" else ms.bfloat16)
        wanted = high.to_local().astype(ms.bfloat16).astype(ms.float32).asnumpy()
        assert np.allclose(low.to_local().astype(ms.float32).asnumpy(), wanted, rtol=ULP, atol=1e-6)
        for got, exact in zip(low_grads, high_grads):
            assert np.allclose(got, exact, rtol=4 * ULP, atol=4 * ULP * max(1.0, float(np.abs(exact).max())))
