# SPDX-License-Identifier: Apache-2.0
"""From uneven pieces on any dim to the equal flat blocks that device collectives move, and back.

Not communication. A block is 1-d, so nothing is ever 0-d on the wire, and padded to the largest piece, so nothing is
uneven. Two sets of local operations do the work: `TensorOps` on the device, `HostOps` through NumPy on CPU, where
MindSpore lacks kernels for several dtypes. The invariant: `unpack(pack(pieces)) == pieces`.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, mint
from mindspore import dtype as mstype

from ..internals.target import on_cpu
from .protocol import cut
from .shm.reduce import reduce_into


class TensorOps:
    """Local tensor work with MindSpore ops; runs where the tensors are."""

    @staticmethod
    def flat(x: Tensor) -> Tensor:
        """All elements in row-major order, contiguous."""
        return mint.reshape(x.contiguous(), (-1,))

    @staticmethod
    def shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
        """A flat tensor with a shape."""
        return mint.reshape(x, tuple(shape))

    @staticmethod
    def take(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
        """`[start, stop)` of a dim."""
        return mint.narrow(x, dim, start, stop - start)

    @staticmethod
    def join(parts: Sequence[Tensor], dim: int) -> Tensor:
        """Concatenation."""
        return parts[0] if len(parts) == 1 else mint.cat(tuple(parts), dim)

    @staticmethod
    def empty(count: int, dtype: Any) -> Tensor:
        """A flat tensor to be written."""
        return mint.zeros((count,), dtype=dtype)

    @staticmethod
    def cast(x: Tensor, dtype: Any) -> Tensor:
        """Another dtype."""
        return x.astype(dtype)

    @staticmethod
    def copy(x: Tensor) -> Tensor:
        """Memory of its own."""
        # `copy_` refuses a source that is a view of a larger tensor, `copy` is arithmetic: joining with nothing copies.
        flat = x if x.ndim == 1 else mint.reshape(x, (-1,))
        out = mint.cat((flat, mint.zeros((0,), dtype=x.dtype)), 0)
        return out if x.ndim == 1 else mint.reshape(out, tuple(x.shape))

    @staticmethod
    def reduce(parts: Sequence[Tensor], op: str) -> Tensor:
        """The reduction of equal flat tensors, in order."""
        step = {"sum": mint.add, "avg": mint.add, "max": mint.maximum, "min": mint.minimum, "prod": mint.mul}[op]
        acc = parts[0]
        for p in parts[1:]:
            acc = step(acc, p)
        return mint.div(acc, len(parts)) if op == "avg" else acc


class HostOps(TensorOps):
    """The same through NumPy views of CPU tensors; every dtype."""

    @staticmethod
    def flat(x: Tensor) -> Tensor:
        return Tensor.from_numpy(np.ascontiguousarray(x.asnumpy()).reshape(-1).copy())

    @staticmethod
    def shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
        return Tensor.from_numpy(x.asnumpy().reshape(tuple(shape)))

    @staticmethod
    def take(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
        return Tensor.from_numpy(x.asnumpy()[cut(dim, start, stop)].copy())

    @staticmethod
    def join(parts: Sequence[Tensor], dim: int) -> Tensor:
        return Tensor.from_numpy(np.concatenate([p.asnumpy() for p in parts], dim))

    @staticmethod
    def empty(count: int, dtype: Any) -> Tensor:
        return Tensor.from_numpy(np.zeros((count,), numpy_dtype(dtype)))

    @staticmethod
    def cast(x: Tensor, dtype: Any) -> Tensor:
        return Tensor.from_numpy(x.asnumpy().astype(numpy_dtype(dtype)))

    @staticmethod
    def copy(x: Tensor) -> Tensor:
        return Tensor.from_numpy(x.asnumpy().copy())

    @staticmethod
    def reduce(parts: Sequence[Tensor], op: str) -> Tensor:
        arrays = [p.asnumpy() for p in parts]
        out = np.empty_like(arrays[0])
        reduce_into([out], op, arrays)
        return Tensor.from_numpy(out)


_dtypes: dict[int, tuple[np.dtype, Any]] = {}  # by the id of MindSpore's dtype, which is kept: its hash costs 1 us


def numpy_dtype(dtype: Any) -> np.dtype:
    """The NumPy dtype whose arrays `Tensor.from_numpy` turns into `dtype`."""
    known = _dtypes.get(id(dtype))
    if known is None:
        if dtype == mstype.bfloat16:  # NumPy has none; MindSpore brings its own
            made = Tensor([0.0], mstype.bfloat16).asnumpy().dtype
        else:
            made = np.dtype(mstype.dtype_to_nptype(dtype))
        known = _dtypes[id(dtype)] = made, dtype
    return known[0]


def copy(x: Tensor) -> Tensor:
    """A copy with memory of its own (`Tensor.copy` is arithmetic in MindSpore)."""
    return (HostOps if on_cpu() else TensorOps).copy(x)


def pack(pieces: Sequence[Tensor], block: int, ops: type[TensorOps]) -> Tensor:
    """The pieces as flat blocks of `block` elements, one behind the other."""
    parts = []
    for piece in pieces:
        count = math.prod(piece.shape)
        if count:
            parts.append(ops.flat(piece))
        if count < block:
            parts.append(ops.empty(block - count, piece.dtype))
    return ops.join(parts, 0)


def unpack(blocks: Tensor, block: int, index: int, shape: Sequence[int], ops: type[TensorOps]) -> Tensor:
    """The piece in block `index`."""
    return ops.shaped(ops.take(blocks, 0, index * block, index * block + math.prod(shape)), shape)
