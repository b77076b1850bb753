# SPDX-License-Identifier: Apache-2.0
"""What ranks and whoever starts them with msrun agree on: a port, how a rank says that it failed, when it ends.

Not a launcher: the recipe's is `model_zoo/llama/launch.py`, that of the benchmarks `bench/hosts.py`. No import of MindSpore
before a rank's device is asked for.
"""
from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from ..comm.hccl_words import explain
from ..errors import ConfigError, DTensorError
from .guard import Diverged

FAILED = "ms_dtensor: failed"  # who started the ranks finds the one that failed first by this line
NODE = "MS_DTENSOR_NODE"  # which machine of the run this is; the launcher says it
PARTING_SECONDS = 3.0  # msrun kills all ranks when the first one leaves, and each is to say its reason before
DEVICES = {"Ascend": "npu", "GPU": "gpu", "CPU": "cpu"}
CHATTER = re.compile(r"^\[(INFO|WARNING)\] [A-Z_]+\(.*\n?", re.M)  # MindSpore's own lines behind a traceback
REASON = re.compile(rf"^{FAILED} rank=(\S+) time=([\d.]+)\n", re.M)
PRCTL = ctypes.CDLL(None).prctl


def free_port() -> int:
    """A port of the range msrun accepts that nobody listens on."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))  # on no address of this machine: other nodes may come by any
                return port
            except OSError:
                continue
    raise OSError("For 'msrun', no free port was found between 20000 and 32000.")


def end_with_parent(parent: int) -> None:
    """In the child, before it is msrun: when this process is gone it is killed, and ranks end with their msrun."""
    PRCTL(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # gone meanwhile
        os._exit(1)


def failures(log_dir: Path) -> Iterator[tuple[float, str, str]]:
    """(time, rank, text) of each rank that said why it failed."""
    for log in log_dir.glob("worker_*.log"):
        text = log.read_text(errors="replace")
        for found in REASON.finditer(text):
            yield float(found[2]), found[1], CHATTER.sub("", text[found.end():])


def world_size() -> int:
    """Number of ranks, as msrun told this process."""
    return int(os.environ.get("MS_WORKER_NUM", "1"))


def rank() -> int:
    """This process's rank, as msrun told it."""
    return int(os.environ.get("RANK_ID", "0"))


def guarded(run: Callable[[], None]) -> int:
    """Exit code of `run()`: 0, or 2 (bad configuration) or 1 (anything else) after saying why on stderr."""
    try:
        if not _idle():
            run()
    except Exception as error:
        who = "scheduler" if os.environ.get("MS_ROLE") == "MS_SCHED" else rank()
        if isinstance(error, (ConfigError, Diverged)):  # the text says it all
            why, code = f"{type(error).__name__}: {error}", 2 if isinstance(error, ConfigError) else 1
        else:
            why, code = traceback.format_exc(), 1
            if not isinstance(error, DTensorError) and (told := explain(why)):  # of a device it comes when it is waited for
                why += "\n".join((f"HCCL's {told[0]}: {told[1]}", *(f"  {way}" for way in told[2])))
        if os.environ.get("MS_ROLE") or world_size() > 1:  # a process that a user starts alone speaks to the user
            why = f"{FAILED} rank={who} time={time.monotonic():.3f}\n{why}"
        print(why, file=sys.stderr, flush=True)
        if world_size() > 1:
            time.sleep(PARTING_SECONDS)
        return code
    return 0


def _idle() -> bool:
    """Whether msrun started this process as the scheduler of one rank: that never calls it, and does all the work itself."""
    if os.environ.get("MS_ROLE") != "MS_SCHED" or world_size() > 1:
        return False
    from ..comm.shm.rendezvous import msrun_ancestor
    if not msrun_ancestor():
        raise ConfigError("For 'MS_ROLE', this process is to be a scheduler, and no msrun started it.",
                          "MS_ROLE=MS_SCHED, and MS_WORKER_NUM is 1 or not there", "A scheduler computes nothing.",
                          "unset MS_ROLE: another job left it in the environment")
    return True


def start_device() -> str:
    """The device type of this machine for `init_device_mesh`, ready to compute."""
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        if os.environ.get(NODE, "0") != "0":
            sys.exit(0)  # msrun starts one wherever it finds the master's address; two nodes on one machine have both
        os.nice(10)  # what it does on one machine's CPUs is to see that there is nothing to do
    if os.environ.get("MS_ROLE"):
        from ..comm.launcher import end_with_msrun
        end_with_msrun()  # now: MindSpore's import takes seconds
    import mindspore as ms

    from ..internals.target import cpu_kernels, target
    device = "cpu" if cpu_kernels() else DEVICES[target()]  # of a rehearsal, too
    if device == "cpu" and os.environ.get("MS_DTENSOR_CPU_BACKEND"):  # "mccl": ranks on several hosts
        from ..comm import set_cpu_backend
        set_cpu_backend(os.environ["MS_DTENSOR_CPU_BACKEND"])
    if device == "cpu":
        ms.runtime.launch_blocking()  # the asynchronous pipeline is far slower on CPU
    return device
