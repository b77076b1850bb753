# SPDX-License-Identifier: Apache-2.0
"""Copies that an asynchronous save is written from, in memory that stays for the next one.

To touch memory for the first time takes up to ten times as long as to copy into it, and the program waits meanwhile. So the
memory is kept when a save has been written: as much as the save itself needed. Invariant: no two saves have the same memory.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .plan import Part

SLAB = 4 << 20  # bytes that a thread copies at a time
_ALIGNED = 64
_free: np.ndarray | None = None  # what the last save has left


class Snapshot:
    """Copies of parts; `release` them when they have been written.

    Args:
        parts: what is copied, and how many bytes it has.
        array_of: gives a part's array, to be copied before it is asked for the next.
    """

    def __init__(self, parts: Sequence[tuple[Part, int]], array_of: Callable[[Part], np.ndarray]):
        global _free
        need = sum(-(-size // _ALIGNED) * _ALIGNED for _, size in parts)
        memory, _free = _free, None
        if memory is None or not need <= len(memory) <= 2 * need:
            del memory  # before there is other
            memory = np.empty(need, np.uint8)
        self._memory, self._arrays, at = memory, {}, 0
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        with ThreadPoolExecutor(cores) as threads:
            for part, size in parts:
                source = array_of(part)
                copy = self._arrays[part] = memory[at:at + size].view(source.dtype).reshape(source.shape)
                at += -(-size // _ALIGNED) * _ALIGNED
                if cores == 1 or size <= SLAB:
                    np.copyto(copy, source)
                else:
                    list(threads.map(np.copyto, _slabs(copy), _slabs(source)))

    def __getitem__(self, part: Part) -> np.ndarray:
        return self._arrays[part]

    def release(self) -> None:
        """The arrays are no more; their memory is for the next save."""
        global _free
        self._arrays, _free = {}, self._memory


def _slabs(array: np.ndarray) -> Iterator[np.ndarray]:
    rows = max(SLAB // (array.nbytes // len(array)), 1)
    return (array[at:at + rows] for at in range(0, len(array), rows))
