# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens that all forms of a mixture of experts share: sent, taken by number, added up, and weighed by choice.

Not here: which rows go where (`experts.py`, `experts_room.py`). Numbers are an array of the host's or a tensor of i32, and
16-bit floats are float32 meanwhile.
"""
from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor, ops

from ..comm.group import Group
from ..comm.pretended import executing
from ..custom_ops.rows import Rows, SendRows, added_up, index_of
from ..ops.local import Nothing
from ..ops.local.dtypes import full, rounded, wider


@dataclass(frozen=True, slots=True)
class Call:
    """The call of `moe` that is at work on this rank."""

    name: str = ""
    """Of the experts: told in what is refused, and compared between ranks, which may come to cells in another order."""
    meanwhile: Callable[[], None] | None = None
    """Computes what needs no token of another rank."""


call: ContextVar[Call] = ContextVar("experts", default=Call())  # noqa: B039  immutable


def sent(rows: Rows, group: Group, *tensors: Tensor) -> tuple:
    """`SendRows`; meanwhile this rank computes what the call has for it."""
    if (meanwhile := call.get().meanwhile) is None:
        return SendRows.apply(rows, group, *tensors)
    arrive = SendRows.leave(rows, group, *tensors)
    meanwhile()
    return arrive()


def rows_at(x: Tensor, index: np.ndarray | Tensor) -> Tensor:
    """[numbers, d]: the rows of x with these numbers."""
    if not len(index):
        return Nothing.apply((0, *x.shape[1:]), x.dtype, x)
    if (dry := executing()) is not None:  # what has come from other ranks
        x = dry.alone(x)
    return rounded(ops.gather(wider(x), index_of(index), 0), x)


def added_at(y: Tensor, index: np.ndarray | Tensor, count: int) -> Tensor:
    """[count, d]: row i of y is added to row `index[i]`."""
    if not len(index):
        return Nothing.apply((count, *y.shape[1:]), y.dtype, y)
    wide = wider(y)
    return rounded(added_up(wide, index, full((count, *y.shape[1:]), 0, wide.dtype)), y)


def weighted(choices: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    """The sum of a token's choices, [n * k, d] -> [n, d]."""
    (n, k), d = weights.shape, x.shape[1]
    if not n:
        return Nothing.apply((0, d), x.dtype, x, choices, weights)
    wide = wider(choices)
    # a product of matrices: one with broadcasting takes ten times as long on a CPU
    y = ops.BatchMatMul()(weights.astype(wide.dtype).reshape(n, 1, k), wide.reshape(n, k, d))
    return y.reshape(n, d).astype(x.dtype)
