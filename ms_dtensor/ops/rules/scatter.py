# SPDX-License-Identifier: Apache-2.0
"""Writing rows or elements by index, one-hot codes, sorted search; and what has a shape that depends on data.

Dims that the index does not address may be sharded alike on input, index and source. Setting or adding rows is linear
in (input, source) together. Ops whose result *shape* depends on values (nonzero, unique, masked_select) work on what
is whole: of shards, a global shape would have to be agreed upon by all ranks before anyone could go on.
"""
from __future__ import annotations

from ...errors import OpRuleError
from .spec import SUMS, Call, Case, OpSpec, P, S, summand

NAMES = """
scatter:Scatter,ScatterValue,DeprecatedScatter:input dim index src reduce
scatter_add:ScatterAddExt:input dim index src
scatter:TensorScatterElements:input index src dim reduce
index_add:IndexAddExt:input dim index src alpha
index_add:DeprecatedIndexAdd:input index src dim
index_add:IndexAdd:input index src
index_fill:IndexFill:input dim index value
scatter_rows:TensorScatterUpdate,TensorScatterMax,TensorScatterMin,TensorScatterMul,TensorScatterDiv:input index src
scatter_rows_linear:TensorScatterAdd,TensorScatterSub:input index src
scatter_nd:ScatterNd:index src shape
masked_scatter:MaskedScatter:input mask src
one_hot:OneHot,OneHotExt:index depth on off dim
searchsorted:SearchSorted:sorted values sorter dtype right
masked_select:MaskedSelect:input mask
nonzero:NonZero:input
nonzero_tuple:NonZeroExt:input
unique:Unique:input
unique_method:DeprecatedUnique:input sorted return_inverse return_counts dim
unique_counts:Unique2:input sorted return_inverse return_counts
unique_counts:UniqueDim:input sorted return_inverse dim
unique_consecutive:UniqueConsecutive:input return_inverse return_counts dim
unique_with_pad:UniqueWithPad:input pad_num
bincount:BincountExt:input weights minlength
"""


def _case(call: Call, out, **places) -> Case:
    """A case by argument name; operands that are not named are replicated."""
    return call.case({call.args[k].index: p for k, p in places.items() if hasattr(call.args.get(k), "index")}, out)


def scatter(call: Call) -> OpSpec:
    """`scatter(dim, index, src or value)`: elements set (or, with `reduce`, combined)."""
    x, ids, src = call.args["input"], call.args["index"], call.get("src")
    if call.get("reduce", 0) not in (0, 1, "none", "add"):
        raise OpRuleError(f"For '{call.op}', 'reduce' {call.args['reduce']!r} has no rule.", "",
                          "MindSpore's kernels add or set; on CPU another reduction gives wrong numbers.",
                          "reduce='add' of logarithms, or x * scatter(ones, factors) where no element comes twice")
    d = int(call.get("dim", 0)) % max(x.ndim, 1)
    tensor = hasattr(src, "shape") and src.ndim == x.ndim
    cases = [_case(call, S(k), input=S(k), index=S(k), **({"src": S(k)} if tensor else {}))
             for k in range(x.ndim) if k != d and x.shape[k] == ids.shape[k] and (not tensor or src.shape[k] == x.shape[k])]
    adds = call.op == "scatter_add" or call.get("reduce") in (1, "add")
    if tensor and (adds or call.get("reduce", 0) in (0, "none")):
        cases += [_case(call, p, input=p, src=p) for p in SUMS]
    if tensor and adds and ids.ndim and ids.shape[d] == src.shape[d]:  # each rank adds what it has to its summand
        case = _case(call, P, input=P, index=S(d), src=S(d))
        # no shard may be empty: a rank with nothing to add would leave out its summand of the input, too
        cases.append(Case(case.ins, case.outs, ((ids.index, d, ids.shape[d]), (src.index, d, src.shape[d]))))
    return OpSpec((x.shape,), tuple(cases))


def whole(call: Call) -> OpSpec:
    """Same shape as the input, and no case but all-replicated: what it works on is known only from values."""
    return OpSpec((call.operands[0].shape,), ())


def scatter_rows(call: Call) -> OpSpec:
    """`tensor_scatter_*`: the last dim of the index addresses leading dims; the trailing ones may be sharded."""
    x, ids = call.args["input"], call.args["index"]
    k = ids.shape[-1]
    cases = [_case(call, S(d), input=S(d), src=S(d - k + ids.ndim - 1)) for d in range(k, x.ndim)]
    if call.op in ("scatter_rows_linear", "nd_add", "nd_sub"):
        cases += [_case(call, p, input=p, src=p) for p in SUMS]
    return OpSpec((x.shape,), tuple(cases))


def scatter_nd(call: Call) -> OpSpec:
    """Rows added into zeros of a given shape: index and source split alike give summands."""
    ids, shape = call.args["index"], tuple(call.args["shape"])
    cases = [_case(call, summand(call.args["src"].dtype), index=S(j), src=S(j)) for j in range(ids.ndim - 1)]
    return OpSpec((shape,), (*cases, *(_case(call, p, src=p) for p in SUMS)))


def one_hot(call: Call) -> OpSpec:
    """A new dim of `depth` classes, -1 for as many as the labels need; index dims may be split."""
    ids, depth = call.args["index"], int(call.args["depth"])
    if depth < -1:
        raise OpRuleError(f"For 'one_hot', the number of classes is {depth}.", "", "",
                          ("pass num_classes", "-1, for one more than the largest label"))
    if depth == -1:
        return OpSpec((None,), (), by_data=True)
    d = int(call.get("dim", -1)) % (ids.ndim + 1)
    cases = [_case(call, S(j + (j >= d)), index=S(j)) for j in range(ids.ndim)]
    on = call.args["on"]
    return OpSpec(((*ids.shape[:d], depth, *ids.shape[d:]),), tuple(cases),
                  dtypes=(on.dtype,) if hasattr(on, "dtype") else None)


def searchsorted(call: Call) -> OpSpec:
    """Positions of `values` in the sorted last dim of `sorted`."""
    table, values = call.args["sorted"], call.args["values"]
    if not hasattr(values, "shape"):
        return OpSpec(((),), ())
    if table.ndim == 1:
        cases = [_case(call, S(k), values=S(k)) for k in range(values.ndim)]
    else:
        cases = [_case(call, S(k), sorted=S(k), values=S(k), sorter=S(k)) for k in range(values.ndim - 1)]
        cases.append(_case(call, S(values.ndim - 1), values=S(values.ndim - 1)))
    if call.get("sorter") is None:
        cases.append(_case(call, P, sorted=S(table.ndim - 1)))  # a position is a count of what is less
    return OpSpec((values.shape,), tuple(cases))


def by_data(call: Call) -> OpSpec:
    """masked_select, nonzero (argwhere, where(condition)), unique, bincount: only of what is whole, alike on every rank."""
    count = _RESULTS.get(call.op, 1)
    if call.op == "nonzero_tuple":
        count = call.operands[0].ndim
    elif call.op == "unique_method":
        count += bool(call.get("return_inverse")) + bool(call.get("return_counts"))
    return OpSpec((None,) * count, (), by_data=True)


_RESULTS = {"unique": 2, "unique_counts": 3, "unique_consecutive": 3}


RULES = {"scatter": scatter, "scatter_add": scatter,
         "scatter_rows": scatter_rows, "scatter_rows_linear": scatter_rows, "scatter_nd": scatter_nd,
         "masked_scatter": whole, "one_hot": one_hot, "searchsorted": searchsorted,
         "unique_with_pad": lambda call: OpSpec((call.operands[0].shape,) * 2, ()),
         **dict.fromkeys(("masked_select", "nonzero", "nonzero_tuple", "unique", "unique_method", "unique_counts",
                          "unique_consecutive", "bincount"), by_data)}
