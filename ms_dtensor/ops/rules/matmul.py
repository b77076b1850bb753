# SPDX-License-Identifier: Apache-2.0
"""The matmul family from one notation: an einsum equation gives every legal case.

A label sharded alike on all operands that have it is sharded in the result if the result has it, else summed over:
Partial. Products are linear in each operand alone, so one Partial operand among replicated ones gives a Partial.
A bias joins a Partial result on the first rank only, or the reduction would add it once per rank.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from ...errors import OpRuleError
from .spec import SUMS, Call, Case, Local, LocalCall, Operand, OpSpec, P, R, S, Unfit

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def einsum_cases(labels: Sequence[str], out: str, shapes: Sequence[tuple[int, ...]], ones: bool = False) -> tuple[Case, ...]:
    """Cases of an einsum; an operand whose dim has size 1 where others have more broadcasts and stays replicated.

    Args:
        labels: of each operand, a letter per dim.
        out: letters of the result; the others are summed over.
        shapes: global shape of each operand.
        ones: a dim that is summed over broadcasts as well.

    Raises:
        Unfit: sizes of one letter differ.

    Example: [4, 6] @ [6, 8], its rows, its sum, and its columns sharded:
        >>> from ms_dtensor.ops.rules.matmul import einsum_cases
        >>> einsum_cases(["ab", "bc"], "ac", [(4, 6), (6, 8)])[:3]
        (S(0), R -> S(0), S(1), S(0) -> P(sum), R, S(1) -> S(1))
    """
    return _einsum_cases(tuple(labels), out, tuple(shapes), ones)


@lru_cache(1024)
def _einsum_cases(labels: tuple[str, ...], out: str, shapes: tuple[tuple[int, ...], ...], ones: bool) -> tuple[Case, ...]:
    size: dict[str, int] = {}
    for text, shape in zip(labels, shapes):
        for c, n in zip(text, shape):
            size[c] = max(size.get(c, 1), n) if n != 0 else 0
    if any(n != size[c] and (n != 1 or c not in out and not ones) for text, shape in zip(labels, shapes)
           for c, n in zip(text, shape)):
        raise Unfit
    cases = []
    for c in dict.fromkeys("".join(labels)):
        if any(text.count(c) > 1 for text in labels) or size[c] == 1:
            continue
        ins = tuple(S(text.index(c)) if c in text and shape[text.index(c)] == size[c] else R
                    for text, shape in zip(labels, shapes))
        cases.append(Case(ins, (S(out.index(c)) if c in out else P,)))
    for i in range(len(labels)):
        cases += [Case(tuple(p if j == i else R for j in range(len(labels))), (p,)) for p in SUMS]
    return tuple(cases)


def _out_shape(labels, out, shapes):
    size: dict[str, int] = {}
    for text, shape in zip(labels, shapes):
        for c, n in zip(text, shape):
            size[c] = n if size.get(c, 1) == 1 else size[c]
    return tuple(size[c] for c in out)


def _matmul_labels(a: int, b: int, transpose_a: bool, transpose_b: bool):
    """Labels of `a @ b` for operands of `a` and `b` dims: batch dims broadcast from the right."""
    batch = max(a, b, 2) - 2
    names = _LETTERS[3:3 + batch]
    left = "b" if a == 1 else names[batch - (a - 2):] + ("ba" if transpose_a else "ab")
    right = "b" if b == 1 else names[batch - (b - 2):] + ("cb" if transpose_b else "bc")
    out = names + ("" if a == 1 else "a") + ("" if b == 1 else "c")
    return left, right, out


def matmul(call: Call) -> OpSpec:
    """`input @ other` with NumPy's rules for 1-D and batched operands; also bmm, mm, mv, BatchMatMul, MatMul."""
    x, y = call.args["input"], call.args["other"]
    left, right, out = _matmul_labels(x.ndim, y.ndim, bool(call.get("transpose_a")), bool(call.get("transpose_b")))
    labels, shapes = [left, right], [x.shape, y.shape]

    def local(at: Local) -> LocalCall | None:
        mine = at.in_shape(x.index)
        unlike = x.ndim > 2 and (y.ndim > 2 and x.ndim != y.ndim or y.ndim <= 2 and prod(mine[:-1]) == 1)
        single = x.ndim == y.ndim > 2 and mine[-1] == 1 == prod(mine[:-2])
        return LocalCall("matmul", (x, y)) if (unlike or single) and "transpose_a" not in call.args else None
    return OpSpec((_out_shape(labels, out, shapes),), tuple(_reorder(call, [x, y], einsum_cases(labels, out, shapes))),
                  local, any_rows=True)


def _reorder(call: Call, operands: list[Operand], cases: Sequence[Case]) -> Sequence[Case]:
    """Cases listed for `operands`, as cases in the call's operand order."""
    if list(call.operands) == operands:
        return cases
    return [call.case({o.index: p for o, p in zip(operands, c.ins)}, *c.outs, even=c.even) for c in cases]


def outer(call: Call) -> OpSpec:
    """Outer product of two vectors; the method flattens a matrix, whose rows stay in order where all ranks have as many."""
    x, y = call.args["input"], call.args["other"]
    if y.ndim != 1:
        raise OpRuleError("For 'outer', the second operand is no vector.", f"{list(x.shape)}, {list(y.shape)}",
                          "One device would broadcast it.", "x.reshape(-1, 1) * y, if that is meant")
    cases = [call.case({x.index: S(0)}, S(0), even=((x.index, 0, x.shape[0]),) if x.ndim > 1 else ())] if x.ndim else []
    cases += [call.case({y.index: S(0)}, S(1)), *(call.case({o.index: p}, p) for o in (x, y) for p in SUMS)]
    return OpSpec(((prod(x.shape), *y.shape),), tuple(cases))


def linear(call: Call) -> OpSpec:
    """`input @ weight.T + bias`, weight [out, in]; the op behind `mint.nn.Linear` and `ops.dense`."""
    x, w, b = call.args["input"], call.args["weight"], call.get("bias")
    batch = _LETTERS[3:3 + x.ndim - 1]
    labels, out = [batch + "i", "oi" if w.ndim == 2 else "i"], batch + ("o" if w.ndim == 2 else "")
    shapes = [x.shape, w.shape]
    cases = einsum_cases(labels, out, shapes)
    shape = _out_shape(labels, out, shapes)
    if b is None:
        return OpSpec((shape,), tuple(_reorder(call, [x, w], cases)))
    with_bias = []
    for c in cases:
        result = c.outs[0]
        if result.is_partial("avg"):
            continue
        with_bias.append(Case((*c.ins, S(0) if result.is_shard(len(shape) - 1) and b.ndim else R), c.outs))
    return OpSpec((shape,), tuple(_reorder(call, [x, w, b], with_bias)),
                  _bias_once("linear_bias_once", x, w, b, always=0 in x.shape), any_rows=True)


def _bias_once(name: str, *operands: Operand, always: bool = False):
    """Every rank runs the same local form, so that backward collectives keep one order; only the share differs."""
    def local(at: Local) -> LocalCall | None:
        summed = at.outs[0].partial_axes
        return LocalCall(name, (*operands, int(at.is_first(summed)))) if summed or always else None
    return local


def bias_add(call: Call) -> OpSpec:
    """`input + bias` along the channel dim (1); the second half of `nn.Dense`."""
    x, b = call.args["input"], call.args["bias"]
    channel = 1 if x.ndim > 1 else 0
    cases = [Case((S(d), S(0) if d == channel else R), (S(d),)) for d in range(x.ndim)]
    cases.append(Case((P, R), (P,)))
    return OpSpec((x.shape,), tuple(cases), _bias_once("bias_once", x, b), any_rows=True)


def _filled(ins, operands) -> tuple[tuple[int, int, int], ...]:
    """No shard may be empty: a rank without a product would leave out its summand of the Partial input, too."""
    return tuple((o.index, p.dim, o.shape[p.dim]) for p, o in zip(ins, operands) if p.is_shard())


_PRODUCT = {"addmm": ("ab", "bc", "ac"), "addmv": ("ab", "b", "a"), "baddbmm": ("dab", "dbc", "dac"),
            "addbmm": ("dab", "dbc", "ac")}


def add_product(call: Call) -> OpSpec:
    """`beta * input + alpha * product`: addmm, addmv, baddbmm, and addbmm, which also sums over the batch.

    A sharded contraction leaves a Partial; then `input` is either Partial too, or counted on the first rank only.
    """
    x, y, z = (call.args[k] for k in ("input", "mat1", "mat", "batch1", "mat2", "vec", "batch2") if k in call.args)
    left, right, out = _PRODUCT[call.op]
    shape = _out_shape([left, right], out, [y.shape, z.shape])
    if any(n not in (1, m) for n, m in zip(reversed(x.shape), reversed(shape))):
        raise Unfit
    cases = []
    for c in einsum_cases([left, right], out, [y.shape, z.shape]):
        result = c.outs[0]
        if result.is_shard():
            k = result.dim - len(shape) + x.ndim
            cases.append(Case((S(k) if k >= 0 and x.shape[k] == shape[result.dim] else R, *c.ins), c.outs))
        else:
            cases += [Case((R, *c.ins), c.outs), Case((result, *c.ins), c.outs, _filled(c.ins, (y, z)))]

    def local(at: Local) -> LocalCall | None:
        layout = at.outs[0]
        once = [a for a in layout.partial_axes
                if layout.placements[a].is_partial("sum") and at.ins[x.index].placements[a].is_replicate()]
        if not once:
            return None
        return LocalCall("add_product_once", (call.op, x, y, z, call.args.get("beta", 1), call.args.get("alpha", 1),
                                           int(at.is_first(once))))
    return OpSpec((shape,), tuple(_reorder(call, [x, y, z], cases)), local)


def with_communication(call: Call) -> OpSpec:
    """Kernels that gather or reduce within a group that they are told."""
    raise OpRuleError(f"For '{call.op}', a DTensor was given to a kernel that communicates.",
                      ", ".join(f"{o.dtype}{list(o.shape)}" for o in call.operands),
                      "It gathers or reduces what each rank holds, in a group of its own; a DTensor knows how it is cut.",
                      ("mint.matmul(x, w) of the DTensors, and redistribute: each cut says what is gathered or reduced",
                       "x.to_local(), or local_map, for this kernel itself"))


NAMES = """
all_gather_matmul:AllGatherMatmul:*args
matmul_reduce_scatter:MatmulReduceScatter:*args
matmul_all_reduce_add_rms_norm:MatmulAllReduceAddRmsNorm:*args
matmul:Vdot:input other
outer:Ger:input other
addmm:Addmm:input mat1 mat2 beta alpha
addmv:Addmv:input mat vec beta alpha
baddbmm:Baddbmm:input batch1 batch2 beta alpha
addbmm:Addbmm:input batch1 batch2 beta alpha
"""
RULES = {**dict.fromkeys(_PRODUCT, add_product), **dict.fromkeys(
    ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce_add_rms_norm"), with_communication)}
