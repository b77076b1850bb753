# SPDX-License-Identifier: Apache-2.0
"""Rearrangements and scatters that MindSpore 2.10 has no CPU kernel for, from ops that have one.

Arguments are the primitives' own, in their order and by their names. Also the local forms of `rules/arrange.py`.
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import mint, ops

from ...internals.names import Function
from .dtypes import as_dtype


def _pairs(pads):
    return [(int(pads[i]), int(pads[i + 1])) for i in range(0, len(pads), 2)]


def _by_rows(x, pads, source):
    """Pads by repeating rows of the tensor: `source(before, n, after)` numbers them."""
    for k, (before, after) in enumerate(_pairs(pads)):
        d = len(x._shape) - 1 - k
        if before or after:
            x = ops.gather(x, ms.Tensor(source(before, x._shape[d], after), ms.int32), d)
    return x


def reflection_pad(x, pads):
    """`ReflectionPad1D/2D/3D`."""
    return _by_rows(x, pads, lambda a, n, b: [*range(a, 0, -1), *range(n), *range(n - 2, n - 2 - b, -1)])


def replication_pad(x, pads):
    """`ReplicationPad1D/2D/3D`."""
    return _by_rows(x, pads, lambda a, n, b: [0] * a + [*range(n)] + [n - 1] * b)


class Split(Function):
    """Views of consecutive rows along a dim, with a backward that joins their cotangents whatever their strides."""

    @staticmethod
    def forward(ctx, x, sizes, dim):
        ctx.dim = dim
        return tuple(mint.split(x, list(sizes), dim))

    @staticmethod
    def backward(ctx, *cotangents):
        return mint.cat([c.contiguous() for c in cotangents], ctx.dim), None, None


def split(x, split_size, dim=0):
    """`SplitTensor`, `SplitWithSize`, whose backward on CPU reads a strided cotangent as if it were contiguous."""
    n, sizes = x._shape[dim], split_size
    sizes = tuple(min(sizes, n - i) for i in range(0, n, sizes)) or (0,) if isinstance(sizes, int) else tuple(sizes)
    return Split.apply(x, sizes, dim % len(x._shape))


def split_method(x, split_size_or_sections, axis=0):
    """`x.split(..., axis=...)`."""
    return split(x, split_size_or_sections, axis)


split.takes_dtensors = split_method.takes_dtensors = True  # type: ignore[attr-defined]  # they ask no operand for its shape


def unbind(x, dim=0):
    """`UnstackExtView`, whose backward fails on CPU."""
    return tuple(select(x, dim, i) for i in range(x._shape[dim]))


def select(x, dim, index):
    """`SelectExtView`, whose backward fails on CPU."""
    d = dim % len(x._shape)
    x = mint.narrow(x, d, index % x._shape[d], 1)
    return mint.reshape(x, (*x._shape[:d], *x._shape[d + 1:]))


def flip(input, dims):
    """`ReverseV2`, whose CPU kernel ends the process on a tensor without elements."""
    return mint.flip(input, dims) if 0 not in input._shape else input.view(input._shape)


def diag(x, diagonal=0):
    """`DiagExt`: a vector to a matrix, a matrix to its diagonal."""
    if len(x._shape) == 2:
        return ops.diagonal(x, diagonal)
    n, k = x._shape[0], abs(diagonal)
    rows = np.arange(n) + max(-diagonal, 0)
    cols = np.arange(n) + max(diagonal, 0)
    return ops.scatter_nd(ms.Tensor(np.stack([rows, cols], 1), ms.int32), x, (n + k, n + k))


def trace_shard(x, diagonal, dtype=None):
    """Sum of the elements with column - row == `diagonal`; the summand of a trace that a shard holds."""
    rows, cols = x._shape
    mask = np.arange(cols)[None, :] - np.arange(rows)[:, None] == diagonal
    if dtype is not None:
        x = x.astype(as_dtype(dtype))
    elif x.dtype == ms.bool_ or ("Int" in str(x.dtype) and x.dtype != ms.uint64):
        x = x.astype(ms.int64)
    return ops.select(ms.Tensor(mask), x, ops.zeros_like(x)).sum()


def scatter(input, dim, index, src, reduce=0):
    """`Scatter` and `ScatterValue`: after one call of another rank of dims, MindSpore 2.10's CPU kernel writes nothing."""
    if not isinstance(src, ms.Tensor):
        src = ops.full(index._shape, src, dtype=input.dtype)
    for d, n in enumerate(index._shape):
        if src._shape[d] != n:
            src = mint.narrow(src, d, 0, n)
    index = index if index.dtype in (ms.int32, ms.int64) else index.astype(ms.int64)
    return ops.tensor_scatter_elements(input, index, src, dim, "add" if reduce in (1, "add") else "none")


def index_add(x, dim, index, src, alpha=1):
    """`IndexAddExt`."""
    d = dim % len(x._shape)
    order = (d, *(i for i in range(len(x._shape)) if i != d))
    back = tuple(order.index(i) for i in range(len(order)))
    if alpha != 1:
        src = src * alpha
    rows = mint.reshape(index, (-1, 1))
    out = ops.tensor_scatter_add(mint.permute(x, order), rows, mint.permute(src, order))
    return mint.permute(out, back)


def _index_add_primitive(x, index, src, attrs):
    """`IndexAdd`, which on CPU writes into its input besides returning the result."""
    return index_add(x, attrs["axis"], index, src)


vars(_index_add_primitive)["takes_attributes"] = True


TABLE = {"trace_shard": trace_shard, "split": split}
CPU = {
    **dict.fromkeys(("SplitTensor", "SplitTensorView", "SplitWithSize", "SplitWithSizeView"), split),
    "DeprecatedSplit": split_method,
    "ReverseV2": flip, "UnstackExtView": unbind, "SelectExtView": select, "DiagExt": diag,
    "TraceExt": lambda x: trace_shard(x, 0),
    **dict.fromkeys(("ReflectionPad1D", "ReflectionPad2D", "ReflectionPad3D"), reflection_pad),
    **dict.fromkeys(("ReplicationPad1D", "ReplicationPad2D", "ReplicationPad3D"), replication_pad),
    "IndexAddExt": index_add, "IndexAdd": _index_add_primitive,
    "DeprecatedIndexAdd": lambda x, index, src, dim=None, **named: index_add(x, named.get("axis", dim), index, src),
    "Scatter": scatter, "ScatterValue": scatter,
}
