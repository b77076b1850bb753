# SPDX-License-Identifier: Apache-2.0
"""Many real-rank cases in one launch, each of them one pytest test.

A launch costs 10 s and more, a case milliseconds. So a module `cases_*.py` (imported by pytest and by every rank) holds

    @case(world_size=4)
    def all_reduce_sums(world): ...          # runs on every rank; world.rank, world.size

and a test file beside it turns these into tests, which share one launch per (group, world size):

    @pytest.mark.parametrize("case", case_params("tests.dist.cases_comm", 4))
    def test_comm(case, ranks):
        ranks.check(case)

Only selected tests are run (`-k`). Cases run in definition order. When ranks may have lost step with each other, the
launch ends there, and another one goes on with the cases behind; see `tests/rank_main.py` for how that is told.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.msrun import Outcome, headline, launch

START_LIMIT = 180.0  # seconds for MindSpore to start on all ranks: 8 of them on 2 loaded cores
LAUNCHES = 6  # of one group at most: each but the last has ended in a case that failed
TEST_LIMIT = 2400  # pytest's own limit, in seconds: the first test of a group waits for all of its launches
NOT_RUN = "not run: the launch ended in "
SYNC_FILE = "sync.bin"  # one byte per case and rank, see rank_main.agree


def case(world_size: int | tuple[int, ...] = 4, timeout: float = 180) -> Callable[[Callable], Callable]:
    """Marks a function `fn(world)` as a case for launches of this size, or each of these sizes."""

    def mark(fn: Callable) -> Callable:
        fn.case_sizes = (world_size,) if isinstance(world_size, int) else tuple(world_size)
        fn.case_timeout = timeout
        return fn

    return mark


@dataclass(frozen=True, slots=True)
class Case:
    module: str
    name: str
    world_size: int
    group: str
    timeout: float

    @property
    def address(self) -> str:
        return f"{self.module}:{self.name}"


def case_params(module: str | ModuleType, world_size: int, group: str | None = None) -> list[Any]:
    """The module's cases of this world size, for `pytest.mark.parametrize`; launches nothing.

    Modules of the same `group` share a launch; those without one share theirs, too. A group of its own is for cases that
    need another environment, or so many that one launch of all would take too long.
    """
    import pytest

    module = importlib.import_module(module) if isinstance(module, str) else module
    marks = [pytest.mark.dist, pytest.mark.timeout(TEST_LIMIT)]
    return [
        pytest.param(
            Case(module.__name__, name, world_size, group or "ranks", fn.case_timeout), id=name, marks=marks
        )
        for name, fn in vars(module).items()
        if world_size in getattr(fn, "case_sizes", ()) and fn.__module__ == module.__name__
    ]


class Launches:
    """Runs each group of the selected cases once, when its first case is asked for (the fixture `ranks`)."""

    def __init__(self, selected: Iterable[Case], new_dir: Callable[[str], Path]) -> None:
        self._selected = list(dict.fromkeys(selected))
        self._new_dir = new_dir
        self._verdicts: dict[Case, str | None] = {}
        self.spent: list[tuple[str, int, float]] = []  # group, ranks and seconds of each launch
        self.seconds: dict[Case, float] = {}  # on the rank that took longest

    def check(self, wanted: Case) -> None:
        """Raises AssertionError with the first failing rank's traceback unless the case passed on every rank."""
        __tracebackhide__ = True
        if wanted not in self._verdicts:
            todo = [c for c in self._selected if (c.group, c.world_size) == (wanted.group, wanted.world_size)]
            for _ in range(LAUNCHES):
                self._run(todo)
                todo = [c for c in todo if (self._verdicts[c] or "").startswith(NOT_RUN)]
                if not todo:
                    break
        verdict = self._verdicts[wanted]
        if verdict is not None:
            raise AssertionError(verdict)

    def _run(self, cases: list[Case]) -> None:
        size = cases[0].world_size
        log_dir = self._new_dir(f"{cases[0].group}-{size}-")
        (log_dir / SYNC_FILE).write_bytes(bytes(len(cases) * size))
        args = [f"{c.address}:{c.timeout:g}" for c in cases]
        limit = START_LIMIT + max(c.timeout for c in cases) + 2 * len(cases)
        start = time.monotonic()
        outcome = launch("tests.rank_main", size, args, limit, log_dir=log_dir)
        self.spent.append((cases[0].group, size, time.monotonic() - start))
        for index, one in enumerate(cases):
            took = [reports[index]["seconds"] for reports in outcome.reports if len(reports) > index]
            self.seconds[one] = max(took, default=0.0)
        self._verdicts.update(verdicts(cases, outcome))


def verdicts(cases: list[Case], outcome: Outcome) -> dict[Case, str | None]:
    """For each case None when it passed on all ranks, otherwise what to tell."""
    result: dict[Case, str | None] = {}
    stopped_by = None
    reached = max(map(len, outcome.reports))
    for index, one in enumerate(cases):
        done = {rank: reports[index] for rank, reports in enumerate(outcome.reports) if len(reports) > index}
        missing = [rank for rank in range(one.world_size) if rank not in done]
        bad = sorted((record["ended"], rank) for rank, record in done.items() if not record["ok"])
        lines = []
        if stopped_by is not None:
            lines.append(NOT_RUN + stopped_by)
        elif bad:
            first = bad[0][1]
            lines.append(f"{one.address}: rank {first} failed first:\n{done[first]['traceback']}")
            lines += [f"rank {rank} after it: {headline(done[rank]['traceback'])}" for _, rank in bad[1:]]
            if missing:
                lines.append(f"ranks {missing} did not finish: they waited, most likely for rank {first}.")
        elif missing:
            lines.append(f"{one.address}: ranks {missing} did not finish.\n{outcome.failure}")
        if stopped_by is None and (missing or (bad and outcome.failure and index + 1 == reached)):
            stopped_by = one.address
        result[one] = "\n".join(lines) or None
    if outcome.failure is not None and not any(result.values()):
        result[cases[-1]] = f"every case passed, but the launch failed: {outcome.failure}"
    return result
