# SPDX-License-Identifier: Apache-2.0
"""A rank's place in its job: it ends with the msrun that waits for it, and MindSpore's own communication stays out.

Not a launcher. Invariant: what is done here is undone by `release_mindspore`, or concerns a process that is lost anyway.
"""
from __future__ import annotations

import os
import re
import select
import signal
import threading
import time
from functools import cache, partial
from typing import NoReturn

from ..errors import ConfigError

_GRACE = 30.0  # seconds between SIGTERM and SIGKILL: to save something, if the script wants to
_STARTS = ("init_hccl", "init_cluster", "_init_hccl_with_store", "_init_cluster_with_store")  # behind every `init`
_ENDS = ("finalize_hccl",)                                                                     # behind every `release`
_originals: dict[str, object] = {}


@cache
def end_with_msrun() -> None:
    """Ends this process when the msrun that waits for it (`--join=True`) is gone. Once is enough; the earlier the better.

    msrun gives each worker a session of its own, so nothing else would end the workers of a killed msrun. Without
    `--join=True` msrun leaves at once, and its workers are meant to go on.
    """
    from .shm.rendezvous import msrun_ancestor
    try:
        pid = int(msrun_ancestor() or 0)
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            waits = re.search(rb"\0--jo?i?n?[=\0]True\0", f.read())
        if waits:
            threading.Thread(target=_wait_for, args=(os.pidfd_open(pid), pid), name="ms_dtensor-msrun", daemon=True).start()
    except OSError:  # no msrun, or a system that cannot tell us
        pass


def _wait_for(process: int, pid: int) -> None:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.poll()
    os.write(2, f"ms_dtensor: msrun (pid {pid}) is gone, so this rank ends.\n".encode())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


def check_device(device: str, kind: str) -> None:
    """Refuses a device that is not here; in every process, msrun's scheduler too, before anything is waited for.

    Args:
        device: MindSpore's name of it.
        kind: what the user called it.
    """
    import mindspore
    if device != "CPU" and not mindspore.hal.is_available(device):
        raise ConfigError(f"For 'start', there is no {device} device here.", f"device type '{kind}'",
                          "The device, its driver and a MindSpore built for it are on every host of the job.",
                          ('use "cpu"', f"install MindSpore for {device} and look whether its tools see the device"))


def hold_mindspore() -> None:
    """From now on `mindspore.communication.init` and `release` are refused, under any name that a script has for them."""
    from mindspore.communication import management
    for names, refuse in ((_STARTS, partial(_refuse, "init")), (_ENDS, partial(_refuse, "release"))):
        for name in names:
            if hasattr(management, name):
                _originals.setdefault(name, getattr(management, name))
                setattr(management, name, refuse)


def release_mindspore() -> None:
    """Undoes `hold_mindspore`."""
    if _originals:
        from mindspore.communication import management
        while _originals:
            setattr(management, *_originals.popitem())


def _refuse(what: str, *args: object) -> NoReturn:
    if what == "init":
        raise ConfigError("For 'mindspore.communication.init', ms_dtensor has started communication already.",
                          "a world that the first mesh started",
                          "A second communication would wait for a scheduler that has left, or cut off the first.",
                          ("leave init() out", "call it before the first mesh, to use MindSpore's collectives too"))
    raise ConfigError("For 'mindspore.communication.release', ms_dtensor still communicates.",
                      "a world that the first mesh started", "After it, any op ends the process.",
                      ("leave release() out: ranks leave by themselves", "call ms_dtensor.comm.shutdown() first"))
