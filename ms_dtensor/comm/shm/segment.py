# SPDX-License-Identifier: Apache-2.0
"""One rank's anonymous memory, written by that rank and readable by all.

Layout: one header page (the call this rank is in, for checks and for messages about hangs), two halves of `CHUNK` bytes
for large messages, then one double slot per group for small ones. The size is virtual: a page costs memory once it is
touched. The invariant: only the owner writes; readers read between the owner's signals.
"""
from __future__ import annotations

import mmap
import os
import struct

import numpy as np

from ...errors import CommError

PAGE = 4096
CHUNK = 4 << 20          # bytes of a large message per rank in flight; two halves, so that writing overlaps reading
SLOT = 64 << 10          # largest payload of a small message
TOTAL = 256 << 20        # virtual size
_SLOTS = PAGE + 2 * CHUNK

_LEN = struct.Struct("<I")
_STATE, _TEXT, _TEXT_MAX, _SITE, _SITE_MAX, _OFFSET = 0, 8, 1400, 1416, 1000, 2448


def create() -> int:
    """A new anonymous memory file; freed by the kernel with its last descriptor and mapping."""
    fd = os.memfd_create("ms_dtensor", os.MFD_CLOEXEC)
    os.ftruncate(fd, TOTAL)
    return fd


class Segment:
    """A mapped segment.

    Args:
        fd: the memory file; the mapping keeps the memory, so the descriptor is closed here.
        writable: True for the owner.
    """

    def __init__(self, fd: int, writable: bool):
        self.map = mmap.mmap(fd, TOTAL, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        os.close(fd)
        self._next = _SLOTS
        self._shown = (b"", b"")

    def view(self, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
        """`count` elements at `offset`, flat."""
        return np.ndarray((count,), dtype, self.map, offset)

    # -- the call this rank is in ----------------------------------------------------------------------------------

    def enter(self, text: bytes, site: bytes) -> bytes:
        """Publishes the call; returns what peers must show too (the site may differ between ranks, the call not)."""
        if len(text) > _TEXT_MAX:
            import zlib  # long size lists only
            text = text[:_TEXT_MAX - 12] + b"~%010d" % zlib.crc32(text)
        head = _LEN.pack(len(text)) + text
        site = site[-_SITE_MAX:]
        m = self.map
        if head != self._shown[0]:  # loops repeat themselves
            m[_TEXT - 4:_TEXT - 4 + len(head)] = head
        if site != self._shown[1]:
            m[_SITE - 4:_SITE + len(site)] = _LEN.pack(len(site)) + site
        self._shown = head, site
        m[_STATE] = 1
        return head

    def leave(self) -> None:
        """The call is over; the rank is back in the user's code."""
        self.map[_STATE] = 0

    def shows(self, head: bytes) -> bool:
        """Whether this rank published the same call."""
        return self.map[_TEXT - 4:_TEXT - 4 + len(head)] == head

    def call(self) -> tuple[str, str, bool]:
        """The published call, its site, and whether the rank is still in it."""
        m = self.map
        text = m[_TEXT:_TEXT + _LEN.unpack_from(m, _TEXT - 4)[0]].decode(errors="replace")
        site = m[_SITE:_SITE + _LEN.unpack_from(m, _SITE - 4)[0]].decode(errors="replace")
        return text, site, m[_STATE] == 1

    # -- group slots -----------------------------------------------------------------------------------------------

    def allocate(self) -> int:
        """A double slot for a new group, published for the peers to read; returns its offset."""
        offset = self._next
        if offset + 2 * SLOT > TOTAL:
            raise CommError("For 'group', this rank is a member of too many groups.",
                            f"{(TOTAL - _SLOTS) // (2 * SLOT)} groups", "Each group has a slot in shared memory.",
                            "use fewer distinct groups of ranks")
        self._next += 2 * SLOT
        self.map[_OFFSET:_OFFSET + 8] = struct.pack("<Q", offset)
        return offset

    def allocated(self) -> int:
        """The offset the owner published last."""
        return struct.unpack_from("<Q", self.map, _OFFSET)[0]

    def chunk(self, half: int) -> int:
        """Offset of one half of the area for large messages."""
        return PAGE + half * CHUNK

    def close(self) -> None:
        """Forgets the mapping (views still alive keep the memory until they go)."""
        try:
            self.map.close()
        except BufferError:  # a view is alive somewhere; the kernel frees the memory at exit
            pass
