# SPDX-License-Identifier: Apache-2.0
"""One rank's anonymous memory, mapped by all ranks of the host.

Layout: a header (the call this rank is in, what it waits for, which groups it knows), two halves of `CHUNK` bytes for
reductions in progress, one page and a double slot per group for small messages, then the arena of large results. The size
is virtual: a page costs memory once it is touched. Invariant: only the owner writes, except for its unfinished results,
whose parts are written by the member that has them.
"""
from __future__ import annotations

import mmap
import os
import resource
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import CommError, ConfigError
from .arena import Arena
from .futex import Word

PAGE = 4096
CHUNK = 4 << 20          # bytes of a reduction per rank in flight; two halves, so that writing overlaps reading
SLOT = 256 << 10         # largest payload of a small message
GROUPS = 1024            # that a rank can be a member of
_HEADER = 64 << 10
_SLOTS = _HEADER + 2 * CHUNK
_GROUP = PAGE + 2 * SLOT
_ARENA = _SLOTS + GROUPS * _GROUP
_ALL_ARENAS = 16 << 40   # addresses that the arenas of all ranks may take in a process

_LEN = struct.Struct("<I")
_STATE, _HALF = 0, 1     # in a call or not; which of the two texts is the present one
_CALLS, _CALL, _TEXT_MAX, _SITE, _SITE_MAX = 64, 2560, 1400, 1408, 1000
_WAITS = 6144            # id, how many, then (rank, word, wanted value) of each
_MOST_WAITS = 120
_KNOWN = 8192            # how many groups, then the key of each
_POSTED = 16640          # messages posted to each rank


def create(size: int) -> int:
    """A new anonymous memory file for a rank of a world of `size`; freed by the kernel with its last mapping."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    length = _ARENA + min(2 * memory, _ALL_ARENAS // size) // PAGE * PAGE
    _check_limits(size, length)
    fd = os.memfd_create("ms_dtensor", os.MFD_CLOEXEC)
    os.ftruncate(fd, length)
    return fd


def _check_limits(size: int, length: int) -> None:
    """Refuses a process that may not map the segments of all ranks, or not keep a socket and a handle for each."""
    if not os.access("/proc/self/statm", os.R_OK):  # hidden: what is mapped and open already cannot be told
        return
    with open("/proc/self/statm", "rb") as f:
        mapped = int(f.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for name, need, fix in (("RLIMIT_AS", mapped + size * length, "ulimit -v unlimited"),
                            ("RLIMIT_FSIZE", length, "ulimit -f unlimited"),
                            ("RLIMIT_NOFILE", len(os.listdir("/proc/self/fd")) + 2 * size + 32, "ulimit -n 4096")):
        limit = resource.getrlimit(getattr(resource, name))[0]
        if 0 <= limit < need:
            raise ConfigError(f"For 'start', {name} leaves no room for {size} ranks.", f"it is {limit}, they need {need}",
                              "A rank maps the memory of all ranks, virtually, and keeps two descriptors for each.",
                              (fix, 'ms_dtensor.comm.set_cpu_backend("mccl") maps nothing'))


class Segment:
    """A mapped segment.

    Args:
        fd: the memory file; the mapping keeps the memory, so the descriptor is closed here.
        own: True for the owner.
    """

    def __init__(self, fd: int, own: bool):
        self.map = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fd)
        self._whole: np.ndarray = np.ndarray((1,), np.uint8, self.map)
        self.base = self._whole.ctypes.data
        self.words = memoryview(self.map).cast("I")
        self.arena: Any = Arena(self.map, _ARENA, len(self.map)) if own else None
        self.known = self.word(_KNOWN)
        self._groups: dict[bytes, int] = {}
        self._waits = 0
        self._shown = (b"", b"")

    def view(self, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
        """`count` elements at `offset`, flat."""
        return np.ndarray((count,), dtype, self.map, offset)

    def offset_of(self, x: np.ndarray) -> int | None:
        """Where `x` is in this segment, if it begins with a page of it."""
        at = x.__array_interface__["data"][0] - self.base
        return at if 0 <= at < len(self.map) and at % PAGE == 0 else None

    def word(self, offset: int) -> Word:
        """The word at a byte offset."""
        return Word(self.words, self.base, offset // 4)

    # -- the call this rank is in ----------------------------------------------------------------------------------

    def enter(self, text: bytes, site: bytes) -> None:
        """Publishes the call and where it is made."""
        m = self.map
        m[_STATE] = 1
        if (text, site) == self._shown:  # loops repeat themselves
            return
        self._shown = text, site
        text, site = text[:_TEXT_MAX], site[-_SITE_MAX:]
        half = 1 - m[_HALF]
        at = _CALLS + half * _CALL
        m[at:at + 4 + len(text)] = _LEN.pack(len(text)) + text
        m[at + _SITE:at + _SITE + 4 + len(site)] = _LEN.pack(len(site)) + site
        m[_HALF] = half

    def leave(self) -> None:
        """The call is over; the rank is back in the user's code."""
        self.map[_STATE] = 0

    def call(self) -> tuple[str, str, bool]:
        """The published call, its site, and whether the rank is still in it."""
        at = _CALLS + self.map[_HALF] * _CALL
        return self._text(at), self._text(at + _SITE), self.map[_STATE] == 1

    def last_calls(self) -> tuple[str, str]:
        """The two calls published last, in any order."""
        return self._text(_CALLS), self._text(_CALLS + _CALL)

    def _text(self, at: int) -> str:
        return self.map[at + 4:at + 4 + _LEN.unpack_from(self.map, at)[0]].decode(errors="replace")

    # -- what this rank waits for, when that takes long ------------------------------------------------------------

    def wait_for(self, conditions: Sequence[tuple[int, int, int]]) -> None:
        """Publishes conditions that must all come true: (rank, index of a word in its segment, value wanted)."""
        at, flat = _WAITS // 4, [x for c in conditions[:_MOST_WAITS] for x in c]
        self._waits = (self._waits + 1) & 0xFFFFFFFF
        self.words[at + 1] = 0
        self.words[at] = self._waits  # a new number before the new conditions
        for i, x in enumerate(flat):
            self.words[at + 2 + i] = x
        self.words[at + 1] = len(flat) // 3

    def waits(self) -> tuple[int, list[tuple[int, int, int]]]:
        """What the owner published: a number that changes with every wait, and the conditions."""
        at = _WAITS // 4
        number = self.words[at]  # first: who reads on while the owner writes will find another number afterwards
        count = min(self.words[at + 1], _MOST_WAITS)
        flat = self.words[at + 2:at + 2 + 3 * count].tolist()
        return number, [(flat[i], flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]

    def posted(self, rank: int) -> Word:
        """How many messages the owner has posted to a rank."""
        return self.word(_POSTED + 4 * rank)

    # -- groups ----------------------------------------------------------------------------------------------------

    def introduce(self, key: bytes) -> int:
        """Makes the page and the slots of a group; returns their offset. `key` has eight bytes."""
        if (made := self.group(key)) is not None:  # by a call that raised while it waited for the others
            return made
        number = self.known.get()
        if number == GROUPS:
            raise CommError("For 'group', this rank is a member of too many groups.", f"{GROUPS} groups",
                            "Each group has a slot in shared memory.", "use fewer distinct groups of ranks")
        at = _KNOWN + 8 + 8 * number
        self.map[at:at + 8] = key
        self.known.set(number + 1)
        return _SLOTS + number * _GROUP

    def group(self, key: bytes) -> int | None:
        """Where the owner keeps a group, if it knows it yet."""
        for number in range(len(self._groups), self.known.get()):
            at = _KNOWN + 8 + 8 * number
            self._groups[self.map[at:at + 8]] = _SLOTS + number * _GROUP
        return self._groups.get(key)

    def chunk(self, half: int) -> int:
        """Offset of one half of the area for reductions."""
        return _HEADER + half * CHUNK

    def close(self) -> None:
        """Forgets the mapping (views still alive keep the memory until they go)."""
        try:
            self.words.release()
            self.map.close()
        except (BufferError, ValueError):  # a view is alive somewhere; the kernel frees the memory at exit
            pass
