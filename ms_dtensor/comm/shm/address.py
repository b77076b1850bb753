# SPDX-License-Identifier: Apache-2.0
"""Where a rank listens while it starts: a socket file that nobody but its user can find free, connect to or take away.

Abstract names have no owner and no mode, so anybody could sit on them first, or call. A file has both. Its name ends at
random, so that no other user can make it before; peers look for files of the job that their own user made; and on each
connection the kernel says whose the other end is, before a byte is sent or read. The file goes when the start is over; what
a killed start leaves is in nobody's way, and goes with a later start of the user's. Invariant: what `open_to` and `of_us`
let pass is a process of the same user.
"""
from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Iterator

from ...errors import ConfigError

_log = logging.getLogger("ms_dtensor")
_FOLDERS = ("/dev/shm", "/tmp")  # not TMPDIR, which launchers set for each process
_NAME = "ms_dtensor-"
_OLD = 60.0                      # seconds after which a file that nobody listens on is removed: not one just being made


def of_us(sock: socket.socket) -> bool:
    """Whether the other end of a connection is a process of this user."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid == os.geteuid()


def _folder() -> str:
    """Where a socket file is made, if there is room."""
    return _folders()[0]


def _folders() -> list[str]:
    found = [folder for folder in _FOLDERS if os.access(folder, os.W_OK | os.X_OK)]
    if not found:
        raise ConfigError("For 'start', there is no folder for a socket.", f"tried {' and '.join(_FOLDERS)}",
                          "Ranks of one host find each other by a socket file.", "make one of them writable for this user")
    return found


def _start_of(name: str, rank: int) -> str:
    return f"{_NAME}{hashlib.sha256(name.encode()).hexdigest()[:16]}-{rank}."


def _ours(beginning: str) -> Iterator[str]:
    """Sockets of this user whose names begin like this."""
    for folder in _folders():
        for name in os.listdir(folder):
            if name.startswith(beginning):
                path = f"{folder}/{name}"
                with contextlib.suppress(FileNotFoundError):
                    found = os.lstat(path)
                    if stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid():
                        yield path


def _connected(path: str, timeout: float) -> socket.socket | None:
    """A connection; None if nobody listens, or somebody else does."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(timeout)
    try:
        sock.connect(path)
        if of_us(sock):
            return sock
    except (ConnectionError, FileNotFoundError):
        pass
    except BaseException:
        sock.close()
        raise
    sock.close()
    return None


def open_to(name: str, rank: int, timeout: float) -> socket.socket | None:
    """A connection to a rank of the job; None if it does not listen yet, or has no room just now."""
    for path in _ours(_start_of(name, rank)):
        with contextlib.suppress(BlockingIOError):  # its queue is full
            if (sock := _connected(path, timeout)) is not None:
                return sock
    return None


@contextlib.contextmanager
def listening(name: str, rank: int, backlog: int) -> Iterator[socket.socket]:
    """The socket at which a rank of the job can be called; for the time of the block.

    Raises:
        ConfigError: another process is this rank of the job.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        os.fchmod(sock.fileno(), 0o600)  # the file is made with this mode, so that nobody else can connect at any moment
        path = _bound(sock, f"{_start_of(name, rank)}{secrets.token_hex(8)}")
        try:
            _check_free(name, rank, path)  # before anybody can call us in place of the other
            sock.listen(backlog)
            _check_free(name, rank, path)  # it may have come at the same time
            _sweep()
            yield sock
        finally:
            os.unlink(path)


def _bound(sock: socket.socket, name: str) -> str:
    """Binds to a file of this name in the first folder that has room for one more."""
    full = []
    for folder in _folders():
        try:
            sock.bind(f"{folder}/{name}")
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            full.append(f"{folder}: {e.strerror}")
            continue
        if full:
            _log.warning("a rank's socket file is in '%s', as there is no room elsewhere (%s)", folder, "; ".join(full))
        return f"{folder}/{name}"
    raise ConfigError("For 'start', there is no room for a socket file.", "; ".join(full),
                      "Ranks of one host find each other by a socket file, which needs an inode.",
                      ("remove files: df -i /dev/shm /tmp tells how many there may be",
                       "mount -o remount,nr_inodes=1m /dev/shm"))


def _check_free(name: str, rank: int, mine: str) -> None:
    if any(path != mine and _alive(path) for path in _ours(_start_of(name, rank))):
        raise ConfigError(f"For 'start', rank {rank} is taken by another process.", f"job name '{name}'",
                          "Each rank of a job has one process, and each job its own port.",
                          ("pass another --master_port to msrun", "end the job that runs on this port"))


def _alive(path: str) -> bool:
    """Whether somebody of us listens there; who does takes the call for one that came and went."""
    try:
        sock = _connected(path, 1.0)
    except (BlockingIOError, TimeoutError):
        return True
    if sock is not None:
        sock.close()
    return sock is not None


def _sweep() -> None:
    """Removes what killed processes of this user left."""
    for path in _ours(_NAME):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - os.lstat(path).st_mtime > _OLD and not _alive(path):
                os.unlink(path)
