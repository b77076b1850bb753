# SPDX-License-Identifier: Apache-2.0
"""Ops that only rearrange: each sharded input dim maps to the result dim that holds the same elements.

A reshape splits into groups of input dims and result dims with equal products. In a group the leftmost dim may stay
sharded, if the shards divide both extents; a dim that is alone in its group stays sharded however uneven. A sharded dim
of size 1 means that one rank has everything, as it has with any dim of size 1 of the result. Every reduction commutes
with a rearrangement, so any Partial passes. Local shapes are computed, never guessed.
"""
from __future__ import annotations

from math import prod

from ...core.placements import FusedShard, Shard
from ...errors import OpRuleError
from .spec import (
    PARTIALS,
    Call,
    Case,
    Local,
    LocalCall,
    OpSpec,
    R,
    S,
    any_layout,
    dims_of,
    mixed_sums,
    result_dtype,
    taken_once,
)

# Ops whose result is, on one device, a view of the first operand: a write to one of them is seen by the other.
VIEWS = frozenset("reshape view_as flatten flatten_order permute swap matrix_transpose unsqueeze squeeze "
                  "expand expand_as split split_equal chunk unbind slice slice_sizes strided_slice narrow select diagonal "
                  "identity real_view imag_view".split())



def view_kind(call: Call) -> str:
    """"" for no view; "view" where the local form shares storage; "copy" where one device has a view and shards do not."""
    if call.op == "cast":  # to its own dtype one device hands the operand back
        return "view" if result_dtype(call) == call.operands[0].dtype and not call.get("copy") else ""
    if call.op not in VIEWS:
        return ""
    steps = [b[2] for b in call.get("bounds", ())] + list(call.get("strides", ()))
    return "view" if all(s == 1 for s in steps) and "_view" not in call.op else "copy"


def order_of_view(call: Call, shape, thin: bool) -> str:
    """How a view's elements lie to those of its operand: "same", "other", "repeated", or "unsure".

    A reshape keeps them, but one device copies what lies strided; of a thin shard nobody can tell how the whole lies. What
    is contiguous MindSpore copies too if it does not begin where its storage does.
    """
    if call.op == "cast":
        return "itself"
    if call.op in ("unsqueeze", "squeeze"):
        return "same"
    if call.op in ("reshape", "view_as", "flatten", "flatten_order", "identity"):
        return "unsure" if thin or call.op == "identity" else "same"
    return "repeated" if prod(shape) > prod(call.operands[0].shape) else "other"


def rearrange(call: Call, out, mapping: dict[int, int], even=(), local=None, results: int = 1, by_part=()) -> OpSpec:
    """Spec of a rearrangement of one operand: input dim -> result dim, plus all Partials, plus what `_by_part` gives."""
    cases = [Case((S(d),), (S(k),) * results, tuple(e for e in even if e[1] == d)) for d, k in mapping.items()]
    cases += [Case((p,), (p,) * results) for p in PARTIALS]
    shapes = out if results > 1 or (out and isinstance(out[0], tuple)) else (tuple(out),)
    return OpSpec(tuple(shapes), (*cases, *by_part), local, any_rows=True)


def infer_shape(shape, wanted) -> tuple[int, ...]:
    """A target shape with its -1 filled in."""
    wanted = tuple(int(n) for n in wanted)
    if wanted.count(-1) == 1:
        rest = prod(n for n in wanted if n != -1)
        wanted = tuple(prod(shape) // rest if n == -1 and rest else (0 if n == -1 else n) for n in wanted)
    if prod(wanted) != prod(shape) or wanted.count(-1):
        raise OpRuleError(f"For 'reshape', a tensor cannot take the shape {list(wanted)}.", f"global shape {list(shape)}",
                          f"It has {prod(shape)} elements, the new shape {prod(wanted)}.", "check the global shape")
    return wanted


def groups(src, dst) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of input dims and result dims with equal products.

    Example:
        >>> from ms_dtensor.ops.rules.view import groups
        >>> groups((2, 3, 4), (6, 2, 2))
        [([0, 1], [0]), ([2], [1, 2])]
    """
    out, i, j = [], 0, 0
    while i < len(src) or j < len(dst):
        a, b = [], []
        m = n = 1
        if i < len(src):
            a.append(i)
            m = src[i]
            i += 1
        if j < len(dst):
            b.append(j)
            n = dst[j]
            j += 1
        while m != n:
            if m < n and i < len(src):
                m *= src[i]
                a.append(i)
                i += 1
            elif j < len(dst):
                n *= dst[j]
                b.append(j)
                j += 1
            else:
                break
        out.append((a, b))
    return out


def view_spec(call: Call, shape) -> OpSpec:
    """Spec of a reshape of the first operand to the global `shape`."""
    x = call.operands[0]
    mapping, even, by_part = {}, [], []
    if prod(x.shape) == 0 and tuple(shape) != x.shape:
        pairs = []
    elif tuple(shape) == x.shape:
        pairs = [([d], [d]) for d in range(x.ndim)]
    else:
        pairs = groups(x.shape, shape)
    for a, b in pairs:
        a = [d for d in a if x.shape[d] != 1]
        b = [d for d in b if shape[d] != 1]
        if not a or not b:
            continue
        mapping[a[0]] = b[0]
        if len(a) > 1 or len(b) > 1:
            even += [(0, a[0], x.shape[a[0]]), (0, a[0], shape[b[0]])]
        if len(a) == 1 and len(b) > 1:  # a fused projection: part by part in, heads out
            each = x.shape[a[0]] // shape[b[0]]
            by_part.append(_by_part(a[0], (each,) * shape[b[0]], (S(b[1]),), (each, shape[b[1]])))
    single = [k for k, n in enumerate(shape) if n == 1]
    if single and prod(shape):
        mapping.update((d, single[min(i, len(single) - 1)])
                       for i, d in enumerate(d for d, n in enumerate(x.shape) if n == 1))
    return rearrange(call, tuple(shape), mapping, even, lambda at: LocalCall("reshape", (x, at.out_shape())),
                     by_part=by_part)


def _by_part(dim: int, parts: tuple[int, ...], outs: tuple[Shard, ...], extents: tuple[int, ...]) -> Case:
    """A dim that is cut part by part becomes dims, or results, of which each part is cut alone."""
    return Case((FusedShard(dim, parts),), outs, tuple((0, dim, n) for n in extents))


def reshape(call: Call) -> OpSpec:
    """`reshape` and `view`, with shape as one tuple or as integers."""
    return view_spec(call, infer_shape(call.operands[0].shape, _ints(call.args["shape"])))


def view_as(call: Call) -> OpSpec:
    """`x.view_as(other)`: only `other`'s global shape matters."""
    x, other = call.operands[0], call.args["other"]
    spec = view_spec(call, other.shape)
    return OpSpec(spec.shapes, any_layout((*spec.cases, Case((R,), (R,))), other.ndim), spec.local, dtypes=(x.dtype,),
                  shape_only=(1,))


def flatten(call: Call) -> OpSpec:
    """`flatten(start_dim, end_dim)`."""
    x = call.operands[0]
    nd = max(x.ndim, 1)
    a, b = int(call.get("start_dim", 0)) % nd, int(call.get("end_dim", -1)) % nd
    shape = (*x.shape[:a], prod(x.shape[a:b + 1]), *x.shape[b + 1:]) if x.ndim else (1,)
    return view_spec(call, shape)


def flatten_primitive(call: Call) -> OpSpec:
    """The classic `Flatten`: everything but dim 0."""
    x = call.operands[0]
    return view_spec(call, (x.shape[0], prod(x.shape[1:])))


def permute(call: Call) -> OpSpec:
    """`permute`/`transpose(perm)`: result dim i is input dim perm[i]."""
    x = call.operands[0]
    dims = call.get("dims", ())
    perm = list(range(x.ndim))[::-1] if dims in ((), (None,)) else [int(d) % x.ndim for d in _ints(dims)]
    return rearrange(call, tuple(x.shape[d] for d in perm), {d: i for i, d in enumerate(perm)})


def swap(call: Call) -> OpSpec:
    """`transpose(dim0, dim1)`."""
    x = call.operands[0]
    perm = list(range(x.ndim))
    if x.ndim:
        a, b = (int(call.args.get(k, k == "dim1")) % x.ndim for k in ("dim0", "dim1"))
        perm[a], perm[b] = perm[b], perm[a]
    return rearrange(call, tuple(x.shape[d] for d in perm), {d: i for i, d in enumerate(perm)})


def matrix_transpose(call: Call) -> OpSpec:
    """`x.t()` / `x.T`: dims reversed."""
    x = call.operands[0]
    return rearrange(call, x.shape[::-1], {d: x.ndim - 1 - d for d in range(x.ndim)})


def unsqueeze(call: Call) -> OpSpec:
    """A new dim of size 1."""
    x = call.operands[0]
    d = int(_ints(call.args["dim"])[0]) % (x.ndim + 1)
    return rearrange(call, (*x.shape[:d], 1, *x.shape[d:]), {i: i + (i >= d) for i in range(x.ndim)})


def squeeze(call: Call) -> OpSpec:
    """Dims of size 1 removed, judged by the *global* shape: a shard of one row keeps its dim."""
    x = call.operands[0]
    dims = dims_of(call.args.get("dim"), x.ndim)
    gone = [d for d in dims if x.ndim and x.shape[d] == 1]
    kept = [d for d in range(x.ndim) if d not in gone]
    return rearrange(call, tuple(x.shape[d] for d in kept), {d: i for i, d in enumerate(kept)},
                     local=lambda at: LocalCall("reshape", (x, at.out_shape())))


def expand(call: Call) -> OpSpec:
    """`broadcast_to` / `expand`: a dim of size 1 or a new one grows; -1 keeps a dim."""
    x = call.operands[0]
    wanted = list(_ints(call.args["shape"]))
    lead = len(wanted) - x.ndim
    shape = tuple(x.shape[i - lead] if n == -1 else n for i, n in enumerate(wanted))
    mapping = {d: d + lead for d in range(x.ndim) if x.shape[d] == shape[d + lead]}
    return rearrange(call, shape, mapping, local=lambda at: LocalCall("broadcast_to", (x, at.out_shape())))


def tile(call: Call) -> OpSpec:
    """`tile` / `repeat`: a repeated dim must be whole, or copies would interleave."""
    x = call.operands[0]
    reps = list(_ints(call.args["repeats"]))
    lead = max(len(reps) - x.ndim, 0)
    reps = [1] * (x.ndim - len(reps)) + reps
    shape = (1,) * lead + x.shape
    mapping = {d: d + lead for d in range(x.ndim) if reps[d + lead] == 1}
    return rearrange(call, tuple(n * r for n, r in zip(shape, reps)), mapping)


def split(call: Call) -> OpSpec:
    """`split(size or sizes, dim)`."""
    x = call.operands[0]
    d = int(call.args.get("dim", 0)) % x.ndim
    size = call.args["sizes"]
    if isinstance(size, int):
        sizes = [min(size, x.shape[d] - i) for i in range(0, x.shape[d], size)] or [0]
    else:
        sizes = [int(n) for n in size]
    return _pieces(call, d, sizes)


def chunk(call: Call) -> OpSpec:
    """`chunk(n, dim)`: ceil(extent / n) rows each, maybe fewer pieces than asked for."""
    x = call.operands[0]
    d = int(call.args.get("dim", 0)) % x.ndim
    step = max(-(-x.shape[d] // int(call.args["chunks"])), 1)
    return _pieces(call, d, [min(step, x.shape[d] - i) for i in range(0, x.shape[d], step)] or [0])


def split_equal(call: Call) -> OpSpec:
    """The classic `Split(axis, output_num)`: equal pieces."""
    x = call.operands[0]
    d, n = int(call.args.get("dim", 0)) % x.ndim, int(call.args["chunks"])
    return _pieces(call, d, [x.shape[d] // n] * n)


def unbind(call: Call) -> OpSpec:
    """`unbind(dim)`: one result per row; the classic `Unstack` has `axis` as an attribute."""
    x = call.operands[0]
    d = int(call.get("dim", call.args.get("attrs", {}).get("axis", 0))) % x.ndim
    shape = (*x.shape[:d], *x.shape[d + 1:])
    return rearrange(call, [shape] * x.shape[d], {i: i - (i > d) for i in range(x.ndim) if i != d}, results=x.shape[d])


def _pieces(call, d, sizes):
    x = call.operands[0]
    shapes = [(*x.shape[:d], n, *x.shape[d + 1:]) for n in sizes]

    def local(at: Local) -> LocalCall | None:
        mine = tuple(at.out_shape(i)[d] for i in range(len(shapes)))
        return None if at.in_shape(0)[d] == x.shape[d] else LocalCall("split", (x, mine, d))
    return rearrange(call, shapes, {i: i for i in range(x.ndim) if i != d}, local=local, results=len(shapes),
                     by_part=[_by_part(d, tuple(sizes), (S(d),) * len(sizes), tuple(sizes))])


def cat(call: Call) -> OpSpec:
    """`cat(tensors, dim)`: the joined dim must be whole on every operand."""
    xs = call.operands
    full = [x for x in xs if x.shape != (0,)] or list(xs)
    nd = full[0].ndim
    d = int(call.args.get("dim", 0)) % nd
    shape = (*full[0].shape[:d], sum(x.shape[d] for x in full), *full[0].shape[d + 1:])
    cases = [Case(tuple(S(k) if x in full else R for x in xs), (S(k),)) for k in range(nd) if k != d]
    return OpSpec((shape,), (*cases, *(Case((p,) * len(xs), (p,)) for p in PARTIALS), *_mixed(call)),
                  lambda at: _joined_once(call, at, d))


def _mixed(call: Call) -> list[Case]:
    return mixed_sums(len(call.operands)) if all(x.dtype == call.operands[0].dtype != "bool" for x in call.operands) else []


def _joined_once(call: Call, at: Local, dim: int) -> LocalCall | None:
    once = taken_once(at)
    return LocalCall("joined_once", (call.op, call.operands, dim, once)) if once else None


def stack(call: Call) -> OpSpec:
    """`stack(tensors, dim)`: a new dim."""
    xs = call.operands
    d = int(call.args.get("dim", 0)) % (xs[0].ndim + 1)
    shape = (*xs[0].shape[:d], len(xs), *xs[0].shape[d:])
    cases = [Case((S(k),) * len(xs), (S(k + (k >= d)),)) for k in range(xs[0].ndim)]
    return OpSpec((shape,), (*cases, *(Case((p,) * len(xs), (p,)) for p in PARTIALS), *_mixed(call)),
                  lambda at: _joined_once(call, at, d))


def _ints(value) -> tuple[int, ...]:
    """`(2, 3)`, `((2, 3),)` and `2` as a tuple of ints."""
    if isinstance(value, int):
        return (value,)
    value = tuple(value)
    return _ints(value[0]) if len(value) == 1 and not isinstance(value[0], int) else tuple(int(v) for v in value)
