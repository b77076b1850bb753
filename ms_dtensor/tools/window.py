# SPDX-License-Identifier: Apache-2.0
"""A profile of some steps: MindSpore's own, and a trace of what this rank dispatched and communicated, for Perfetto.

The trace is `CommDebugMode`'s records and one event per op that a DTensor was in, on a clock that the ranks of a host share.
The invariant: outside the window nothing is patched, timed or kept.
"""
from __future__ import annotations

import json
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ..core.files import make_folder, replacing

DISPATCH = 1000  # the track of ops; communication has one per axes, counted from 0


class Window:
    """Profiles the steps from `first` on, `count` of them.

    Args:
        folder: files go there: `trace_rank0.json`, and MindSpore's folder beside it.
        first: the number of the first step, from 1; 0: none.
        count: how many.
        rank: of this process.
        mindspore: whether MindSpore's profiler runs too.
    """

    def __init__(self, folder: Path, first: int, count: int, rank: int = 0, mindspore: bool = True):
        self.folder, self.first, self.last, self.rank, self.mindspore = folder, first, first + count - 1, rank, mindspore
        self._open: ExitStack | None = None

    def step(self, number: int) -> None:
        """Before step `number` (from 1): opens the window if it is the first one."""
        if number == self.first and self._open is None:
            self._open = ExitStack()
            make_folder(self.folder)
            if self.mindspore:
                self._open.enter_context(_mindspore_profile(self.folder / "mindspore"))
            self._open.enter_context(trace(self.folder / f"trace_rank{self.rank}.json"))

    def stepped(self, number: int) -> Path | None:
        """After step `number`: closes the window if it was the last one, and says where the files are."""
        if self._open is None or number < self.last:
            return None
        self.close()
        return self.folder

    def close(self) -> None:
        """Closes the window early, if it is open: the run ends."""
        if self._open is not None:
            open_, self._open = self._open, None
            open_.close()


@contextmanager
def trace(path: Path):
    """Writes what a block dispatches and communicates as a Chrome trace.

    Example:
        >>> import json, tempfile, ms_dtensor as md, mindspore as ms
        >>> path = Path(tempfile.mkdtemp()) / "trace.json"
        >>> with md.comm.fake_world(2), trace(path):
        ...     x = md.DTensor.from_local(ms.ops.ones((2, 4)), md.init_device_mesh("cpu", (2,)), [md.Shard(0)])
        ...     y = (x * 2).redistribute(placements=[md.Replicate()])
        >>> sorted({e["cat"] for e in json.loads(path.read_text())["traceEvents"] if "cat" in e})
        ['dispatch', 'forward']
    """
    from ..debug.comm_mode import CommDebugMode, chrome_trace
    from ..tensor.dtensor import DTensor

    ops: list[tuple[str, float, float]] = []
    dispatch, clock = DTensor.__fallback__, time.perf_counter

    def timed(self: Any, func: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = clock()
        try:
            return dispatch(self, func, args, kwargs)
        finally:
            ops.append((func.name, started, clock() - started))

    with CommDebugMode() as mode:
        DTensor.__fallback__ = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            DTensor.__fallback__ = dispatch  # type: ignore[method-assign]
    drawn = chrome_trace(mode.events, mode.rank)
    drawn["traceEvents"] += [
        {"name": "thread_name", "ph": "M", "pid": mode.rank, "tid": DISPATCH, "args": {"name": "dispatch"}},
        *({"name": name, "cat": "dispatch", "ph": "X", "ts": start * 1e6, "dur": seconds * 1e6, "pid": mode.rank,
           "tid": DISPATCH} for name, start, seconds in ops)]
    with replacing(path) as file:
        file.write(json.dumps(drawn).encode() + b"\n")


@contextmanager
def _mindspore_profile(folder: Path):
    """MindSpore's profiler around a block; it reads and writes for seconds when the block ends."""
    from mindspore import profiler

    run = profiler.profile(start_profile=False, on_trace_ready=profiler.tensorboard_trace_handler(str(folder)))
    run.start()
    try:
        yield
    finally:
        run.stop()
