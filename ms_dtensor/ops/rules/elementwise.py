# SPDX-License-Identifier: Apache-2.0
"""Names of element-by-element ops: a new one is added here; activations with parameters, special functions.

All are `pointwise.pointwise`, which reads shapes only; here are their names and the few that differ: a gated unit halves
a dim, a PReLU weight belongs to the channel dim.
"""
from __future__ import annotations

from dataclasses import replace

from ...core.placements import Partial
from .pointwise import partial_cases, pointwise
from .spec import SUMS, Call, Case, LocalCall, OpSpec, R, S

NAMES = """
acos:ACos:input
frac:Frac:input
round:Round:input decimals
isneginf:IsNegInf:input
invert:Invert:input
nan_to_num:NanToNum:input nan posinf neginf
lgamma:Lgamma:input
digamma:Digamma:input
bessel:BesselI0,BesselI1,BesselI0e,BesselI1e,BesselJ0,BesselJ1,BesselK0,BesselK1,BesselY0,BesselY1:input
inv:Inv:input
logit:Logit:input eps
zeros_like:ZerosLike,ZerosLikeExt:input dtype
ones_like:OnesLike,OnesLikeExt:input dtype
celu:CeLU:input alpha
softplus:Softplus:input
softplus:SoftplusExt:input beta threshold
hardshrink:HShrink:input lambd
softshrink:SoftShrink:input lambd
hardtanh:Hardtanh:input min_val max_val
threshold:Threshold:input threshold value
glu:GLU:input dim
glu:Swiglu:input dim
prelu:PReLU:input weight
fmax:Fmax:input other
fmin:Fmin:input other
hypot:Hypot:input other
gcd:Gcd,Lcm:input other
xlogy:XLogYScalarOther,XLogYScalarSelf:input other
eq:EqScalar:input other
isclose:IsClose,DeprecatedIsclose:input other rtol atol equal_nan
equal:EqualExt:input other
approximate_equal:ApproximateEqual:input other
nextafter:NextAfter:input other
logaddexp:LogAddExp,LogAddExp2:input other
heaviside:Heaviside:input other
shift:LeftShift,RightShift:input other
divmod:DivMod,DivMods:input other rounding_mode
no_nan:DivNoNan,MulNoNan,Xdivy:input other
truncated:TruncateDiv,TruncateMod:input other
squared_difference:SquaredDifference:input other
addcmul:AddcmulExt,Addcmul:input tensor1 tensor2 value
addcdiv:AddcdivExt,Addcdiv:input tensor1 tensor2 value
where:DeprecatedSelect,DeprecatedWhere:input condition other
to_other:ToOther,TypeAs:input other
log_sigmoid:LogSigmoid:input
real:Real:input
real_view:RealView:input
imag:Imag:input
imag_view:ImagView:input
conj:Conj:input
angle:Angle,ComplexAbs:input
complex:Complex:input other
polar:Polar:input other
"""


def fused(call: Call) -> OpSpec:
    """`input + value * tensor1 * tensor2` (or `/ tensor2`): linear in input and one factor together."""
    spec, groups = pointwise(call), (("input", "tensor1"), ("input", "tensor2"))[:1 if call.op == "addcdiv" else 2]
    if call.op == "addcdiv" and "int" in call.operands[0].dtype:  # a quotient of integers is cut off
        return spec
    return replace(spec, cases=(*spec.cases, *partial_cases(call, groups)))


def equal(call: Call) -> OpSpec:
    """One boolean, true where it is true on every shard; tensors of different shapes are not equal."""
    x, y = call.operands
    cases = tuple(Case(c.ins, (Partial("min"),)) for c in pointwise(call).cases) if x.shape == y.shape else ()
    return OpSpec(((),), cases)


def gated(call: Call) -> OpSpec:
    """GLU and SwiGLU pair the halves of `dim`, which must be whole."""
    x = call.operands[0]
    d = int(call.get("dim", -1)) % x.ndim
    cases = call.like_first(k for k in range(x.ndim) if k != d)
    return OpSpec(((*x.shape[:d], x.shape[d] // 2, *x.shape[d + 1:]),), tuple(cases))


def log_sigmoid(call: Call) -> OpSpec:
    """(result, a buffer that nobody reads): the buffer's shape is the device's affair, so shards never use the kernel."""
    x = call.operands[0]
    cases = tuple(call.like_first(range(x.ndim), results=2))
    return OpSpec((x.shape, x.shape), cases, lambda at: LocalCall("log_sigmoid_pair", (x,)))


def prelu(call: Call) -> OpSpec:
    """The weight, one number or one per channel (dim 1), is sharded with the channels."""
    x, w = call.operands
    per_channel = x.ndim > 1 and w.shape != (1,)
    cases = [Case((S(d), S(0) if d == 1 and per_channel else R), (S(d),)) for d in range(x.ndim)]
    return OpSpec((x.shape,), tuple(cases))


def to_other(call: Call) -> OpSpec:
    """`x.to(other)`: only the dtype of `other` is read."""
    x, other = call.operands
    cases = call.like_first(range(x.ndim))
    if other.shape == x.shape:
        cases += [Case((S(d), S(d)), (S(d),)) for d in range(x.ndim)]
    return OpSpec((x.shape,), tuple(cases), dtypes=(other.dtype,))


def like(call: Call) -> OpSpec:
    """`zeros_like`, `ones_like`: only shape and dtype are read, so a Partial operand gives a whole result."""
    spec = pointwise(call)
    return OpSpec(spec.shapes, (*spec.cases, *(Case((p,), (R,)) for p in SUMS)))


_ALIKE = ("frac round invert nan_to_num lgamma digamma bessel inv logit celu softplus hardshrink softshrink "
          "hardtanh threshold fmax fmin hypot gcd nextafter logaddexp heaviside shift divmod no_nan truncated "
          "squared_difference isneginf isclose approximate_equal real real_view imag imag_view "
          "conj angle complex polar").split()
RULES = {
    **dict.fromkeys(_ALIKE, pointwise),
    "equal": equal, "glu": gated, "prelu": prelu,
    "addcmul": fused, "addcdiv": fused, "to_other": to_other,
    "log_sigmoid": log_sigmoid,
    "zeros_like": like, "ones_like": like,
}
