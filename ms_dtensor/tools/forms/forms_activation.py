# SPDX-License-Identifier: Apache-2.0
"""Activations in every public form, the softmax family included."""
from __future__ import annotations

from mindspore import mint, nn, ops

from ...errors import OpRuleError
from .form import Form
from .samples import F, arrays, forms, named, unary

X = unary()
LINES = (arrays((4, 6)), arrays((5, 3)), arrays((2, 3, 4)), arrays((0, 2)), arrays((3, 2), dtype="float16"))
EVEN = (arrays((4, 6)), arrays((3, 2)), arrays((2, 3, 4)))

_SIMPLE = [
    *named("F", "relu silu sigmoid tanh hardsigmoid hardswish gelu mish elu logsigmoid softplus leaky_relu relu6 selu", X),
    *named("F", "hardshrink softshrink hardtanh", X),
    *named("ops", "relu relu6 silu mish hardsigmoid hardswish selu logsigmoid softsign gelu fast_gelu elu celu softplus", X[:4]),
    *named("ops", "hardshrink softshrink tanhshrink hardtanh leaky_relu", X[:4]),
    *forms(X[:3], {
        "F.gelu(tanh)": lambda x: F.gelu(x, approximate="tanh"), "ops.gelu(tanh)": lambda x: ops.gelu(x, "tanh"),
        "F.elu(alpha)": lambda x: F.elu(x, 0.5), "F.softplus(beta, threshold)": lambda x: F.softplus(x, 2, 1),
        "F.leaky_relu(slope)": lambda x: F.leaky_relu(x, 0.2), "F.hardtanh(bounds)": lambda x: F.hardtanh(x, -0.3, 0.6),
        "F.hardshrink(lambd)": lambda x: F.hardshrink(x, 0.2), "F.threshold": lambda x: F.threshold(x, 0.1, 2.0),
        "ops.threshold": lambda x: ops.threshold(x, 0.1, 2.0), "nn.Threshold": lambda x: nn.Threshold(0.1, 2.0)(x),
        "mint.nn.Threshold": lambda x: mint.nn.Threshold(0.1, 2.0)(x), "x.hardshrink()": lambda x: x.hardshrink(),
        "nn.get_activation": lambda x: nn.get_activation("relu")(x), "ops.ReLU": lambda x: ops.ReLU()(x),
        "ops.GeLU": lambda x: ops.GeLU()(x), "ops.Sigmoid": lambda x: ops.Sigmoid()(x), "ops.Elu": lambda x: ops.Elu()(x),
        "ops.Softplus": lambda x: ops.Softplus()(x), "nn.GELU(exact)": lambda x: nn.GELU(approximate=False)(x),
        "mint.nn.GELU(tanh)": lambda x: mint.nn.GELU("tanh")(x)}),
    *[Form(f"nn.{n}", lambda x, n=n: getattr(nn, n)()(x), X[:3]) for n in (
        "ReLU ReLU6 SiLU GELU FastGelu Mish Sigmoid Tanh LeakyReLU HSwish HSigmoid SeLU LogSigmoid ELU CELU Hardtanh HShrink "
        "SoftShrink Tanhshrink Softsign").split()],
    *[Form(f"mint.nn.{n}", lambda x, n=n: getattr(mint.nn, n)()(x), X[:3]) for n in (
        "ReLU ReLU6 SiLU GELU Mish Sigmoid Tanh Hardswish Hardsigmoid SELU LogSigmoid ELU Hardtanh Hardshrink Softshrink").split()],
]

PRELU = (arrays((4, 3), (3,)), arrays((5, 2, 2), (2,)), arrays((4, 3), (1,)))
_GATED = [
    *forms(EVEN, {"F.glu": F.glu, "ops.glu": ops.glu, "nn.GLU": lambda x: nn.GLU()(x), "mint.nn.GLU": lambda x: mint.nn.GLU()(x),
                  "ops.swiglu": ops.swiglu}),
    *forms((arrays((4, 6)), arrays((2, 4, 3))), {"F.glu(dim)": lambda x: F.glu(x, -2), "ops.glu(axis)": lambda x: ops.glu(x, -2),
                                                "ops.swiglu(dim)": lambda x: ops.swiglu(x, -2)}),
    *forms(PRELU, {"F.prelu": F.prelu, "ops.prelu": ops.prelu}),
    Form("nn.PReLU", lambda x: nn.PReLU(3)(x), arrays((4, 3))), Form("mint.nn.PReLU", lambda x: mint.nn.PReLU(3)(x), arrays((4, 3))),
]

_SOFTMAX = [
    *forms(LINES, {
        "mint.softmax": lambda x: mint.softmax(x, -1), "mint.softmax(0)": lambda x: mint.softmax(x, 0), "ops.softmax": ops.softmax,
        "ops.softmax(axis)": lambda x: ops.softmax(x, axis=0), "F.softmax(dim)": lambda x: F.softmax(x, dim=-1),
        "F.softmax()": F.softmax, "ops.Softmax": lambda x: ops.Softmax(-1)(x), "nn.Softmax": lambda x: nn.Softmax()(x),
        "mint.nn.Softmax": lambda x: mint.nn.Softmax(0)(x), "x.softmax": lambda x: x.softmax(-1),
        "ops.softmin": ops.softmin, "nn.Softmin": lambda x: nn.Softmin()(x)}),
    *forms(LINES[:4], {
        "ops.log_softmax": ops.log_softmax, "ops.log_softmax(axis)": lambda x: ops.log_softmax(x, 0),
        "F.log_softmax": lambda x: F.log_softmax(x, dim=-1), "F.log_softmax()": F.log_softmax,
        "F.log_softmax(dtype)": lambda x: F.log_softmax(x, -1, dtype=x.dtype),
        "mint.special.log_softmax": lambda x: mint.special.log_softmax(x, -1), "nn.LogSoftmax": lambda x: nn.LogSoftmax()(x),
        "mint.nn.LogSoftmax": lambda x: mint.nn.LogSoftmax(-1)(x), "ops.LogSoftmax": lambda x: ops.LogSoftmax(-1)(x)}),
    Form("nn.Softmax2d", lambda x: nn.Softmax2d()(x), arrays((2, 4, 3, 3))),
]

_REFUSED = [Form("F.elu_", lambda x: F.elu_(x), arrays((4, 3)), raises=OpRuleError, note="in place")]

FORMS = [*_SIMPLE, *_GATED, *_SOFTMAX, *_REFUSED]
