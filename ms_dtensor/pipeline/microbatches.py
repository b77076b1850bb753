# SPDX-License-Identifier: Apache-2.0
"""A batch cut into microbatches: rows of tensors, of the local shard of a DTensor; everything else goes to each as it is.

What rows do not say, or what is no tensor and differs between microbatches, comes as `PerMicrobatch`.
"""
from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from mindspore import Tensor, mint

from ..core.tree import leaves, map_leaves
from ..dispatch.operands import local_alias
from ..errors import LayoutError
from ..internals.names import NoFallbackGuard
from ..tensor.dtensor import DTensor


class PerMicrobatch:
    """Values of the microbatches, first to last, in the place of a tensor that is cut into them.

    Lists of tokens whose order is another in each microbatch are such values: the order is no tensor.

    Args:
        values: one for each microbatch.

    Example:
        >>> from ms_dtensor.pipeline import PerMicrobatch
        >>> PerMicrobatch(["first", "second"]).values
        ('first', 'second')
    """

    def __init__(self, values: Iterable):
        self.values = tuple(values)


def check_rows(args: tuple, others: Any, m: int) -> None:
    """Refuses what cannot be cut into m microbatches; on all ranks alike, also on those that cut none of it.

    Args:
        args: the batch.
        others: what is cut like it.
        m: how many.
    """
    if arrays := leaves((args, others), np.ndarray):
        raise LayoutError("For a pipeline, a NumPy array was given.", f"{arrays[0].dtype}{list(arrays[0].shape)}",
                          "Tensors are cut into microbatches, and everything else goes to each as it is.",
                          "mindspore.Tensor(array)")
    for given in leaves((args, others), PerMicrobatch):
        if len(given.values) != m:
            raise LayoutError(f"For a pipeline, there are {len(given.values)} values for {m} microbatches.", "PerMicrobatch",
                              "Each microbatch has its own.", f"PerMicrobatch of {m} values")
    first = next((x for x in leaves(args, Tensor) if x.shape), None)
    rows = set() if first is None else {first.shape[0], first._shape[0]}  # here, and over all data-parallel ranks
    for x in leaves((args, others), Tensor):
        if x.shape:
            _check(x, m, rows)


def _check(x: Tensor, m: int, rows: set[int]) -> None:
    if rows and not rows & {x.shape[0], x._shape[0]}:
        raise LayoutError(f"For a pipeline, a tensor has {x.shape[0]} rows, and the batch {max(rows)}.", f"{list(x.shape)}",
                          "Tensors are cut along dim 0, each row belongs to one of the batch.",
                          ("hold what is the same for all rows in a cell, or in the loss function", "x.expand(...)"))
    layout = getattr(x, "_layout", None)
    pieces = m if layout is None else m * math.prod(layout.mesh.shape[a] for a in layout.dim_axes[0])
    if x.shape[0] % pieces:
        raise LayoutError(f"For a pipeline, {x.shape[0]} rows are not cut into {m} microbatches.",
                          f"{list(x.shape)}" if layout is None else layout.describe(),
                          "Each microbatch has as many rows, on each rank.", f"rows that {pieces} divides")


def microbatch(tree: Any, i: int, m: int) -> Any:
    """Number i of m: each tensor's rows of it, in the memory of the batch; everything else repeated."""
    def _part(x: Tensor | PerMicrobatch):
        if isinstance(x, PerMicrobatch):
            return x.values[i]
        return _rows(x, i, m) if x.shape else x
    return map_leaves(_part, tree, (Tensor, PerMicrobatch))


def _rows(x: Tensor, i: int, m: int) -> Tensor:
    n, layout = x._shape[0] // m, getattr(x, "_layout", None)
    with NoFallbackGuard():
        piece = mint.narrow(local_alias(x), 0, i * n, n).contiguous()
    if layout is None:
        return piece
    return DTensor.from_local(piece, layout.mesh, list(layout.placements), shape=(layout.shape[0] // m, *layout.shape[1:]))
