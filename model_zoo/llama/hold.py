# SPDX-License-Identifier: Apache-2.0
"""A run's folders belong to one run: whoever trains holds a lock there, which the system lets go with the process.

Rank 0 holds it; where launch.py started the ranks, both do, so that it is held between two attempts, and while ranks that
have lost their launcher still save. Nobody but their user can open the lock's file, and so hold it; it goes with the run.
Reading (evaluate, generate) asks nobody. A file system without locks guards nothing.
"""
from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

from ms_dtensor.core.files import make_folder, own_file
from ms_dtensor.errors import ConfigError
from ms_dtensor.tools.ranks import world_size

from .config import Config, checkpoint_folder
from .ranks import LAUNCHER, this_process

LOCK = ".lock"


@contextlib.contextmanager
def hold(cfg: Config, launcher: bool = False) -> Iterator[None]:
    """Holds the folders that a run writes, while the block runs, if this process is the one to do so.

    Args:
        cfg: of the run.
        launcher: this is launch.py of the first machine: it shares them with its rank 0.

    Raises:
        ConfigError: another run has one of them, or another user's file is in the way.
    """
    folders = {"train.log_dir": Path(cfg.train.log_dir)}
    if cfg.checkpoint.interval:
        folders["checkpoint.dir"] = checkpoint_folder(cfg)
    with contextlib.ExitStack() as stack:
        for key, folder in folders.items() if launcher or _first() else ():
            file = _locked(folder / LOCK, key, launcher)
            if file is not None:
                stack.callback(_let_go, file)
        yield


def _first() -> bool:
    """Whether this process is a run's rank 0, and knows: an msrun that is not told its node's number numbers ranks later."""
    role = os.environ.get("MS_ROLE", "")
    return not role or world_size() == 1 or role == "MS_WORKER" and os.environ.get("MS_NODE_ID") == "0"


def _locked(path: Path, key: str, launcher: bool) -> IO[bytes] | None:
    """The lock's file, held; None where there are no locks, or nothing can be written (somebody else says so)."""
    while True:
        try:
            make_folder(path.parent)
            file = open(path, "ab+", buffering=0, opener=partial(own_file, mode=0o600))  # noqa: SIM115  until `_let_go`
        except OSError as error:
            if not os.path.lexists(path) and not path.parent.is_symlink():
                return None
            raise ConfigError(f"For '{key}', the lock of '{path.parent}' cannot be taken.", f"{path}: {error.strerror}",
                              "A folder is of one run at a time, and only this user's runs can be asked.",
                              [f"another --{key}", f"if no run of anybody's is at work there: rm {path}"]) from None
        try:
            _lock(file, key, launcher)
            if os.path.lexists(path) and os.path.samestat(os.lstat(path), os.fstat(file.fileno())):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # a run that has just ended took the name away


def _lock(file: IO[bytes], key: str, launcher: bool) -> None:
    shared = fcntl.LOCK_SH | fcntl.LOCK_NB
    with contextlib.suppress(OSError):  # of a file system without modes
        os.fchmod(file.fileno(), 0o600)  # an older one: who can open it can hold it
    try:
        if not launcher and os.environ.get(LAUNCHER, "-") == _said(file):  # launch.py, which has it, started this rank
            fcntl.flock(file, shared)
            return
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(this_process().encode())
        if launcher:
            fcntl.flock(file, shared)
    except BlockingIOError:
        said = _said(file)
        raise ConfigError(f"For '{key}', another run is at work in '{os.path.dirname(file.name)}'.",
                          said if _alive(said) else f"{said}, which is gone; its ranks go on, to save what they have",
                          "A folder is of one run at a time: metrics and checkpoints of two would mix.",
                          ["wait until it ends, or end it", f"another --{key}"]) from None
    except OSError:  # a file system without locks
        pass


def _said(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), 200, 0).decode(errors="replace")


def _alive(process: str) -> bool:
    """Whether "process 12 on host" is there, as far as this host can tell."""
    number, _, host = process.removeprefix("process ").partition(" on ")
    return host != socket.gethostname() or os.path.exists(f"/proc/{number}")


def _let_go(file: IO[bytes]) -> None:
    """The last one to do so takes the name away, so that the next run may be another user's."""
    with file, contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.lstat(file.name), os.fstat(file.fileno())):
            os.unlink(file.name)
