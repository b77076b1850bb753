# SPDX-License-Identifier: Apache-2.0
"""debug.checks: a wrong rule or gradient is found before it is used, a right one costs one check and changes nothing.

And the verifier's question whether all ranks get the same kind of thing.
"""
import os

import numpy as np
import pytest
from mindspore import Tensor, mint

from ms_dtensor import DFunction, Shard, distribute_tensor, init_device_mesh, register_rule, value_and_grad
from ms_dtensor.custom_ops import checks as made_checks
from ms_dtensor.debug import checks
from ms_dtensor.debug.verify.alike import check_alike
from ms_dtensor.dispatch import modes
from ms_dtensor.errors import ConfigError, OpRuleError
from ms_dtensor.ops.local import run
from ms_dtensor.ops.rules import RULES
from tests.msrun import python

A = np.random.default_rng(0).normal(size=(4, 6)).astype("f")
RIGHT, WRONG = "S(0), S(0) -> S(0)\nS(1), R -> S(1)", "S(0), R -> S(0)"


@pytest.fixture
def x():
    return distribute_tensor(Tensor(A), init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), [Shard(0)])


class Rows(DFunction):
    """x * f per row."""

    _op_name = "rows"

    @staticmethod
    def forward(ctx, x, f):
        ctx.save_for_backward(x, f)
        return x * f.reshape((-1, 1))

    @staticmethod
    def backward(ctx, grad):
        x, f = ctx.saved_tensors
        return grad * f.reshape((-1, 1)), (grad * x).sum(1)


class BadRows(Rows):
    backward = staticmethod(lambda ctx, grad: (grad, (grad * ctx.saved_tensors[0]).sum(1)))


def factors(x):
    return distribute_tensor(Tensor(A[:, 0].copy()), x.device_mesh, [Shard(0)])


def test_a_decorated_function_is_verified_at_once():
    with checks(), register_rule("own", RIGHT, shapes="m n, m -> m n") as rule:
        assert rule(lambda x, f: x * f.reshape((-1, 1)))
    with checks(), register_rule("own", WRONG, shapes="m n, m -> m n") as rule:
        with pytest.raises(OpRuleError, match="is wrong"):
            rule(lambda x, f: x * f.reshape((-1, 1)))
    with register_rule("own", WRONG, shapes="m n, m -> m n") as rule:
        assert rule(lambda x, f: x * f.reshape((-1, 1)))  # off: trusted
    assert "own" not in RULES


def test_a_dfunctions_rule_is_verified_before_its_first_call(x):
    with checks(), register_rule("rows", WRONG):
        with pytest.raises(OpRuleError, match="is wrong"):
            Rows.apply(x, factors(x))
        with pytest.raises(OpRuleError, match="is wrong"):  # and again, as nothing was proven
            value_and_grad(lambda t: Rows.apply(t, factors(x)).sum(), 0)(x)
    with checks(), register_rule("rows", RIGHT):
        value, grad = value_and_grad(lambda t: Rows.apply(t, factors(x)).sum(), 0)(x)
        np.testing.assert_allclose(grad.full_tensor().asnumpy(), np.broadcast_to(A[:, :1], A.shape), rtol=1e-6)
        before = len(made_checks._done)
        Rows.apply(x, factors(x))
        assert len(made_checks._done) == before


def test_a_primitives_rule_needs_something_to_verify_it_with():
    with checks(), pytest.raises(ConfigError, match="nothing was given to verify"):
        register_rule("Abs", "S(0) -> S(0)", override=True)
    with checks():
        register_rule("Abs", "S(0) -> S(0)\nS(1) -> S(1)", override=True, verify=(mint.abs, A)).unregister()


def test_gradients_on_request(x):
    with register_rule("rows", RIGHT):
        with checks(gradients=True):
            value_and_grad(lambda t: Rows.apply(t, factors(x)).sum(), 0)(x)
            Rows.apply(Tensor(A), Tensor(A[:, 0].copy()))
            for call in (lambda: BadRows.apply(x, factors(x)),
                         lambda: value_and_grad(lambda t: BadRows.apply(t, Tensor(A[:, 0].copy())).sum(), 0)(Tensor(A))):
                with pytest.raises(OpRuleError, match="gradient of tensor 0 is wrong"):
                    call()
        with checks():  # rules only
            BadRows.apply(Tensor(A), Tensor(A[:, 0].copy()))
    assert modes.mode.get() is modes.DEFAULT and not made_checks.running


def test_integers_become_legal_indices(x):
    class Lookup(DFunction):
        in_placements, out_placements = ([Shard(0)], None), [Shard(0)]
        forward = staticmethod(lambda ctx, t, ids: t[:, ids] * 2)

        @staticmethod
        def backward(ctx, grad):
            raise AssertionError
    ids = Tensor(np.array([3, 5]))
    with checks():
        assert Lookup.apply(x, ids).shape == (4, 2)


def test_the_environment_turns_it_on():
    out = python("-c", "from ms_dtensor import modes; print(modes.mode.get().check_rules)",
                 env={**os.environ, "MS_DTENSOR_DEBUG": "1"})
    assert out.stdout.strip().endswith("True")


X = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))

FRESH = """
import mindspore as ms, numpy as np
from mindspore import mint
ms.runtime.launch_blocking()
from ms_dtensor.debug.verify import check_rule
report = check_rule(mint.matmul, np.ones((4, 6), np.float32), np.ones((6, 3), np.float32), axes=((2,),))
assert report.compared and not report.wrong, report.wrong[:1]
print("fine")
"""


def test_a_process_that_imports_nothing_else():
    done = python("-c", FRESH)
    assert done.stdout.strip() == "fine", done.stderr[-1500:]


def test_it_tells_a_tensor_from_a_tuple_of_one(monkeypatch):
    def split(x):
        return mint.split(x, 3, 1)
    assert check_alike(split, (X,), {}) == []
    real = run.on_stand_ins
    monkeypatch.setattr(run, "on_stand_ins", lambda *args: real(*args)[0])
    wrong = check_alike(split, (X,), {})
    assert wrong and "tuple(" in wrong[0]
