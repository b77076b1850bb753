# SPDX-License-Identifier: Apache-2.0
"""Collectives that run while the caller goes on: one thread, in the order in which they were asked for.

Not a pool: two collectives at a time would have to be in one order on every rank. The thread starts with the first call.
Invariant: whoever communicates on the calling thread first waits until this one has nothing left to do.
"""
from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import numpy as np


class _Job:
    __slots__ = ("done", "error", "run")

    def __init__(self, run: Callable[[], None]):
        self.run: Callable[[], None] | None = run
        self.done = threading.Event()
        self.error: BaseException | None = None


class Future:
    """The result of a collective that may still run.

    Attributes:
        out: the array that will hold it.
    """

    __slots__ = ("_job", "out")

    def __init__(self, out: np.ndarray, job: _Job):
        self.out, self._job = out, job

    def wait(self) -> np.ndarray:
        """The filled array; raises what the collective raised."""
        self._job.done.wait()
        if self._job.error is not None:
            raise self._job.error
        return self.out


class Worker:
    """Runs jobs one after the other."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._last: _Job | None = None
        self._started = False

    @property
    def busy(self) -> bool:
        """Whether a job is not done yet."""
        return self._last is not None and not self._last.done.is_set()

    def submit(self, run: Callable[[], None]) -> _Job:
        """Queues a job."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._work, name="ms_dtensor-comm", daemon=True).start()
        job = self._last = _Job(run)
        self._jobs.put(job)
        return job

    def drain(self) -> None:
        """Waits until all jobs are done; their errors belong to their own `wait`."""
        if self._last is not None:
            self._last.done.wait()

    def end(self) -> None:
        """Lets the thread end after its last job."""
        if self._started:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.run()  # type: ignore[misc]
            except BaseException as e:  # told to whoever waits
                job.error = e
            job.done.set()
            job.run = None  # what the collective read may go
