# SPDX-License-Identifier: Apache-2.0
"""The part of an asynchronous save that runs behind the program, and how its failures come to light.

Each rank's thread writes the rank's file and then a note, also if it failed; rank 0's thread waits for all notes and
completes the checkpoint. Nothing is communicated here but through the folder. The main threads meet at the next save, or
at `wait()`, and raise there what any thread met. Invariant: at most one save is under way, and none is forgotten.
"""
from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..comm.group import Group
from ..errors import CheckpointError
from .folder import Folder, write_synced
from .ranks import attempted, gathered, raise_together, rank_of, told
from .refusals import refusals

PATIENCE = 3600.0  # seconds rank 0 waits for the slowest rank's file
AT_EXIT = 120.0  # the same after its program has ended
_log = logging.getLogger("ms_dtensor")
_current: AsyncSave | None = None


class AsyncSave:
    """A save whose files are being written by a thread.

    Example:
        >>> import tempfile, numpy as np, ms_dtensor as md
        >>> saving = md.checkpoint.save({"w": np.ones(3)}, tempfile.mkdtemp(), step=1, async_save=True)
        >>> saving.wait()
        >>> saving.done
        True
    """

    def __init__(self, group: Group | None, work: Callable[[threading.Event], None]):
        self._group, self._told = group, False
        self._error: Exception | None = None
        self._alone = threading.Event()  # the other ranks have gone
        self._thread = threading.Thread(target=self._run, args=(work,), name="ms_dtensor.checkpoint")
        self._thread.start()

    def _run(self, work: Callable[[threading.Event], None]) -> None:
        _, self._error = attempted(partial(work, self._alone))
        if self._error is not None:
            _log.error("the asynchronous save failed: %s", self._error)

    @property
    def done(self) -> bool:
        """Whether this rank's thread has ended; says nothing of the other ranks'."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint is complete; every rank calls it.

        Raises:
            CheckpointError: on all ranks the same, if it could not be completed; once.
        """
        global _current
        if _current is self:
            _current = None
        if self._told:
            return
        self._told = True
        try:
            while self._group is not None and not all(gathered(self._group, self.done)):  # so that a lost rank is noticed
                self._thread.join(0.02)
        except BaseException:
            self._alone.set()
            raise
        self._thread.join()
        raise_together(self._group, "save", self._error)


def wait() -> None:
    """Waits for the asynchronous save that is under way, if one is; every rank calls it. See `AsyncSave.wait`.

    Example:
        >>> import ms_dtensor as md
        >>> md.checkpoint.wait()
    """
    if _current is not None:
        _current.wait()


def start(group: Group | None, where: Path, folder: Folder | None, write: Callable[[], bool],
          complete: Callable[[Sequence[bool]], None]) -> AsyncSave:
    """Starts this rank's thread.

    Args:
        group: all ranks.
        where: the hidden folder.
        folder: on rank 0 what completes it.
        write: writes this rank's file, and tells whether there is one.
        complete: runs on rank 0 with what all ranks have told.
    """
    global _current

    def work(alone: threading.Event) -> None:
        written, error = attempted(write)
        if folder is None:
            _note(where, rank_of(group), [None if error is None else told(error), written])
            if error is not None:
                raise error
            return
        try:
            others, missing = attempted(lambda: _notes(where, 1 if group is None else group.size, alone))
            if others is None or error is not None:  # only now: the others' folder must not go while they write
                raise error or missing or AssertionError
            if any(e is not None for e, _ in others):  # they raise it
                folder.abandon()
            else:
                complete([bool(written), *(bool(w) for _, w in others)])
        except BaseException:
            folder.abandon()
            raise
    _current = AsyncSave(group, work)
    return _current


def _note(where: Path, rank: int, told_of: list) -> None:
    """Leaves word of this rank, whole or not at all."""
    with refusals(f"For 'save', rank {rank} cannot write into '{where}'"):
        write_synced(where / f"rank-{rank}.json", json.dumps(told_of).encode())


def _notes(where: Path, size: int, alone: threading.Event) -> list[list]:
    """The notes of all other ranks, as they come; removed."""
    found: list[list] = []
    begun, ended, pause = time.monotonic(), None, 0.002
    for rank in range(1, size):
        path = where / f"rank-{rank}.json"
        while True:
            try:
                found.append(json.loads(path.read_text("utf-8")))
                path.unlink()
                break
            except FileNotFoundError:
                pass
            now = time.monotonic()
            if ended is None and not threading.main_thread().is_alive():
                ended = now
            over = alone.is_set() or ended is not None and (
                now > ended + AT_EXIT or getattr(sys, "last_type", None) is not None)
            if over or now > begun + PATIENCE:
                raise CheckpointError(f"For 'save', rank {rank} has not written its file after {now - begun:.0f} s.",
                                      str(where), "All ranks write into one folder, which all of them see.",
                                      "see whether the rank has ended, or sees another file system")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
    return found
