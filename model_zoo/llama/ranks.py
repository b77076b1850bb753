# SPDX-License-Identifier: Apache-2.0
"""What a script needs to know before MindSpore starts: how many ranks there are, and how a rank says that it failed.

No import of MindSpore or of anything that communicates.
"""
from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable

from ms_dtensor.comm.hccl_words import explain
from ms_dtensor.errors import CommError, ConfigError, DTensorError
from ms_dtensor.tools.guard import Diverged

FAILED = "ms_dtensor: failed"  # launch.py finds the rank that failed first by this line
NODE = "MS_DTENSOR_NODE"  # which machine of the run this is; launch.py says it
LAUNCHER = "MS_DTENSOR_LAUNCHER"  # its own `this_process()`; what another job left in the environment names another one
LINGER = 3.0  # seconds; msrun kills all ranks when the first one leaves, and each is to say its reason before
DEVICES = {"Ascend": "npu", "GPU": "gpu", "CPU": "cpu"}


def world_size() -> int:
    """Number of ranks, as msrun told this process."""
    return int(os.environ.get("MS_WORKER_NUM", "1"))


def rank() -> int:
    """This process's rank, as msrun told it."""
    return int(os.environ.get("RANK_ID", "0"))


def this_process() -> str:
    """What tells this process from all others."""
    return f"process {os.getpid()} on {socket.gethostname()}"


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
        print(f"{FAILED} rank={who} time={time.monotonic():.3f}\n{why}", file=sys.stderr, flush=True)
        if world_size() > 1:
            time.sleep(LINGER)
        return code
    return 0


def _idle() -> bool:
    """Whether msrun started this process as the scheduler of one rank: that never calls it, and does all the work itself."""
    if os.environ.get("MS_ROLE") != "MS_SCHED" or world_size() > 1:
        return False
    from ms_dtensor.comm.shm.rendezvous import msrun_ancestor
    if not msrun_ancestor():
        raise ConfigError("For 'MS_ROLE', this process is to be a scheduler, and no msrun started it.",
                          "MS_ROLE=MS_SCHED, and MS_WORKER_NUM is 1 or not there", "A scheduler computes nothing.",
                          "unset MS_ROLE: another job left it in the environment")
    return True


def script(run: Callable[[], None]) -> int:
    """Exit code of `run()`, of a script that nothing starts again: what the library refuses is one message and 2."""
    def refusing() -> None:
        try:
            run()
        except DTensorError as error:
            if isinstance(error, (ConfigError, CommError)):
                raise
            raise ConfigError(error.attempt, error.operands, error.rule, error.fix) from None
    return guarded(refusing)


def leave(code: int) -> None:
    """Ends the process with this exit code, once what it said is written.

    After a success at once: MindSpore's own end takes up to two seconds, and has nothing left to do where no scheduler of
    its own waits for word from the ranks.
    """
    if not code and "mindspore" in sys.modules:
        from ms_dtensor import comm
        from ms_dtensor.internals.target import on_cpu

        world = comm.current_world()
        if on_cpu() and (world is None or not world.backend.needs_scheduler):
            comm.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    sys.exit(code)


def start_device() -> str:
    """The device type of this machine for `init_device_mesh`, ready to compute."""
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        if os.environ.get(NODE, "0") != "0":
            sys.exit(0)  # msrun starts one wherever it finds the master's address; two nodes on one machine have both
        os.nice(10)  # what it does on one machine's CPUs is to see that there is nothing to do
    if os.environ.get("MS_ROLE"):
        from ms_dtensor.comm.launcher import end_with_msrun
        end_with_msrun()  # now: MindSpore's import takes seconds
    import mindspore as ms

    device = DEVICES[ms.get_context("device_target")]
    if device == "cpu" and os.environ.get("MS_DTENSOR_CPU_BACKEND"):  # "mccl": ranks on several hosts
        from ms_dtensor.comm import set_cpu_backend
        set_cpu_backend(os.environ["MS_DTENSOR_CPU_BACKEND"])
    if device == "cpu":
        ms.runtime.launch_blocking()  # the asynchronous pipeline is far slower on CPU
    return device
