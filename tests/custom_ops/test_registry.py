# SPDX-License-Identifier: Apache-2.0
"""Registered rules in one process: the notation, what fits a call, and verification at registration."""
import sys

import numpy as np
import pytest
from mindspore import Tensor, bfloat16, mint, ops

import ms_dtensor as md
from ms_dtensor import DFunction, Partial, Replicate, Shard, init_device_mesh, ones, register_rule, unregister_rule
from ms_dtensor.custom_ops.register import parse_cases, signature
from ms_dtensor.errors import ConfigError, OpRuleError
from ms_dtensor.ops.rules import RULES, Call, Case, Operand, OpSpec
from ms_dtensor.ops.rules.names import PRIMITIVES

A, B = np.random.default_rng(0).normal(size=(4, 6)).astype("f"), np.random.default_rng(1).normal(size=(4,)).astype("f")


def call(*shapes):
    operands = tuple(Operand(i, s, "float32") for i, s in enumerate(shapes))
    return Call("own", dict(enumerate(operands)), operands)


def test_notation():
    assert parse_cases(" S(0), R->S(-1)\n\n# nothing\nP(max) -> P(max), R # two") == (
        Case((Shard(0), Replicate()), (Shard(-1),)), Case((Partial("max"),), (Partial("max"), Replicate())))
    assert repr(parse_cases("P, R -> P")[0]) == "P(sum), R -> P(sum)"


@pytest.mark.parametrize("text", ["S(0)", "S -> R", "S(x) -> R", "R -> R -> R", "Q -> R", "P(median) -> R", " , R -> R"])
def test_text_that_is_no_notation(text):
    with pytest.raises((ConfigError, ValueError)):
        register_rule("own", text)
    assert "own" not in RULES


@pytest.mark.parametrize("cases", ["", [], ["S(0) -> S(0)"], "R -> R\nR -> R, R"])
def test_no_cases(cases):
    with pytest.raises(ConfigError):
        register_rule("own", cases)


def test_what_fits_a_call():
    with register_rule("own", "S(0), S(0) -> S(0)\nS(-1), R -> S(-1)\nS(2), R -> S(2)\nR -> R"):
        spec = RULES["own"](call((4, 6), (4,)))
        assert [repr(c) for c in spec.cases] == ["S(0), S(0) -> S(0)", "S(1), R -> S(-1)"]
        assert all(c.even for c in spec.cases) and spec.shapes == (None,)
        assert not RULES["own"](call((4, 6), (1,))).cases[0].ins[0].is_shard(0)  # a dim that broadcasts is not split
        with pytest.raises(OpRuleError, match="3 tensors came"):
            RULES["own"](call((4,), (4,), (4,)))
    with register_rule("own", "S(0), S(0) -> S(0)\nS(1), R -> S(1)", shapes="m n, m -> m n"):
        spec = RULES["own"](call((4, 6), (4,)))
        assert spec.shapes == ((4, 6),) and not any(c.even for c in spec.cases)
    with register_rule("own", "S(0), S(0) -> S(0)", shapes=lambda c: ((c.operands[0].shape[0] + c.operands[1].shape[0],),)):
        assert RULES["own"](call((4,), (4,))).cases[0].even  # extents differ, so uneven chunks would not fit together


def test_signature():
    assert signature("m k, k n -> m n, n")(call((2, 3), (3, 4))) == ((2, 4), (4,))
    assert signature("n -> n 2")(call((5,))) == ((5, 2),)
    with pytest.raises(OpRuleError, match="'k' is 3"):
        signature("m k, k n -> m n")(call((2, 3), (4, 4)))
    with pytest.raises(OpRuleError, match="do not have the shapes"):
        signature("m k, k n -> m n")(call((2, 3), (4,)))
    for text in ("m k", "m -> n"):
        with pytest.raises(ConfigError):
            signature(text)


def test_names_are_taken_once_and_given_back():
    for taken in ("matmul", "AddExt"):
        with pytest.raises(ConfigError, match="has a rule already"):
            register_rule(taken, "R, R -> R")
    before = PRIMITIVES["Abs"], RULES["abs"]
    with register_rule("Abs", "R -> R", override=True):
        assert PRIMITIVES["Abs"] == ("Abs", ("*inputs",))
    assert (PRIMITIVES["Abs"], RULES["abs"]) == before and "Abs" not in RULES
    rule = register_rule("own", "R -> R")
    assert repr(rule) == "Registration('own')"
    unregister_rule("own")
    rule.unregister()
    assert "own" not in RULES and "own" not in PRIMITIVES and "ended" in repr(rule)
    with pytest.raises(ConfigError, match="no rule was registered"):
        unregister_rule("own")
    with pytest.raises(ConfigError, match="'op' must be a name"):
        register_rule(ops.abs, "R -> R")


@pytest.mark.parametrize("shapes", [None, "m n, m -> m n"])
def test_a_right_rule_is_verified(shapes):
    with register_rule("own", "S(0), S(0) -> S(0)\nS(1), R -> S(1)\nP, R -> P\nR, P -> P", shapes=shapes) as rule:
        scale = rule(lambda x, f: x * f.reshape((-1, 1)))
        report = rule.check(scale, A, B)
        assert report and report.compared > 30


@pytest.mark.parametrize("wrong", ["S(0), R -> S(0)", "S(1), R -> P", "P, P -> P", "S(0), S(0) -> S(1)",
                                   "P(max), R -> P(max)"])
def test_a_wrong_rule_is_found_and_not_left_behind(wrong):
    rule = register_rule("own", wrong)
    scale = rule(lambda x, f: x * f.reshape((-1, 1)))
    with pytest.raises(OpRuleError, match="is wrong"):
        rule.check(scale, A, B)
    rule.unregister()

    class Own(DFunction):
        _op_name = "own"
        forward = staticmethod(lambda ctx, x, f: x * f.reshape((-1, 1)))
        backward = staticmethod(lambda ctx, grad: (grad, None))
    with pytest.raises(OpRuleError):
        register_rule("own", wrong, verify=(Own, A, B))
    assert "own" not in RULES


def test_a_wrong_gradient_in_a_case_is_found():
    """Right values, but the backward of a sharded sum forgets nothing only if its face is right: checked both ways."""
    class Mean(DFunction):
        _op_name = "own"

        @staticmethod
        def forward(ctx, x):
            ctx.n = x.shape[0]
            return x.sum(0) / ctx.n

        @staticmethod
        def backward(ctx, grad):
            return ops.broadcast_to(grad / ctx.n, (ctx.n, *grad.shape))
    with pytest.raises(OpRuleError, match="is wrong"):
        register_rule("own", "S(0) -> P", verify=(Mean, A))
    register_rule("own", "S(1) -> S(0)", verify=(Mean, A)).unregister()


def test_a_primitive_is_verified_through_its_public_function():
    with register_rule("MatMulExt", "S(0), R -> S(0)\nR, S(1) -> S(1)\nS(1), S(0) -> P", shapes="m k, k n -> m n",
                       params="input other", override=True) as rule:
        assert rule.check(mint.matmul, A, np.ones((6, 2), "f"))
        with pytest.raises(OpRuleError, match="does not reach"):
            rule.check(mint.add, A, A)


def test_a_function_is_a_rule():
    def rule(call):
        x = call.args["x"]
        assert call.get("power", 1) == 2
        return OpSpec((x.shape,), tuple(Case((Shard(d),), (Shard(d),)) for d in range(x.ndim)))
    with register_rule("own", rule) as registration:
        own = registration(lambda x, power=1: x ** power)
        assert registration.check(own, A, power=2)


def _python_calls(fn) -> int:
    """Python functions entered by one call of `fn`, its plan cached."""
    for _ in range(3):
        fn()
    seen = []
    sys.setprofile(lambda frame, event, arg: seen.append(frame.f_code) if event == "call" else None)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return len(seen)


def test_a_users_op_takes_the_path_of_a_built_in_one():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    x = md.distribute_tensor(Tensor(A), mesh, [Shard(0), Shard(1)])
    cases = "S(0) -> S(0)\nS(1) -> S(1)"

    class Own(DFunction):
        _op_name = "own"
        forward = staticmethod(lambda ctx, x: mint.abs(x))
    built_in = _python_calls(lambda: mint.abs(x))
    with register_rule("Abs", cases, shapes="m n -> m n", override=True):
        assert _python_calls(lambda: mint.abs(x)) == built_in
    with register_rule("own", cases, shapes="m n -> m n") as rule:
        own = rule(lambda x: mint.abs(x))
        assert _python_calls(lambda: own(x)) <= built_in + 6  # the function itself, and what makes its operand plain
        assert _python_calls(lambda: Own.apply(x)) <= built_in + 14  # and a context


def test_a_users_function_is_given_bfloat16_as_it_is():
    mesh, seen = init_device_mesh("cpu", (1,)), []

    def fn(x):
        seen.append(x.dtype)
        return x * 2
    with register_rule("own", "S(0) -> S(0)", shapes="n -> n") as rule:
        rule(fn)(ones(4, device_mesh=mesh, dtype=bfloat16))
    assert seen and set(seen) == {bfloat16}


@pytest.mark.parametrize("shapes", [None, "m n -> m n"])
def test_a_primitive_with_a_users_rule_computes_bfloat16_in_float32(shapes):
    x = md.distribute_tensor(Tensor(A).astype(bfloat16), init_device_mesh("cpu", (1,)), [Shard(0)])
    with register_rule("Exp", "S(0) -> S(0)", shapes=shapes, override=True):  # no such kernel on CPU
        got = mint.exp(x)
    assert got.dtype == bfloat16
    np.testing.assert_allclose(got.to_local().float().asnumpy(), np.exp(A), rtol=2e-2)
