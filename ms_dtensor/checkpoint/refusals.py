# SPDX-License-Identifier: Apache-2.0
"""What the system refuses, a full disk or a folder that may not be written, as our error with what helps."""
from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from ..errors import CheckpointError

SAVING = ("The previous checkpoint stays.", "free space, or keep fewer checkpoints: save(..., keep_last=2)")
COPYING = ("A file is under its name when it is whole.", "free space, or a target on another disk")
_CLOSED = "save into a folder that this user may write"
_LARGE = "a larger limit (ulimit -f), or a file system that has larger files"
_FIXES = {errno.EACCES: _CLOSED, errno.EPERM: _CLOSED, errno.EROFS: _CLOSED, errno.EFBIG: _LARGE}


@contextlib.contextmanager
def refusals(attempt: str, advice: tuple[str, str] = SAVING) -> Iterator[None]:
    """The system's refusals as our error; `advice`: what holds, and what helps where the disk is full."""
    try:
        yield
    except OSError as e:
        raise CheckpointError(f"{attempt}: {e.strerror or e}.", str(e.filename or ""), advice[0],
                              advice[1] if e.errno in (errno.ENOSPC, errno.EDQUOT) else _FIXES.get(e.errno or 0, ())) from e
