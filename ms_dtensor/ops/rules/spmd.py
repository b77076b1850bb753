# SPDX-License-Identifier: Apache-2.0
"""Types of local tensors on one mesh axis, and what an op makes of them: one table, read off the rules' cases.

A type says what the ranks' tensors mean together, and what their cotangents do:

    R  replicated  one value on all ranks; each rank's cotangent is a summand of the whole
    I  invariant   one value on all ranks; its whole cotangent is on all ranks as well
    V  varying     each rank has its own; so are the cotangents
    P  partial     the value is the sum (or another reduction) of all ranks' tensors; its whole cotangent is on all ranks

A Partial passes where a rule has the case, and where what the rule runs there is the op itself: dispatch may take a bias in
on one rank only, local code adds it on every rank. What varies also knows as what a global op would *read* it, a shard of a
dim or a summand: so a product over a sharded dim may be called Partial, and its logarithm may not. Invariant: an answer
depends on local shapes, static arguments and types only. Not here: tensors (`debug/types`).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...core.layout import Layout
from ...core.mesh import DeviceMesh
from ...core.placements import PARTIAL, REPLICATE, Placement, Shard
from . import RULES, attention, random
from .spec import Call, Case, Local, OpSpec
from .view import VIEWS


class Kind(NamedTuple):
    """A type on one axis; `reads`: the reduction of a P; as what a global op reads a V, None: as nothing."""

    letter: str
    reads: Placement | None = None


R, I, V, P = Kind("R"), Kind("I"), Kind("V"), Kind("P", PARTIAL)  # noqa: E741  the field's letter
WORDS = {"R": "replicated", "I": "invariant", "V": "varying", "P": "partial"}
OF_LETTER = {"R": R, "I": I, "V": V, "P": P}


class Refused(Exception):
    """What an op cannot do with its operands on an axis.

    Args:
        operand: the number of the one at fault.
        why: which rule that breaks.
        ways: ways out; `{x}` is the operand, `{axis}` the axis.
    """

    def __init__(self, operand: int, why: str, *ways: str):
        super().__init__(why)
        self.operand, self.why, self.ways = operand, why, ways


# -- inputs and results of a function that declares placements -----------------------------------------------------------
def of_input(placement: Placement, cotangent: Placement) -> Kind | None:
    """The type of an input, by how it lies and how its cotangent is to be; None where these do not belong together."""
    if placement.is_replicate():
        return R if cotangent.is_partial("sum") else I if cotangent.is_replicate() else None
    if placement.is_shard():
        return Kind("V", placement) if cotangent.is_shard() else None
    return Kind("P", placement) if cotangent.is_replicate() else None


def misfit(kind: Kind, graded: bool, placement: Placement) -> tuple[str, tuple[str, ...]] | None:
    """Why a result of a type is not what a placement says of it, and ways out; None if it is.

    Args:
        kind: its type.
        graded: a gradient may come back through it.
        placement: what it is said to be.
    """
    if placement.is_shard():
        return None if kind.letter == "V" else (
            "Every rank has a summand of all of it, not a piece." if kind.letter == "P" else
            "Every rank has the whole, so there would be as many copies as ranks.",
            ("reduce_scatter({x}, '{axis}', dim)", f"say {kind.reads!r}") if kind.letter == "P" else
            ("convert({x}, '{axis}', to='V') takes each rank's part", "say Replicate()"))
    if placement.is_partial():
        if kind.letter in "PV" and kind.reads == placement:
            return None
        if kind.letter == "V":
            return ("Each rank has its own, and no op has made it a summand; a sum of it may mean nothing.",
                    ("reinterpret({x}, '{axis}', as_='P') where it becomes a summand, if it is one",
                     "say Shard(dim), if each rank has a piece"))
        return ((f"It is partial by another reduction: {kind.reads!r}.", ("say so",)) if kind.letter == "P" else
                ("Every rank has the whole, so the sum would be as many times too large.",
                 ("convert({x}, '{axis}', to='P') keeps it on one rank", "say Replicate()")))
    if kind.letter == "I" or kind.letter == "R" and not graded:
        return None
    if kind.letter == "R":
        return ("Its cotangent comes whole to every rank, and a replicated value expects summands: gradients would be as "
                "many times too large as there are ranks.",
                ("convert({x}, '{axis}', to='I')", "all_reduce({x}, '{axis}', to='I') where it was summed up"))
    if kind.letter == "P":
        return ("Every rank has a summand.", ("all_reduce({x}, '{axis}', to='I') before it is returned", "say Partial()"))
    return ("Each rank has its own.", ("all_reduce or all_gather it over '{axis}'", "say Shard(dim), if each has a piece",
                                       "reinterpret({x}, '{axis}', as_='I'), if you know that all have the same"))


# -- ops -----------------------------------------------------------------------------------------------------------------
_UNLIKE = frozenset(("empty_like", "new_empty"))  # what one rank finds in its memory


def draws(call: Call) -> bool:
    """Whether ranks make other numbers of the same operands: in a local function each draws its own, unlike in dispatch."""
    if call.op in _UNLIKE:
        return True
    if call.op.startswith("func_dropout"):
        return bool(call.get("training", False)) and float(call.get("p", 0.5)) > 0
    if call.op in attention.RULES:
        return float(call.get("keep_prob", 1.0)) < 1 or float(call.get("dropout_p", 0.0)) > 0
    return call.op in random.RULES


def spec_of(call: Call) -> OpSpec | None:
    """What the op's rule says of local tensors of these shapes; None if there is none, or it refuses them."""
    rule = RULES.get(call.op)
    try:
        return None if rule is None else rule(call)
    except Exception:  # noqa: BLE001  it is made for global shapes; where it knows nothing, nothing is claimed
        return None


def results(call: Call, spec: OpSpec | None, kinds: Sequence[Kind], graded: Sequence[bool]) -> tuple[Kind, ...]:
    """The types of an op's results on one axis.

    Args:
        call: the op, its operands of local shapes.
        spec: see `spec_of`.
        kinds: of its operands.
        graded: which of them have a gradient; an R or I without one is a constant, and goes with either.

    Returns:
        One for each result, or one for all of an op without a rule.

    Raises:
        Refused: there is none.

    Example: a product of a shard's columns with a weight's rows is a summand, of a summand and a value too:
        >>> from ms_dtensor.core.placements import Shard
        >>> from ms_dtensor.ops.rules.spec import Call, Operand
        >>> x, w = Operand(0, (4, 6), "float32"), Operand(1, (6, 2), "float32")
        >>> call = Call("matmul", {"input": x, "other": w}, (x, w))
        >>> results(call, spec_of(call), [Kind("V", Shard(1)), Kind("V", Shard(0))], [True, True])
        (Kind(letter='V', reads=Partial('sum')),)
        >>> results(call, spec_of(call), [P, R], [True, True])
        (Kind(letter='P', reads=Partial('sum')),)
    """
    kinds = [R if k.letter == "I" and not g else k for k, g in zip(kinds, graded)]
    letters = [k.letter for k in kinds]
    count = 1 if spec is None else len(spec.shapes)
    if spec is None or draws(call):
        return _each_its_own(letters, spec is None, count)
    out = _combined(call, spec, kinds, graded, letters, count)
    for w in spec.writes:  # running statistics, say
        if letters[w] != out[0].letter and (graded[w] or letters[w] != "R" or out[0].letter != "I"):
            raise Refused(w, f"It is {WORDS[letters[w]]} and would be written with what is {WORDS[out[0].letter]}.",
                          "reduce what is written over '{axis}' first")
    return out


def _each_its_own(letters, unknown: bool, count: int) -> tuple[Kind, ...]:
    for i, letter in enumerate(letters):
        if letter in "PI":
            raise Refused(i, f"No rule says what this op does, and an operand is {WORDS[letter]}." if unknown else
                          "Each rank draws numbers of its own, " + (
                              "and the sum of what they make is no draw." if letter == "P" else
                              "so the cotangents of an invariant value would differ."),
                          *(("give `types=`: a DFunction with types = (..., '->', ...)",) if unknown else ()),
                          "all_reduce({x}, '{axis}') before it" if letter == "P" else "convert({x}, '{axis}', to='R')")
    return (V,) * count


def beside_numbers(kinds: Sequence[Kind], graded: Sequence[bool], said: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """The same results, where a number among the arguments may be each rank's own.

    Raises:
        Refused: an operand is a summand, or invariant.
    """
    for i, (k, g) in enumerate(zip(kinds, graded)):
        if k.letter == "P" or k.letter == "I" and g:
            raise Refused(i, "Python has read what varies over this axis before, and the op of what is "
                          f"{WORDS[k.letter]} may have numbers of it among its arguments.",
                          "read it behind this op, or in a DFunction with `types`")
    return tuple(V if k.letter != "V" else k for k in said)


def _combined(call, spec: OpSpec, kinds, graded, letters, count) -> tuple[Kind, ...]:
    known = set(letters)
    strict = [i for i, k in enumerate(letters) if k == "I"]
    if "P" in known:
        return _of_sums(call, spec, kinds, letters, count, strict)
    if strict and ("V" in known or any(k == "R" and g for k, g in zip(letters, graded))):
        other = "varying" if "V" in known else "replicated"
        raise Refused(strict[0], f"It is invariant and meets what is {other}: its gradient would miss a sum.",
                      "convert({x}, '{axis}', to='R')")
    if "V" not in known:
        return ((I if strict else R),) * count
    return tuple(map(_varying, _read(call, spec, kinds) or (None,) * count))


def _varying(p: Placement | None) -> Kind:
    return Kind("V", p) if p is not None and (p.is_partial() or p.__class__ is Shard) else V


def _of_sums(call, spec: OpSpec, kinds, letters, count, strict) -> tuple[Kind, ...]:
    first = letters.index("P")
    if "V" in letters:
        raise Refused(first, "It is a summand and meets what varies: the sum of these is not the op of the sum.",
                      "all_reduce({x}, '{axis}') before it")
    if strict:
        raise Refused(strict[0], "It is invariant and meets a summand: its cotangents would be summands.",
                      "convert({x}, '{axis}', to='R')")
    outs = _read(call, spec, kinds)
    if outs is None:
        several = letters.count("P") > 1
        raise Refused(first, f"'{call.op}' of " + ("sums is not the sum of its results" if several else
                      "a sum is not the sum of its results") + ", as it is called here.",
                      "all_reduce({x}, '{axis}') before it", "reduce_scatter({x}, '{axis}', dim) before it")
    return tuple(Kind("P", p) if p.is_partial() else R for p in outs)


def _read(call: Call, spec: OpSpec, kinds: Sequence[Kind]) -> tuple[Placement, ...] | None:
    """The results' placements by the case whose operands lie as these read, if the op itself runs there."""
    ins = [p for k in kinds if (p := REPLICATE if k.letter in "RI" else k.reads) is not None]
    if len(ins) < len(kinds):
        return None
    if call.op in VIEWS and any(p.is_shard() and o.shape[p.dim] == 1 for p, o in zip(ins, call.operands)):
        return None  # of one row nobody can tell how a view of all rows would lie
    for case in spec.cases:
        if case.ins == tuple(ins):
            return case.outs if _is_op_itself(call, spec, case) else None
    return None


# -- what dispatch would run there ---------------------------------------------------------------------------------------
_PAIR = DeviceMesh("cpu", [0, 1], mesh_dim_names=("x",))


def _is_op_itself(call: Call, spec: OpSpec, case: Case) -> bool:
    """Whether dispatch would run on each rank of a case what it runs where all is whole, which is the op."""
    local = spec.local
    if local is None:
        return True
    if call.op in VIEWS and any(p.is_shard() for p in case.ins):
        return True  # it says other shapes only, and local code has said the local ones
    whole = Case((REPLICATE,) * len(case.ins), (REPLICATE,) * len(case.outs))
    try:
        return all(_form(call, spec, local, case, at) == _form(call, spec, local, whole, 0) for at in (0, 1))
    except Exception:  # noqa: BLE001  arguments that have no truth value, forms that need more than a pair of ranks
        return False


def _form(call: Call, spec: OpSpec, local: Callable, case: Case, at: int):
    ins = [_layout(p, o.shape, o.dtype) for p, o in zip(case.ins, call.operands)]
    outs = [_layout(p, shape, call.operands[0].dtype) for p, shape in zip(case.outs, spec.shapes) if shape is not None]
    return local(Local(tuple(ins), tuple(outs), (at,)))


def _layout(p: Placement, shape: tuple[int, ...], dtype: str) -> Layout:
    if p.is_shard():
        shape = tuple(n * 2 if d == p.dim else n for d, n in enumerate(shape))
    return Layout(_PAIR, [p], shape, dtype)


# -- moves ---------------------------------------------------------------------------------------------------------------
# what a move does with the type on its axis: (move, from) -> to; `to` where the caller chooses between R and I
MOVES: dict[tuple[str, str], tuple[str, ...]] = {
    ("all_reduce", "P"): ("R", "I"), ("all_reduce", "V"): ("R", "I"),
    ("all_gather", "V"): ("R", "I"),
    ("reduce_scatter", "P"): ("V",), ("reduce_scatter", "V"): ("V",),
    ("all_to_all", "V"): ("V",),
    ("convert", "I"): ("R",), ("convert", "R"): ("I", "V", "P"),
}
_INSTEAD = {("all_reduce", "R"): "Every rank has the whole already; a sum would be as many times too large.",
            ("all_reduce", "I"): "Every rank has the whole already; a sum would be as many times too large.",
            ("all_gather", "P"): "Every rank has a summand of all of it: all_reduce it."}


def after_move(move: str, kind: Kind, to: str, dim: int | None = None) -> Kind:
    """The type after a move over its axis; `dim`: which one it cuts.

    Raises:
        Refused: there is no such move of this type.
    """
    if to not in MOVES.get((move, kind.letter), ()):
        starts = [f"{WORDS[k]} to {' or '.join(WORDS[t] for t in ts)}" for (m, k), ts in MOVES.items() if m == move]
        takes = f"It is {WORDS[kind.letter]}; '{move}' takes {', '.join(starts)}."
        way = {"P": "all_reduce({x}, '{axis}')", "I": "convert({x}, '{axis}', to='R') first"}
        raise Refused(0, _INSTEAD.get((move, kind.letter), takes),
                      way.get(kind.letter, "reinterpret({x}, '{axis}', as_='V') first, if it is meant"))
    if kind.letter == "P" and not kind.reads.is_partial("sum"):  # type: ignore[union-attr]
        raise Refused(0, f"It is {kind.reads!r}, and '{move}' sums up.", "group.all_reduce(x, op) without a gradient")
    return Kind("V", None if dim is None else Shard(dim)) if to == "V" else OF_LETTER[to]


def by_signature(signatures: Sequence[tuple[tuple[str, ...], tuple[str, ...]]], kinds: Sequence[Kind],
                 graded: Sequence[bool]) -> tuple[Kind, ...] | None:
    """The results' types by the first of several signatures (operands, results) that has these operands; else None."""
    for ins, outs in signatures:
        if ins[1:] and ins[-1] == "*":  # as many as there are of what stands before it
            ins = ins[:-2] + (ins[-2],) * (len(kinds) - len(ins) + 2)
        if len(ins) == len(kinds) and all(k.letter == s or not g and k.letter in "RI" and s in "RI"
                                          for s, k, g in zip(ins, kinds, graded)):
            return tuple(OF_LETTER[s] for s in outs)
    return None
