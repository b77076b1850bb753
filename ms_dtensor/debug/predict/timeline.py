# SPDX-License-Identifier: Apache-2.0
"""Seconds of a list of events (`core/dry_event.py`) on a machine: a stream in its order, an event after what it waits for.

What a dry run recorded of a program, and `cost.py`'s figure for each event; no formula of a model. Read next: `step.py`,
which needs no program.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.dry_event import COMPUTE, DryEvent
from ...ops.rules import attention, conv
from .cost import Collective, Op, Work, seconds
from .hardware import Hardware

# What a device's matrix units do: products, convolutions, fused attention. All other ops are its vector units'.
PRODUCTS = frozenset(("matmul", "linear", "grouped_matmul", "addmm", "addmv", "baddbmm", "addbmm",
                      *conv.RULES, *attention.RULES))


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
    """Runs a list of events on a machine, by its figures.

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
    free: dict[str, float] = {}
    begin: list[float] = []
    end: list[float] = []
    waits: dict[str, float] = {}
    for event in events:
        ready, by = max(((end[at], events[at].stream) for at in event.after), default=(0.0, COMPUTE))
        start = max(free.get(event.stream, 0.0), ready)
        if event.stream == COMPUTE and ready > free.get(COMPUTE, 0.0):
            waits[by] = waits.get(by, 0.0) + ready - free.get(COMPUTE, 0.0)
        begin.append(start)
        end.append(start + seconds(work_of(event), machine))
        free[event.stream] = end[-1]
    return Timeline(tuple(begin), tuple(end), max(end, default=0.0), waits)


def work_of(event: DryEvent) -> Work:
    """An event as `cost.py` takes it."""
    if not event.is_move:
        return Op(event.op, event.flops, event.read + event.written, event.op in PRODUCTS, event.phase == "backward")
    op = event.op if event.op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all") else "exchange"
    size = event.payload * event.ranks if op == "all_gather" else event.payload
    return Collective(op, size, event.ranks, event.span + 1, ",".join(event.axes))
