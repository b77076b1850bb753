# SPDX-License-Identifier: Apache-2.0
"""How a script of the recipe begins and ends: who launched it, what the library refuses as one message, the exit.

No import of MindSpore or of anything that communicates. What any launcher needs is `ms_dtensor/tools/ranks.py`.
"""
from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable

from ms_dtensor.errors import CommError, ConfigError, DTensorError
from ms_dtensor.tools.ranks import guarded

LAUNCHER = "MS_DTENSOR_LAUNCHER"  # its own `this_process()`; what another job left in the environment names another one


def this_process() -> str:
    """What tells this process from all others."""
    return f"process {os.getpid()} on {socket.gethostname()}"


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
