# SPDX-License-Identifier: Apache-2.0
"""Ops whose result's shape depends on data, for CPU: places, distinct values, counts, repeats by a tensor.

Positions and counts are found on the host; values that have a gradient go through a gather or a scatter.
"""
from __future__ import annotations

import numpy as np
from mindspore import Tensor, mint, ops

from .lookup import gather, host_values


def nonzero_tuple(input):
    """`NonZeroExt`: one tensor of positions per dim."""
    return tuple(Tensor(at.astype(np.int64)) for at in np.nonzero(host_values(input)))


def unique(input, sorted=True, return_inverse=False, return_counts=False):
    """`Unique2`: (values, inverse, counts); what nobody wants has no elements."""
    return _unique(input, None, return_inverse, return_counts)


def unique_dim(input, sorted, return_inverse, dim):
    """`UniqueDim`: (rows, inverse, counts)."""
    return _unique(input, dim, True, True)


def unique_method(input, sorted=True, return_inverse=False, return_counts=False, dim=None):
    """`x.unique()`: the values, and besides what is asked for."""
    values, inverse, counts = _unique(input, dim, return_inverse, return_counts)
    asked = (*((inverse,) if return_inverse else ()), *((counts,) if return_counts else ()))
    return (values, *asked) if asked else values


def unique_consecutive(input, return_inverse=False, return_counts=False, dim=None):
    """`UniqueConsecutive`, which leaves what nobody wants uninitialised: (values, inverse, counts) of runs."""
    x = host_values(input)
    rows = x.reshape(-1) if dim is None else np.moveaxis(x, dim, 0)
    new = np.ones(len(rows), bool)
    new[1:] = (rows[1:] != rows[:-1]).reshape(max(len(rows) - 1, 0), -1).any(1)
    starts = np.flatnonzero(new)
    inverse = (np.cumsum(new) - 1).reshape(x.shape if dim is None else -1) if return_inverse else np.zeros(0)
    counts = np.diff(np.append(starts, len(rows))) if return_counts else np.zeros(0)
    values = rows[starts] if dim is None else np.moveaxis(rows[starts], 0, dim)
    return Tensor(np.ascontiguousarray(values)), Tensor(inverse.astype(np.int64)), Tensor(counts.astype(np.int64))


def _unique(input, dim, inverse, counts):
    values, back, count = np.unique(host_values(input), return_inverse=True, return_counts=True, axis=dim)
    back = back.reshape(input._shape if dim is None else -1) if inverse else np.zeros(0)
    return Tensor(values), Tensor(back.astype(np.int64)), Tensor((count if counts else np.zeros(0)).astype(np.int64))


def bincount(input, weights=None, minlength=0):
    """`BincountExt`: how often each number occurs, or the sum of its weights."""
    values = host_values(input)
    n = max(int(values.max(initial=-1)) + 1, minlength)
    if weights is None:
        return Tensor(np.bincount(values, minlength=n).astype(np.int64))
    return ops.tensor_scatter_add(ops.zeros((n,), weights.dtype), mint.reshape(input, (-1, 1)), weights)


def repeat_rows(input, repeats, dim=None, output_size=None):
    """`RepeatInterleaveTensor`: row i of `dim` as often as `repeats` says, numbers or a tensor."""
    if dim is None:
        input, dim = mint.reshape(input, (-1,)), 0
    counts = host_values(repeats) if isinstance(repeats, Tensor) else np.array(repeats)
    counts = np.broadcast_to(counts.reshape(-1), (input._shape[dim],))
    return gather(input, Tensor(np.repeat(np.arange(len(counts)), counts).astype(np.int32)), dim)


TABLE = {"repeat_rows": repeat_rows}
CPU = {"NonZeroExt": nonzero_tuple, "Unique2": unique, "UniqueDim": unique_dim, "DeprecatedUnique": unique_method,
       "UniqueConsecutive": unique_consecutive, "BincountExt": bincount,
       "RepeatInterleaveTensor": repeat_rows}
