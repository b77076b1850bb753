# SPDX-License-Identifier: Apache-2.0
"""Rearrangements that work along some dims and leave the others alone: flip, roll, pad, diagonals, grids, repeats.

The dims an op works along must be whole on every rank; every other dim may be sharded, and a reduction that commutes
with moving elements about passes. Where shards of the worked-on dim line up with shards of the result (repeats of an
evenly split dim, a trace of rows), they stay. Views proper are in `view.py`.
"""
from __future__ import annotations

from math import prod

from ...errors import OpRuleError
from .spec import PARTIALS, SUMS, Call, Case, Local, LocalCall, OpSpec, P, R, S, any_layout, dims_of
from .view import flatten, rearrange

NAMES = """
expand_as:ExpandAs:input other
flatten_order:DeprecatedFlatten:input order start_dim end_dim
repeat_interleave:DeprecatedRepeatInterleave:input repeats dim
repeat_interleave:RepeatInterleaveInt,RepeatInterleaveTensor:input repeats dim output_size
unbind:Unstack:input dim
slice_sizes:Slice:input begin size
flip:ReverseV2:input dim
roll:Roll:input shifts dims
pad:PadV3:input pads value
pad:ConstantPadND:input pads value
pad:ReflectionPad1D,ReflectionPad2D,ReflectionPad3D,ReplicationPad1D,ReplicationPad2D,ReplicationPad3D:input pads
pad_pairs:Pad:input
diag:DiagExt:input diagonal
diag_all:Diag:input
diagonal:Diagonal:input offset dim1 dim2
trace:Trace,TraceExt:input
trace:TraceV2:input offset dim1 dim2 dtype
meshgrid:Meshgrid:tensors indexing
"""



def expand_as(call: Call) -> OpSpec:
    """`x.expand_as(other)`: only `other`'s global shape matters."""
    x, other = call.operands[0], call.args["other"]
    shape = other.shape
    lead = len(shape) - x.ndim
    cases = [Case((S(d),), (S(d + lead),)) for d in range(x.ndim) if x.shape[d] == shape[d + lead]]
    cases += [Case((p,), (p,)) for p in PARTIALS]
    new = [Case((R, S(k)), (S(k),)) for k, n in enumerate(shape) if k < lead or x.shape[k - lead] != n]
    return OpSpec((shape,), (*new, *any_layout((*cases, Case((R,), (R,))), other.ndim)),
                  lambda at: LocalCall("broadcast_to", (x, at.out_shape())), dtypes=(x.dtype,), shape_only=(1,))


def flatten_order(call: Call) -> OpSpec:
    """The NumPy-like `x.flatten("C")`; column-major order is refused."""
    if call.get("order", "C") != "C":
        raise OpRuleError(f"For 'flatten', order {call.args['order']!r} has no rule.", "",
                          "Shards are row-major.", "x.T.flatten()")
    return flatten(call)


def repeat_interleave(call: Call) -> OpSpec:
    """Each row of `dim` repeated `repeats` times in place; an evenly split dim stays split."""
    x, n = call.operands[0], call.args["repeats"]
    if not isinstance(n, int):
        n = n[0] if isinstance(n, tuple) and len(n) == 1 and isinstance(n[0], int) else None
    if n is None:
        return repeat_rows(call)
    if call.get("dim") is None:
        return rearrange(call, (prod(x.shape) * n,), {})
    d = int(call.args["dim"]) % x.ndim
    out = (*x.shape[:d], x.shape[d] * n, *x.shape[d + 1:])
    return rearrange(call, out, {i: i for i in range(x.ndim)}, ((0, d, x.shape[d]),))


def repeat_rows(call: Call) -> OpSpec:
    """A count per row: told in numbers, `dim` must be whole; told by a tensor, the result's shape depends on data."""
    x, counts, dim = call.operands[0], call.args["repeats"], call.get("dim")
    if hasattr(counts, "shape"):
        return OpSpec((None,), (), by_data=True)
    if dim is None:
        return OpSpec(((sum(counts),),), (), lambda at: LocalCall("repeat_rows", (x, counts)))
    d = int(dim) % x.ndim
    return rearrange(call, (*x.shape[:d], sum(counts), *x.shape[d + 1:]), {i: i for i in range(x.ndim) if i != d},
                     local=lambda at: LocalCall("repeat_rows", (x, counts, d)))


def slice_sizes(call: Call) -> OpSpec:
    """The classic `Slice(begin, size)`; size -1 means up to the end."""
    from .index import slices
    x = call.operands[0]
    begin, size = call.args["begin"], call.args["size"]
    bounds = tuple((int(lo), x.shape[d] if n == -1 else int(lo) + int(n), 1)
                   for d, (lo, n) in enumerate(zip(begin, size)))
    return slices(Call("slice", {"input": x, "bounds": bounds}, call.operands))


def _except(call: Call, dims, out=None, partials=PARTIALS) -> OpSpec:
    """Every dim but `dims` may be sharded; further operands are replicated constants."""
    x = call.operands[0]
    cases = call.like_first((d for d in range(x.ndim) if d not in dims), partials)
    return OpSpec((x.shape if out is None else tuple(out),), tuple(cases))


def flip(call: Call) -> OpSpec:
    """`flip(dims)`."""
    return _except(call, dims_of(call.args["dim"], call.operands[0].ndim))


def roll(call: Call) -> OpSpec:
    """`roll(shifts, dims)`; without dims the tensor is rolled as if flat."""
    dims = call.get("dims")
    nd = call.operands[0].ndim
    return _except(call, range(nd) if dims is None or dims == () else dims_of(dims, nd))


def pad(call: Call) -> OpSpec:
    """`pad` with pairs from the last dim backwards; a sum may be padded with zeros or with its own elements."""
    x, pads = call.operands[0], call.args["pads"]
    if not isinstance(pads, tuple | list):
        raise OpRuleError("For 'pad', the padding is a tensor.", "", "It decides the result's shape, so a rule must "
                          "know it.", "pass it as a tuple of ints")
    pairs = [(0, 0)] * (x.ndim - len(pads) // 2) + [(int(pads[i]), int(pads[i + 1])) for i in range(len(pads) - 2, -1, -2)]
    mode = call.args.get("attrs", {}).get("mode")
    constant = mode == "constant" if mode else "value" in call.args
    value = call.args.get("value")
    zero = isinstance(value, int | float | bool) and value == 0
    return _padded(call, pairs, PARTIALS if not constant else SUMS if zero else ())


def _padded(call, pairs, partials):
    x = call.operands[0]
    return _except(call, [d for d, p in enumerate(pairs) if p != (0, 0)], [n + sum(p) for n, p in zip(x.shape, pairs)],
                   partials)


def pad_pairs(call: Call) -> OpSpec:
    """The classic `Pad`: a pair per dim, zeros."""
    return _padded(call, [tuple(map(int, p)) for p in call.args["attrs"]["paddings"]], SUMS)


def diag(call: Call) -> OpSpec:
    """`mint.diag`: a vector to a matrix, or a matrix to its diagonal."""
    x, k = call.operands[0], call.get("diagonal")
    if x.ndim == 1:
        n = x.shape[0] + abs(int(k or 0))
        return OpSpec(((n, n),), tuple(call.like_first((), SUMS)))
    if k is None:
        raise OpRuleError("For 'x.diag()', a matrix means different things on different devices.", "",
                          "MindSpore gives the diagonal on Ascend, and on CPU a matrix of matrices.",
                          ("x.diagonal()", "mint.diag(x)"))
    return _diagonal(call, int(k), 0, 1)


def diag_all(call: Call) -> OpSpec:
    """The classic `Diag`: the elements on the diagonal of a tensor of twice the dims."""
    shape = call.operands[0].shape
    return OpSpec(((*shape, *shape),), tuple(call.like_first((), SUMS)))


def diagonal(call: Call) -> OpSpec:
    """`diagonal(offset, dim1, dim2)`: the other dims first, then the diagonal."""
    return _diagonal(call, int(call.get("offset", 0)), int(call.get("dim1", 0)), int(call.get("dim2", 1)))


def _diagonal(call, k, a, b):
    x = call.operands[0]
    a, b = a % x.ndim, b % x.ndim
    n = max(0, min(x.shape[a] + min(k, 0), x.shape[b] - max(k, 0)))
    kept = [d for d in range(x.ndim) if d not in (a, b)]
    return rearrange(call, (*(x.shape[d] for d in kept), n), {d: i for i, d in enumerate(kept)})


def trace(call: Call) -> OpSpec:
    """The sum of a matrix's diagonal: rows or columns that are split give summands."""
    x = call.operands[0]
    k, dims = int(call.get("offset", 0)), (int(call.get("dim1", 0)), int(call.get("dim2", 1)))
    if x.ndim != 2 or sorted(d % 2 for d in dims) != [0, 1]:
        return OpSpec((tuple(n for d, n in enumerate(x.shape) if d not in (dims[0] % x.ndim, dims[1] % x.ndim)),), ())
    k = k if dims[0] % 2 == 0 else -k
    cases = [Case((S(0),), (P,)), Case((S(1),), (P,))] + call.like_first((), SUMS)
    if x.dtype == "bool" and "offset" in call.args:  # `x.trace()` of booleans is a boolean, and no sum
        cases = []

    def local(at: Local) -> LocalCall | None:
        if not any(at.ins[0].dim_axes) and call.get("dtype") is None:  # a dtype makes MindSpore's gradient have it, too
            return None
        row, col = at.in_offset(0)
        return LocalCall("trace_shard", (x, k + row - col, call.get("dtype")))
    return OpSpec(((),), tuple(cases), local)


def meshgrid(call: Call) -> OpSpec:
    """One grid per vector; the dim a vector runs along may be split."""
    xs = call.operands
    where = list(range(len(xs)))
    if len(xs) > 1 and call.get("indexing", 0) in (1, "xy"):
        where[:2] = 1, 0
    shape = [0] * len(xs)
    for i, x in enumerate(xs):
        shape[where[i]] = prod(x.shape)
    cases = [Case(tuple(S(0) if j == i else R for j in range(len(xs))), (S(where[i]),) * len(xs))
             for i, x in enumerate(xs) if x.ndim]
    return OpSpec((tuple(shape),) * len(xs), tuple(cases))


RULES = {"expand_as": expand_as, "flatten_order": flatten_order, "repeat_interleave": repeat_interleave,
         "slice_sizes": slice_sizes, "flip": flip, "roll": roll, "pad": pad, "pad_pairs": pad_pairs, "diag": diag,
         "diag_all": diag_all, "diagonal": diagonal, "trace": trace, "meshgrid": meshgrid}
