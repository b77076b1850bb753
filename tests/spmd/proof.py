# SPDX-License-Identifier: Apache-2.0
"""The table of types against the definition of each type: enumerated over calls, types of operands, and one or two axes.

What a type promises is written here once more, on lists of NumPy arrays, without the table: a value's meaning is indexed by
the axes on which it varies; where it is partial the ranks' arrays are summed up, elsewhere they must be equal. Cotangents by
the dual types. An answer of the table is right if every rank's own op gives what these mean, forward and backward.
"""
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from mindspore import Tensor

from ms_dtensor.core.tree import leaves, map_leaves
from ms_dtensor.debug.verify import Report
from ms_dtensor.debug.verify.capture import Captured, capture
from ms_dtensor.debug.verify.check import Trial, _identity
from ms_dtensor.debug.verify.oracle import _summands, same
from ms_dtensor.dispatch.op_call import bind_arguments
from ms_dtensor.dispatch.operands import dtype_name
from ms_dtensor.dispatch.planner import as_operands
from ms_dtensor.ops.rng import frozen
from ms_dtensor.ops.rules import RULES, Call, Operand, spmd
from ms_dtensor.ops.rules.names import PRIMITIVES
from ms_dtensor.ops.rules.spmd import I, Kind, P, R, Refused, V

ORDERED = {"searchsorted"}  # values are shuffled here, and it asks for sorted ones
Table = Callable[..., tuple[Kind, ...]]


@dataclass
class Tally:
    """What was asked and what was wrong."""

    calls: int = 0
    cells: int = 0
    accepted: int = 0
    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    seen: set = field(default_factory=set)


class OneCall:
    """A call of the corpus with its rule, its whole answer and how each rank runs it."""

    def __init__(self, c: Captured, op: str, params):
        tensors = leaves((c.args, c.kwargs), Tensor)
        operands = tuple(Operand(i, tuple(t.shape), dtype_name(t.dtype)) for i, t in enumerate(tensors))
        it = iter(operands)
        bound = bind_arguments(c.name, params, c.args, c.kwargs, c.primitive)
        self.call = Call(op, {k: as_operands(v, it) for k, v in bound.items()}, operands)
        self.spec = spmd.spec_of(self.call)
        self.trial = Trial(c, self.call, RULES[op](self.call), tensors, np.random.default_rng(0), Report())
        self.arrays = self.trial.arrays
        self.graded = [o.dtype.startswith(("float", "bfloat", "complex")) for o in operands]

    def run(self, arrays) -> list[np.ndarray]:
        return [r.asnumpy() for r in as_list(self.trial.original([Tensor(np.array(a, order="C")) for a in arrays]))]

    def gradients(self, arrays, cotangents) -> list[np.ndarray]:
        return self.trial.gradients(arrays, cotangents, self.trial.original)


def as_list(results) -> list:
    return list(results) if isinstance(results, tuple | list) else [results]


def calls_of(fn, args, tally: Tally) -> Iterator[OneCall]:
    """The calls behind a form that were not met before."""
    with frozen(0):
        for c in capture(fn, *map_leaves(Tensor, args, np.ndarray)):
            key = _identity(c, ((2,),), False)
            entry = c.own or PRIMITIVES.get(c.name)
            if key in tally.seen or entry is None or entry[0] not in RULES:
                continue
            if entry[0] in ORDERED or any(0 in t.shape for t in leaves((c.args, c.kwargs), Tensor)):
                continue  # MindSpore's sums of nothing are uninitialised memory
            tally.seen.add(key)
            try:
                one = OneCall(c, *entry)
            except Exception:  # noqa: BLE001, S112  a rule that refuses whole tensors says nothing of local ones
                continue
            if one.call.operands and one.spec is not None:
                tally.calls += 1
                yield one


def kinds_of(one: OneCall, i: int) -> tuple[Kind, ...]:
    """What operand i may be on an axis; truth values have no sums, and what has no gradient is not invariant."""
    dtype = one.call.operands[i].dtype
    return (R, V) if dtype == "bool" else (R, I, V, P) if one.graded[i] else (R, V, P)


def prove(one: OneCall, shape: Sequence[int], table: Table, tally: Tally, most: int = 256) -> None:
    """All types of all operands on each axis of a mesh; at most so many, of many operands."""
    count = len(one.arrays)
    rng = np.random.default_rng(len(one.call.op))
    options = [list(itertools.product(kinds_of(one, i), repeat=len(shape))) for i in range(count)]
    total = int(np.prod([float(len(o)) for o in options]))
    cells = itertools.product(*options) if total <= most else (
        tuple(o[rng.integers(len(o))] for o in options) for _ in range(most))
    for cell in cells:
        prove_cell(one, cell, shape, table, tally)


def prove_cell(one: OneCall, cell, shape, table: Table, tally: Tally) -> None:
    """One answer of the table: `cell[operand][axis]`."""
    tally.cells += 1
    try:
        per_axis = [table(one.call, one.spec, [of[a] for of in cell], one.graded) for a in range(len(shape))]
    except Refused:
        return
    tally.accepted += 1
    outs = list(zip(*per_axis))  # per result, per axis
    if all(k.letter == "V" for out in outs for k in out) and not any(k.letter in "PI" for of in cell for k in of):
        return  # each rank's own, and every operand's gradient as its op has it: nothing is promised
    label = f"{one.call.op} {[list(a.shape) for a in one.arrays]} {show(cell)} -> {show(outs)} on {tuple(shape)}"
    problem = compare(one, cell, outs, shape, tally)
    if problem:
        tally.wrong.append(f"{label}: {problem}")


def show(of) -> str:
    return ", ".join("".join(k.letter for k in kinds) for kinds in of)


# -- what types mean -----------------------------------------------------------------------------------------------------
def coordinates(shape):
    return list(itertools.product(*map(range, shape)))


def keep(at, kinds, letters: str) -> tuple[int, ...]:
    """A coordinate with the axes of other types set to 0."""
    return tuple(c if k.letter in letters else 0 for c, k in zip(at, kinds))


def values_of(array, kinds, shape, rng) -> tuple[dict, dict]:
    """(coordinate -> local array, coordinate on varying axes -> meaning) of an operand."""
    where, meaning, local = coordinates(shape), {}, {}
    for at in where:
        v = keep(at, kinds, "V")
        if v not in meaning:
            flat = array.reshape(-1)
            meaning[v] = array if not any(k.letter == "V" for k in kinds) else rng.permutation(flat).reshape(array.shape)
    for v, whole in meaning.items():
        spots = sorted({keep(at, kinds, "VP") for at in where if keep(at, kinds, "V") == v})
        parts = dict(zip(spots, _summands(whole, "sum", len(spots), rng))) if len(spots) > 1 else {spots[0]: whole}
        for at in where:
            if keep(at, kinds, "V") == v:
                local[at] = parts[keep(at, kinds, "VP")]
    return local, meaning


def shares_of(example, kinds, shape, rng) -> dict:
    """Coordinate -> cotangent of a result: own where it is replicated (a summand) or varies, the same elsewhere."""
    made: dict = {}
    return {at: made.setdefault(keep(at, kinds, "RV"), rng.normal(size=example.shape).astype(example.dtype))
            for at in coordinates(shape)}


def summed(parts: dict, kinds, letters: str) -> tuple[dict, bool]:
    """Summed up over the axes of these types, for each coordinate on the others; whether the rest agree."""
    out: dict = {}
    for at, x in parts.items():
        rest = tuple(0 if k.letter in letters else c for c, k in zip(at, kinds))
        out[rest] = out[rest] + x if rest in out else x
    return out, True


def compare(one: OneCall, cell, outs, shape, tally: Tally) -> str:
    """What an accepted cell breaks; nothing if it keeps what the types promise."""
    rng, where = np.random.default_rng(1), coordinates(shape)
    made = [values_of(a, kinds, shape, rng) for a, kinds in zip(one.arrays, cell)]
    varies = [tuple(Kind("V") if any(k.letter == "V" for k in (of[a] for of in cell)) else Kind("R")
                    for a in range(len(shape)))][0]
    try:
        results = {at: one.run([local[at] for local, _ in made]) for at in where}
        meanings = {w: [m[keep(w, kinds, "V")] for (_, m), kinds in zip(made, cell)]
                    for w in {keep(at, varies, "V") for at in where}}
        wanted = {w: one.run(xs) for w, xs in meanings.items()}
    except Exception:  # noqa: BLE001  values that the op refuses: nothing to compare
        return ""
    tally.compared += 1
    half = one.trial.half
    outs = outs * len(next(iter(wanted.values()))) if len(outs) == 1 else outs
    for j, kinds in enumerate(outs):
        for a, (k, v) in enumerate(zip(kinds, varies)):
            if v.letter == "V" and k.letter != "V":
                return f"result {j} does not vary on axis {a}, where an operand does"
        got, _ = summed({at: r[j] for at, r in results.items()}, kinds, "P")
        for at, x in got.items():
            want = wanted[keep(at, varies, "V")][j]
            if x.shape != want.shape or not same(want, x.astype(want.dtype), half=half):
                return f"value of result {j} at {at}"
    if one.trial.grads is None or not one.trial.wrt:
        return ""
    return compare_gradients(one, cell, outs, shape, made, meanings, varies, wanted, rng)


def compare_gradients(one: OneCall, cell, outs, shape, made, meanings, varies, wanted, rng) -> str:
    where, first = coordinates(shape), next(iter(wanted.values()))
    active = [c is not None for c in one.trial.cotangents]
    shares = [shares_of(x, kinds, shape, rng) if on else None for x, kinds, on in zip(first, outs, active)]
    local = {at: one.gradients([v[at] for v, _ in made], [s and s[at] for s in shares]) for at in where}
    true: dict = {}
    for w, xs in meanings.items():
        whole = []
        for s, kinds in zip(shares, outs):
            if s is None:
                whole.append(None)
                continue
            got, _ = summed({at: g for at, g in s.items() if keep(at, varies, "V") == w
                             and all(c == 0 for c, k in zip(at, kinds) if k.letter in "IP")}, kinds, "R")
            whole.append(sum(got.values()))
        true[w] = one.gradients(xs, whole)
    for n, i in enumerate(one.trial.wrt):
        kinds = cell[i]
        got, _ = summed({at: g[n] for at, g in local.items()}, kinds, "R")
        for at, g in got.items():
            spot = keep(at, kinds, "V")
            want = sum(true[w][n] for w in true if keep(w, kinds, "V") == spot)
            if not same(np.asarray(want), g, half=one.trial.half):
                return f"gradient of operand {i} at {at}"
    return ""


# -- what varies, and a global op reads as a summand ---------------------------------------------------------------------
def prove_reads(one: OneCall, n: int, table: Table, tally: Tally) -> None:
    """Of shards of a dim: where the table says that the ranks' results are summands, they are, of the op of the whole."""
    for case in one.trial.spec.cases:
        if not any(p.is_shard() for p in case.ins) or any(p.is_partial() or p.parts for p in case.ins):
            continue
        kinds = [Kind("V", p) if p.is_shard() else R for p in case.ins]
        tally.cells += 1
        try:
            outs = table(one.call, one.spec, kinds, one.graded)
        except Refused:
            continue
        if not all(k.letter == "V" and k.reads is not None and k.reads.is_partial("sum") for k in outs):
            continue
        tally.accepted += 1
        problem = _sums_of_shards(one, case.ins, n, tally)
        if problem:
            tally.wrong.append(f"{one.call.op} {[list(a.shape) for a in one.arrays]} {case}, {n} ranks: {problem}")


def _sums_of_shards(one: OneCall, ins, n: int, tally: Tally) -> str:
    rng = np.random.default_rng(2)
    parts = [[rng.permutation(a.reshape(-1)).reshape(a.shape) if p.is_shard() else a for _ in range(n)]
             for a, p in zip(one.arrays, ins)]
    whole = [np.concatenate(p, at.dim) if at.is_shard() else p[0] for p, at in zip(parts, ins)]
    try:
        results = [one.run([p[r] for p in parts]) for r in range(n)]
        wanted = one.run(whole)
    except Exception:  # noqa: BLE001  static arguments that fit local shapes alone: there is no such call of the whole
        return ""
    if [x.shape for x in wanted] != [x.shape for x in results[0]]:
        return ""
    tally.compared += 1
    for j, want in enumerate(wanted):
        if not same(want, sum(r[j] for r in results).astype(want.dtype), half=one.trial.half):
            return f"value of result {j}"
    if one.trial.grads is None or not one.trial.wrt:
        return ""
    shares = [None if c is None else rng.normal(size=w.shape).astype(w.dtype) for w, c in zip(wanted, one.trial.cotangents)]
    local = [one.gradients([p[r] for p in parts], shares) for r in range(n)]
    try:
        true = one.gradients(whole, shares)
    except Exception:  # noqa: BLE001  as above, of the op that the backward is: a transposed convolution's is a convolution
        return ""
    for k, (i, want) in enumerate(zip(one.trial.wrt, true)):
        got = np.concatenate([g[k] for g in local], ins[i].dim) if ins[i].is_shard() else sum(g[k] for g in local)
        if not same(want, got, half=one.trial.half):
            return f"gradient of operand {i}"
    return ""
