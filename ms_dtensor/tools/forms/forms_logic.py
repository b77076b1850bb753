# SPDX-License-Identifier: Apache-2.0
"""Comparison, logic, bits, tests of numbers, selection by masks, bounds and casts."""
from __future__ import annotations

import operator

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from ...errors import OpRuleError
from .form import Form
from .samples import arrays, binary, both, forms, named, unary

AB = binary()
_COMPARE = [
    *named("mint", "eq ne not_equal lt less le less_equal gt greater ge greater_equal", AB),
    *named("ops", "eq equal ne not_equal lt less le less_equal gt greater ge greater_equal", AB),
    *named("x", "eq equal ne not_equal lt less le less_equal gt greater ge greater_equal", AB),
    *forms(AB, {"x == y": operator.eq, "x != y": operator.ne, "x < y": operator.lt, "x <= y": operator.le,
                "x > y": operator.gt, "x >= y": operator.ge, "ops.Less": lambda x, y: ops.Less()(x, y),
                "ops.Equal": lambda x, y: ops.Equal()(x, y), "ops.GreaterEqual": lambda x, y: ops.GreaterEqual()(x, y)}),
    *forms((arrays((4, 3)), arrays((5,)), arrays((3, 2), dtype="int32")), {
        "x == 1": lambda x: x == 1, "x != 1": lambda x: x != 1, "x < 1": lambda x: x < 1, "x <= 0": lambda x: x <= 0,
        "x > 0": lambda x: x > 0, "x >= 0": lambda x: x >= 0, "1 < x": lambda x: 1 < x, "mint.eq(x, 1)": lambda x: mint.eq(x, 1),
        "mint.ge(x, 1)": lambda x: mint.ge(x, 1), "mint.lt(x, 1)": lambda x: mint.lt(x, 1),
        "ops.ne(x, 1)": lambda x: ops.ne(x, 1), "ops.le(1, x)": lambda x: ops.le(1, x), "x.gt(0)": lambda x: x.gt(0),
        "x.eq(1)": lambda x: x.eq(1), "x > 0-d": lambda x: x > Tensor(1.0)}),
    *named("mint", "isclose", AB[:5]), *named("ops", "isclose", AB[:3]), *named("ops", "approximate_equal", AB[:1]), *named("x", "isclose", AB[:3]),
    Form("mint.allclose", mint.allclose, AB[:3]), Form("x.allclose", lambda x, y: x.allclose(y), AB[:3], raises=OpRuleError, note="mint.allclose has a rule"),
]

BOOL2 = (arrays((4, 3), (4, 3), dtype="bool"), arrays((5, 3), (3,), dtype="bool"), arrays((0, 3), (3,), dtype="bool"))
BOOL1 = (arrays((4, 3), dtype="bool"), arrays((5,), dtype="bool"), arrays((), dtype="bool"))
INT2 = (arrays((4, 3), (4, 3), dtype="int32"), arrays((5, 3), (3,), dtype="int32"), arrays((3,), (3,), dtype="int64"))
INT1 = (arrays((4, 3), dtype="int32"), arrays((5,), dtype="int64"))
_LOGIC = [
    *named("mint", "logical_and logical_or logical_xor", BOOL2), *named("ops", "logical_and logical_or logical_xor", BOOL2),
    *named("x", "logical_and logical_or logical_xor", BOOL2), *named("mint", "logical_not", BOOL1),
    *named("ops", "logical_not", BOOL1), *named("x", "logical_not", BOOL1),
    *forms(BOOL2, {"a & b": operator.and_, "a | b": operator.or_, "a ^ b": operator.xor}), Form("~a", operator.invert, BOOL1),
    *named("mint", "bitwise_and bitwise_or bitwise_xor", INT2), *named("ops", "bitwise_and bitwise_or bitwise_xor", INT2),
    *named("x", "bitwise_and bitwise_or bitwise_xor", INT2), *named("mint", "bitwise_not", INT1),
    *named("x", "bitwise_not", INT1), Form("ops.invert", ops.invert, INT1[:1]),
    *named("ops", "bitwise_left_shift bitwise_right_shift", INT2[:2]),
    *forms(INT2, {"i & j": operator.and_, "i | j": operator.or_, "i ^ j": operator.xor}),
    *forms(INT1, {"i & 1": lambda x: x & 1, "i | 1": lambda x: x | 1, "i ^ 1": lambda x: x ^ 1,
                  "mint.bitwise_and(i, 1)": lambda x: mint.bitwise_and(x, 1)}),
]

WEIRD = tuple(lambda rng, s=s: (np.where(rng.random(s) < 0.3, np.nan, np.where(rng.random(s) < 0.3, -np.inf, rng.normal(
    size=s))).astype("float32"),) for s in ((4, 3), (5,)))
_TESTS = [
    *named("mint", "isfinite isinf isnan isneginf", WEIRD), *named("ops", "isfinite isinf isnan isneginf isposinf", WEIRD),
    *named("x", "isfinite isinf isnan isneginf isposinf", WEIRD), *named("ops", "signbit", unary()[:3]),
    *named("x", "signbit", unary()[:3]),
]


def masked(*shapes, mask=None, dtype="float32"):
    """A mask and arrays."""
    return both(arrays(mask or shapes[0], dtype="bool"), arrays(*shapes, dtype=dtype))


COND = (masked((4, 3), (4, 3)), masked((5, 3), (3,), mask=(5, 1)), masked((2,), (2,), mask=(3, 2)), masked((3,), (3,), dtype="int32"))
FILL = (masked((4, 3)), masked((5, 3), mask=(3,)), masked((2, 3), mask=(2, 1)))
_SELECT = [
    *named("mint", "where", COND), *named("ops", "where", COND), *named("ops", "select", COND[:1]),
    Form("x.where", lambda c, x, y: x.where(c, y), COND), Form("ops.Select", lambda c, x, y: ops.Select()(c, x, y), COND[:1]),
    *forms(tuple(masked(s) for s in ((4, 3), (5,))), {
        "mint.where(x, 0.0)": lambda c, x: mint.where(c, x, 0.0), "mint.where(1.0, x)": lambda c, x: mint.where(c, 1.0, x),
        "ops.where(x, 2.0)": lambda c, x: ops.where(c, x, 2.0), "x.select": lambda c, x: x.select(c, x * 2),
        "ops.select(x, 1.0)": lambda c, x: ops.select(c, x, 1.0)}),
    *forms(FILL, {
        "ops.masked_fill(0)": lambda c, x: ops.masked_fill(x, c, 0.0), "ops.masked_fill(2)": lambda c, x: ops.masked_fill(x, c, 2.0),
        "x.masked_fill(0)": lambda c, x: x.masked_fill(c, 0.0), "x.masked_fill(-inf)": lambda c, x: x.masked_fill(c, -float("inf")),
        "x.masked_fill(0-d)": lambda c, x: x.masked_fill(c, Tensor(2.0)), "ops.MaskedFill": lambda c, x: ops.MaskedFill()(x, c, 1.5)}),
    Form("x.masked_fill(mask > 0)", lambda x, y: x.masked_fill(y > 0, 1.0), arrays((4, 3), (4, 3))),
]

_BOUNDS = [
    *forms(unary()[:4], {
        "mint.clamp": lambda x: mint.clamp(x, -0.5, 0.5), "mint.clamp(min)": lambda x: mint.clamp(x, min=0.0),
        "mint.clip": lambda x: mint.clip(x, -0.5, 0.5), "ops.clamp": lambda x: ops.clamp(x, -0.5, 0.5),
        "ops.clip": lambda x: ops.clip(x, -0.5, 0.5), "x.clamp": lambda x: x.clamp(-0.5, 0.5), "x.clip": lambda x: x.clip(-0.5, 0.5),
        "x.clamp(max)": lambda x: x.clamp(max=0.1)}),
    *forms((arrays((4, 3), (4, 3)), arrays((5, 3), (3,))), {
        "mint.clamp(tensors)": lambda x, y: mint.clamp(x, y, y + 1), "ops.clamp(tensors)": lambda x, y: ops.clamp(x, y, y + 1),
        "x.clamp(tensor)": lambda x, y: x.clamp(min=y), "x.clamp(tensors)": lambda x, y: x.clamp(y, y + 1)}),
    Form("ops.clip_by_value", lambda x: ops.clip_by_value(x, -0.5, 0.5), unary()[:2]),
]

CAST = (arrays((4, 3)), arrays((5,)), arrays((0, 2)), arrays((3, 2), dtype="int32"), arrays((3, 2), dtype="float16"))
_CASTS = [*forms(CAST, {
    "x.to(float16)": lambda x: x.to(ms.float16), "x.to(float32)": lambda x: x.to(ms.float32), "x.to(int32)": lambda x: x.to(ms.int32),
    'x.astype("float64")': lambda x: x.astype("float64"), "x.astype(int64)": lambda x: x.astype(ms.int64), "x.type": lambda x: x.type(ms.float16),
    "ops.cast": lambda x: ops.cast(x, ms.float64), "ops.Cast": lambda x: ops.Cast()(x, ms.float64), "x.float()": lambda x: x.float(),
    "x.half()": lambda x: x.half(), "x.double()": lambda x: x.double(), "x.bool()": lambda x: x.bool(), "x.int()": lambda x: x.int(),
    "x.long()": lambda x: x.long(), "x.short()": lambda x: x.short(), "x.byte()": lambda x: x.byte(), "x.to(dtype of y)": lambda x: x.to(x.dtype) * 1,
    "x.to(dtype=float32)": lambda x: x.to(dtype=ms.float32), "x.to(dtype=int32, copy=True)": lambda x: x.to(dtype=ms.int32, copy=True),
    "x.to(float64, False, True)": lambda x: x.to(ms.float64, False, True), "x.to(device)": lambda x: x.to("CPU"), "x.to()": lambda x: x.to(),
    "x.to(device, float16)": lambda x: x.to("CPU", ms.float16), "x.to(device=, dtype=)": lambda x: x.to(device="CPU", dtype=ms.float64)}),
    Form("x.to(another device)", lambda x: x.to("Ascend"), arrays((4, 3)), raises=OpRuleError),
    Form("x.to(y)", lambda x, y: x.to(y > 0), arrays((4, 3), (4, 3))), Form("x.type_as", lambda x, y: x.type_as(y > 0), arrays((4, 3), (4, 3))),
    *forms(CAST[:4], {"mint.zeros_like": mint.zeros_like, "mint.ones_like": mint.ones_like, "ops.zeros_like": ops.zeros_like,
                      "ops.ones_like": ops.ones_like}),
]

_REFUSED = [Form("ops.masked_select", lambda x: ops.masked_select(x, x > 0), arrays((4, 3)), raises=OpRuleError)]

FORMS = [*_COMPARE, *_LOGIC, *_TESTS, *_SELECT, *_BOUNDS, *_CASTS, *_REFUSED]
