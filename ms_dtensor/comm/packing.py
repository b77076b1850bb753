# SPDX-License-Identifier: Apache-2.0
"""From pieces on any dim to the flat blocks that device collectives move, and back.

Not communication. A block is 1-d, so nothing is ever 0-d on the wire. Equal pieces of dim 0 are such blocks as they lie;
of another dim they are one strided view, copied once; uneven ones are joined with padding, one kernel too. Sets of local
operations do the work: `TensorOps` on the device, `HostOps` through NumPy on CPU, where MindSpore lacks kernels for several
dtypes, `ArrayOps` on the arrays themselves. The invariant: what `blocks` or `padded` cut, `last_back` or `unpadded` puts
together.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, mint
from mindspore import dtype as mstype

from ..internals.host import host_array, numpy_dtype
from ..internals.target import on_cpu
from .pretended import executing
from .protocol import cut
from .shm.reduce import reduce_into


class TensorOps:
    """Local tensor work with MindSpore ops; runs where the tensors are. `reshape`, `permute` and `take` are views."""

    @staticmethod
    def of(x: Tensor) -> Any:
        """What the others take for a tensor."""
        return x

    @staticmethod
    def tensor(x: Any) -> Tensor:
        """The tensor of what they give."""
        return x

    @staticmethod
    def flat(x: Tensor) -> Tensor:
        """All elements in row-major order, contiguous; a copy only where they do not lie so."""
        return mint.reshape(x.contiguous(), (-1,))

    @staticmethod
    def in_order(x: Tensor) -> Tensor:
        """Contiguous; a copy only where it is not."""
        return x.contiguous()

    @staticmethod
    def shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
        """A tensor whose dims are split or merged."""
        return mint.reshape(x, tuple(shape))

    @staticmethod
    def permute(x: Tensor, order: Sequence[int]) -> Tensor:
        """Its dims in another order, in place."""
        return mint.permute(x, tuple(order))

    @staticmethod
    def take(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
        """`[start, stop)` of a dim."""
        return mint.narrow(x, dim, start, stop - start)

    @staticmethod
    def split(x: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
        """Pieces of these sizes, as views."""
        return mint.split(x, list(sizes), dim)

    @staticmethod
    def join(parts: Sequence[Tensor], dim: int) -> Tensor:
        """Concatenation of views, which is one kernel, or what is alone already."""
        return parts[0] if len(parts) == 1 else mint.cat(tuple(parts), dim)

    @staticmethod
    def empty(shape: Sequence[int], dtype: Any) -> Tensor:
        """A tensor to be written."""
        return mint.empty(tuple(shape), dtype=dtype)

    @staticmethod
    def cast(x: Tensor, dtype: Any) -> Tensor:
        """Another dtype."""
        return x.astype(dtype)

    @staticmethod
    def lies_as_it_is(x: Tensor) -> bool:
        """Whether the elements lie in row-major order."""
        return x.is_contiguous()

    @classmethod
    def copy(cls, x: Tensor) -> Tensor:
        """Memory of its own; one kernel."""
        out = cls.empty(x.shape, x.dtype)
        return cls.write(out, x) if math.prod(x.shape) else out

    @staticmethod
    def write(out: Tensor, x: Tensor) -> Tensor:
        """`out`, with the values of `x`; one kernel, which also casts."""
        out.copy_(x)
        return out

    @staticmethod
    def scaled(x: Tensor, factor: float) -> Tensor:
        """A new tensor with every element times a number."""
        return mint.mul(x, factor)

    @staticmethod
    def reduce(parts: Sequence[Tensor], op: str) -> Tensor:
        """The reduction of equal tensors, in order."""
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
    def in_order(x: Tensor) -> Tensor:
        return Tensor.from_numpy(np.array(x.asnumpy(), order="C"))

    @staticmethod
    def shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
        return Tensor.from_numpy(x.asnumpy().reshape(tuple(shape)))

    @staticmethod
    def permute(x: Tensor, order: Sequence[int]) -> Tensor:
        return Tensor.from_numpy(np.ascontiguousarray(x.asnumpy().transpose(tuple(order))))

    @staticmethod
    def take(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
        return Tensor.from_numpy(x.asnumpy()[cut(dim, start, stop)].copy())

    @staticmethod
    def join(parts: Sequence[Tensor], dim: int) -> Tensor:
        return Tensor.from_numpy(np.concatenate([p.asnumpy() for p in parts], dim))

    @staticmethod
    def empty(shape: Sequence[int], dtype: Any) -> Tensor:
        return Tensor.from_numpy(np.zeros(tuple(shape), numpy_dtype(dtype)))

    @staticmethod
    def cast(x: Tensor, dtype: Any) -> Tensor:
        return Tensor.from_numpy(x.asnumpy().astype(numpy_dtype(dtype)))

    @staticmethod
    def lies_as_it_is(x: Tensor) -> bool:
        return True

    @classmethod
    def copy(cls, x: Tensor) -> Tensor:
        return Tensor.from_numpy(x.asnumpy().copy())

    @staticmethod
    def write(out: Tensor, x: Tensor) -> Tensor:
        if math.prod(x.shape):  # NumPy crashes where it copies no elements of MindSpore's bfloat16
            host_array(out, gaps=True)[...] = x.asnumpy()
        return out

    @staticmethod
    def scaled(x: Tensor, factor: float) -> Tensor:
        array = x.asnumpy()
        return Tensor.from_numpy(np.array(array * array.dtype.type(factor), array.dtype))

    @staticmethod
    def reduce(parts: Sequence[Tensor], op: str) -> Tensor:
        arrays = [p.asnumpy() for p in parts]
        out = np.empty_like(arrays[0])
        reduce_into([out.reshape(-1)], op, [a.reshape(-1) for a in arrays])
        return Tensor.from_numpy(out)


class ArrayOps(TensorOps):
    """The same on the NumPy arrays of CPU tensors, views where they can be, too: of small pieces the least host time."""

    @staticmethod
    def of(x: Tensor) -> Any:
        return host_array(x)

    @staticmethod
    def tensor(x: Any) -> Tensor:
        return Tensor.from_numpy(x)

    @staticmethod
    def shaped(x: Any, shape: Sequence[int]) -> Any:
        return x.reshape(tuple(shape))

    @staticmethod
    def permute(x: Any, order: Sequence[int]) -> Any:
        return x.transpose(tuple(order))

    @staticmethod
    def take(x: Any, dim: int, start: int, stop: int) -> Any:
        return x[cut(dim, start, stop)]

    @staticmethod
    def split(x: Any, sizes: Sequence[int], dim: int) -> Sequence[Any]:
        return np.split(x, np.cumsum(sizes)[:-1], dim)

    @staticmethod
    def join(parts: Sequence[Any], dim: int) -> Any:
        return parts[0] if len(parts) == 1 else np.concatenate(parts, dim)

    @staticmethod
    def empty(shape: Sequence[int], dtype: Any) -> Any:
        return np.empty(tuple(shape), numpy_dtype(dtype))

    @staticmethod
    def cast(x: Any, dtype: Any) -> Any:
        return x.astype(numpy_dtype(dtype), copy=False)

    @staticmethod
    def lies_as_it_is(x: Any) -> bool:
        return x.flags.c_contiguous

    @classmethod
    def copy(cls, x: Any) -> Any:
        return np.array(x, order="C")

    @staticmethod
    def write(out: Any, x: Any) -> Any:
        if x.size:  # NumPy crashes where it copies no elements of MindSpore's bfloat16
            out[...] = x
        return out


def copy(x: Tensor) -> Tensor:
    """A copy with memory of its own (`Tensor.copy` is arithmetic in MindSpore)."""
    dry = executing()
    if dry is not None:
        return dry.like(x)
    return (HostOps if on_cpu() else TensorOps).copy(x)


def write(out: Tensor, x: Tensor) -> Tensor:
    """`out`, with the values of `x` cast to its dtype."""
    if executing() is not None:
        return out
    return (HostOps if on_cpu() else TensorOps).write(out, x)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two local tensors of one dtype and size have the same bytes: NaN is NaN, and 0 is not -0."""
    return np.array_equal(*(x.asnumpy().reshape(-1).view(np.uint8) for x in (a, b)))


def cast(x: Tensor, dtype: Any) -> Tensor:
    """A local tensor in a dtype; itself if it is in that."""
    dry = executing()
    return x.astype(dtype) if dry is None else x if x.dtype == dtype else dry.like(x, dtype=dtype)


def added(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two local gradients, in the dtype of the first."""
    dry = executing()
    if dry is not None:
        return dry.sum(a, b)
    return a + (b if b.dtype == a.dtype else b.astype(a.dtype))


def add_into(out: Tensor, x: Tensor) -> Tensor:
    """`out`, a local gradient that nobody else holds, with another added to it: in its place on hosts."""
    dry = executing()
    on_host = on_cpu() if dry is None else dry.on_host
    if not on_host or out.dtype not in (mstype.float32, mstype.float64):  # NumPy adds others slowly, or not at all
        return added(out, x)
    if dry is not None:
        return dry.sum(out, x, into=True)
    x = x if x.dtype == out.dtype else x.astype(out.dtype)
    array = host_array(out, gaps=True)
    np.add(array, host_array(x), out=array)  # a third of the time of MindSpore's, whose sum is a tensor of its own
    return out


def first(x: Tensor, dim: int, ops: type[TensorOps]) -> Tensor:
    """A dim in front of the others, as a view."""
    return x if dim == 0 else ops.permute(x, (dim, *(d for d in range(len(x.shape)) if d != dim)))


def last_back(x: Tensor, dim: int, ops: type[TensorOps]) -> Tensor:
    """The first dim back at its place, as a view; of `count` equal pieces, what they make joined on it."""
    return x if dim == 0 else ops.permute(x, (*range(1, dim + 1), 0, *range(dim + 1, len(x.shape))))


def blocks(x: Tensor, dim: int, count: int, ops: type[TensorOps]) -> Tensor:
    """`count` equal pieces of a dim as a first dim of their own, as a view."""
    shape = tuple(x.shape)
    return first(ops.shaped(x, (*shape[:dim], count, shape[dim] // count, *shape[dim + 1:])), dim, ops)


def padded(pieces: Sequence[Tensor], dim: int, rows: int, ops: type[TensorOps]) -> Tensor:
    """Pieces with a dim in front, each filled up to so many rows: flat blocks one behind another."""
    parts = []
    for piece in (first(x, dim, ops) for x in pieces):
        have = piece.shape[0]
        parts += [piece] if have else []
        parts += [ops.empty((rows - have, *piece.shape[1:]), piece.dtype)] if have < rows else []
    return ops.flat(ops.join(parts, 0))


def unpadded(flat: Tensor, shape: Sequence[int], dim: int, rows: int, index: int, ops: type[TensorOps]) -> Tensor:
    """The piece in block `index`, as a view."""
    rest = (*shape[:dim], *shape[dim + 1:])
    at = index * rows * math.prod(rest)
    block = ops.take(flat, 0, at, at + math.prod(shape))
    return last_back(ops.shaped(block, (shape[dim], *rest)), dim, ops)
