# SPDX-License-Identifier: Apache-2.0
"""Reductions without a matching Partial, cumulative ops and sorting: the dim they run along must be whole.

Two ways out where it is not: some norms are sums or maxima of shards after all, and `dispatch/composite.py` makes
variance and the 2-norm from sums. What counts positions (argmax, sort) gathers its own dim only; every other stays sharded.
"""
from __future__ import annotations

from collections.abc import Callable
from math import inf, prod

from ...core.placements import Partial
from ...errors import OpRuleError
from .reduce import kept_dims, reduced_shape, reduction
from .spec import SUMS, Call, Case, OpSpec, P, S, Winners, default_softmax_dim, dims_of, result_dtype

NAMES = """
prod:DeprecatedProd:input dim keepdim dtype
first_max:DeprecatedMax:input dim keepdim initial where return_indices
first_min:DeprecatedMin:input dim keepdim initial where return_indices
any:AnyExt:input dim keepdim
count_nonzero:CountNonZero,DeprecatedCountNonzero:input dim keepdim dtype
nansum:Nansum,DeprecatedNansum:input dim keepdim dtype
argmax:ArgMaxExt,ArgMinExt:input dim keepdim
argmax_classic:Argmax,Argmin:input dim output_type
argmax_method:DeprecatedArgmax,DeprecatedArgmin:input dim keepdim
extreme_with_index:ArgMaxWithValue,ArgMinWithValue:input dim keepdim
max_dim:MaxDim,MinDim:input dim keepdim
median:MedianExt:input
max_dim:MedianDim,DeprecatedMedian:input dim keepdim
median_classic:Median:input
var:Var,Std:input dim correction keepdim
var:DeprecatedVar,DeprecatedStd:input dim correction keepdim
var_mean:VarMean,StdMean:input dim correction keepdim
reduce_std:ReduceStd:input dim unbiased keepdim
vector_norm:LinalgVectorNorm:input p dim keepdim dtype
vector_norm:Norm:input p dim keepdim dtype
vector_norm:LpNormV2:input p dim keepdim epsilon
lp_norm:LpNorm:input
l2_normalize:L2Normalize:input
logsumexp:LogSumExp:input dim keepdim
cumsum:CumSum:input dim exclusive reverse
cumsum:CumsumExt,DeprecatedCumsum:input dim dtype
cumprod:CumProd:input dim exclusive reverse
cum_extreme:Cummax,CummaxExt,CumminExt:input dim
cummin:Cummin:input dim
sort:SortExt,DeprecatedSort:input dim descending stable
sort_classic:Sort:input
argsort:ArgSort,DeprecatedArgsort:input dim descending stable
topk:TopkExt,DeprecatedTopk:input k dim largest sorted
topk_classic:TopK:input k
kthvalue:Kthvalue:input k dim keepdim
histogram:HistcExt:input bins low high
histogram:Histogram:input
"""


def _reduced(call: Call, dim, keepdim, results: int = 1) -> OpSpec:
    x = call.args["input"]
    dims, keepdim = dims_of(dim, x.ndim), bool(keepdim)
    cases = [Case((S(d),), (S(k),) * results) for d, k in kept_dims(x.ndim, dims, keepdim).items()]
    return OpSpec((reduced_shape(x.shape, dims, keepdim),) * results, tuple(cases))


def _reduction(default: int | None, results: int = 1) -> Callable[[Call], OpSpec]:
    """The rule of a reduction over `dim`, `default` where it is not told, to so many results: values, positions, means."""
    return lambda call: _reduced(call, call.get("dim", default), call.get("keepdim"), results)


def median(call: Call) -> OpSpec:
    """The median of all elements: no shard knows it, every dim must be whole."""
    return OpSpec(((),), ())


def median_classic(call: Call) -> OpSpec:
    """The classic `Median`, which is told its dim when it is made."""
    made = call.args["attrs"]
    return _reduced(call, None if made.get("global_median") else made.get("axis", 0), made.get("keep_dims"), 2)


def vector_norm(call: Call) -> OpSpec:
    """A p-norm; over a sharded dim the 0- and 1-norm are sums of the shards' norms, infinite ones extremes of them."""
    spec = _reduced(call, call.get("dim"), call.get("keepdim"))
    x, p = call.args["input"], float(call.get("p", 2))
    kind = {0: "sum", 1: "sum", inf: "max", -inf: "min"}.get(p)
    cases = [Case((S(d),), (Partial(kind),)) for d in dims_of(call.get("dim"), x.ndim) if x.ndim] if kind else []
    winners = Winners(dims_of(call.get("dim"), x.ndim), bool(call.get("keepdim")), magnitude=True)
    return OpSpec(spec.shapes, (*spec.cases, *cases), winners=winners if abs(p) == inf else None)


def lp_norm(call: Call) -> OpSpec:
    """The classic `LpNorm`, which is told its dims when it is made."""
    made = call.args["attrs"]
    return _reduced(call, made.get("axis"), made.get("keep_dims"))


def kthvalue(call: Call) -> OpSpec:
    """(k-th smallest along `dim`, its position)."""
    return _reduced(call, call.get("dim", -1), call.get("keepdim"), 2)


def histogram(call: Call) -> OpSpec:
    """Counts of equal bins add up, if they do not go from the smallest to the largest element there is."""
    x, given = call.args["input"], {**call.args.get("attrs", {}), **call.args}
    room = {"bool": 1, "int8": 2 ** 7, "uint8": 2 ** 8, "int16": 2 ** 15}.get(x.dtype, inf)
    if prod(x.shape) >= room:
        raise OpRuleError(f"For 'histc', counts of {prod(x.shape)} elements may be too large for {x.dtype}.", "",
                          "Counts have the dtype of what is counted.", "x.astype(mindspore.int32)")
    low, high = (given.get(a, given.get(b, 0)) for a, b in (("low", "min"), ("high", "max")))
    cases = [Case((S(d),), (P,)) for d in range(x.ndim)] if low != high else []
    return OpSpec(((int(given.get("bins", 100)),),), tuple(cases))


def _along(call: Call, dim, results: int = 1, linear: bool = False) -> OpSpec:
    x, k = call.args["input"], call.args.get("k")
    dims = dims_of(dim, x.ndim)
    shape = x.shape if k is None else tuple(int(k) if d in dims else n for d, n in enumerate(x.shape))
    cases = call.like_first((d for d in range(x.ndim) if d not in dims), SUMS if linear else (), results)
    return OpSpec((shape,) * results, tuple(cases))


def _lines(results: int = 1) -> Callable[[Call], OpSpec]:
    """The rule of what works along `dim`, the last where it is not told (or on its first `k`): values, positions."""
    return lambda call: _along(call, call.get("dim", -1), results)


def _made_lines(default: int, results: int = 1) -> Callable[[Call], OpSpec]:
    """The same of a classic primitive that is told its dim when it is made."""
    return lambda call: _along(call, call.args["attrs"].get("axis", default), results)


def cumsum(call: Call) -> OpSpec:
    """Running sums, without a dim of all elements: linear, so a Partial passes unless it is converted on the way."""
    x = call.operands[0]
    if call.get("dim") is None:
        return OpSpec(((prod(x.shape),),), ())
    linear = "float" in x.dtype and (call.args.get("dtype") is None or result_dtype(call) == x.dtype)
    return _along(call, call.args["dim"], linear=linear)


def log_softmax(call: Call) -> OpSpec:
    """Along one dim, which may be None."""
    dim = call.args.get("dim", -1)
    return _along(call, default_softmax_dim(call.args["input"].ndim) if dim is None else dim)


def extreme(call: Call) -> OpSpec:
    """`x.max(axis=...)`, whose gradient goes to the first of equals; further arguments of this form need every element."""
    dim = call.get("dim")
    if dim is None:  # then MindSpore keeps no dims
        call = Call(call.op, {**call.args, "keepdim": False}, call.operands)
    if call.get("return_indices") and not isinstance(dim, tuple | list):
        spec = _reduced(call, dim, call.get("keepdim"), 2)
        return OpSpec(spec.shapes, spec.cases if isinstance(dim, int) else ())
    spec = reduction(call)
    return OpSpec(spec.shapes, ()) if any(call.get(k) is not None for k in ("initial", "where")) else spec


def argmax_method(call: Call) -> OpSpec:
    """`x.argmax(axis=...)`, which keeps no dims without an axis."""
    return _reduced(call, call.get("dim"), call.get("keepdim") and call.get("dim") is not None)


RULES = {
    "count_nonzero": reduction, "nansum": reduction, "any": reduction, "first_max": extreme, "first_min": extreme,
    "argmax": _reduction(None), "argmax_classic": _reduction(-1), "argmax_method": argmax_method,
    "extreme_with_index": _reduction(0, 2), "max_dim": _reduction(-1, 2), "median": median,
    "median_classic": median_classic, "var": _reduction(None), "var_mean": _reduction(None, 2),
    "reduce_std": _reduction(None, 2), "vector_norm": vector_norm, "lp_norm": lp_norm,
    "logsumexp": _reduction(None),  # over whole dims only: the shards' results do not add up
    "l2_normalize": _made_lines(0), "cumsum": cumsum, "cumprod": _lines(), "cum_extreme": _lines(2), "cummin": _lines(2),
    "logcumsumexp": _lines(),
    "sort": _lines(2), "sort_classic": _made_lines(-1, 2), "argsort": _lines(), "topk": _lines(2),
    "topk_classic": _lines(2), "log_softmax": log_softmax, "kthvalue": kthvalue, "histogram": histogram,
}
