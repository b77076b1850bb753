# SPDX-License-Identifier: Apache-2.0
"""How often, how much and how long this process communicates, cheap enough to be on in every step of a training run.

Not the recorder (`record.py`), which also says why and from where, and costs ten times as much. The invariant: with no tally
running a collective pays one look at a global. Of a device the seconds are those of handing the work over.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Line(NamedTuple):
    """Calls, bytes given to other ranks, seconds of the caller."""

    calls: int
    bytes: int
    seconds: float


class Tally:
    """Adds up the communication of a block by collective and mesh axes.

    Attributes:
        lines: by (collective, axes); waiting for asynchronous ones is ("wait", ()), zero bytes.

    Example:
        >>> import ms_dtensor as md, mindspore as ms
        >>> from ms_dtensor.comm.tally import Tally
        >>> with md.comm.fake_world(4), Tally() as tally:
        ...     y = md.comm.group((0, 1, 2, 3), ("tp",)).all_reduce(ms.ops.ones(8))
        >>> [(key, line.calls, line.bytes) for key, line in tally.take().items()], tally.take()
        ([(('all_reduce', ('tp',)), 1, 48)], {})
    """

    def __init__(self) -> None:
        self.lines: dict[tuple[str, tuple[str, ...]], Line] = {}
        self._outer: Tally | None = None

    def __enter__(self) -> Tally:
        global running
        self._outer, running = running, self
        return self

    def __exit__(self, *exc: object) -> None:
        global running
        running, self._outer = self._outer, None

    def add(self, op: str, axes: tuple[str, ...], nbytes: int, seconds: float) -> None:
        """One call more."""
        key = op, axes
        line = self.lines.get(key)
        self.lines[key] = Line(1, nbytes, seconds) if line is None else Line(
            line.calls + 1, line.bytes + nbytes, line.seconds + seconds)

    def waited(self, finish: Callable[[], Any]) -> Any:
        """Runs what waits for an asynchronous collective."""
        started = time.perf_counter()
        result = finish()
        self.add("wait", (), 0, time.perf_counter() - started)
        return result

    def take(self) -> dict[tuple[str, tuple[str, ...]], Line]:
        """What has been added up since the last time."""
        lines, self.lines = self.lines, {}
        return lines


running: Tally | None = None  # of the process: a backward runs on MindSpore's thread
