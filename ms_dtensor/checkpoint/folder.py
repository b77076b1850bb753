# SPDX-License-Identifier: Apache-2.0
"""Folders that are there whole or not at all: written aside, renamed; `latest`; which to keep. No ranks, no tensors.

A save writes into a hidden folder beside its target, `.NAME.saving`, has every file on the disk, and renames it; what was
there under the name is exchanged with it in the same system call. The hidden folder is locked while its save runs, so that
a leftover is told from a save at work. Invariant: after a kill at any moment, each name holds a whole checkpoint or
nothing, and `latest` names one that is there.
"""
from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from ..core.files import beside, make_folder, ours, own_file, replacing
from ..errors import CheckpointError
from .index import NAME
from .refusals import refusals

LATEST = "latest"
_SAVING, _OLD, _RETIRED = ".saving", ".replaced", ".retired"
_STEP = re.compile(r"step-([0-9]{8,})")
_SAVED = re.compile(rb'"saved": ([0-9]{1,20})')
_OWN = re.compile(r"index\.json|shard-\d+-of-\d+\.safetensors|\.nfs.*")  # the last: removed files that NFS holds open
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def step_name(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:08d}"


def steps(root: str | os.PathLike) -> list[int]:
    """The steps whose checkpoints are in a folder, in order."""
    try:
        names = os.listdir(root)
    except OSError:
        return []
    found = [_STEP.fullmatch(name.removesuffix(_OLD).removeprefix(".")) for name in names]
    numbers = {int(match[1]) for match in found if match}  # `step-000000010` is no folder that a save makes
    return sorted(number for number in numbers if (place_of(Path(root) / step_name(number)) / NAME).is_file())


def place_of(target: Path) -> Path:
    """Where a checkpoint is: at its name, or aside, if a save was killed between two renames that cannot be one."""
    old = target.parent / f".{target.name}{_OLD}"
    return old if not target.exists() and (old / NAME).is_file() else target


def saved_at(folder: Path) -> int:
    """When a checkpoint was saved, in nanoseconds, a later one with a larger number even where the clock went back; 0 if it
    cannot be read."""
    try:
        with open(folder / NAME, "rb", opener=own_file) as file:
            found = _SAVED.search(file.read(1024))
            return int(found[1]) if found else os.fstat(file.fileno()).st_mtime_ns  # the first format did not tell
    except OSError:
        return 0


def now(root: Path) -> int:
    """The time of a save into a folder of steps, later than that of all that are there."""
    return max([time.time_ns(), *(saved_at(root / step_name(step)) + 1 for step in steps(root))])


def by_age(root: Path) -> list[int]:
    """The steps in a folder, in the order in which they were saved: a run that went back counts anew from there."""
    return sorted(steps(root), key=lambda step: (saved_at(place_of(root / step_name(step))), step))


def latest(root: str | os.PathLike) -> Path | None:
    """The checkpoint that the last complete `save(..., step=)` into a folder made; None if there is none.

    Example:
        >>> import tempfile, ms_dtensor as md
        >>> root = tempfile.mkdtemp()
        >>> md.checkpoint.latest(root) is None
        True
        >>> for step in (10, 20):
        ...     md.checkpoint.save({"loss": 1.5}, root, step=step)
        >>> md.checkpoint.latest(root).name
        'step-00000020'
    """
    try:
        with open(Path(root) / LATEST, encoding="utf-8", opener=own_file) as file:
            name = file.read(100).strip()
    except (OSError, UnicodeDecodeError):
        name = ""
    if _STEP.fullmatch(name) and (place_of(Path(root) / name) / NAME).is_file():
        return place_of(Path(root) / name)
    found = by_age(Path(root))  # the very first save was killed before its last step, or somebody removed the file
    return place_of(Path(root) / step_name(found[-1])) if found else None


def find(path: str | os.PathLike) -> Path:
    """The checkpoint that a path means: itself, or the `latest` of a folder of steps.

    Raises:
        CheckpointError: it is both.
    """
    path = Path(path)
    if (path / NAME).is_file():
        step = latest(path)
        if step is not None:
            raise CheckpointError(f"For '{path}', there are two checkpoints: the folder is one, and '{step.name}' is in it.",
                                  "", "A path means one checkpoint.",
                                  (f"for the step pass '{step}'",
                                   f"for the other move '{NAME}' and its shards into a folder of their own"))
        return path
    return latest(path) or place_of(path)


class Folder:
    """A checkpoint folder in the making. `commit` makes it visible; without it nothing has changed.

    Args:
        target: where it will be.

    Raises:
        CheckpointError: another save is at work there, something else than one checkpoint is there, the folder of steps is
            itself a checkpoint, or the system refuses.
    """

    def __init__(self, target: Path):
        self.target = target
        self.path = target.parent / f".{target.name}{_SAVING}"
        self._locks: list[int] = []
        self._complete = False
        try:
            with refusals(f"For 'save', '{target}' cannot be made"):
                make_folder(target.parent)
                self._check_target()
                of_step = _STEP.fullmatch(target.name) is not None
                if of_step:  # steps of two jobs in one folder, of which each would move `latest`
                    self._locks.append(claimed(Path(os.path.realpath(target.parent)), target.parent, "save", make=False))
                self._locks.append(claimed(self.path, target, "save"))
                for name in os.listdir(self.path):
                    _remove(self.path / name)
                clean(target.parent, self.path, of_step)
        except BaseException:
            self.close()
            raise

    def _check_target(self) -> None:
        """What would be replaced is a checkpoint and nothing else; what is above a step is none."""
        target, fixes = self.target, ("save into a folder of its own", "save(..., step=N) makes a folder for each step")
        rule = "A checkpoint is replaced by the next one under its name; other things are not."
        there = sorted(os.listdir(target)) if target.is_dir() else []
        if target.is_symlink() or target.exists() and not target.is_dir() or there and not (target / NAME).is_file():
            raise CheckpointError(f"For 'save', '{target}' is there and is no checkpoint.", "", rule, fixes)
        place = place_of(target)
        if (place / NAME).is_file() and not ours(os.stat(place), os.fspath(place)):
            raise CheckpointError(f"For 'save', '{target}' is a checkpoint that another user saved.",
                                  f"of user {os.stat(place).st_uid}; this is user {os.geteuid()}",
                                  "A save replaces and removes what its own user saved, nothing else.",
                                  ("save into a folder of your own", "have its user remove it"))
        other = [name for name in there if not _OWN.fullmatch(name) or (target / name).is_dir()]
        if other:
            more = f" and {len(other) - 5} more" if len(other) > 5 else ""
            raise CheckpointError(f"For 'save', '{target}' has other things in it than a checkpoint.",
                                  ", ".join(other[:5]) + more, rule, fixes)
        if _STEP.fullmatch(target.name) and (target.parent / NAME).is_file():
            raise CheckpointError(f"For 'save', '{target.parent}' is itself a checkpoint, of no step.", f"{target.name}",
                                  "A folder is a checkpoint, or holds one for each step.",
                                  ("save steps into another folder",
                                   f"move '{NAME}' and its shards into a folder of their own"))

    def commit(self, then: Callable[[], object] = lambda: None) -> None:
        """Makes it the target. All files in it are on the disk already; so is this on return.

        Args:
            then: what else is done before another save may begin.
        """
        with refusals(f"For 'save', '{self.target}' cannot be put in its place"):
            self._check_target()  # again: what came since is not ours either
            sync(self.path)
            old = self.target.parent / f".{self.target.name}{_OLD}"
            if not self.target.exists():
                os.rename(self.path, self.target)
            elif _exchange(self.path, self.target):
                os.rename(self.path, old)
            else:
                os.rename(self.target, old)
                os.rename(self.path, self.target)
            self._complete = True
            sync(self.target.parent)
            shutil.rmtree(old, ignore_errors=True)
        then()
        self.close()

    def abandon(self) -> None:
        """Removes what was written so far, if it is not complete."""
        if self._locks and not self._complete:  # else what is there may be another save's by now
            with contextlib.suppress(OSError):
                _remove(self.path)
        self.close()

    def close(self) -> None:
        """Lets the locks go."""
        while self._locks:
            os.close(self._locks.pop())


def point_latest(root: Path, name: str) -> None:
    """Moves `latest`, in one step."""
    with refusals(f"For 'save', '{root / LATEST}' cannot be written"):
        with replacing(root / LATEST) as file:
            file.write(f"{name}\n".encode())
        sync(root)


def retire(root: Path, keep_last: int, keep_every: int | None) -> list[int]:
    """Removes this user's steps that are neither its last nor multiples of `keep_every`, nor `latest`; returns them."""
    owners = {}
    for s in by_age(root):
        with contextlib.suppress(FileNotFoundError):
            owners[s] = os.stat(place_of(root / step_name(s)))
    found, now = [s for s, owner in owners.items() if ours(owner, os.fspath(root / step_name(s)))], latest(root)
    if len(found) < len(owners):
        users = ", ".join(str(uid) for uid in sorted({owners[s].st_uid for s in owners.keys() - found}))
        warnings.warn(f"save: '{root}' has steps that other users saved (user {users}); 'keep_last' counts and removes those"
                      " of this user only", stacklevel=2)  # once: Python tells the same of the same line once
    gone = [s for s in found[:-keep_last] if not (keep_every and s % keep_every == 0)
            and root / step_name(s) != now and saved_at(root / step_name(s))]
    for s in gone:
        hidden = root / f".{step_name(s)}.{secrets.token_hex(8)}{_RETIRED}"  # no name that something else may have
        with refusals(f"For 'save', '{root / step_name(s)}' cannot be removed"), contextlib.suppress(FileNotFoundError):
            os.rename(root / step_name(s), hidden)  # whole, or not there
            _remove(hidden)
    return sorted(gone)


def clean(parent: Path, but: Path | None = None, steps: bool = True) -> None:
    """Removes what interrupted saves have left in a folder, and finishes an interrupted exchange.

    Args:
        parent: the folder.
        but: what stays.
        steps: whether no save of a step can be at work there, which would be about to move `latest`.
    """
    for name in os.listdir(parent) if parent.is_dir() else ():
        path = parent / name
        if not name.startswith(".") or name.startswith(f".{LATEST}.") and not steps:
            continue
        with contextlib.suppress(OSError):  # another user's, which is left to that user
            if name.endswith(_RETIRED):
                _remove(path)
            elif name.endswith(_OLD):
                target = parent / name[1:-len(_OLD)]
                if target.exists():
                    shutil.rmtree(path, ignore_errors=True)
                elif (path / NAME).is_file():
                    os.rename(path, target)
            elif name.endswith(_SAVING) and path != but:
                if path.is_symlink() or not path.is_dir():  # a `latest` that was not yet moved
                    path.unlink()
                    continue
                lock = _locked(path, make=False)
                if lock is not None:
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(lock)


def write_synced(path: Path, data: bytes) -> None:
    """A file that is whole, and on the disk, on return; a link of its name is replaced, not followed."""
    with replacing(path) as file:
        file.write(data)


def sync(folder: Path) -> None:
    """Has the names in a folder on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have nothing to sync in a folder
            raise
    finally:
        os.close(fd)


def claimed(path: Path, target: Path, who: str, make: bool = True) -> int:
    """A descriptor that holds the lock of a folder in which `target` is made.

    Args:
        path: the folder.
        target: what is made.
        who: the function that the user called.
        make: the folder is made if need be, and is this user's.

    Raises:
        CheckpointError: another process, or another save of this one, has it; something else has its name.
    """
    try:
        lock = _locked(path, make)
    except OSError as e:
        found = os.lstat(path) if make and os.path.lexists(path) else None
        if found is None or stat.S_ISDIR(found.st_mode) and ours(found, os.fspath(path)):
            raise
        raise CheckpointError(f"For '{who}', '{path}' is in the way: {e.strerror}.",
                              f"{stat.filemode(found.st_mode)}, of user {found.st_uid}; this is user {os.geteuid()}",
                              "What is written is made in a folder of this name and user; what else has the name is not "
                              "opened, followed or removed.",
                              (f"if no save of that user is at work there: rm -r '{path}'", "another folder")) from None
    if lock is None:
        raise CheckpointError(f"For '{who}', another save is writing '{target}' at this moment.", str(path),
                              "Two saves into one folder would mix.",
                              ("wait for it", "save into another folder", "end the other job"))
    return lock


def _locked(path: Path, make: bool = True) -> int | None:
    """A descriptor that holds the folder's lock, which the system lets go with the process; None if another has it.

    With `make` it is a folder of this user's: what a killed save of another has left is moved out of the way.
    """
    for _ in range(100):
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # its save has just been completed
            if make:
                continue
            return None
        try:
            with contextlib.suppress(FileNotFoundError):
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(fd)
                    return None
                except OSError:  # a file system without locks: what is there counts as a leftover
                    pass
                if os.path.samestat(os.lstat(path), found := os.fstat(fd)):
                    if not make or ours(found, os.fspath(path)):
                        return fd
                    os.rename(path, beside(path))
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    return None


def _exchange(a: Path, b: Path) -> bool:
    """Two names change places in one system call; False where the system has no such call."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
