# SPDX-License-Identifier: Apache-2.0
"""A batch cut into microbatches: rows of tensors, of the local shard of a DTensor; everything else goes to each as it is."""
from __future__ import annotations

import math
from typing import Any

import numpy as np
from mindspore import Tensor

from ..core.tree import leaves, map_leaves
from ..dispatch.operands import local_alias
from ..errors import LayoutError
from ..internals.names import NoFallbackGuard
from ..tensor.dtensor import DTensor


def rows_of_batch(args: tuple) -> set[int]:
    """Of the first tensor, here and over all data-parallel ranks."""
    first = next((x for x in leaves(args, Tensor) if x.shape), None)
    return set() if first is None else {first.shape[0], first._shape[0]}


def cut(tree: Any, m: int, rows: set[int]) -> list:
    """The microbatches: each tensor's rows in m equal parts, everything else repeated."""
    if arrays := leaves(tree, np.ndarray):
        raise LayoutError("For a pipeline, a NumPy array was given.", f"{arrays[0].dtype}{list(arrays[0].shape)}",
                          "Tensors are cut into microbatches, and everything else goes to each as it is.",
                          "mindspore.Tensor(array)")
    return [map_leaves(lambda x, i=i: _rows(x, i, m, rows), tree, Tensor) for i in range(m)]


def _rows(x: Tensor, i: int, m: int, rows: set[int]) -> Tensor:
    if not x.shape:
        return x
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
    n = x._shape[0] // m
    with NoFallbackGuard():
        piece = local_alias(x)[i * n:(i + 1) * n].contiguous()
    if layout is None:
        return piece
    return DTensor.from_local(piece, layout.mesh, list(layout.placements), shape=(layout.shape[0] // m, *layout.shape[1:]))
