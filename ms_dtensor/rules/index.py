# SPDX-License-Identifier: Apache-2.0
"""Slicing and looking up: a dim that is taken whole stays sharded; a looked-up dim may be sharded by masking.

A lookup in a sharded table is the vocabulary-parallel embedding: each rank shifts the indices by its offset, looks up
those that are its own, and gives zeros for the others: Partial(sum). No rank ever reads another rank's rows.
"""
from __future__ import annotations

from ..placements import REDUCE_OPS, Partial
from .spec import Call, Case, Invoke, Local, OpSpec, P, R, S

_PARTIALS = tuple(Partial(op) for op in REDUCE_OPS)


def slices(call: Call) -> OpSpec:
    """Basic indexing, as (start, stop, step) per dim plus the dims to drop: op "slice" of our own `__getitem__`."""
    x = call.operands[0]
    bounds, drop = call.args["bounds"], call.args.get("drop", ())
    extents = [max(0, -(-(hi - lo) // st)) if st > 0 else max(0, -(-(lo - hi) // -st)) for lo, hi, st in bounds]
    kept = [d for d in range(x.ndim) if d not in drop]
    shape = tuple(extents[d] for d in kept)
    whole = [d for d in kept if bounds[d] == (0, x.shape[d], 1)]
    cases = [Case((S(d),), (S(kept.index(d)),)) for d in whole] + [Case((p,), (p,)) for p in _PARTIALS]

    def local(at: Local) -> Invoke:
        mine = at.in_shape(0)
        return Invoke("slice", (x, tuple((0, mine[d], 1) if d in whole else bounds[d] for d in range(x.ndim)), drop))
    return OpSpec((shape,), tuple(cases), local)


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
    return slices(Call("slice", {"input": x, "bounds": tuple(bounds)}, call.operands))


def narrow(call: Call) -> OpSpec:
    """`narrow(dim, start, length)`."""
    x = call.operands[0]
    d = int(call.args["dim"]) % x.ndim
    lo = int(call.args["start"]) % max(x.shape[d], 1) if call.args["start"] < 0 else int(call.args["start"])
    bounds = tuple((lo, lo + int(call.args["length"]), 1) if i == d else (0, n, 1) for i, n in enumerate(x.shape))
    return slices(Call("slice", {"input": x, "bounds": bounds}, call.operands))


def select(call: Call) -> OpSpec:
    """`select(dim, index)`."""
    x = call.operands[0]
    d = int(call.args["dim"]) % x.ndim
    i = int(call.args["index"]) % x.shape[d]
    bounds = tuple((i, i + 1, 1) if k == d else (0, n, 1) for k, n in enumerate(x.shape))
    return slices(Call("slice", {"input": x, "bounds": bounds, "drop": (d,)}, call.operands))


def gather(call: Call) -> OpSpec:
    """Rows of `input` along `dim` by an index tensor of any shape (`ops.gather`, embedding, `x[i]`)."""
    table, ids = call.args["input"], call.args["index"]
    d = int(call.get("dim", 0)) % table.ndim
    lead = len(table.shape[:d])
    shape = (*table.shape[:d], *ids.shape, *table.shape[d + 1:])

    def case(t, i, out):
        return Case(tuple(t if o is table else i for o in call.operands), (out,))
    cases = [case(R, S(j), S(lead + j)) for j in range(ids.ndim)]
    cases += [case(S(k), R, S(k if k < d else k - 1 + ids.ndim)) for k in range(table.ndim) if k != d]
    cases += [case(S(d), R, P)] + [case(Partial(op), R, Partial(op)) for op in ("sum", "avg")]

    def local(at: Local) -> Invoke | None:
        if not at.ins[table.index].dim_axes[d]:
            return None
        return Invoke("gather_shard", (table, ids, d, at.in_offset(table.index)[d]))
    return OpSpec((shape,), tuple(cases), local)


def embedding(call: Call) -> OpSpec:
    """`embedding(index, weight)`: a gather along dim 0 with the arguments the other way round."""
    if call.get("max_norm") is not None:
        return OpSpec(((*call.args["index"].shape, call.args["input"].shape[1]),), ())
    spec = gather(Call("gather", {**call.args, "dim": 0}, call.operands))
    table, ids = call.args["input"], call.args["index"]
    return OpSpec(spec.shapes, spec.cases, lambda at: spec.local(at) or Invoke("gather", (table, ids, 0)))


def take_along(call: Call) -> OpSpec:
    """`gather(x, dim, index)` element-wise: other dims may be sharded where index and input have the same extent."""
    x, ids = call.args["input"], call.args["index"]
    d = int(call.args["dim"]) % x.ndim

    def case(a, b, out):
        return Case(tuple(a if o is x else b for o in call.operands), (out,))
    cases = [case(S(k), S(k), S(k)) for k in range(x.ndim) if k != d and x.shape[k] == ids.shape[k]]
    cases += [case(R, S(d), S(d)), case(S(d), R, P)] + [case(Partial(op), R, Partial(op)) for op in ("sum", "avg")]

    def local(at: Local) -> Invoke | None:
        if not at.ins[x.index].dim_axes[d]:
            return None
        return Invoke("take_along_shard", (x, ids, d, at.in_offset(x.index)[d]))
    return OpSpec((ids.shape,), tuple(cases), local)


def triangle(call: Call) -> OpSpec:
    """`tril` / `triu`: the diagonal shifts by the offset of the shard."""
    x = call.operands[0]
    k = int(call.get("diagonal", 0))
    cases = [Case((S(d),), (S(d),)) for d in range(x.ndim)] + [Case((op,), (op,)) for op in _PARTIALS[:2]]

    def local(at: Local) -> Invoke | None:
        row, col = at.in_offset(0)[-2:]
        return Invoke(call.op, (x, k + row - col)) if row or col else None
    return OpSpec((x.shape,), tuple(cases), local)
