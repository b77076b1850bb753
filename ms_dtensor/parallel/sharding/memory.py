# SPDX-License-Identifier: Apache-2.0
"""Memory in which the parameters of a block are whole: on a host, and in a dry run of one. A device's is in `rooms.py`.

It comes and goes under the tensors on it, which keep their address. So what autograd saved of a forward is right again in
the backward, once the parameters have been gathered again.
"""
from __future__ import annotations

import ctypes
import itertools
import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor

from ...comm.packing import numpy_dtype
from ...comm.pretended import executing
from ...comm.protocol import Backend
from ...comm.world import synchronize

_SMALL = 512 << 10  # bytes


def trim() -> None:
    """What drawing parameters has left in glibc's lists goes back to the system: up to two thirds of the parameters."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


class Memory:
    """Tensors side by side; of small ones packing costs less than a window, into which the backend of hosts can write."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype, backend: Backend | None = None):
        self.shapes, self.counts, self.dtype = list(shapes), [math.prod(shape) for shape in shapes], dtype
        self.starts = list(itertools.accumulate(self.counts, initial=0))
        self.count = max(self.starts[-1], 1)
        self.bytes = self.count * numpy_dtype(dtype).itemsize
        self.window: Any = backend.window(self.bytes) if backend is not None and self.bytes > _SMALL else None

    def tensor(self, i: int) -> Tensor:
        """A new tensor on the memory; autograd knows nothing of it."""
        raise NotImplementedError

    def array(self, i: int) -> Any:
        """The same as what packing works on."""
        return self.tensor(i)

    def holds(self, x: Tensor) -> bool:
        """Whether a tensor lies here; of a host's memory."""
        raise NotImplementedError

    def joined(self, start: int, stop: int) -> Any:
        """Elements [start, stop), of one tensor or of several, as what packing works on."""
        raise NotImplementedError

    def room(self) -> Any:
        """Where it is: on a device that can be in more than one place."""
        return self

    def claim(self, room: Any = None) -> None:
        """It is there, to be written; in this room, on a device."""

    def bring(self, room: Any) -> None:
        """What it holds is in this room, too."""

    def release(self) -> None:
        """It is given back."""
        raise NotImplementedError


class HostMemory(Memory):
    """Pages that can be given back to the system, and come again at the same address when written."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype, backend: Backend):
        trim()
        super().__init__(shapes, dtype, backend)
        if self.window is None:  # private: of a shared mapping the system keeps the pages that a process gives back
            self._map = mmap.mmap(-1, self.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._flat: Any = np.frombuffer(self._map, np.uint8) if self.window is None else self.window
        self._elements: np.ndarray = np.ndarray((self.starts[-1],), numpy_dtype(dtype), self._flat)
        self.arrays: list[np.ndarray] = [self.joined(*ends).reshape(shape)
                                        for ends, shape in zip(itertools.pairwise(self.starts), self.shapes)]

    def tensor(self, i: int) -> Tensor:
        return Tensor.from_numpy(self.arrays[i])

    def array(self, i: int) -> np.ndarray:
        return self.arrays[i]

    def joined(self, start: int, stop: int) -> np.ndarray:
        return self._elements[start:stop]

    def holds(self, x: Tensor) -> bool:
        return 0 <= Tensor.data_ptr(x) - self._flat.ctypes.data < self._flat.size

    def release(self) -> None:
        synchronize()  # a gradient through a frozen cell had zeros, which kernels found here that came late
        if self.window is not None:
            self.window.release()
        else:
            self._map.madvise(mmap.MADV_DONTNEED)

    def claim(self, room: Any = None) -> None:
        synchronize()
        if self.window is not None:
            self.window.claim()


class AbstractMemory(Memory):
    """The same in a dry run: bytes that come and go, and tensors that have a shape."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype, backend: Backend):
        super().__init__(shapes, dtype, backend)
        self._dry, self._taken = executing(), False
        self._flat = self._dry.ledger.place((self.count,), dtype)
        if self.window is None:
            self._take(True)
        else:
            self.window.flat = self._flat

    def tensor(self, i: int) -> Tensor:
        return self._dry.on_storage_of(self._flat, self.shapes[i])

    def holds(self, x: Tensor) -> bool:
        return Tensor.data_ptr(x) == Tensor.data_ptr(self._flat)

    def release(self) -> None:
        self._take(False)

    def claim(self, room: Any = None) -> None:
        self._take(True)

    def _take(self, taken: bool) -> None:
        if self.window is not None:
            (self.window.claim if taken else self.window.release)()
        elif taken != self._taken:
            self._taken = taken
            self._dry.ledger.change("gathered", self.bytes if taken else -self.bytes, "pool")
