# SPDX-License-Identifier: Apache-2.0
"""Addresses that stay, under which a block of the arena comes and goes.

Tensors on a window outlive what they show: between `release` and `claim` they show zeros of this process alone, so who reads
or writes there meets nobody's data. The pages themselves stay in the arena for the next window: to move them costs a tenth
of what new ones cost. Linux only, as all of `shm`.
"""
from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any

import numpy as np

from .segment import Segment

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_PLACED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10 | getattr(mmap, "MAP_NORESERVE", 0x4000)  # 0x10: MAP_FIXED
_MOVE_TO = 3          # MREMAP_MAYMOVE | MREMAP_FIXED
_POPULATE = 22        # MADV_POPULATE_READ, of Linux 5.14: many pages at a time, which may be written, too


class Window(np.ndarray):
    """So many bytes; arrays on it keep it, and what is under it.

    Args:
        memory: the rank's own segment.
        nbytes: how many.

    Attributes:
        offset: of the block that is under it, in the segment; None while there is none.
    """

    offset: int | None
    _memory: Segment
    _under: Any = None

    def __new__(cls, memory: Segment, nbytes: int) -> Window:
        held = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        out = np.ndarray.__new__(cls, (nbytes,), np.uint8, held)
        out.offset, out._memory, out._held = None, memory, held  # type: ignore[attr-defined]
        return out

    def claim(self) -> None:
        """A block comes under it, of any content; nothing if there is one."""
        if self.offset is not None:
            return
        self._under, self.offset = self._memory.arena.array((self.size,), np.dtype(np.uint8), self.size, again=True)
        # of a shared mapping, a size of 0 leaves the old one where it is, and makes another of the same pages
        self._check(_libc.mremap(ctypes.c_void_p(self._memory.base + self.offset), ctypes.c_size_t(0),
                                 ctypes.c_size_t(self.size), ctypes.c_int(_MOVE_TO), ctypes.c_void_p(self.ctypes.data)))
        with contextlib.suppress(OSError):
            self._held.madvise(_POPULATE)  # type: ignore[attr-defined]

    def release(self) -> None:
        """The block goes back to the arena; nothing if there is none."""
        if self.offset is not None:
            self._check(_libc.mmap(ctypes.c_void_p(self.ctypes.data), ctypes.c_size_t(self.size),
                                   ctypes.c_int(mmap.PROT_READ | mmap.PROT_WRITE), ctypes.c_int(_PLACED), ctypes.c_int(-1),
                                   ctypes.c_long(0)))
            self._under = self.offset = None

    def _check(self, address: int) -> None:
        if address != self.ctypes.data:
            raise MemoryError(f"For 'shm', {self.size} bytes could not be mapped: errno {ctypes.get_errno()}.")
