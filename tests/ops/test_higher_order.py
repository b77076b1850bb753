# SPDX-License-Identifier: Apache-2.0
"""Second derivatives of single ops against differences of first ones: plain MindSpore's are 0 or a fraction for many."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops

import ms_dtensor as md
from ms_dtensor.errors import OpRuleError
from ms_dtensor.ops.local.orders import AGAIN, BILINEAR, LINEAR
from ms_dtensor.ops.rules import RULES

A = np.random.default_rng(0).normal(size=(3, 4))
W = np.random.default_rng(1).normal(size=(4, 5))
ROWS = np.array([2, 0], np.int32)


def laid(mesh, array):
    return md.distribute_tensor(Tensor(array), mesh, src_data_rank=None)


FORMS = {
    "reshape": lambda t, c: mint.reshape(t, (4, 3)), "view": lambda t, c: t.view(2, 6),
    "flatten": lambda t, c: mint.flatten(t),
    "transpose": lambda t, c: mint.transpose(t, 0, 1), "permute": lambda t, c: mint.permute(t, (1, 0)),
    "expand": lambda t, c: t.expand((2, 3, 4)), "unsqueeze": lambda t, c: mint.unsqueeze(t, 1),
    "tile": lambda t, c: mint.tile(t, (2, 1)), "split": lambda t, c: mint.split(t, 3, 1)[0] * 2.0,
    "chunk": lambda t, c: mint.chunk(t, 2, 1)[1], "unbind": lambda t, c: ops.unbind(t, 0)[1],
    "cat": lambda t, c: mint.cat([t, t * t], 0), "stack": lambda t, c: ops.stack([t, t * t], 1),
    "slice": lambda t, c: t[1:, ::2], "an integer": lambda t, c: t[1], "rows": lambda t, c: t[c(ROWS)],
    "narrow": lambda t, c: mint.narrow(t, 1, 1, 2), "sum": lambda t, c: mint.sum(t, 0),
    "mean": lambda t, c: mint.mean(t, 1, True), "sum of all": lambda t, c: t.sum() * t,
    "cumsum": lambda t, c: t.cumsum(0), "abs": lambda t, c: mint.abs(t), "relu": lambda t, c: mint.nn.functional.relu(t),
    "maximum": lambda t, c: mint.maximum(t, t * t),
    "tril": lambda t, c: t.tril(),
    "matmul": lambda t, c: mint.matmul(t, c(W)), "gram": lambda t, c: mint.matmul(t, mint.transpose(t, 0, 1)),
    "linear": lambda t, c: mint.nn.functional.linear(t, c(W.T)),
    "linear in all": lambda t, c: mint.nn.functional.linear(t, t[:2] * t[1:], t[0, :2]),
    "bias": lambda t, c: ops.bias_add(t, t[1]),
    "a row of itself": lambda t, c: t * t[:1], "a column of itself": lambda t, c: t - mint.exp(t[:, 1:2]),
    "softmax": lambda t, c: mint.softmax(t, 1),
    "logsumexp": lambda t, c: mint.logsumexp(t, 0), "var": lambda t, c: t.var(0),
    "norm": lambda t, c: mint.norm(t, 2.0, 1),
    "div": lambda t, c: t / (t * t + 1.0), "pow": lambda t, c: t ** 3,
    "where": lambda t, c: mint.where(t > 0, t, t * t),
    "sigmoid": lambda t, c: mint.sigmoid(t), "silu": lambda t, c: mint.nn.functional.silu(t),
    "sqrt": lambda t, c: mint.sqrt(t * t + 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_second_derivative_is_the_slope_of_the_first(form):
    mesh = md.init_device_mesh("cpu", (1,))
    along = np.random.default_rng(2).normal(size=A.shape)
    constant = lambda array: laid(mesh, array)  # noqa: E731

    def f(t):
        return (FORMS[form](mint.tanh(t) * 2.0, constant) ** 3).sum()

    def squares(t):
        return (md.grad(f)(t) ** 2).sum()
    told = (md.grad(squares)(laid(mesh, A)).to_local().asnumpy() * along).sum()
    ends = [squares(laid(mesh, A + sign * 1e-5 * along)).item() for sign in (1, -1)]
    measured = (ends[0] - ends[1]) / 2e-5
    assert abs(measured) > 1e-6
    assert abs(told - measured) <= 1e-5 * max(1.0, abs(measured)), (told, measured)


CONVOLVED = np.random.default_rng(3).normal(size=(2, 3, 6, 6)).astype(np.float32)
KERNEL = 0.3 * np.random.default_rng(4).normal(size=(4, 3, 3, 3)).astype(np.float32)
CONVOLUTIONS = {  # MindSpore's, and the same of slices and a product; both have no kernel of float64 on CPU
    "conv": (lambda x, w: ops.Conv2D(4, 3, pad_mode="valid", stride=2)(x, w),
             lambda x, w: sum(mint.matmul(mint.permute(x[:, :, i:i + 3:2, j:j + 3:2], (0, 2, 3, 1)),
                                          mint.transpose(w[:, :, i, j], 0, 1)) for i in range(3) for j in range(3))),
    "transposed": (lambda x, w: ops.Conv2DTranspose(3, 3, pad_mode="valid", stride=3)(x, w, (2, 3, 12, 12)),
                   lambda x, w: mint.stack([mint.matmul(mint.permute(x, (0, 2, 3, 1)), w[:, :, i, j])
                                            for i in range(3) for j in range(3)])),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_differentiated_twice_as_the_product_that_it_is(name):
    mesh, got = md.init_device_mesh("cpu", (1,)), []
    x = CONVOLVED if name == "conv" else np.concatenate((CONVOLVED, CONVOLVED[:, :1]), 1)[..., :4, :4]
    for f in CONVOLUTIONS[name]:
        def squares(x, w, f=f):
            inner = md.grad(lambda *xs: (mint.tanh(f(*xs)) ** 2).sum(), (0, 1))(x, w)
            return sum((g * g).sum() for g in inner)
        got.append(md.grad(squares, (0, 1))(laid(mesh, x), laid(mesh, KERNEL)))
    for g, w in zip(*got):
        wanted = w.to_local().asnumpy()
        assert np.abs(g.to_local().asnumpy() - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_a_second_model_of_the_same_values_has_its_own_weights_in_a_penalty():
    mesh = md.init_device_mesh("cpu", (1,))
    given = laid(mesh, CONVOLVED)

    def penalty(weight):
        f = lambda x: (mint.tanh(CONVOLUTIONS["conv"][0](x, weight)) ** 2).sum()  # noqa: E731
        return lambda x: (md.grad(f)(x) ** 2).sum()
    values = []
    for _ in range(2):
        weight = ms.Parameter(laid(mesh, KERNEL), name="weight")
        loss, (gradient,) = md.value_and_grad(penalty(weight), None, [weight])(given)
        values.append((loss.item(), gradient.to_local().asnumpy()))
        ops.assign(weight, weight * 3)  # as an optimizer does
    assert values[0][0] == values[1][0] and np.array_equal(values[0][1], values[1][1])


def test_what_has_not_been_shown_is_refused_and_first_order_is_as_ever():
    mesh = md.init_device_mesh("cpu", (1,))
    x = laid(mesh, A.astype(np.float32))
    f = lambda t: mint.amax(t * t, 0).sum()  # noqa: E731
    md.grad(f)(x)
    with pytest.raises(OpRuleError, match="derivative of its gradient"):
        md.grad(lambda t: (md.grad(f)(t) ** 2).sum())(x)
    assert np.allclose(md.grad(f)(x).to_local().asnumpy(), ms.grad(f)(Tensor(A.astype(np.float32))).asnumpy(), atol=1e-5)


def test_the_tables_name_ops_and_do_not_overlap():
    assert not (AGAIN | LINEAR | BILINEAR) - set(RULES) and not AGAIN & LINEAR
