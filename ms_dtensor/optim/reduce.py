# SPDX-License-Identifier: Apache-2.0
"""Sums over the ranks that hold the pieces of a tensor: all numbers of one mesh axis travel in one all-reduce."""
from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from ..core.layout import Layout
from .arrays import Array, join, to_array, to_tensor


def axes_of(layout: Layout | None, *dims: int) -> frozenset[int]:
    """The mesh axes over several ranks that cut these dims."""
    if layout is None:
        return frozenset()
    return frozenset(a for dim in dims for a in layout.dim_axes[dim] if layout.mesh.shape[a] > 1)


def sum_over_ranks(parts: Sequence[tuple[Layout | None, Collection[int], Array]]) -> list[Array]:
    """Of each (layout, mesh axes, this rank's summand) the sum over the ranks along these axes of the layout's mesh."""
    out = [array for _, _, array in parts]
    todo: dict[tuple, list[int]] = {}
    for i, (layout, axes, array) in enumerate(parts):
        if layout is not None and layout.mesh.get_coordinate() is not None:
            for axis in sorted(axes):
                todo.setdefault((layout.mesh, axis, array.dtype), []).append(i)
    # One order on every rank, axis by axis: a sum over two axes takes them in turn.
    for (mesh, axis, _), indices in sorted(todo.items(), key=lambda item: item[0][1]):
        packed = join([out[i].reshape(-1) for i in indices])
        if math.prod(packed.shape):
            total = to_array(mesh.get_group(axis).all_reduce(to_tensor(packed)))
            at = 0
            for i in indices:
                shape = out[i].shape
                out[i] = total[at:at + math.prod(shape)].reshape(shape)
                at += math.prod(shape)
    return out
