# SPDX-License-Identifier: Apache-2.0
"""Decompositions for CPU: element-by-element primitives, medians, batch norm and losses that have no kernel there."""
from __future__ import annotations

import functools
import math

import mindspore as ms
import numpy as np
from mindspore import mint, ops

from .composites import batch_norm, nll_loss
from .cpu_nn import reduced, softplus
from .dtypes import rounded
from .run import StandIn


def _exp2(input):
    return mint.exp(input * math.log(2))


def _bitwise(integers, booleans):
    def run(input, other):
        if input.dtype == ms.bool_ and other.__class__ is int:
            input = input.astype(ms.int64)
        if input.dtype != ms.bool_:
            other = other if isinstance(other, ms.Tensor) else ops.full(input._shape, other, dtype=input.dtype)
            return integers(input, other)
        return booleans(input, other if isinstance(other, ms.Tensor) else ops.full(input._shape, other, dtype=ms.bool_))
    return run


def _frac(input):
    input = input.astype(ms.int64) if input.dtype == ms.bool_ else input
    return input - ops.stop_gradient(mint.trunc(input))


def _not(input):
    return mint.logical_not(input) if input.dtype == ms.bool_ else ops.invert(input)


def _hardtanh(input, min_val=-1.0, max_val=1.0):
    # not clamp: at the bounds themselves the gradient is 0
    inside = mint.logical_and(input > min_val, input < max_val)
    bounded = ops.stop_gradient(mint.clamp(input, min_val, max_val))
    return mint.where(inside, input, bounded)


def _selu(input):
    alpha, scale = 1.6732632423543772, 1.0507009873554805
    below = mint.where(input > 0, ops.zeros_like(input), input)
    return scale * mint.where(input > 0, input, alpha * (mint.exp(below) - 1))


def _log_add_exp(input, other):
    top = ops.stop_gradient(mint.maximum(input, other))
    return top + mint.log(mint.exp(input - top) + mint.exp(other - top))


def _log_add_exp2(input, other):
    top = ops.stop_gradient(mint.maximum(input, other))
    return top + mint.log(_exp2(input - top) + _exp2(other - top)) * (1 / math.log(2))


def _median_dim(input, dim=-1, keepdim=False):
    """The lower of the two middle elements, and where it was."""
    values, at = ops.sort(input, dim)
    middle = (input._shape[dim] - 1) // 2
    values, at = (mint.narrow(t, dim, middle, 1) for t in (values, at))
    if not keepdim:
        values, at = mint.squeeze(values, dim), mint.squeeze(at, dim)
    return values, at.astype(ms.int64)


def _cummin(input, dim):
    at = ops.cummin(ops.stop_gradient(input), dim)[1].astype(ms.int64)
    return mint.gather(input, dim, at), at  # the kernel's own values have no backward on CPU


def binary_cross_entropy(input, target, weight=None, reduction=1):
    """`BinaryCrossEntropy` from its unreduced kernel: the reducing one doubles the loss of a single element."""
    return reduced(ops.binary_cross_entropy(input, target, weight, "none"), reduction)


def bce_with_logits(input, target, weight=None, pos_weight=None, reduction=1):
    """`BCEWithLogitsLoss` from its unreduced kernel: the mean's gradient divides by the size of an earlier call."""
    return reduced(ops.binary_cross_entropy_with_logits(input, target, weight, pos_weight, "none"), reduction)


def _batch_norm(name, input, weight=None, bias=None, running_mean=None, running_var=None, training=False, momentum=0.1,
                eps=1e-5):
    if training:
        return batch_norm(name, input, weight, bias, running_mean, running_var, True, momentum, eps, input._shape)
    unused = (input._shape[1],) * (2 if name == "BatchNormExt" else 4)
    if 0 in input._shape:  # the gradients of weight and bias would be empty sums
        return StandIn.apply(input, input._shape, 0), *(ops.zeros((n,), input.dtype) for n in unused)
    shape = tuple(n if d == 1 else 1 for d, n in enumerate(input._shape))
    out = (input - mint.reshape(running_mean, shape)) * mint.rsqrt(mint.reshape(running_var, shape) + eps)
    out = out if weight is None else out * mint.reshape(weight, shape)
    out = out if bias is None else out + mint.reshape(bias, shape)
    return rounded(out, input), *(ops.zeros((n,), input.dtype) for n in unused)


def _batch_norm_classic(input, weight, bias, running_mean, running_var, training=False, eps=1e-5, momentum=0.1,
                        data_format=None):
    return _batch_norm("BatchNorm", input, weight, bias, running_mean, running_var, training, momentum, eps)


def _next_after(input, other):
    """`NextAfter`, whose backward gives every operand the shape of the result."""
    shape = np.broadcast_shapes(input._shape, other._shape)
    return ops.nextafter(*(x if tuple(x._shape) == shape else mint.broadcast_to(x, shape) for x in (input, other)))


def _equal(input, other):
    if input._shape != other._shape:
        return ops.zeros((), ms.bool_)
    return (input == other).all()


_AND = _bitwise(ops.bitwise_and, mint.logical_and)
_OR = _bitwise(ops.bitwise_or, mint.logical_or)
_XOR = _bitwise(ops.bitwise_xor, mint.logical_xor)

TABLE = {
    "Log10": lambda input: mint.log(input) * (1 / math.log(10)), "Exp2": _exp2,
    "AsinExt": lambda input: ops.asin(input), "AcosExt": lambda input: ops.acos(input),
    "AtanExt": lambda input: ops.atan(input), "AsinhExt": lambda input: ops.asinh(input),
    "AcoshExt": lambda input: ops.acosh(input), "IsNegInf": lambda input: input == -math.inf,
    "Frac": _frac,
    "BitwiseNot": _not, "BitwiseAndTensor": _AND, "BitwiseAndScalar": _AND, "BitwiseOrTensor": _OR,
    "BitwiseOrScalar": _OR, "BitwiseXorTensor": _XOR, "BitwiseXorScalar": _XOR,
    "FloorDivScalar": lambda input, other: ops.floor_div(input, other),
    "Hardtanh": _hardtanh, "SeLUExt": _selu, "LogAddExp": _log_add_exp, "LogAddExp2": _log_add_exp2,
    "Threshold": lambda input, threshold, value: mint.where(input > threshold, input,
                                                            ops.full(input._shape, value, dtype=input.dtype)),
    "MedianExt": lambda input: _median_dim(mint.reshape(input, (-1,)), 0)[0], "MedianDim": _median_dim,
    "CumminExt": _cummin, "NextAfter": _next_after, "EqualExt": _equal,
    "SoftMarginLoss": lambda input, target, reduction=1: reduced(softplus(-target * input), reduction),
    **dict.fromkeys(("NLLLoss2d", "NLLLoss"), functools.partial(nll_loss, "NLLLoss2d")),  # kernel: garbage where ignored
    "BinaryCrossEntropy": binary_cross_entropy, "BCEWithLogitsLoss": bce_with_logits,
    "BatchNormExt": functools.partial(_batch_norm, "BatchNormExt"),  # kernel: garbage in what it leaves out
    "BatchNorm": _batch_norm_classic,
}
