# SPDX-License-Identifier: Apache-2.0
"""Arithmetic: operators with reflected and scalar operands, functions of one and two numbers."""
from __future__ import annotations

import operator

from mindspore import Tensor, mint, ops

from ...errors import OpRuleError
from .form import Form
from .samples import arrays, binary, forms, named, unary

PLAIN = "abs neg exp expm1 sin cos tan sinh cosh tanh erf erfc sign floor ceil trunc sigmoid square sinc"
POSITIVE = "log log1p log2 log10 sqrt rsqrt reciprocal"
BOUNDED = "asin acos atan atanh erfinv arcsin arccos arctan arctanh"
pos, bounded, above = unary(0.5, 2.0), unary(-0.8, 0.8), unary(1.2, 3.0)

_UNARY = [
    *named("mint", PLAIN + " negative fix frac exp2 asinh arcsinh", unary()), *named("mint", POSITIVE, pos),
    *named("mint", BOUNDED, bounded), *named("mint", "acosh arccosh", above),
    *named("mint", "round nan_to_num", unary()),
    *named("ops", PLAIN + " absolute negative asinh arcsinh deg2rad rad2deg sgn round frac", unary(half=False)),
    *named("ops", POSITIVE + " inv", unary(0.5, 2.0, half=False)),
    *named("ops", "lgamma digamma i0", unary(0.5, 2.0, half=False, empty=False)), *named("ops", BOUNDED, bounded[:3]),
    *named("ops", "acosh arccosh", above[:3]), *named("ops", "nan_to_num exp2", unary(half=False)),
    *named("x", PLAIN + " absolute negative asinh deg2rad rad2deg sgn frac round nan_to_num", unary(half=False)),
    *named("x", POSITIVE, pos[:4]), *named("x", BOUNDED, bounded[:3]), *named("x", "acosh", above[:3]),
    *forms(unary(half=False), {
        "-x": operator.neg, "abs(x)": abs, "round(x)": round, "+x": lambda x: (+x) * 1,
        "ops.Exp": lambda x: ops.Exp()(x), "ops.Neg": lambda x: ops.Neg()(x), "ops.Abs": lambda x: ops.Abs()(x),
        "ops.Square": lambda x: ops.Square()(x), "ops.Erf": lambda x: ops.Erf()(x), "ops.Tanh": lambda x: ops.Tanh()(x),
    }),
    *forms(pos[:4], {"ops.Log": lambda x: ops.Log()(x), "ops.Sqrt": lambda x: ops.Sqrt()(x),
                     "ops.Rsqrt": lambda x: ops.Rsqrt()(x), "ops.Reciprocal": lambda x: ops.Reciprocal()(x),
                     "ops.Inv": lambda x: ops.Inv()(x)}),
]

AB, POS2 = binary(), binary(0.5, 2.0)
NO_INT = binary(ints=False)
FULL, FULL_FLOAT = binary(empty=False), binary(ints=False, empty=False)  # Maximum has no kernel for empty results
_BINARY = [
    *named("mint", "add sub mul", AB), *named("mint", "maximum minimum", FULL), *named("mint", "div divide atan2 arctan2 remainder fmod", NO_INT),
    *named("mint", "floor_divide pow xlogy float_power", POS2[:5]), *named("mint", "logaddexp logaddexp2", FULL_FLOAT),
    *named("ops", "add sub mul subtract multiply tensor_add", AB), *named("ops", "maximum minimum", FULL),
    *named("ops", "div divide true_divide atan2 arctan2 remainder fmod hypot fmax copysign", NO_INT),
    *named("ops", "floor_divide floor_div floor_mod pow xlogy float_power xdivy", POS2[:5]), *named("ops", "logaddexp logaddexp2", FULL_FLOAT),
    *named("x", "add sub mul subtract multiply", AB), *named("x", "maximum minimum", FULL),
    *named("x", "div divide true_divide atan2 remainder fmod hypot fmax copysign", NO_INT), *named("x", "logaddexp", FULL_FLOAT),
    *named("x", "floor_divide pow xlogy float_power", POS2[:5]),
    Form("ops.nextafter", ops.nextafter, NO_INT[:1]), Form("ops.heaviside", ops.heaviside, NO_INT[:3]),
    Form("ops.ldexp", ops.ldexp, POS2[:3]),
    *forms(AB, {
        "x + y": operator.add, "x - y": operator.sub, "x * y": operator.mul, "ops.Add": lambda x, y: ops.Add()(x, y),
        "ops.Sub": lambda x, y: ops.Sub()(x, y), "ops.Mul": lambda x, y: ops.Mul()(x, y),
        "mint.add(alpha)": lambda x, y: mint.add(x, y, alpha=2), "mint.sub(alpha)": lambda x, y: mint.sub(x, y, alpha=3),
        "x.add(alpha)": lambda x, y: x.add(y, alpha=2), "x.sub(alpha)": lambda x, y: x.sub(y, alpha=2),
    }),
    *forms(FULL, {"ops.Maximum": lambda x, y: ops.Maximum()(x, y), "ops.Minimum": lambda x, y: ops.Minimum()(x, y)}),
    *forms((arrays((5, 2), (2,), dtype="int32"),), {"x / y of integers": operator.truediv, "mint.div of integers": mint.div}),
    *forms((arrays((4, 3), (4, 3), dtype="int32"), arrays((5, 3), (3,), dtype="int32")), {"mint.gcd": mint.gcd, "ops.lcm": ops.lcm}),
    *forms(NO_INT, {
        "x / y": operator.truediv, "ops.Div": lambda x, y: ops.Div()(x, y), "ops.RealDiv": lambda x, y: ops.RealDiv()(x, y),
        "ops.DivNoNan": lambda x, y: ops.DivNoNan()(x, y), "ops.MulNoNan": lambda x, y: ops.MulNoNan()(x, y),
        "ops.SquaredDifference": lambda x, y: ops.SquaredDifference()(x, y),
        "mint.div(floor)": lambda x, y: mint.div(x, y, rounding_mode="floor"),
        "mint.div(trunc)": lambda x, y: mint.div(x, y, rounding_mode="trunc"),
        "ops.div(floor)": lambda x, y: ops.div(x, y, rounding_mode="floor"),
        "x.div(floor)": lambda x, y: x.div(y, rounding_mode="floor"),
        "ops.TruncateDiv": lambda x, y: ops.TruncateDiv()(x, y), "ops.TruncateMod": lambda x, y: ops.TruncateMod()(x, y),
    }),
    *forms(POS2[:5], {"x // y": operator.floordiv, "x % y": operator.mod, "x ** y": operator.pow,
                      "ops.Pow": lambda x, y: ops.Pow()(x, y), "ops.FloorDiv": lambda x, y: ops.FloorDiv()(x, y),
                      "ops.Xdivy": lambda x, y: ops.Xdivy()(x, y), "ops.FloorMod": lambda x, y: ops.FloorMod()(x, y)}),
]

ONE, ONE_POS = (arrays((4, 3)), arrays((5,)), arrays((3, 2), dtype="int32")), (arrays((4, 3), low=0.5, high=2.0), arrays((5,), low=1, high=2))
_SCALAR = [
    *forms(ONE, {
        "x + 1": lambda x: x + 1, "1 + x": lambda x: 1 + x, "x - 1": lambda x: x - 1, "1 - x": lambda x: 1 - x,
        "x * 2": lambda x: x * 2, "2 * x": lambda x: 2 * x, "x * 2.5": lambda x: x * 2.5, "x + 0.5": lambda x: x + 0.5,
        "x * True": lambda x: x * True, "mint.add(x, 2)": lambda x: mint.add(x, 2), "mint.mul(x, 2)": lambda x: mint.mul(x, 2),
        "mint.add(2, x)": lambda x: mint.add(2, x), "mint.sub(2, x)": lambda x: mint.sub(2, x),
        "mint.mul(2, x)": lambda x: mint.mul(2, x), "ops.add(x, 2)": lambda x: ops.add(x, 2),
        "ops.mul(2, x)": lambda x: ops.mul(2, x), "ops.sub(2, x)": lambda x: ops.sub(2, x), "x.add(2)": lambda x: x.add(2),
        "x + 0-d": lambda x: x + Tensor(2), "0-d * x": lambda x: Tensor(2) * x, "0-d - x": lambda x: Tensor(2) - x,
        "mint.maximum(x, 1)": lambda x: mint.maximum(x, 1), "ops.minimum(1, x)": lambda x: ops.minimum(1, x),
    }),
    *forms(ONE_POS, {
        "x / 2": lambda x: x / 2, "1 / x": lambda x: 1 / x, "x ** 2": lambda x: x ** 2, "x ** 0.5": lambda x: x ** 0.5,
        "2 ** x": lambda x: 2 ** x, "2.0 ** x": lambda x: 2.0 ** x, "x // 2": lambda x: x // 2, "x % 2": lambda x: x % 2,
        "3 // x": lambda x: 3 // x, "3 % x": lambda x: 3 % x, "mint.div(x, 2)": lambda x: mint.div(x, 2),
        "mint.div(2, x)": lambda x: mint.div(2, x), "ops.div(2, x)": lambda x: ops.div(2, x), "mint.pow(x, 3)": lambda x: mint.pow(x, 3),
        "mint.pow(2, x)": lambda x: mint.pow(2, x), "ops.pow(x, 2)": lambda x: ops.pow(x, 2), "x.pow(2)": lambda x: x.pow(2),
        "mint.remainder(x, 2)": lambda x: mint.remainder(x, 2), "mint.remainder(3, x)": lambda x: mint.remainder(3, x),
        "mint.fmod(x, 2)": lambda x: mint.fmod(x, 2), "mint.floor_divide(x, 2)": lambda x: mint.floor_divide(x, 2),
        "mint.xlogy(x, 2)": lambda x: mint.xlogy(x, 2), "x.floor_divide(2)": lambda x: x.floor_divide(2),
        "0-d / x": lambda x: Tensor(2.0) / x, "ops.floor_mod(x, 2)": lambda x: ops.floor_mod(x, 2),
    }),
]

ABC = (arrays((4, 3), (4, 3), (4, 3)), arrays((5, 3), (3,), (1, 3)), arrays((2, 2), (2, 1), (2, 2)))
ABC_POS = (arrays((4, 3), (4, 3), (4, 3), low=0.5, high=2), arrays((5, 3), (3,), (1, 3), low=0.5, high=2))
_FUSED = [
    *named("mint", "lerp addcmul", ABC), *named("ops", "lerp", ABC), *named("x", "lerp addcmul", ABC),
    *named("mint", "addcdiv", ABC_POS), *named("x", "addcdiv", ABC_POS),
    *forms(ABC, {"mint.addcmul(value)": lambda a, b, c: mint.addcmul(a, b, c, value=2), "ops.addcmul": ops.addcmul,
                 "x.addcmul(value)": lambda a, b, c: a.addcmul(b, c, value=2)}),
    *forms(ABC_POS, {"mint.addcdiv(value)": lambda a, b, c: mint.addcdiv(a, b, c, value=2), "ops.addcdiv": ops.addcdiv}),
    *forms((arrays((4, 3), (4, 3)), arrays((5,), (5,)), arrays((2, 3), (3,))), {
        "mint.lerp(scalar)": lambda a, b: mint.lerp(a, b, 0.3), "ops.lerp(scalar)": lambda a, b: ops.lerp(a, b, 0.3),
        "x.lerp(scalar)": lambda a, b: a.lerp(b, 0.3)}),
]

_REFUSED = [Form("ops.zeta", ops.zeta, arrays((4,), (4,), low=2, high=3), raises=OpRuleError),
            Form("ops.polygamma", lambda x: ops.polygamma(Tensor(1), x), arrays((4,), low=1, high=2), raises=OpRuleError),
            Form("ops.igamma", ops.igamma, arrays((4,), (4,), low=1, high=2), raises=OpRuleError)]

FORMS = [*_UNARY, *_BINARY, *_SCALAR, *_FUSED, *_REFUSED]
