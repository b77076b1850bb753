# SPDX-License-Identifier: Apache-2.0
"""Reductions without a matching Partial, cumulative ops and sorting: the dim they run along must be whole.

Two ways out where it is not: some norms are sums or maxima of shards after all, and `dispatch/composite.py` makes
variance and the 2-norm from sums. What counts positions (argmax, sort) gathers its own dim only; every other stays sharded.
"""
from __future__ import annotations

from dataclasses import replace
from math import inf, prod

from ...core.placements import Partial
from .reduce import kept_dims, reduced_shape, reduction
from .spec import SUMS, Call, Case, OpSpec, S, Winners, dims_of, result_dtype

NAMES = """
prod:DeprecatedProd:input dim keepdim dtype
first_max:DeprecatedMax:input dim keepdim initial where return_indices
first_min:DeprecatedMin:input dim keepdim initial where return_indices
any:AnyExt:input dim keepdim
count_nonzero:CountNonZero:input dim
count_nonzero_method:DeprecatedCountNonzero:input dim keepdim dtype
nansum:Nansum:input dim keepdim dtype
nansum_method:DeprecatedNansum:input dim keepdim dtype
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
cumsum:CumsumExt:input dim dtype
cumsum_method:DeprecatedCumsum:input dim dtype
cumprod:CumProd:input dim exclusive reverse
cum_extreme:Cummax,CummaxExt,CumminExt:input dim
cummin:Cummin:input dim
sort:SortExt:input dim descending stable
sort_classic:Sort:input
sort_method:DeprecatedSort:input dim descending
argsort:ArgSort:input dim descending stable
argsort_method:DeprecatedArgsort:input dim descending
topk:TopkExt:input k dim largest sorted
topk_classic:TopK:input k
"""


def _reduced(call: Call, dim, keepdim, dtypes) -> OpSpec:
    x = call.args["input"]
    dims = dims_of(dim, x.ndim)
    shape = reduced_shape(x.shape, dims, bool(keepdim))
    n = len(dtypes)
    cases = [Case((S(d),), (S(k),) * n) for d, k in kept_dims(x.ndim, dims, bool(keepdim)).items()]
    return OpSpec((shape,) * n, tuple(cases), dtypes=tuple(dtypes))


def _floats(call: Call) -> str:
    dtype = result_dtype(call)
    return dtype if "float" in dtype else "float32"


def argmax(call: Call) -> OpSpec:
    """Positions of extremes, int64 counted in the whole dim; without a dim in the flattened tensor."""
    flat = call.op == "argmax_method" and call.get("dim") is None  # then MindSpore keeps no dims
    return _reduced(call, call.get("dim"), call.get("keepdim") and not flat, ("int64",))


def argmax_classic(call: Call) -> OpSpec:
    """The classic `Argmax`: int32 unless told otherwise (34 and 35 are MindSpore's numbers of int32 and int64)."""
    kind = str(call.get("output_type", 34)).lower()
    return _reduced(call, call.get("dim", -1), False, ("int64" if "35" in kind or "64" in kind else "int32",))


def extreme_with_index(call: Call) -> OpSpec:
    """(position, value) along one dim."""
    return _reduced(call, call.get("dim", 0), call.get("keepdim"), ("int64", call.operands[0].dtype))


def max_dim(call: Call) -> OpSpec:
    """(value, position) along one dim."""
    return _reduced(call, call.get("dim", -1), call.get("keepdim"), (call.operands[0].dtype, "int64"))


def median(call: Call) -> OpSpec:
    """The median of all elements: no shard knows it, every dim must be whole."""
    return OpSpec(((),), ())


def median_classic(call: Call) -> OpSpec:
    """The classic `Median`, which is told its dim when it is made."""
    made = call.args["attrs"]
    dim = None if made.get("global_median") else made.get("axis", 0)
    return _reduced(call, dim, made.get("keep_dims"), (call.operands[0].dtype, "int64"))


def var(call: Call) -> OpSpec:
    """Variance and standard deviation."""
    return _reduced(call, call.get("dim"), call.get("keepdim"), (_floats(call),))


def var_mean(call: Call) -> OpSpec:
    """Variance (or standard deviation) and mean."""
    return _reduced(call, call.get("dim"), call.get("keepdim"), (_floats(call),) * 2)


def vector_norm(call: Call) -> OpSpec:
    """A p-norm; over a sharded dim the 0- and 1-norm are sums of the shards' norms, infinite ones extremes of them."""
    spec = _reduced(call, call.get("dim"), call.get("keepdim"), (_floats(call),))
    x, p = call.args["input"], float(call.get("p", 2))
    kind = {0: "sum", 1: "sum", inf: "max", -inf: "min"}.get(p)
    cases = [Case((S(d),), (Partial(kind),)) for d in dims_of(call.get("dim"), x.ndim) if x.ndim] if kind else []
    winners = Winners(dims_of(call.get("dim"), x.ndim), bool(call.get("keepdim")), magnitude=True)
    return OpSpec(spec.shapes, (*spec.cases, *cases), dtypes=spec.dtypes, winners=winners if abs(p) == inf else None)


def lp_norm(call: Call) -> OpSpec:
    """The classic `LpNorm`, which is told its dims when it is made."""
    made = call.args["attrs"]
    return _reduced(call, made.get("axis"), made.get("keep_dims"), (call.operands[0].dtype,))


def l2_normalize(call: Call) -> OpSpec:
    """Each line along the dim divided by its 2-norm."""
    return _along(call, call.args["attrs"].get("axis", 0), (call.operands[0].dtype,))


def logsumexp(call: Call) -> OpSpec:
    """Over whole dims only: the shards' results do not add up."""
    return _reduced(call, call.get("dim"), call.get("keepdim"), (_floats(call),))


def _along(call: Call, dim, dtypes, extent: int | None = None, linear: bool = False) -> OpSpec:
    x = call.args["input"]
    dims = dims_of(dim, x.ndim)
    shape = x.shape if extent is None else tuple(extent if d in dims else n for d, n in enumerate(x.shape))
    cases = call.like_first((d for d in range(x.ndim) if d not in dims), SUMS if linear else (), len(dtypes))
    return OpSpec((shape,) * len(dtypes), tuple(cases), dtypes=tuple(dtypes))


def cumsum(call: Call) -> OpSpec:
    """Running sums: linear, so a Partial passes unless it is converted on the way."""
    x = call.operands[0]
    wanted = call.args.get("dtype")
    dtype = result_dtype(call) if wanted is not None else x.dtype
    linear = wanted is None or dtype == x.dtype
    return _along(call, call.args["dim"], (dtype,), linear=linear and "float" in x.dtype)


def cumsum_method(call: Call) -> OpSpec:
    """`x.cumsum(axis=...)`: small integers add up as int32; without an axis the tensor is flattened first."""
    x, wanted = call.operands[0], call.args.get("dtype")
    small = x.dtype in ("bool", "int8", "int16", "uint8")
    dtype = result_dtype(call) if wanted is not None else "int32" if small else x.dtype
    if call.get("dim") is None:
        return OpSpec(((prod(x.shape),),), (), dtypes=(dtype,))
    return _along(call, call.args["dim"], (dtype,), linear=dtype == x.dtype and "float" in dtype)


def cumprod(call: Call) -> OpSpec:
    """Running products."""
    return _along(call, call.args["dim"], (result_dtype(call),))


def cum_extreme(call: Call) -> OpSpec:
    """Running extremes and their positions."""
    return _along(call, call.args["dim"], (call.operands[0].dtype, "int64"))


def cummin(call: Call) -> OpSpec:
    """The classic `Cummin` counts in int32."""
    return _along(call, call.args["dim"], (call.operands[0].dtype, "int32"))


def sort(call: Call) -> OpSpec:
    """(sorted, positions) along one dim."""
    return _along(call, call.get("dim", -1), (call.operands[0].dtype, "int32" if call.op == "sort_method" else "int64"))


def sort_classic(call: Call) -> OpSpec:
    """The classic `Sort`, which is told its dim when it is made."""
    return _along(call, call.args["attrs"].get("axis", -1), (call.operands[0].dtype, "int32"))


def argsort(call: Call) -> OpSpec:
    """Positions of the sorted elements."""
    return _along(call, call.get("dim", -1), ("int32" if call.op == "argsort_method" else "int64",))


def topk(call: Call) -> OpSpec:
    """(values, positions) of the k largest along one dim."""
    return _along(call, call.get("dim", -1), (call.operands[0].dtype, "int64"), int(call.args["k"]))


def topk_classic(call: Call) -> OpSpec:
    """The classic `TopK`: along the last dim."""
    return _along(call, -1, (call.operands[0].dtype, "int32"), int(call.args["k"]))


def log_softmax(call: Call) -> OpSpec:
    """Along one dim; without one, dim 0 of 0-, 1- and 3-dim tensors and dim 1 of others, as in PyTorch."""
    x = call.args["input"]
    dim = call.args.get("dim", -1)
    if dim is None:
        dim = 0 if x.ndim in (0, 1, 3) else 1
    return _along(call, dim, (_floats(call),))


def extreme(call: Call) -> OpSpec:
    """`x.max(axis=...)`, whose gradient goes to the first of equals; further arguments of this form need every element."""
    dim = call.get("dim")
    if dim is None:  # then MindSpore keeps no dims
        call = Call(call.op, {**call.args, "keepdim": False}, call.operands)
    if call.get("return_indices") and not isinstance(dim, tuple | list):
        spec = _reduced(call, dim, call.get("keepdim"), (call.operands[0].dtype, "int64"))
        return OpSpec(spec.shapes, spec.cases if isinstance(dim, int) else (), dtypes=spec.dtypes)
    spec = reduction(call)
    return OpSpec(spec.shapes, ()) if any(call.get(k) is not None for k in ("initial", "where")) else spec


RULES = {
    "count_nonzero": lambda call: replace(reduction(call), dtypes=("int64",)), "nansum": reduction, "any": reduction,
    "count_nonzero_method": lambda call: replace(reduction(call), dtypes=(
        result_dtype(call) if call.args.get("dtype") is not None else "int32",)),
    "nansum_method": lambda call: replace(reduction(call), dtypes=(
        result_dtype(call) if call.args.get("dtype") is not None else call.operands[0].dtype,)),
    "first_max": extreme, "first_min": extreme, "argmax": argmax, "argmax_classic": argmax_classic,
    "argmax_method": argmax, "extreme_with_index": extreme_with_index, "max_dim": max_dim,
    "median": median, "median_classic": median_classic, "var": var, "var_mean": var_mean, "reduce_std": var_mean,
    "vector_norm": vector_norm, "lp_norm": lp_norm, "l2_normalize": l2_normalize, "logsumexp": logsumexp,
    "cumsum": cumsum, "cumsum_method": cumsum_method, "cumprod": cumprod, "cum_extreme": cum_extreme, "cummin": cummin,
    "sort": sort, "sort_method": sort, "sort_classic": sort_classic,
    "argsort": argsort, "argsort_method": argsort, "topk": topk, "topk_classic": topk_classic, "log_softmax": log_softmax,
}
