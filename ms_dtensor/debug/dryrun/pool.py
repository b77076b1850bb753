# SPDX-License-Identifier: Apache-2.0
"""Where MindSpore's pool puts what it hands out, and so the gaps between: the smallest free piece that is large enough.

As `DynamicMemPoolBestFit` of MindSpore 2.10 does on a CPU, address for address: of free pieces of one size the one that has
been free longest; what is left of a piece stays free, and neighbours that are free are one. Pages that were handed out once
stay the process's.
Pure. Invariant: pieces in use do not overlap.
"""
from __future__ import annotations

from bisect import bisect_left, insort

ALIGNED = 512
BLOCK = 1 << 30  # asked of the system at once


class Pool:
    """A pool in which pieces come and go.

    Attributes:
        most: bytes of all blocks up to the end of the piece that lay furthest back in each.

    Example:
        >>> from ms_dtensor.debug.dryrun.pool import Pool
        >>> pool = Pool()
        >>> a, b = pool.take(1024), pool.take(512)
        >>> pool.give(a)
        >>> pool.take(1536), pool.most          # it does not fit into the gap, and lies behind
        (1536, 3072)
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, int, int]] = []  # size, since when, address
        self._begins: dict[int, tuple[int, int, int]] = {}  # address of a free piece -> it
        self._ends: dict[int, tuple[int, int, int]] = {}
        self._used: dict[int, int] = {}  # address -> size
        self._blocks: list[int] = []  # addresses of their ends
        self._furthest: list[int] = []  # in each block
        self._count = 0

    @property
    def most(self) -> int:
        return sum(end - self._first(i) for i, end in enumerate(self._furthest))

    def take(self, size: int) -> int:
        """The address of a piece of so many bytes."""
        size = -(-max(size, 1) // ALIGNED) * ALIGNED
        at = bisect_left(self._free, (size, -1, -1))
        if at == len(self._free):
            self._grow(size)
            at = bisect_left(self._free, (size, -1, -1))
        whole, _, address = self._remove(self._free[at])
        if whole > size:
            self._add(address + size, whole - size)
        self._used[address] = size
        self._reached(address)
        return address

    def give(self, address: int) -> None:
        """A piece is free again."""
        size = self._used.pop(address)
        if address + size in self._begins:
            size += self._remove(self._begins[address + size])[0]
        if address in self._ends:
            before, _, address = self._remove(self._ends[address])
            size += before
        self._add(address, size)

    def _first(self, block: int) -> int:
        return self._blocks[block - 1] + ALIGNED if block else 0  # of two blocks no pieces are neighbours

    def _reached(self, address: int) -> None:
        block = bisect_left(self._blocks, address + 1)
        self._furthest[block] = max(self._furthest[block], address + self._used[address])

    def _grow(self, size: int) -> None:
        self._blocks.append(0)
        first = self._first(len(self._blocks) - 1)
        self._blocks[-1] = first + max(size, BLOCK)
        self._furthest.append(first)
        self._add(first, max(size, BLOCK))

    def _add(self, address: int, size: int) -> None:
        self._count += 1
        piece = size, self._count, address
        insort(self._free, piece)
        self._begins[address] = self._ends[address + size] = piece

    def _remove(self, piece: tuple[int, int, int]) -> tuple[int, int, int]:
        size, _, address = piece
        del self._free[bisect_left(self._free, piece)], self._begins[address], self._ends[address + size]
        return piece
