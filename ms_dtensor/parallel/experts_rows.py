# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens on one rank, by their numbers: taken, added up, and weighed by choice; 16-bit floats in float32 meanwhile.

Not here: which rows go where (`experts.py`, `experts_room.py`). Numbers are an array of the host's or a tensor of i32.
"""
from __future__ import annotations

import numpy as np
from mindspore import Tensor, mint, ops

from ..comm.pretended import executing
from ..ops.local import Nothing
from ..ops.local.dtypes import full, rounded, wider


def rows_at(x: Tensor, index: np.ndarray | Tensor) -> Tensor:
    """[numbers, d]: the rows of x with these numbers."""
    if not len(index):
        return Nothing.apply((0, *x.shape[1:]), x.dtype, x)
    if (dry := executing()) is not None:  # what has come from other ranks
        x = dry.alone(x)
    return rounded(ops.gather(wider(x), _index(index), 0), x)


def added_at(y: Tensor, index: np.ndarray | Tensor, count: int) -> Tensor:
    """[count, d]: row i of y is added to row `index[i]`."""
    if not len(index):
        return Nothing.apply((count, *y.shape[1:]), y.dtype, y)
    return rounded(mint.index_add(full((count, *y.shape[1:]), 0, wider(y).dtype), 0, _index(index), wider(y)), y)


def _index(numbers: np.ndarray | Tensor) -> Tensor:
    return numbers if isinstance(numbers, Tensor) else Tensor(numbers.astype(np.int32))


def weighted(choices: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    """The sum of a token's choices, [n * k, d] -> [n, d]."""
    (n, k), d = weights.shape, x.shape[1]
    if not n:
        return Nothing.apply((0, d), x.dtype, x, choices, weights)
    wide = wider(choices)
    # a product of matrices: one with broadcasting takes ten times as long on a CPU
    y = ops.BatchMatMul()(weights.astype(wide.dtype).reshape(n, 1, k), wide.reshape(n, k, d))
    return y.reshape(n, d).astype(x.dtype)
