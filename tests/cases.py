# SPDX-License-Identifier: Apache-2.0
"""Many real-rank cases in one launch, each of them one pytest test.

A launch costs 10 s and more, a case milliseconds. So a module `cases_*.py` (imported by pytest and by every rank) holds

    @case(world_size=4)
    def all_reduce_sums(world): ...          # runs on every rank; world.rank, world.size

which pytest collects as `cases_comm.py::all_reduce_sums[4]` (see `tests/conftest.py`); all cases of a world size share one
launch. Without a mark each function of `world` is a case of four ranks (or as many as its folder says: `WORLD = 2`), of four
minutes at most; one that asks for `grid` or `line` beside it is given that mesh. What cases share begins with an underscore.
A module that says `GROUP = "errors"` has launches of its own, beside the others': for cases that leave behind in their
processes what others must not meet, or that wait for time limits.

Only selected tests are run (`-k`). The launches begin with the first test, in a thread for each group, so that ranks work
beside the tests of one process. When ranks may have lost step with each other, the launch ends there, and another one
goes on with the cases behind; see `tests/rank_main.py` for how that is told.
"""
import importlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import isfunction, signature
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.msrun import Outcome, headline, launch

START_LIMIT = 180.0  # seconds for MindSpore to start on all ranks: 8 of them on 2 loaded cores
CASE_LIMIT = 4.0  # seconds a case on the average, with the other tests beside it on two cores; one takes 0.4 idle
LAUNCHES = 8  # of one group at most: each but the last has ended in a case that failed
TEST_LIMIT = 2400  # pytest's own limit, in seconds: the first test of a group waits for all of its launches
NOT_RUN = "not run: the launch ended in "
WORLD = 4  # ranks of a case that has no mark, in a folder that says nothing else
MESHES = {"line": "mesh_1d", "grid": "mesh_2d"}  # that a case may ask for, of tests/operands.py
SYNC_FILE = "sync.bin"  # one byte per case and rank, see rank_main.agree


def case(world_size: int | tuple[int, ...] = 4, timeout: float = 240) -> Callable[[Callable], Callable]:
    """Marks a function `fn(world)` as a case for launches of this size, or each of these sizes."""

    def mark(fn: Callable) -> Callable:
        fn.case_sizes = (world_size,) if isinstance(world_size, int) else tuple(world_size)
        fn.case_timeout = timeout
        return fn

    return mark


def cases(world_size: int | tuple[int, ...], rows: dict[str, tuple], timeout: float = 240) -> Callable[[Callable], Callable]:
    """Makes a case of each row of a table, by the row's name: the function with the row behind `world`."""

    def mark(fn: Callable) -> Callable:
        for name, row in rows.items():
            def run(world, row=row):
                fn(world, *row)
            run.__name__, run.__module__ = name, fn.__module__
            fn.__globals__[name] = case(world_size, timeout)(run)
        return fn

    return mark


def given(fn: Callable) -> list[str]:
    """What a case asks for, by name: `world` and meshes of it."""
    return [name for name, parameter in signature(fn).parameters.items() if parameter.default is parameter.empty]


def call(fn: Callable, world: Any) -> None:
    """Runs a case on this rank."""
    operands = importlib.import_module("tests.operands")
    fn(world, *(getattr(operands, MESHES[name])() for name in given(fn)[1:]))


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


def cases_of(module: ModuleType, name: str, fn: object) -> list[Case]:
    """Of a function that stands in this module its cases, one for each world size; none if it is no case."""
    if getattr(fn, "__module__", None) != module.__name__:
        return []
    if isfunction(fn) and not name.startswith("_") and not hasattr(fn, "case_sizes"):
        usual = getattr(sys.modules.get(module.__package__ or ""), "WORLD", WORLD)
        first, *meshes = given(fn) or [""]
        fn = case(usual)(fn) if first == "world" and MESHES.keys() >= {*meshes} else fn
    return [Case(module.__name__, name, size, getattr(module, "GROUP", "ranks"), fn.case_timeout)
            for size in getattr(fn, "case_sizes", ())]


class Launches:
    """Runs each group of the selected cases once, those of most ranks first, beside the other groups and other tests."""

    def __init__(self, selected: Iterable[Case], new_dir: Callable[[str], Path]) -> None:
        self._todo: dict[tuple[str, int], list[Case]] = {}
        for one in dict.fromkeys(selected):
            self._todo.setdefault((one.group, one.world_size), []).append(one)
        self._new_dir = new_dir
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run_all, args=(group,), name=f"launches of {group}")
                         for group in dict.fromkeys(group for group, _ in self._todo)]
        self._verdicts: dict[Case, str | None] = {}
        self._finished = {key: threading.Event() for key in self._todo}
        self.spent: list[tuple[str, int, float]] = []  # group, ranks and seconds of each launch
        self.seconds: dict[Case, float] = {}  # on the rank that took longest
        self.used: dict[Case, float] = {}  # seconds of CPU, of all ranks together

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends what runs still: the session is over, perhaps early."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def check(self, wanted: Case) -> None:
        """Raises AssertionError with the first failing rank's traceback unless the case passed on every rank."""
        __tracebackhide__ = True
        self._finished[wanted.group, wanted.world_size].wait()
        verdict = self._verdicts.get(wanted, "its launch was not made")
        if verdict is not None:
            raise AssertionError(verdict)

    def _run_all(self, group: str) -> None:
        for key, todo in sorted((i for i in self._todo.items() if i[0][0] == group), key=lambda item: -item[0][1]):
            try:
                for _ in range(LAUNCHES):
                    if todo and not self._stopped.is_set():
                        self._run(todo)
                        todo = [c for c in todo if (self._verdicts[c] or "").startswith(NOT_RUN)]
            except Exception:  # a launcher that cannot launch is a failure of each of its tests, not of none
                self._verdicts.update(dict.fromkeys(todo, traceback.format_exc()))
            finally:
                self._finished[key].set()

    def _run(self, cases: list[Case]) -> None:
        size = cases[0].world_size
        log_dir = self._new_dir(f"{cases[0].group}-{size}-")
        (log_dir / SYNC_FILE).write_bytes(bytes(len(cases) * size))
        args = [f"{c.address}:{c.timeout:g}" for c in cases]
        limit = START_LIMIT + max(c.timeout for c in cases) + CASE_LIMIT * len(cases)
        start = time.monotonic()
        outcome = launch("tests.forks", size, args, limit, log_dir=log_dir, stopped=self._stopped, forked=True)
        self.spent.append((cases[0].group, size, time.monotonic() - start))
        for index, one in enumerate(cases):
            told = [reports[index] for reports in outcome.reports if len(reports) > index]
            self.seconds[one] = max((r["seconds"] for r in told), default=0.0)
            self.used[one] = sum(r["cpu"] for r in told)
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
