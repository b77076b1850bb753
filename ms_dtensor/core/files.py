# SPDX-License-Identifier: Apache-2.0
"""Files in folders where other users may write too: a link that somebody planted leads nowhere.

Not for files that a user names to be read. Invariant: what is written is a plain file of this user's that no other name
leads to, or a new one; what is replaced is a name, never what it points to.
"""
from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def own_file(path: str, flags: int, mode: int = 0o666) -> int:
    """Opens a plain file, for `open(..., opener=own_file)`; to be written it is this user's, or it is made.

    Raises:
        OSError: a link, a pipe, a file of another user, or one that has another name too.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> os.symlink("/etc/passwd", folder + "/a")
        >>> open(folder + "/a", "w", opener=own_file)
        Traceback (most recent call last):
        OSError: [Errno 40] It is a symbolic link: ...
    """
    path = os.fspath(path)
    # no pipe keeps us waiting, and nothing is cut before we know what it is
    try:
        fd = os.open(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "It is a symbolic link", path) from None
        raise
    try:
        found, writes = os.fstat(fd), flags & (os.O_WRONLY | os.O_RDWR)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(errno.EPERM, "It is no plain file", path)
        if writes and not ours(found, path):
            raise PermissionError(errno.EPERM, f"It is a file of user {found.st_uid}, and this is user {os.geteuid()}", path)
        if writes and found.st_nlink > 1:
            raise PermissionError(errno.EPERM, "The file has another name elsewhere (a hard link)", path)
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def regular(path: Path) -> Path:
    """The same path, of a file to be read: not of a pipe or a device, which may block, or never end.

    Raises:
        OSError: something else is there.

    Example:
        >>> from pathlib import Path
        >>> from ms_dtensor.core.files import regular
        >>> regular(Path("no-such-file")), regular(Path(__file__)) == Path(__file__)
        (PosixPath('no-such-file'), True)
    """
    if path.exists() and not path.is_file():
        raise OSError("it is no regular file")
    return path


def ours(found: os.stat_result, path: str) -> bool:
    """Whether this user made it; root's own belong to somebody else on a network disk, as the folder there does."""
    me = os.geteuid()
    return found.st_uid == me or me == 0 and found.st_uid == os.stat(os.path.dirname(path) or ".").st_uid


def beside(path: Path) -> Path:
    """A hidden name in the same folder that nobody can guess, for a file to be made by mode "x", which follows no link."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.saving")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes this name when the block is over, whole and on the disk; what had the name stays till then.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a"
        >>> with replacing(path) as file:
        ...     _ = file.write(b"whole")
        >>> path.read_bytes()
        b'whole'
    """
    aside = beside(path)
    try:
        with open(aside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        if isinstance(error, OSError) and error.filename == os.fspath(aside):  # a name that the caller has never seen
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
        raise


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, if they are not there; a link of another user's does not count as one."""
    path.mkdir(parents=True, exist_ok=True)
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, f"It is a link that user {found.st_uid} made", os.fspath(path))


def new_folder(path: Path) -> Path:
    """Makes a folder that was not there, by this name or this name with a number, and returns it."""
    make_folder(path.parent)
    number = 1
    while True:
        try:
            made = path if number == 1 else path.with_name(f"{path.name}-{number}")
            made.mkdir()
            return made
        except FileExistsError:
            number += 1
