# SPDX-License-Identifier: Apache-2.0
"""Seconds of a list of events (`core/dry_event.py`) on a machine: a stream in its order, an event after what it waits for.

What a dry run recorded of a program, and `cost.py`'s figure for each event; no formula of a model. Read next: `step.py`,
which needs no program.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from ...core.dry_event import COMPUTE, DryEvent
from ...ops.rules import attention, conv
from .cost import Collective, Op, Work, seconds
from .hardware import Hardware

# What a device's matrix units do: products, convolutions, fused attention. All other ops are its vector units'.
PRODUCTS = frozenset(("matmul", "linear", "grouped_matmul", "addmm", "addmv", "baddbmm", "addbmm",
                      *conv.RULES, *attention.RULES))

NODES = frozenset(("swiglu_rows", "context_attention"))  # products in one node of the library's, of which no rule tells
WITHIN = frozenset(("copy_of_view", "accumulate"))  # MindSpore does them by itself


@dataclass(frozen=True, slots=True)
class Timeline:
    """When events run.

    Attributes:
        begin, end: seconds of each event, in the order of the list.
        seconds: when the last one has ended.
        waits: seconds by stream in which computation stands and something of that stream runs.
    """

    begin: tuple[float, ...]
    end: tuple[float, ...]
    seconds: float
    waits: dict[str, float]


def timeline(events: Sequence[DryEvent], machine: Hardware) -> Timeline:
    """Runs a list of events on a machine, by its figures; other ranks are taken to be where this one is.

    Args:
        events: in the order in which the rank issues them.
        machine: of `load_hardware`.

    Example:
        >>> from ms_dtensor.core.dry_event import DryEvent
        >>> from ms_dtensor.debug.predict import load_hardware, timeline
        >>> gather = DryEvent("all_gather", "dp", payload=1 << 27, axes=("dp",), ranks=8, stride=1, span=7)
        >>> product = DryEvent("matmul", flops=1 << 42, read=1 << 27, written=1 << 26)
        >>> after = DryEvent("matmul", after=(0,), flops=1 << 42, read=1 << 27, written=1 << 26)
        >>> a100 = load_hardware("a100")
        >>> sent, computed = (timeline([e], a100).seconds for e in (gather, product))
        >>> sent + computed <= timeline([gather, product, after], a100).seconds < sent + 2 * computed   # one hides the other
        True
    """
    return timelines({-1: events}, machine)[-1]


def timelines(ranks: Mapping[int, Sequence[DryEvent]], machine: Hardware) -> dict[int, Timeline]:
    """Those of several ranks of one step, which wait for each other: stages of a pipeline.

    A message is there when its sender has sent it, and a collective begins when all of these ranks that take part are at it.
    Ranks that are not given are waited for by nobody.

    Args:
        ranks: events by global rank.
        machine: of `load_hardware`.

    Raises:
        ValueError: what one waits for no other sends: they are not of one step.

    Example:
        >>> from ms_dtensor.core.dry_event import DryEvent
        >>> from ms_dtensor.debug.predict import load_hardware, timeline, timelines
        >>> product = DryEvent("matmul", flops=1 << 42, read=1 << 27, written=1 << 26)
        >>> sent = DryEvent("exchange", "pp", (0,), payload=1 << 20, axes=("pp",), ranks=2, span=1, group=(0, 1), sends=(1,))
        >>> taken = DryEvent("exchange", "pp", axes=("pp",), ranks=2, span=1, group=(0, 1), takes=(0,))
        >>> a100 = load_hardware("a100")
        >>> timelines({0: [product, sent], 1: [taken]}, a100)[1].seconds > timeline([product, sent], a100).seconds
        True
    """
    met = _Meetings(frozenset(ranks))
    under_way = {rank: _Rank(rank, events, machine, met) for rank, events in ranks.items()}
    while any([one.goes_on() for one in under_way.values()]):  # noqa: C419  each has its turn
        pass
    stuck = {rank: one for rank, one in under_way.items() if len(one.end) < len(one.events)}
    if stuck:
        told = ", ".join(f"rank {rank} at event {at} ({one.events[at].op})" for rank, one in stuck.items()
                         for at in [len(one.end)])
        raise ValueError(f"These ranks wait for each other, so they are not of one step: {told}")
    return {rank: one.timeline() for rank, one in under_way.items()}


class _Meetings:
    """Where ranks wait for each other: when messages have been sent, and who is at which collective."""

    def __init__(self, ranks: frozenset[int]):
        self.ranks = ranks
        self.sent: dict[tuple[int, int], list[float]] = {}  # (from, to) -> when each message is there
        self.there: dict[tuple, dict[int, float]] = {}  # (group, which of its calls) -> when each rank is ready


class _Rank:
    """One rank's list on its way."""

    def __init__(self, rank: int, events: Sequence[DryEvent], machine: Hardware, met: _Meetings):
        self.rank, self.events, self.machine, self.met = rank, events, machine, met
        self.begin: list[float] = []
        self.end: list[float] = []
        self.free: dict[str, float] = {}
        self.waits: dict[str, float] = {}
        self.before = 0.0  # when the last move had ended
        self.taken: dict[int, int] = {}  # messages, by sender
        self.count: dict[tuple[int, ...], int] = {}  # collectives, by group

    def goes_on(self) -> bool:
        """Runs what waits for no other rank; whether that was anything."""
        before = len(self.end)
        while len(self.end) < len(self.events) and self._next(self.events[len(self.end)]):
            pass
        return len(self.end) > before

    def _next(self, event: DryEvent) -> bool:
        work, end, free = work_of(event), self.end, self.free
        ready, by = max(((end[at], self.events[at].stream) for at in event.after), default=(0.0, COMPUTE))
        link = self.machine.link(event.span + 1)
        whole = event.is_move and link.processor >= 1
        start = max(free.get(event.stream, 0.0), free.get(COMPUTE, 0.0) if whole else 0.0, ready)
        if event.is_move:
            met = self._met(event, start)
            if met is None:
                return False
            if event.ranks > 1:
                met += link.wait * sqrt(max(0.0, start - self.before))
            if whole and met > start:
                self.waits[event.stream] = self.waits.get(event.stream, 0.0) + met - start
            start = met
        elif ready > free.get(COMPUTE, 0.0):
            self.waits[by] = self.waits.get(by, 0.0) + ready - free.get(COMPUTE, 0.0)
        self.begin.append(start)
        end.append(start + seconds(work, self.machine))
        free[event.stream] = end[-1]
        if event.is_move:
            self.before = end[-1]
        if whole:
            free[COMPUTE] = end[-1]
        for to in event.sends:
            self.met.sent.setdefault((self.rank, to), []).append(end[-1])
        return True

    def _met(self, event: DryEvent, start: float) -> float | None:
        """When a move can begin that could at `start` if no other rank counted; None: another rank is not there yet."""
        if event.op == "exchange":
            taken = dict(self.taken)
            for of in event.takes:
                if of in self.met.ranks:
                    sent, at = self.met.sent.get((of, self.rank), ()), taken.get(of, 0)
                    if len(sent) <= at:
                        return None
                    start, taken[of] = max(start, sent[at]), at + 1
            self.taken = taken
            return start
        others = self.met.ranks.intersection(event.group)
        if len(others) < 2:
            return start
        there = self.met.there.setdefault((event.group, self.count.get(event.group, 0)), {})
        there[self.rank] = start
        if len(there) < len(others):
            return None
        self.count[event.group] = self.count.get(event.group, 0) + 1
        return max(there.values())

    def timeline(self) -> Timeline:
        return Timeline(tuple(self.begin), tuple(self.end), max(self.end, default=0.0), self.waits)


def work_of(event: DryEvent) -> Work:
    """An event as `cost.py` takes it."""
    if not event.is_move:
        return Op(event.op, event.flops, event.read + event.written, event.op in PRODUCTS | NODES, event.phase == "backward",
                  event.op in WITHIN)
    op = event.op if event.op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all") else "exchange"
    size = event.payload * event.ranks if op == "all_gather" else event.payload
    return Collective(op, size, event.ranks, event.span + 1, ",".join(event.axes), event.mapped)
