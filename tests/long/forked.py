# SPDX-License-Identifier: Apache-2.0
"""Ranks as forks of a process that has loaded MindSpore and has run nothing: a world in a second, in place of ten.

Not a launcher for users: no scheduler, so of the backends only `shm`. What a rank returns or raises goes to the parent.
`Job` has ranks on the shared-memory engine alone, without MindSpore: for checks of how jobs end and what they leave.
"""
import contextlib
import gc
import json
import os
import signal
import time
from collections.abc import Callable

from ms_dtensor.comm.record import user_site
from ms_dtensor.comm.shm.engine import Engine
from ms_dtensor.comm.shm.rows import RowsEngine
from tests.comm.left import left_of

_count = 0


def world(size: int, run: Callable[[int], object], limit: float = 60) -> dict[int, dict]:
    """Forks ranks: of each its `pid`, and its `result`, or the `error`, its `text` and `at` which time it came.

    Args:
        size: number of ranks.
        run: what each does, given its rank; returns what JSON can write.
        limit: seconds after which ranks are killed. Who was killed has a pid alone.
    """
    global _count
    _count += 1
    job, pids, reads = f"{20000 + os.getpid() % 20000}{_count}", [], []
    gc.freeze()  # else each rank's collector writes into all pages that it shares with the parent, and copies them
    for rank in range(size):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.environ.update(MS_ROLE="MS_WORKER", MS_WORKER_NUM=str(size), MS_NODE_ID=str(rank), MS_SCHED_PORT=job)
            out, why = {"pid": os.getpid()}, ""
            try:
                out["result"] = run(rank)
            except BaseException as error:
                why = f"{type(error).__name__}: {error}".partition("\n")[0]
                out.update(error=type(error).__name__, text=str(error), at=time.time())
            os.write(write, json.dumps(out).encode())
            from ms_dtensor.comm import world as ours
            with contextlib.suppress(Exception):
                ours._leave(why)
            os._exit(0)
        os.close(write)
        pids.append(pid)
        reads.append(read)
    gc.unfreeze()
    until, left, texts = time.time() + limit, dict(enumerate(pids)), [b""] * size
    for read in reads:  # a report may be longer than a pipe holds
        os.set_blocking(read, False)
    while left and time.time() < until:
        for rank, read in enumerate(reads):
            with contextlib.suppress(BlockingIOError):
                texts[rank] += os.read(read, 1 << 20)
        left = {rank: pid for rank, pid in left.items() if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        time.sleep(0.005)
    for pid in left.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    out = {}
    for rank, read in enumerate(reads):
        with os.fdopen(read, "rb") as f:
            text = texts[rank] + (f.read() or b"")
        out[rank] = json.loads(text) if text else {"pid": pids[rank]}
    return out


def name_of(number: int) -> str:
    """A job of this process."""
    return f"ms_dtensor-check-{os.getpid()}-{number}"


class Job:
    """Forked ranks of one world, each of which reports one line of JSON when it ends."""

    def __init__(self, size: int, run: Callable[[Engine, int], object], timeout: float = 60):
        global _count
        _count += 1
        self.started_read, started = os.pipe()
        self.pids, self._reports = [], []
        name = name_of(_count)
        for rank in range(size):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.write(write, json.dumps(self._rank(rank, size, name, run, timeout, started)).encode())
                os._exit(0)
            os.close(write)
            self.pids.append(pid)
            self._reports.append(read)
        os.close(started)
        left = size
        while left:
            left -= len(os.read(self.started_read, left)) or left  # nothing: a rank ended before

    @staticmethod
    def _rank(rank: int, size: int, name: str, run, timeout: float, started: int) -> dict:
        e, out = None, {"rank": rank}
        try:
            e = RowsEngine(rank, size, name, timeout=timeout, start_timeout=30, site=user_site)
            e.barrier(tuple(range(size)))
            os.write(started, b".")
            out["result"] = run(e, rank)
            e.close()
        except BaseException as error:
            out.update(error=type(error).__name__, text=str(error))
            if e is not None:
                e.close(f"{type(error).__name__}: {error}".split("\n")[0])  # as `world` does at exit
        out["at"] = time.monotonic()
        return out

    def reports(self, until: float) -> dict[int, dict]:
        """What each rank reported; ranks that are not done by then are killed and have none."""
        for pid in self.pids:
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    break
                time.sleep(0.002)
        out = {}
        for rank, read in enumerate(self._reports):
            with os.fdopen(read, "rb") as f:
                text = f.read()
            if text:
                out[rank] = json.loads(text)
        os.close(self.started_read)
        return out


def left_over() -> list[str]:
    """Files and sockets of the jobs of this process."""
    return left_of(map(name_of, range(1, _count + 1)))
