# SPDX-License-Identifier: Apache-2.0
"""`python -m ms_dtensor plot --text RUN_DIR`: a run's loss as a curve of characters, its communication as one table.

For a terminal, where no picture can be seen; needs nothing but the run's `metrics.jsonl`. Read next: `runs.py`, which reads.
"""
from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ..debug.text import columns
from .runs import Run

WIDTH, HEIGHT = 64, 12
STEPS, HELD_OUT = "·", "o"


def curve(steps: Sequence[int], values: Sequence[float], marks: tuple[Sequence[int], Sequence[float]] = ((), ()),
          width: int = WIDTH, height: int = HEIGHT) -> str:
    """A curve over steps; where several steps share a column it has their mean.

    Args:
        steps, values: the curve, drawn with "·".
        marks: steps and values of single points, drawn with "o" above it.
        width, height: characters inside the axes.

    Example:
        >>> print(curve([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0], width=4, height=4))
             4.00 │·
                  │ ·
                  │  ·
             1.00 │   ·
                  └────
                   1  4
    """
    both = [*steps, *marks[0]], [*values, *marks[1]]
    first, last = min(both[0], default=0), max(both[0], default=0)
    low, high = min(both[1], default=0.0), max(both[1], default=0.0)

    def column(step: int) -> int:
        return round((step - first) / max(1, last - first) * (width - 1))

    def row(value: float) -> int:
        return round((high - value) / (high - low or 1.0) * (height - 1))

    grid = [[" "] * width for _ in range(height)]
    for x in range(width):
        here = [value for step, value in zip(steps, values, strict=True) if column(step) == x]
        if here:
            grid[row(statistics.fmean(here))][x] = STEPS
    for step, value in zip(*marks, strict=True):
        grid[row(value)][column(step)] = HELD_OUT
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    lines = [f"{labels.get(y, ''):>9} │{''.join(line)}".rstrip() for y, line in enumerate(grid)]
    ends = f"{first}{last:>{max(1, width - len(str(first)))}}"
    return "\n".join([*lines, " " * 10 + "└" + "─" * width, " " * 11 + ends])


def communication(run: Run) -> str:
    """A line for each collective and its mesh axes: calls, bytes and time of a step; empty if none was recorded."""
    found = run.communication()
    if not found:
        return ""
    whole = [sum(line[i] for line in found.values()) for i in range(3)]
    return columns([("collective", "over", "calls a step", "KiB a step, sent by a rank", "ms a step"),
                    *((*in_words(key), *_figures(*line)) for key, line in found.items()), ("all", "", *_figures(*whole))],
                   right=(2, 3, 4))


def _figures(calls: float, size: float, ms: float) -> tuple[str, str, str]:
    return f"{calls:.0f}", f"{size / 1024:,.0f}", f"{ms:.1f}"


def in_words(key: str) -> tuple[str, str]:
    """Of communication, in words: what it is, and over which axes."""
    op, _, axes = key.partition(" ")
    return ("waiting for asynchronous ones" if op == "wait" else op.replace("_", "-")), axes


def _finite(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    there = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    return [step for step, _ in there], [value for _, value in there]


def show(run: Run) -> str:
    """Curve and table, with a line that says what each is."""
    parts = [f"{run.name}: loss of each step ({STEPS}) and on held-out text ({HELD_OUT})",
             curve(*_finite(*run.series("loss")), _finite(*run.series("held_out_loss")))]
    if table := communication(run):
        parts += ["", "what a step communicates:", table]
    return "\n".join(parts)
