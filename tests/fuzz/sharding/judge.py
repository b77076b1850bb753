# SPDX-License-Identifier: Apache-2.0
"""Whether a program on ranks is the program on one device: numbers, refusals, and that ranks communicate alike.

All ranks judge together: after each step they agree about what each saw, and a failing program is made small on all.
"""
import math
import re
import zlib
from collections import Counter
from dataclasses import dataclass, field

import mindspore as ms
import numpy as np

from ms_dtensor.errors import CollectiveMismatch, PeerLost
from tests.fuzz.judged import agreed
from tests.fuzz.sharding.play import Player, Record
from tests.fuzz.sharding.programs import Program, Step, smaller

# of the largest element; SHORT where a policy computes in float32: 4e-4 were seen behind norms, and optimizers enlarge that
RTOL, SHORT = 1e-9, 3e-2
SMALLER = 80  # programs that are tried when one is made small

# Refusals that the documents announce, by a piece of the message: one device does not know the limit.
DOCUMENTED = {
    "the operands live on different meshes": "an input lies on an axis on which no parameter of the model does",
    "were written to since it ran": "what is recomputed has read a parameter that was written before its backward",
}


@dataclass
class Reference:
    """What one device did.

    Args:
        program: which.
        steps: the values after each step.
        stopped: what the step after these raised.
        plain: of steps after which plain MindSpore itself has other values, see `Player`, these. There a refusal is better
            than what one device does. What MindSpore has right must be right; of the rest each use of a parameter is
            differentiated with its own values, or as MindSpore does, and programs end there.
    """

    program: Program
    steps: list[dict[str, np.ndarray]]
    stopped: str = ""
    plain: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)


def refer(program: Program) -> Reference:
    out, plain = Reference(program, []), Player(program)
    right = None
    if program.writes or any(step.between for step in program.steps):
        right = Player(program, copies=True)
    playing = None if right is None else right.play()
    try:
        for number, record in enumerate(plain.play()):
            out.steps.append(record.values)
            if right is None or playing is None:
                continue
            out.steps[-1] = next(playing).values
            if differing(program, record.values, out.steps[-1]):
                out.plain[number] = record.values
                for p, q in zip(plain.net.get_parameters(), right.net.get_parameters(), strict=True):
                    p.set_data(ms.Tensor(q.asnumpy().copy()))  # so each step is judged by itself
    except Exception as e:
        out.stopped = headline(e)
        ms.common.api._pynative_executor.clear_res()
    return out


def headline(e: Exception) -> str:
    lines = [line.strip() for line in str(e).splitlines() if line.strip("- \t")]
    return f"{type(e).__name__}: {lines[0] if lines else ''}"[:300]


def kind_of(text: str) -> str:
    """A message without what differs from program to program."""
    return re.sub(r"body[\w.]*|\d+", "#", text)


def differing(program: Program, got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> str:
    """The first value that is not one device's, in words."""
    rtol = SHORT if program.short else RTOL
    if list(got) != list(want):
        return f"names: {[n for n in got if n not in want]} and not {[n for n in want if n not in got]}"
    for name, y in want.items():
        x = got[name]
        if x.shape != y.shape:
            return f"{name}: shape {list(x.shape)}, want {list(y.shape)}"
        scale = max(float(np.abs(y).max(initial=0)), 1e-3 if not program.short else 1e-1)
        off = np.abs(x.astype(np.float64) - y)
        if not bool((off <= rtol * scale).all()):
            few = [np.array2string(a.ravel()[:4], precision=6) for a in (x, y)]
            return f"{name}: {few[0]}, want {few[1]}"
    return ""


def alike(record: Record) -> int:
    """A number of what was communicated; shapes may differ where a tensor does not divide, and who sends in an exchange."""
    return zlib.crc32(repr([(e.op, e.axes, e.phase, e.dtype if e.op != "exchange" else "") for e in record.events]).encode())


def too_many(program: Program, step: Step, record: Record) -> str:
    """Reductions of gradients that need not be: before the last micro-batch any, then more than one a unit."""
    if step.kind != "train" or step.wrt != "params" or program.tied or any(w.kind == "tp" for w in program.wraps) or any(
            p.kind == "stats" or p.tied for p in program.parts().values()) or any(
            one.rows < 4 for micro in step.passes for one in micro):  # what these send is not gradients of parameters
        return ""
    sent = [[e.op for e in events if e.phase == "backward" and e.op in ("reduce_scatter", "all_reduce")]
            for events in record.micro]
    for m, ops in enumerate(sent[:-1]):
        if ops:
            return f"reductions: {ops} in micro-batch {m}, which is not synchronised"
    units = sum(w.kind in ("fsdp", "zero1") for w in program.wraps)
    if step.between in ("freeze", "turn"):  # what is owed of frozen parameters is reduced behind the others
        units *= 2
    orders = [order for one in step.passes[-1] for order in one.order.values()]
    runs = len(step.passes[-1]) * max([1, *(list(order).count(i) for order in orders for i in order)])
    return f"reductions: {sent[-1]} for {units} units" if runs == 1 and sent[-1].count("reduce_scatter") > units else ""


def grown(values: dict[str, np.ndarray]) -> bool:
    """Whether a parameter has grown so much that `tanh` is flat behind it, where float32 knows 1 and nothing beside it."""
    return any(float(np.abs(x).max(initial=0)) > 3 for n, x in values.items() if "." in n and not n.startswith("gradient"))


def verdict(world, reference: Reference) -> str:
    """"" or what is wrong, the same on every rank. What one device refuses is where the program ends."""
    program = reference.program
    said, number, playing = "", -1, None
    while True:
        number += 1
        code = 0
        if number == len(reference.steps) < len(program.steps) and _few_rows(program, program.steps[number]):
            return ""  # MindSpore counts the writes to what it has saved; a rank that holds no rows has saved nothing
        try:
            playing = playing or Player(program, world.rank).play()
            record = next(playing, None)
            if record is None:
                said = "end"
            elif number >= len(reference.steps):
                said = "end"  # accepted, and one device raises
            elif program.short and number and grown(reference.steps[number - 1]):
                said = "end"
            else:
                code, said = alike(record), differing(program, record.values, reference.steps[number])
                if said and number in reference.plain:
                    want, plain = reference.steps[number], reference.plain[number]
                    known = [n for n in want if not differing(program, {n: plain[n]}, {n: want[n]})]
                    said = differing(program, {n: record.values[n] for n in known}, {n: want[n] for n in known}) or "end"
                said = said or too_many(program, program.steps[number], record)
                said = said if not said or said == "end" or said.startswith("reductions") else f"wrong: {said}"
        except Exception as e:
            if parts_ranks(e):
                raise
            ended = number >= len(reference.steps) or number in reference.plain
            said = "end" if ended or any(d in str(e) for d in DOCUMENTED) else f"refused: {headline(e)}"
            ms.common.api._pynative_executor.clear_res()
        texts = agreed(world, f"{code}|{said}")
        wrongs = [t.split("|", 1)[1] for t in texts]
        if any(w.startswith("wrong") for w in wrongs):
            return f"step {number}: {next(w for w in wrongs if w.startswith('wrong'))}"
        if len(set(wrongs)) > 1:
            return f"step {number}: unlike: {' <> '.join(wrongs)}"
        if said == "end":
            return ""
        if said:
            return f"step {number}: {said}"
        if len(set(texts)) > 1:
            return f"step {number}: unlike communication"


def _few_rows(program: Program, step: Step) -> bool:
    """Whether a rank may hold none."""
    ranks = math.prod(n for axis, n in program.axes.items() if axis != "tp")
    return any(one.rows < 2 * ranks for micro in step.passes for one in micro)


def parts_ranks(e: Exception) -> bool:
    """Whether ranks may not go on together after this."""
    return isinstance(e, PeerLost | CollectiveMismatch) and not e.in_step


def class_of(verdict: str) -> str:
    """What a smaller program has to fail with, too."""
    text = verdict.partition(": ")[2]
    return "wrong number" if text.startswith("wrong") else kind_of(text)


class Judge:
    """The verdict on a program; a failing one is made small, unless enough of its class have been."""

    failed = Counter[str]()  # programs by class, the same on all ranks

    def __init__(self, world, program: Program, want: Reference):
        self.world, self.want = world, want
        self.noted = {"plain_mindspore_wrong": int(bool(want.plain)), "one_device_refused": int(bool(want.stopped))}

    def run(self) -> list[str]:
        program, why, tried = self.want.program, verdict(self.world, self.want), 0
        if not why:
            return []
        first, kind = why, class_of(why)
        goes_on = self.failed[kind] < (6 if kind == "wrong number" else 1)
        self.failed[kind] += 1
        while goes_on:
            goes_on = False
            for candidate in smaller(program):
                tried += 1
                if tried > SMALLER:
                    break
                also = verdict(self.world, refer(candidate))
                if also and class_of(also) == kind:
                    program, why, goes_on = candidate, also, True
                    break
        return [first, f"made small: {why}\n{program}"]


class OfDifferent:
    """The verdict on a program whose ranks differ: only the mismatch, named on all of them, is right; never a number."""

    ends = True  # after a mismatch within a part of the ranks

    def __init__(self, world, program: Program, want: Reference):
        self.world, self.program, self.want = world, program, want

    def run(self) -> list[str]:
        return [seen] if (seen := self._seen()) else []

    def _seen(self) -> str:
        """What this rank saw; "" is the mismatch."""
        playing = Player(self.program, self.world.rank).play()
        try:
            for _ in self.program.steps[:-1]:
                next(playing)
        except Exception as e:
            return f"before: {headline(e)}"
        try:
            record = next(playing)
        except CollectiveMismatch as e:
            return "" if len(set(str(e).splitlines())) == len(str(e).splitlines()) else f"says nothing: {e}"
        except Exception as e:
            return headline(e)
        return differing(self.program, record.values, self.want.steps[-1]) or "a number, the sum of what each rank did"
