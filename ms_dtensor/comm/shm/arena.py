# SPDX-License-Identifier: Apache-2.0
"""Memory for large results: in the rank's own segment, so that peers write their part of a result straight into it.

A block comes back when the last array on it is gone and is used again for the next result of about its size: its pages
are there already, and a first touch costs more than the copy itself. Not a general allocator: sizes are rounded up by at
most an eighth so that few distinct ones exist, and space in the file, which is virtual, is never joined again. Invariant:
at most `KEEP` bytes that nobody uses stay in memory, or as many as buckets of gradients take, which come again every step.
"""
from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Sequence

import numpy as np

from ...errors import CommError

KEEP = 128 << 20  # a rank's gradients of 30 M parameters: to touch them anew every step costs more than to reduce them
_LEAST = 64 << 10


def rounded(nbytes: int) -> int:
    """The size of the block for so many bytes; blocks of one size serve each other.

    Example:
        >>> from ms_dtensor.comm.shm.arena import rounded
        >>> rounded(1), rounded(1 << 20), rounded((1 << 20) + 1)
        (65536, 1048576, 1179648)
    """
    step = max(_LEAST, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-max(nbytes, 1) // step) * step


class _Block(np.ndarray):
    """Owns a block; arrays on it keep it alive through their `base`."""

    _home: deque[tuple[int, int]] | None = None
    _offset = _size = 0

    def __del__(self):
        if self._home is not None:
            self._home.append((self._offset, self._size))


class Arena:
    """Blocks of one segment.

    Args:
        memory: the mapped segment.
        start: where the arena begins.
        end: where it ends.
    """

    def __init__(self, memory: mmap.mmap, start: int, end: int):
        self._memory, self._next, self._end = memory, start, end
        self._given: deque[tuple[int, int]] = deque()       # come back, possibly on another thread, not yet noted
        self._free: dict[int, list[int]] = {}               # by size
        self._warm: dict[int, int] = {}                     # free blocks whose pages exist, oldest first: offset, size
        self._kept = 0
        self._again: dict[int, int] = {}                    # of buckets: offset, size
        self._keep = KEEP

    def array(self, shape: Sequence[int], dtype: np.dtype, nbytes: int, again: bool = False) -> tuple[np.ndarray, int]:
        """An array to be written, and its offset in the segment; `again`: such a one is asked for every step."""
        while self._given:
            self._back(*self._given.popleft())
        size = rounded(nbytes)
        free = self._free.get(size)
        if free:
            offset = free.pop()
            if self._warm.pop(offset, None):
                self._kept -= size
        else:
            offset, self._next = self._next, self._next + size
            if self._next > self._end:
                raise CommError("For 'shm', results do not fit into shared memory any more.", f"one of {nbytes} bytes",
                                "All results that are in use may take as much as the host's memory.",
                                "free results earlier, or use fewer ranks on this host")
        if again and offset not in self._again:
            self._again[offset] = size
            self._keep = max(KEEP, sum(self._again.values()))
        block = _Block((size,), np.uint8, self._memory, offset)
        block._home, block._offset, block._size = self._given, offset, size
        return np.ndarray(shape, dtype, block), offset

    def _back(self, offset: int, size: int) -> None:
        self._free.setdefault(size, []).append(offset)
        self._warm[offset] = size
        self._kept += size
        while self._kept > self._keep:
            oldest = next(iter(self._warm))
            gone = self._warm.pop(oldest)
            self._kept -= gone
            self._memory.madvise(mmap.MADV_REMOVE, oldest, gone)
