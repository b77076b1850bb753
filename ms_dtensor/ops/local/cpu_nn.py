# SPDX-License-Identifier: Apache-2.0
"""Decompositions for CPU: activations, normalisations and losses that only the `mint` primitives name.

Losses take `reduction` as MindSpore passes it: 0 sum, 1 mean, 2 none, or the word.
"""
from __future__ import annotations

import math

import mindspore as ms
from mindspore import mint, ops

from ..rules.spec import default_softmax_dim
from .cpu_math import mean
from .dtypes import as_dtype
from .rms_norm_cpu import RmsNormRows

_REDUCTION = {0: "sum", 1: "mean", 2: "none"}


def reduced(loss, reduction):
    """A loss per element, reduced as `reduction` says."""
    reduction = _REDUCTION.get(reduction, reduction)
    return loss.sum() if reduction == "sum" else loss.mean() if reduction == "mean" else loss


def gelu(input, approximate="none"):
    """`GeluExt`."""
    if approximate == "tanh":
        return 0.5 * input * (1 + mint.tanh(math.sqrt(2 / math.pi) * (input + 0.044715 * input * input * input)))
    return 0.5 * input * (1 + mint.erf(input * math.sqrt(0.5)))


def swiglu(input, dim=-1):
    """`Swiglu`: silu of the first half times the second."""
    half = input._shape[dim] // 2
    gate = mint.narrow(input, dim, 0, half)
    return gate * mint.sigmoid(gate) * mint.narrow(input, dim, half, half)


def _below(x, bound):
    return mint.where(x > bound, ops.zeros_like(x), x)


def softplus(input, beta=1, threshold=20):
    """`SoftplusExt`: linear above the threshold."""
    scaled = input * beta
    bounded = _below(scaled, threshold)
    soft = mint.nn.functional.relu(bounded) + mint.log1p(mint.exp(-mint.abs(bounded)))
    return mint.where(scaled > threshold, input, soft / beta)


def log_sigmoid(input):
    """`LogSigmoid`: (result, a buffer nobody reads)."""
    out = -(mint.nn.functional.relu(-input) + mint.log1p(mint.exp(-mint.abs(input))))
    return out, ops.stop_gradient(out)


def log_softmax(input, dim=None, dtype=None):
    """`LogSoftmaxExt`."""
    x = input if dtype is None else input.astype(as_dtype(dtype))
    if not x._shape:
        return x * 0
    return ops.log_softmax(x, default_softmax_dim(len(x._shape)) if dim is None else dim)


def rms_norm(x, gamma, epsilon=1e-6):
    """`RmsNorm`: (y, 1 / rms), over the trailing dims that gamma has; in float32, rounded once."""
    wide = x.astype(ms.float32) if x.dtype in (ms.float16, ms.bfloat16) else x
    if gamma.dtype != wide.dtype:  # a cast to its own dtype costs a tenth of a small norm
        gamma = gamma.astype(wide.dtype)
    y, scale = RmsNormRows.apply(wide, gamma, epsilon)
    return y if wide is x else y.astype(x.dtype), scale


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    """`LayerNormExt`: (y, mean, 1 / std), in float32, rounded once."""
    wide = input.astype(ms.float32) if input.dtype in (ms.float16, ms.bfloat16) else input
    count = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    dims = tuple(range(len(input._shape) - count, len(input._shape)))
    middle = mean(wide, dims, True)
    off = wide - middle
    scale = mint.rsqrt(mean(off * off, dims, True) + eps)
    out = off * scale
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.astype(input.dtype), middle, scale


def add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    """`AddRmsNorm`: (y, 1 / rms, the sum of x1 and x2)."""
    x = x1 + x2
    return *rms_norm(x, gamma, epsilon), x


def add_layer_norm(x1, x2, gamma, beta, epsilon=1e-5, additionalOut=False):  # noqa: N803  MindSpore's name
    """`AddLayerNormV2`: (y, mean, 1 / std, the sum of x1 and x2)."""
    x = x1 + x2
    return *layer_norm(x, gamma._shape, gamma, beta, epsilon), x


def kl_div(input, target, reduction=1, log_target=False):
    """`KLDiv`; 0 log 0 is 0."""
    if log_target:
        return reduced(mint.exp(target) * (target - input), reduction)
    positive = target > 0
    log = mint.log(mint.where(positive, target, ops.ones_like(target)))
    return reduced(mint.where(positive, target * log, ops.zeros_like(target)) - target * input, reduction)


def cross_entropy(input, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0, *_):
    """`CrossEntropyLoss`, without z-loss: (loss, log-probabilities, nothing, nothing)."""
    log, classes = ops.log_softmax(input, -1), input._shape[-1]
    ignored = target == ignore_index
    hot = ops.one_hot(mint.where(ignored, ops.zeros_like(target), target), classes)
    share = 1.0 if weight is None else weight
    counted = mint.logical_not(ignored).astype(input.dtype)
    weights = (hot * share).sum(-1) * counted
    smooth = -(log * share).sum(-1) * counted * (label_smoothing / classes)
    loss = -(log * hot * share).sum(-1) * counted * (1 - label_smoothing) + smooth
    kind, nothing = _REDUCTION.get(reduction, reduction), ops.zeros((0,), input.dtype)
    loss = loss.sum() / weights.sum() if kind == "mean" else reduced(loss, kind)
    return mint.reshape(loss, (-1,)), log, nothing, nothing


TABLE = {
    "CrossEntropyLoss": cross_entropy, "GeluExt": gelu, "Swiglu": swiglu, "SoftplusExt": softplus,
    "LogSigmoid": log_sigmoid, "LogSoftmaxExt": log_softmax,
    # the branch that is not taken sees 0, so that its gradient stays finite
    "EluExt": lambda input, alpha=1.0: mint.where(input > 0, input, alpha * (mint.exp(_below(input, 0)) - 1)),
    "LeakyReLUExt": lambda input, negative_slope=0.01: mint.where(input > 0, input, input * negative_slope),
    "MishExt": lambda input: input * mint.tanh(softplus(input)),
    "RmsNorm": rms_norm, "LayerNormExt": layer_norm, "KLDiv": kl_div,
    "AddRmsNorm": add_rms_norm, "AddLayerNormV2": add_layer_norm,
    "MSELossExt": lambda input, target, reduction=1: reduced((input - target) * (input - target), reduction),
    "L1LossExt": lambda input, target, reduction=1: reduced(mint.abs(input - target), reduction),
}
