# SPDX-License-Identifier: Apache-2.0
"""Memory for whole parameters that comes and goes under the tensors on it, which keep their address.

So what autograd saved of a forward is right again in the backward, once the parameters have been gathered again.
"""
from __future__ import annotations

import ctypes
import itertools
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ...comm.packing import numpy_dtype
from ...comm.parts import Index
from ...comm.pretended import executing
from ...comm.protocol import Backend

_SMALL = 512 << 10  # bytes


@dataclass(frozen=True)
class OffloadPolicy:
    """Where `fully_shard` keeps parameters, gradients and optimizer state: on the device.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        >>> _ = md.fully_shard(nn.Dense(4, 2), mesh=mesh, offload_policy=md.parallel.OffloadPolicy())
    """


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """In host memory, where they are on a CPU; refused on devices.

    Args:
        pin_memory: of no meaning on a CPU.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        >>> _ = md.fully_shard(nn.Dense(4, 2), mesh=mesh, offload_policy=md.parallel.CPUOffloadPolicy())
    """

    pin_memory: bool = True


def _at(x: Tensor, index: Index) -> Tensor:
    for d, s in enumerate(index):
        if s != slice(None):
            x = ms.mint.narrow(x, d, s.start, s.stop - s.start)
    return x


def _trim() -> None:
    """What drawing parameters has left in glibc's lists goes back to the system: up to two thirds of the parameters."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class DeviceMemory:
    """Tensors side by side: the storage of one flat tensor, which shrinks to nothing and grows again."""

    window: Any = None  # where the backend can write into it

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype, backend: Backend):
        self.shapes, self.counts = list(shapes), [math.prod(shape) for shape in shapes]
        self.starts = list(itertools.accumulate(self.counts, initial=0))
        self._make(max(self.starts[-1], 1), dtype, backend)

    def _make(self, count: int, dtype, backend: Backend) -> None:
        self._flat: Any = ms.mint.empty((count,), dtype=dtype)
        self._bytes = self._flat.untyped_storage().size()

    @staticmethod
    def pack(pieces: Sequence[tuple[Tensor, Index]], dtype) -> Tensor:
        """`x[index]` of each pair, flat, one behind another."""
        return ms.mint.cat([ms.mint.reshape(_at(x, index).contiguous(), (-1,)).astype(dtype) for x, index in pieces])

    @staticmethod
    def part(flat: Tensor, at: int, count: int) -> Tensor:
        """Some of a flat tensor."""
        return ms.mint.narrow(flat, 0, at, count)

    def tensor(self, i: int) -> Tensor:
        """A new tensor on the memory; autograd knows nothing of it."""
        return ms.mint.reshape(ms.mint.narrow(self._flat, 0, self.starts[i], self.counts[i]), self.shapes[i])

    def write(self, i: int, index: Index, piece: Tensor) -> None:
        """Puts a piece into tensor `i`."""
        target = _at(self.tensor(i), index)
        target.copy_(ms.mint.reshape(piece, target.shape))

    def release(self) -> None:
        """Gives the storage back to MindSpore's pool."""
        self._flat.untyped_storage().resize_(0)

    def claim(self) -> None:
        """Takes storage again."""
        if self._flat.untyped_storage().size() == 0:
            self._flat.untyped_storage().resize_(self._bytes)


class HostMemory(DeviceMemory):
    """The same on a host: pages can be given back to the system, and come again at the same address when written."""

    def _make(self, count: int, dtype, backend: Backend) -> None:
        _trim()
        kind = numpy_dtype(dtype)
        size = count * kind.itemsize
        if size > _SMALL:  # of small ones packing costs less than a window
            self.window = backend.window(size)
        if self.window is None:  # private: of a shared mapping the system keeps the pages that a process gives back
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._flat = np.frombuffer(self._map, np.uint8) if self.window is None else self.window
        places = zip(self.shapes, self.starts)
        self.arrays: list[np.ndarray] = [np.ndarray(shape, kind, self._flat, at * kind.itemsize) for shape, at in places]

    @staticmethod
    def pack(pieces: Sequence[tuple[Tensor, Index]], dtype) -> Tensor:
        parts = [x.asnumpy()[index] for x, index in pieces]
        out, at = np.empty(sum(p.size for p in parts), numpy_dtype(dtype)), 0
        for p in (p for p in parts if p.size):  # NumPy crashes where it copies no elements of MindSpore's bfloat16
            out[at:at + p.size].reshape(p.shape)[...] = p
            at += p.size
        return Tensor.from_numpy(out)

    @staticmethod
    def part(flat: Tensor, at: int, count: int) -> Tensor:
        return Tensor.from_numpy(flat.asnumpy()[at:at + count])

    def tensor(self, i: int) -> Tensor:
        return Tensor.from_numpy(self.arrays[i])

    def write(self, i: int, index: Index, piece: Tensor) -> None:
        self.arrays[i][index] = piece.asnumpy().reshape(self.arrays[i][index].shape)

    def holds(self, x: Tensor) -> bool:
        """Whether a tensor lies here."""
        return 0 <= Tensor.data_ptr(x) - self._flat.ctypes.data < self._flat.size

    def release(self) -> None:
        if self.window is not None:
            self.window.release()
        else:
            self._map.madvise(mmap.MADV_DONTNEED)

    def claim(self) -> None:
        if self.window is not None:
            self.window.claim()


class AbstractMemory(DeviceMemory):
    """The same in a dry run: bytes that come and go, and tensors that have a shape."""

    def _make(self, count: int, dtype, backend: Backend) -> None:
        self._dry, self._bytes, self._taken = executing(), count * numpy_dtype(dtype).itemsize, False
        self._flat = self._dry.nameless((count,), dtype)
        self.claim()

    @staticmethod
    def pack(pieces: Sequence[tuple[Tensor, Index]], dtype) -> Tensor:
        count = sum(math.prod(len(range(*s.indices(n))) for s, n in zip((*index, *(slice(None),) * x.ndim), x._shape))
                    for x, index in pieces)
        return executing().ledger.new((count,), dtype, "buffers")

    @staticmethod
    def part(flat: Tensor, at: int, count: int) -> Tensor:
        return executing().on_storage_of(flat, (count,))

    def tensor(self, i: int) -> Tensor:
        return self._dry.on_storage_of(self._flat, self.shapes[i])

    def write(self, i: int, index: Index, piece: Tensor) -> None:
        """Nothing has values."""

    def holds(self, x: Tensor) -> bool:
        """Whether a tensor lies here."""
        return Tensor.data_ptr(x) == Tensor.data_ptr(self._flat)

    def release(self) -> None:
        self._take(False)

    def claim(self) -> None:
        self._take(True)

    def _take(self, taken: bool) -> None:
        if taken != self._taken:
            self._taken = taken
            self._dry.ledger.change("gathered", self._bytes if taken else -self._bytes)
