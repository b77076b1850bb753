# SPDX-License-Identifier: Apache-2.0
"""DFunction on one device: contexts, gradients of every kind, second derivatives, and its own check."""
from dataclasses import dataclass

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from ms_dtensor import DFunction, Shard, distribute_tensor, grad, init_device_mesh, local_map, value_and_grad
from ms_dtensor.errors import LayoutError, OpRuleError
from tests.operands import Built, P, R, S

X = Tensor(np.array([1.0, 2.0, 3.0], np.float32))
Y = Tensor(np.array([0.5, -1.0, 2.0], np.float32))


class Product(DFunction):
    @staticmethod
    def forward(ctx, x, y, times=1):
        ctx.save_for_backward(x, y)
        ctx.times = times
        return x * y * times

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y * ctx.times, grad * x * ctx.times


class Twice(Product):
    second_order = True


class Cube(DFunction):
    """Saves an intermediate value, which a second derivative would take for a constant."""

    @staticmethod
    def forward(ctx, x):
        square = x * x
        ctx.save_for_backward(square)
        return square * x

    @staticmethod
    def backward(ctx, grad):
        square, = ctx.saved_tensors
        return 3 * square * grad


class CubeTwice(Cube):
    second_order = True


def same(a, b):
    np.testing.assert_allclose(a.asnumpy(), b.asnumpy() if isinstance(b, Tensor) else b, rtol=1e-5)


@pytest.mark.parametrize("cls", [Product, Twice])
def test_plain_inputs_take_the_single_device_path(cls):
    same(cls.apply(X, Y), X * Y)
    value, (gx, gy) = ms.value_and_grad(lambda x, y: cls.apply(x, y, times=2).sum(), (0, 1))(X, Y)
    same(value, (X * Y * 2).sum())
    same(gx, Y * 2)
    same(gy, X * 2)
    same(ms.grad(lambda x: cls.apply(x, x).sum())(X), X * 2)
    same(ms.grad(lambda x: cls.apply(x * 1, 3 * x, 2).sum())(X), X * 12)


def test_a_second_derivative_is_refused_not_wrong():
    with pytest.raises(OpRuleError, match="second_order = True"):
        grad(lambda x: grad(lambda t: Product.apply(t, t).sum())(x).sum())(X)
    same(grad(lambda t: Product.apply(t, t).sum())(X), X * 2)  # still usable


def test_second_order_runs_on_function():
    same(ms.grad(lambda x: ms.grad(lambda t: Twice.apply(t * t, t).sum())(x).sum())(X), X * 6)


def test_second_order_refuses_saved_intermediates():
    same(grad(lambda t: CubeTwice.apply(t).sum())(X), X * X * 3)
    with pytest.raises(OpRuleError, match="no input or result"):
        grad(lambda x: grad(lambda t: CubeTwice.apply(t).sum())(x).sum())(X)
    same(grad(lambda t: CubeTwice.apply(t).sum())(X), X * X * 3)


class Split(DFunction):
    @staticmethod
    def forward(ctx, x, pair, note=None, *, factor=1.0):
        assert note is None or note == {"a": 1}
        ctx.factor = factor
        return x + pair[0], pair[1] * factor

    @staticmethod
    def backward(ctx, first, second):
        return first, (first, second * ctx.factor), None, None


def test_several_results_lists_and_none():
    _, grads = ms.value_and_grad(lambda x, a, b: sum(Split.apply(x, [a, b], {"a": 1}, factor=3.0)).sum(), (0, 1, 2))(
        X, Y, Y + 1)
    same(grads[0], np.ones(3))
    same(grads[1], np.ones(3))
    same(grads[2], np.full(3, 3.0))
    _, grads = ms.value_and_grad(lambda x, b: Split.apply(x, (Y, b))[0].sum(), (0, 1))(X, Y + 1)  # the other is unused
    same(grads[1], np.zeros(3))


def test_keyword_tensors_have_gradients():
    class Scaled(DFunction):
        @staticmethod
        def forward(ctx, x, *, by):
            ctx.save_for_backward(x, by)
            return x * by

        @staticmethod
        def backward(ctx, grad):
            x, by = ctx.saved_tensors
            return grad * by, grad * x
    same(ms.grad(lambda b: Scaled.apply(X, by=b).sum())(Y), X)


@pytest.mark.parametrize("grads, text", [((1, 2, 3, 4), "4 gradients"), ((1,), "1 gradients")])
def test_wrong_number_of_gradients(grads, text):
    class Wrong(Product):
        backward = staticmethod(lambda ctx, grad: tuple(grad * g for g in grads))
    with pytest.raises(OpRuleError, match=text):
        grad(lambda x: Wrong.apply(x, Y).sum())(X)


def test_wrong_shape_of_gradient():
    class Wrong(Product):
        backward = staticmethod(lambda ctx, grad: (grad.sum(), None))
    with pytest.raises(OpRuleError, match=r"has shape \[\]"):
        grad(lambda x: Wrong.apply(x, Y).sum())(X)


def test_result_must_be_tensors():
    class Wrong(Product):
        forward = staticmethod(lambda ctx, x: (x, 3))
    with pytest.raises(OpRuleError, match="result 1 is a int"):
        Wrong.apply(X)


def test_nested_in_forward_and_backward_and_a_cell():
    class Outer(DFunction):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return Product.apply(x, x)

        @staticmethod
        def backward(ctx, grad):
            x, = ctx.saved_tensors
            return Product.apply(grad, x, 2)

    net = Built(lambda c, x: Outer.apply(c.dense(x)).sum(), dense=nn.Dense(3, 3))
    x = Tensor(np.ones((2, 3), np.float32))
    got = ms.value_and_grad(net, None, net.trainable_params())(x)
    wanted = ms.value_and_grad(lambda t: (net.dense(t) ** 2).sum(), None, net.trainable_params())(x)
    same(got[0], wanted[0])
    for g, w in zip(got[1], wanted[1]):
        same(g, w)


def test_errors_in_forward_or_backward_leave_autograd_usable():
    class Bad(Product):
        @staticmethod
        def backward(ctx, grad):
            raise KeyError("mine")
    with pytest.raises(KeyError, match="mine"):
        value_and_grad(lambda x: Bad.apply(x, Y).sum(), 0)(X)
    same(value_and_grad(lambda x: Product.apply(x, Y).sum(), 0)(X)[1], Y)


def test_finite_differences_find_a_wrong_backward():
    Cube.check_gradients(X)
    Product.check_gradients(X, Y, times=2)
    Split.check_gradients(X, [Y, Y], factor=2.0)

    class Wrong(Product):
        backward = staticmethod(lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0] * 1.2))
    with pytest.raises(OpRuleError, match="gradient of tensor 1"):
        Wrong.check_gradients(X, Y)


def test_defined_nothing():
    with pytest.raises(NotImplementedError):
        DFunction.apply(X)


def test_hooks_of_a_mesh_of_one():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))

    class Rows(Product):
        in_placements, out_placements = ([Shard(0)], [Shard(0)]), [Shard(0)]
    x, y = (distribute_tensor(t, mesh, [Shard(0)]) for t in (X, Y))
    g = grad(lambda a: Rows.apply(a, y).sum())(x)
    assert g.layout is x.layout
    same(g.to_local(), Y)
    same(ops.exp(Rows.apply(x, y)).to_local(), ops.exp(X * Y))


@dataclass(frozen=True)
class Batch:
    length: int
    places: Tensor


def test_tensors_in_a_dataclass_are_laid_out_as_those_of_a_list():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    x = distribute_tensor(Tensor([[1.0], [2.0]]), mesh, [Shard(0)])

    def scaled(x, batch):
        return x * batch.places * batch.length
    run = local_map(scaled, [Shard(0)], ([Shard(0)], [Shard(0)]), device_mesh=mesh)
    assert run(x, Batch(3, x)).full_tensor().asnumpy().ravel().tolist() == [3.0, 12.0]
    with pytest.raises(LayoutError, match="argument 1.* is a DTensor, but 'in_placements' has None"):
        local_map(scaled, [Shard(0)], ([Shard(0)], None), device_mesh=mesh)(x, Batch(3, x))


@pytest.mark.parametrize(("says", "call"), [
    ("'redistribute_inputs' is off", lambda x: local_map(ops.tanh, [S(0)], ([R],))(x)),
    ("2 entries for 1 arguments", lambda x: local_map(ops.tanh, [S(0)], ([S(0)], [S(0)]))(x)),
    ("cannot become Partial", lambda x: local_map(ops.tanh, [P], ([P],), redistribute_inputs=True)(x)),
    ("result 0 is a int", lambda x: local_map(lambda a: 1, [S(0)])(x)),
    ("is a DTensor already", lambda x: local_map(lambda a: x, [S(0)])(x)),
    ("2 entries for one result", lambda x: local_map(ops.tanh, ([S(0)], [S(0)]))(x)),
    ("'in_grad_placements' has 2", lambda x: local_map(ops.tanh, [S(0)], ([S(0)],), in_grad_placements=([R], [R]))(x))])
def test_what_is_declared_wrong_is_said(says, call):
    """On one rank; that ranks say the same, and send nothing, is asked by tests/cases_refusals.py."""
    x = distribute_tensor(X, init_device_mesh("cpu", (1,)), [S(0)])
    with pytest.raises(LayoutError, match=says):
        call(x)
