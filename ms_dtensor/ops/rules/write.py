# SPDX-License-Identifier: Apache-2.0
"""Writing into a part of a tensor: op "write" of our own `__setitem__`, and ops whose result takes an operand's place.

A write keeps the target where it is: each rank writes the intersection of the global region with its shard. A value
may be sharded where the target's dim is written whole; elsewhere every rank has it whole and uses its part of it.
`INPLACE` maps MindSpore's in-place primitives to the out-of-place op that gives the new value.
"""
from __future__ import annotations

from dataclasses import replace

from ...errors import OpRuleError
from .names import parse
from .scatter import scatter_rows
from .spec import PARTIALS, SUMS, Call, Case, Local, LocalCall, OpSpec, R, S, Unfit, broadcast_shapes

# in-place primitive -> (op, argument names); the first operand is the one that is written
INPLACE_NAMES = """
add:InplaceAddExt,InplaceAddsExt:input other alpha
add:AssignAdd:input other
sub:InplaceSubExt,InplaceSubScalar,DeprecatedSub_:input other alpha
sub:AssignSub:input other
mul:InplaceMul,InplaceMuls:input other
div:InplaceDiv,InplaceDivs:input other
divmod:InplaceDivMod,InplaceDivMods:input other rounding_mode
floor_divide:InplaceFloorDivide,InplaceFloorDivides:input other
remainder:InplaceRemainderTensorScalar,InplaceRemainderTensorTensor:input other
fill:InplaceFillScalar,InplaceFillTensor:input value
zero:InplaceZero:input
copy:InplaceCopy:input src non_blocking
copy:Assign:input src
masked_fill:InplaceMaskedFillScalar,InplaceMaskedFillTensor:input mask value
clamp:InplaceClampScalar,InplaceClampTensor:input min max
exp:InplaceExp:input
log:InplaceLog:input
floor:InplaceFloor:input
sigmoid:InplaceSigmoid:input
tanh:InplaceTanh:input
relu:InplaceReLU:input
silu:InplaceSiLU:input
erfinv:InplaceErfinv:input
sign:InplaceSign:input
threshold:InplaceThreshold:input threshold value
hardtanh:InplaceHardtanh:input min_val max_val
scatter:InplaceScatterSrc,InplaceScatterValue:input dim index src
scatter:InplaceScatterSrcReduce,InplaceScatterValueReduce:input dim index src reduce
scatter_add:InplaceScatterAdd:input dim index src
index_add:InplaceIndexAddExt:input dim index src alpha
index_put:InplaceIndexPut:input indices value accumulate
index_copy:InplaceIndexCopy:input dim index value
index_fill:InplaceIndexFillScalar,InplaceIndexFillTensor:input dim index value
masked_scatter:InplaceMaskedScatter:input mask src
rows_update:ScatterUpdate:input index value
rows_add:ScatterAdd:input index value
rows_sub:ScatterSub:input index value
rows_max:ScatterMax:input index value
rows_min:ScatterMin:input index value
rows_mul:ScatterMul:input index value
rows_div:ScatterDiv:input index value
nd_update:ScatterNdUpdate:input index src
nd_add:ScatterNdAdd:input index src
nd_sub:ScatterNdSub:input index src
nd_max:ScatterNdMax:input index src
nd_min:ScatterNdMin:input index src
nd_mul:ScatterNdMul:input index src
nd_div:ScatterNdDiv:input index src
normal_into:InplaceNormal:input mean std seed offset
uniform_into:InplaceUniform:input low high seed offset
random_into:InplaceRandom:input low high seed offset
exponential_into:InplaceExponential:input rate seed offset
bernoulli_into:InplaceBernoulliScalar,InplaceBernoulliTensor:input p seed offset
"""


def labels(ndim: int, drop, dims, front: bool, indices_ndim: int) -> list:
    """What each dim of the written region is: a target dim, or ("index", j) for a dim of the index tensors."""
    kept = [d for d in range(ndim) if d not in drop and d not in dims]
    if not dims:
        return kept
    at = 0 if front else sum(d < dims[0] for d in kept)
    return [*kept[:at], *(("index", j) for j in range(indices_ndim)), *kept[at:]]


def write(call: Call) -> OpSpec:
    """`x[index] = value`: `bounds` and `drop` as for "slice", `dims`, `indices` and `front` as for "index".

    With a `factor` the value, times that, is added instead: linear in target and value together.
    """
    x, value = call.args["input"], call.args["value"]
    bounds, drop, dims, indices, front = (call.args[k] for k in ("bounds", "drop", "dims", "indices", "front"))
    wide = broadcast_shapes(*(i.shape for i in indices)) if dims else ()
    region = labels(x.ndim, drop, dims, front, len(wide))
    shape = tuple(wide[e[1]] if isinstance(e, tuple) else len(range(*bounds[e])) for e in region)
    tensor = hasattr(value, "index")
    if tensor and (len(value.shape) > len(shape) or broadcast_shapes(value.shape, shape) != shape):
        raise OpRuleError(f"For 'setitem', a value of shape {list(value.shape)} does not fit what is written, "
                          f"{list(shape)}.", "", "The value broadcasts to the indexed region.", "reshape the value")
    cases = []
    for d in range(x.ndim):
        ins = [S(d) if o is x else R for o in call.operands]
        if tensor and d in region and bounds[d] == (0, x.shape[d], 1):
            v = region.index(d) - len(shape) + value.ndim
            if v >= 0 and value.shape[v] == x.shape[d] and x.shape[d] != 1:
                ins[value.index] = S(v)
        cases.append(Case(tuple(ins), (S(d),)))

    factor = call.get("factor")
    if factor is not None:
        cases += [call.case({x.index: p, value.index: p}, p) for p in SUMS]

    def local(at: Local) -> LocalCall:
        held = at.in_pieces(value.index) if tensor else ()
        if factor is not None:
            return LocalCall("write_add", (x, value, tuple(dims), tuple(indices), at.in_pieces(x.index), held, value.shape,
                                           x.shape, factor))
        return LocalCall("write", (x, value, tuple(bounds), tuple(drop), tuple(dims), tuple(indices), bool(front),
                                at.in_pieces(x.index), held, value.shape if tensor else ()))
    return OpSpec((x.shape,), tuple(cases), local, any_rows=True)


def _at(call: Call, dims, indices, factor: float | None = None) -> OpSpec:
    """Writing `value` at index tensors of neighbouring `dims`, whole slices elsewhere; added with a `factor`."""
    x = call.args["input"]
    return write(Call(call.op, {"input": x, "value": call.args["value"], "bounds": tuple((0, n, 1) for n in x.shape),
                                "drop": (), "dims": tuple(dims), "indices": tuple(indices), "front": False,
                                "factor": factor}, call.operands))


def index_put(call: Call) -> OpSpec:
    """`index_put(indices, values, accumulate)`: index tensors of the leading dims."""
    indices = call.args["indices"]
    if any(i.dtype == "bool" for i in indices):
        raise OpRuleError("For 'index_put', a boolean mask has no rule.", "", "How many elements it picks depends on data.",
                          ("x[mask] = value, with one mask", "nonzero(mask, as_tuple=True) of a replicated mask"))
    added = call.args.get("attrs", {}).get("accumulate") or call.get("accumulate")
    return _at(call, range(len(indices)), indices, 1 if added else None)


def index_rows(call: Call) -> OpSpec:
    """`index_copy_`, `index_fill_`: rows of `dim`; what `x.index_fill` makes of the dim, a tensor, says nothing here."""
    x = call.args["input"]
    if hasattr(call.args["dim"], "shape"):
        return OpSpec((x.shape,), ())
    return _at(call, (int(call.args["dim"]) % x.ndim,), (call.args["index"],))


def index_add(call: Call) -> OpSpec:
    """`index_add(dim, index, src)`: rows of `src` added to rows of `input`; MindSpore's own op, unless `dim` is cut."""
    x, dim = call.args["input"], call.get("dim")
    d = int(dim if dim is not None else call.args["attrs"]["axis"]) % x.ndim
    spec = _at(Call(call.op, {**call.args, "value": call.args["src"]}, call.operands), (d,), (call.args["index"],),
               call.get("alpha", 1))
    return replace(spec, local=lambda at: spec.local(at) if spec.local and at.ins[x.index].dim_axes[d] else None)


def rows(call: Call) -> OpSpec:
    """`ops.scatter_update` and its kin: rows of dim 0, by an index of any shape; of extremes and products dim 0 is whole."""
    factor = {"rows_add": 1, "rows_sub": -1}.get(call.op)
    x, ids = call.args["input"], call.args["index"]
    if factor is not None or call.op == "rows_update":
        return _at(call, (0,), (ids,), factor)
    cases = [call.case({x.index: S(d), call.args["value"].index: S(d - 1 + ids.ndim)}, S(d)) for d in range(1, x.ndim)]
    return OpSpec((x.shape,), tuple(cases))


def elementwise(call: Call) -> OpSpec:
    """Result as the target, from operands that broadcast to it; linear in all tensors together."""
    x = call.operands[0]
    cases = []
    for d, n in enumerate(x.shape):
        ins = []
        for o in call.operands:
            k = d - x.ndim + o.ndim
            if k >= 0 and o.shape[k] not in (1, n):
                raise Unfit
            ins.append(S(k) if k >= 0 and o.shape[k] == n and n != 1 or o is x else R)
        cases.append(Case(tuple(ins), (S(d),)))
    return OpSpec((x.shape,), tuple(cases))


def copy(call: Call) -> OpSpec:
    """`copy_`: a Partial target takes a source that is Partial in the same way; every rank copies its own."""
    spec = elementwise(call)
    return replace(spec, cases=(*spec.cases, *(Case((p, p), (p,)) for p in PARTIALS)))


def zero(call: Call) -> OpSpec:
    """`zero_`: zero is also a sum of zeros."""
    spec = elementwise(call)
    return replace(spec, cases=(*spec.cases, *call.like_first((), SUMS)))


INPLACE = parse(INPLACE_NAMES)
NAMES = "index_put:IndexPut:input value indices"
RULES = {"write": write, "fill": elementwise, "zero": zero, "copy": copy, "index_put": index_put, "index_add": index_add,
         "index_copy": index_rows,
         "index_fill": index_rows, **{f"rows_{k}": rows for k in ("update", "add", "sub", "max", "min", "mul", "div")},
         **{f"nd_{k}": scatter_rows for k in ("update", "add", "sub", "max", "min", "mul", "div")}}
