# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a launch of cases: `python -m tests.forks 4 module:case:limit ...`

They are forks of two processes that have loaded MindSpore and the cases and have run nothing. Under msrun each rank, the
scheduler and msrun itself load MindSpore anew: 13 s of CPU before the first case of 4 ranks. What msrun does to a job is
asked by tests of their own (test_msrun.py, comm/test_launch.py, zoo/test_llama_launch.py). Two processes, not one: forks
of one hash strings alike and have their objects at the same addresses, so that an order that differs between ranks is
hidden.
"""
import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.msrun import REPORTS
from tests.rank_main import load, run

GRACE = 3.0  # seconds for ranks to say what they saw when one of them failed; then they are ended
PORT = 32_000  # and above: names the job in shared memory, below it are the ports of msrun's
JOB = "MS_DTENSOR_TEST_JOB"  # set for the second process
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl


def main(size: int, arguments: list[str]) -> int:
    end_with(os.getppid())
    job, mine, pids = os.environ.get(JOB, ""), range(size // 2, size), set()
    if not job:
        job, mine = str(PORT + os.getpid()), range(size // 2)
        other = subprocess.Popen([sys.executable, "-m", "tests.forks", str(size), *arguments], env={**os.environ, JOB: job})
        pids.add(other.pid)
    # As msrun sets them: MindSpore reads some when it is loaded.
    os.environ.update(MS_ROLE="MS_WORKER", MS_WORKER_NUM=str(size), RANK_SIZE=str(size), MS_SCHED_HOST="127.0.0.1",
                      MS_SCHED_PORT=job)
    cases = load(arguments)
    gc.collect()
    gc.freeze()  # no collection goes through MindSpore's objects again, nor has a rank of its own what it does not write
    pids |= {_fork(rank, cases) for rank in mine}
    code, until = 0, 0.0
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG if code else 0)
        if pid:
            pids.discard(pid)
            if not code and (code := abs(os.waitstatus_to_exitcode(status))):
                until = time.monotonic() + GRACE
        elif time.monotonic() > until:
            for pid in pids:  # of the second process the ranks that are left end as all that carry the launch's mark
                os.kill(pid, signal.SIGKILL)
            until += 60
        else:
            time.sleep(0.01)
    return code


def end_with(parent: int) -> None:
    """This process is killed when its parent is: pytest cannot end its ranks when it is killed itself."""
    if hasattr(os, "sched_setaffinity"):  # Linux
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before that
            os.kill(os.getpid(), signal.SIGKILL)


def _fork(rank: int, cases: list) -> int:
    """Of the rank its process."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    if pid := os.fork():
        return pid
    end_with(parent)
    os.environ.update(MS_NODE_ID=str(rank), RANK_ID=str(rank), DEVICE_ID=str(rank))
    with open(Path(os.environ[REPORTS]) / f"worker_{rank}.log", "wb", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.exit(run(cases))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
