# SPDX-License-Identifier: Apache-2.0
"""A run's folders belong to one run: whoever trains holds a lock there, which the system lets go with the process.

Rank 0 holds it; where launch.py started the ranks, both do, so that it is held between two attempts, and while ranks that
have lost their launcher still save. Reading (evaluate, generate) asks nobody. A file system without locks guards nothing.
"""
from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ms_dtensor.errors import ConfigError

from .config import Config, checkpoint_folder
from .ranks import NODE

LOCK = ".lock"


@contextlib.contextmanager
def hold(cfg: Config, launcher: bool = False) -> Iterator[None]:
    """Holds the folders that a run writes, while the block runs, if this process is the one to do so.

    Args:
        cfg: of the run.
        launcher: this is launch.py of the first machine: it shares them with its rank 0.

    Raises:
        ConfigError: another run has one of them.
    """
    folders = {"train.log_dir": Path(cfg.train.log_dir)}
    if cfg.checkpoint.interval:
        folders["checkpoint.dir"] = checkpoint_folder(cfg)
    with contextlib.ExitStack() as stack:
        for key, folder in folders.items() if launcher or _first() else ():
            file = _open(folder)
            if file is not None:
                _lock(stack.enter_context(file), key, launcher)
        yield


def _first() -> bool:
    """Whether this process is a run's rank 0, and knows: an msrun that is not told its node's number numbers ranks later."""
    role = os.environ.get("MS_ROLE", "")
    return not role or role == "MS_WORKER" and os.environ.get("MS_NODE_ID") == "0"


def _open(folder: Path) -> IO[bytes] | None:
    with contextlib.suppress(OSError):  # what cannot be written is not written, or somebody else says so
        folder.mkdir(parents=True, exist_ok=True)
        return open(folder / LOCK, "ab+", buffering=0)
    return None


def _lock(file: IO[bytes], key: str, launcher: bool) -> None:
    shared = fcntl.LOCK_SH | fcntl.LOCK_NB
    try:
        if NODE in os.environ and not launcher:  # launch.py, which has it, started this rank
            fcntl.flock(file, shared)
            return
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        if launcher:
            fcntl.flock(file, shared)
    except BlockingIOError:
        file.seek(0)
        raise ConfigError(f"For '{key}', another run is at work in '{os.path.dirname(file.name)}'.",
                          file.read(200).decode(errors="replace"),
                          "A folder is of one run at a time: metrics and checkpoints of two would mix.",
                          ["wait until it ends, or end it", f"another --{key}"]) from None
    except OSError:  # a file system without locks
        pass
