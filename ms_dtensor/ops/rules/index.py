# SPDX-License-Identifier: Apache-2.0
"""Slicing and looking up: a dim that is taken whole stays sharded; a looked-up dim may be sharded by masking.

A lookup in a sharded table is the vocabulary-parallel embedding: each rank shifts the indices by its offset, looks up
those that are its own, and gives zeros for the others: Partial(sum). No rank ever reads another rank's rows.
"""
from __future__ import annotations

from .spec import PARTIALS, SUMS, Call, Case, Local, LocalCall, OpSpec, R, S, broadcast_shapes, summand

NAMES = """
gather:DeprecatedGather:input index dim batch_dims
index_select:IndexSelect,DeprecatedIndexSelect:input dim index
take:DeprecatedTake:input index dim mode
index_select:Take:input index
gather_nd:GatherNd:input index
embedding_lookup:EmbeddingLookup:input index offset
"""


def slices(call: Call) -> OpSpec:
    """Basic indexing, as (start, stop, step) per dim plus the dims to drop: op "slice" of our own `__getitem__`."""
    x = call.operands[0]
    bounds, drop = call.args["bounds"], call.args.get("drop", ())
    kept = [d for d in range(x.ndim) if d not in drop]
    shape = tuple(len(range(*bounds[d])) for d in kept)
    whole = [d for d in kept if bounds[d] == (0, x.shape[d], 1)]
    cases = [Case((S(d),), (S(kept.index(d)),)) for d in whole] + call.like_first((), PARTIALS)

    def local(at: Local) -> LocalCall:
        mine = at.in_shape(0)
        return LocalCall("slice", (x, tuple((0, mine[d], 1) if d in whole else bounds[d] for d in range(x.ndim)), drop))
    return OpSpec((shape,), tuple(cases), local)


def _sliced(call: Call, bounds, drop=()) -> OpSpec:
    return slices(Call("slice", {"input": call.operands[0], "bounds": tuple(bounds), "drop": drop}, call.operands))


def strided_slice(call: Call) -> OpSpec:
    """The classic `StridedSlice`, without masks, as `x[a:b]` sends it."""
    x = call.operands[0]
    begin, end, step = (call.args[k] for k in ("begin", "end", "strides"))
    bounds = []
    for d, n in enumerate(x.shape):
        if d < len(begin):
            lo, hi, st = begin[d], end[d], step[d]
            lo, hi = (v + n if v < 0 else v for v in (lo, hi))
            bounds.append((min(lo, n), min(hi, n), st) if st > 0 else (lo, hi, st))
        else:
            bounds.append((0, n, 1))
    return _sliced(call, bounds)


def narrow(call: Call) -> OpSpec:
    """`narrow(dim, start, length)`."""
    x = call.operands[0]
    d = int(call.args["dim"]) % x.ndim
    lo = int(call.args["start"]) % max(x.shape[d], 1) if call.args["start"] < 0 else int(call.args["start"])
    return _sliced(call, ((lo, lo + int(call.args["length"]), 1) if i == d else (0, n, 1) for i, n in enumerate(x.shape)))


def select(call: Call) -> OpSpec:
    """`select(dim, index)`."""
    x = call.operands[0]
    d = int(call.args["dim"]) % x.ndim
    i = int(call.args["index"]) % x.shape[d]
    return _sliced(call, ((i, i + 1, 1) if k == d else (0, n, 1) for k, n in enumerate(x.shape)), (d,))


def gather(call: Call) -> OpSpec:
    """Rows of `input` along `dim` by an index tensor of any shape (`ops.gather`, embedding, `x[i]`)."""
    table, ids = call.args["input"], call.args["index"]
    d = int(call.get("dim", 0)) % max(table.ndim, 1)
    batch = int(call.get("batch_dims", 0))
    shape = (*table.shape[:d], *ids.shape[batch:], *table.shape[d + 1:])

    def case(t, i, out):
        return _pair(call, table, t, i, out)
    partials = [case(p, R, p) for p in SUMS]
    if batch:
        batch %= max(ids.ndim, 1)
        return OpSpec((shape,), (*(case(S(k), S(k), S(k)) for k in range(batch)), *partials))
    cases = [case(R, S(j), S(d + j)) for j in range(ids.ndim)]
    cases += [case(S(k), R, S(k if k < d else k - 1 + ids.ndim)) for k in range(table.ndim) if k != d]
    cases += [case(S(d), R, summand(table.dtype)), *partials]

    def local(at: Local) -> LocalCall | None:
        if not at.ins[table.index].dim_axes[d]:
            return None
        return LocalCall("gather_shard", (table, ids, d, at.in_offset(table.index)[d], table.shape[d]))
    return OpSpec((shape,), tuple(cases), local)


def index_select(call: Call) -> OpSpec:
    """`index_select(dim, index)`, `take(index, dim)`: a gather under another name; without dim the table is flat."""
    x, ids = call.args["input"], call.args["index"]
    if call.get("dim") is None:
        cases = [_pair(call, x, R, S(j), S(j)) for j in range(ids.ndim)]
        cases += [_pair(call, x, p, R, p) for p in SUMS]
        return OpSpec((ids.shape,), tuple(cases))
    spec = gather(call)
    d = int(call.args["dim"]) % max(x.ndim, 1)
    if call.op == "take":  # clips or wraps what is out of range, which a masked lookup would not see
        return OpSpec(spec.shapes, tuple(c for c in spec.cases if c.ins[x.index] != S(d)))
    return spec


def embedding(call: Call) -> OpSpec:
    """`embedding(index, weight)`: a gather along dim 0 whose rows at `padding_idx` have no gradient."""
    weight, ids = call.args["input"], call.args["index"]
    shape = (*ids.shape, *weight.shape[1:])
    if call.get("max_norm") is not None:  # renormalises rows of the table itself
        return OpSpec((shape,), ())
    if call.get("scale_grad_by_freq"):  # the gradient divides by counts over all indices
        return OpSpec((shape,), (call.case({weight.index: S(1)}, S(ids.ndim)),))
    spec = gather(Call("gather", {"input": weight, "index": ids, "dim": 0}, call.operands))
    padding = call.get("padding_idx")

    def local(at: Local) -> LocalCall | None:
        if not at.ins[weight.index].dim_axes[0]:
            return None
        return LocalCall("embedding_shard", (weight, ids, at.in_offset(weight.index)[0], weight.shape[0], padding))
    return OpSpec(spec.shapes, spec.cases, local)


def embedding_lookup(call: Call) -> OpSpec:
    """The classic `EmbeddingLookup(params, indices, offset)`; an offset shifts what is in range, so rows stay whole."""
    table = call.args["input"]
    spec = gather(Call("gather", {"input": table, "index": call.args["index"], "dim": 0}, call.operands))
    return OpSpec(spec.shapes, tuple(c for c in spec.cases if c.ins[table.index] != S(0)))


def gather_nd(call: Call) -> OpSpec:
    """Elements or slices by index tuples in the index's last dim; trailing dims of the table may be split."""
    x, ids = call.args["input"], call.args["index"]
    k = ids.shape[-1]
    lead = ids.ndim - 1
    cases = [_pair(call, x, R, S(j), S(j)) for j in range(lead)]
    cases += [_pair(call, x, S(d), R, S(d - k + lead)) for d in range(k, x.ndim)]
    cases += [_pair(call, x, p, R, p) for p in SUMS]
    return OpSpec(((*ids.shape[:-1], *x.shape[k:]),), tuple(cases))


def _pair(call: Call, table, t, i, out) -> Case:
    return Case(tuple(t if o is table else i for o in call.operands), (out,))


def advanced(call: Call) -> OpSpec:
    """Several index tensors at once, in NumPy's meaning: op "index" of our own `__getitem__`.

    `dims` are the indexed dims, `indices` broadcast to one shape, which stands in the result where the first indexed
    dim stood, or in front if the indexed dims were not neighbours.
    """
    x, dims, indices, front = (call.args[k] for k in ("input", "dims", "indices", "front"))
    wide = broadcast_shapes(*(i.shape for i in indices))
    rest = [d for d in range(x.ndim) if d not in dims]
    at = 0 if front else sum(d < dims[0] for d in rest)
    shape = (*(x.shape[d] for d in rest[:at]), *wide, *(x.shape[d] for d in rest[at:]))
    cases = []
    for j, n in enumerate(wide):
        k = [j - len(wide) + i.ndim for i in indices]
        split = {i.index: S(q) for i, q in zip(indices, k) if q >= 0 and i.shape[q] == n and n != 1}
        if split:
            cases.append(call.case(split, S(at + j)))
    for pos, d in enumerate(rest):
        cases.append(_pair(call, x, S(d), R, S(pos if pos < at else pos + len(wide))))
    cases += [_pair(call, x, S(d), R, summand(x.dtype)) for d in dims]
    cases += [_pair(call, x, p, R, p) for p in SUMS]

    def local(at_rank: Local) -> LocalCall:
        offsets = at_rank.in_offset(x.index)
        split = any(at_rank.ins[x.index].dim_axes[d] for d in dims)
        return LocalCall("index", (x, tuple(indices), tuple(dims), at, tuple(offsets[d] for d in dims),
                                tuple(x.shape[d] for d in dims), split))
    return OpSpec((shape,), tuple(cases), local)


def take_along(call: Call) -> OpSpec:
    """`gather(x, dim, index)` element-wise: other dims may be sharded where index and input have the same extent."""
    x, ids = call.args["input"], call.args["index"]
    d = int(call.args["dim"]) % max(x.ndim, 1)
    cases = [_pair(call, x, S(k), S(k), S(k)) for k in range(x.ndim) if k != d and x.shape[k] == ids.shape[k]]
    if x.ndim:
        cases += [_pair(call, x, R, S(d), S(d)), _pair(call, x, S(d), R, summand(x.dtype))]
    cases += [_pair(call, x, p, R, p) for p in SUMS]

    def local(at: Local) -> LocalCall | None:
        if not x.ndim or not at.ins[x.index].dim_axes[d]:
            return None
        return LocalCall("take_along_shard", (x, ids, d, at.in_offset(x.index)[d], x.shape[d]))
    return OpSpec((ids.shape,), tuple(cases), local)


def triangle(call: Call) -> OpSpec:
    """`tril` / `triu`: the diagonal shifts by the offset of the shard."""
    x = call.operands[0]
    k = int(call.get("diagonal", call.args.get("attrs", {}).get("diagonal", 0)))

    def local(at: Local) -> LocalCall | None:
        row, col = at.in_offset(0)[-2:]
        return LocalCall(call.op, (x, k + row - col)) if row or col else None
    return OpSpec((x.shape,), tuple(call.like_first(range(x.ndim), SUMS)), local)


RULES = {"index_select": index_select, "take": index_select, "gather_nd": gather_nd,
         "embedding_lookup": embedding_lookup, "index": advanced}
