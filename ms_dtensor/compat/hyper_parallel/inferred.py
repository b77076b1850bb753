# SPDX-License-Identifier: Apache-2.0
"""What hyper_parallel says of where shards lie, for programs that gather by themselves: as its Muon's owners of matrices do.

While its package is registered, a DTensor's `layout` has hyper_parallel's names beside ours, and a deep copy of it is one
that can be changed. Not here: redistribution in general; `x.redistribute(...)` is that.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ...core.layout import Layout as CoreLayout
from ...errors import LayoutError
from ...internals.undo import Patched
from .layout import Layout

Op = tuple[str, tuple[int, int, list[int]]]


class DevMat:
    """Ranks in rows: `dev_mat` says how many along each axis.

    Example:
        >>> from ms_dtensor.compat.hyper_parallel.inferred import DevMat
        >>> DevMat([2, 3]).get_devices_along_dim(4, [0, 1, 2, 3, 4, 5], [1])
        [3, 4, 5]
    """

    def __init__(self, dev_mat: Sequence[int]):
        self.shape = tuple(dev_mat)

    def get_devices_along_dim(self, rank: int, rank_list: Sequence[int], dims: Sequence[int] | int) -> list[int]:
        """The ranks that differ from `rank` along `dims` only, it among them."""
        along = [dims] if isinstance(dims, int) else list(dims)
        here = np.unravel_index(list(rank_list).index(rank), self.shape)
        at: tuple[Any, ...] = tuple(slice(None) if a in along else int(here[a]) for a in range(len(self.shape)))
        return [int(r) for r in np.reshape(rank_list, self.shape)[at].ravel()]


class RedistributionOperatorInfer:
    """The gathers from one tensor map to another, of which no dim is cut otherwise than before, or not at all.

    Args:
        dev_mat: ranks along each axis.
        in_tensor_map: per dim the axis that cuts it, counted from the last; -1: none; a tuple: several, outermost first.
        out_tensor_map: the same afterwards.

    Example:
        >>> from ms_dtensor.compat.hyper_parallel.inferred import RedistributionOperatorInfer
        >>> RedistributionOperatorInfer([2, 3], [1, -1], [-1, -1]).infer_ops_list(4, [0, 1, 2, 3, 4, 5])
        [('all_concat', (0, 2, [1, 4]))]
    """

    def __init__(self, dev_mat: Sequence[int], in_tensor_map: Sequence, out_tensor_map: Sequence):
        self._mesh, self._before, self._after = DevMat(dev_mat), list(in_tensor_map), list(out_tensor_map)
        if any(after not in (-1, before) for before, after in zip(self._before, self._after, strict=True)):
            raise LayoutError("For 'RedistributionOperatorInfer', more than gathers is asked for.",
                              f"{self._before} -> {self._after}", "Dims are gathered, or stay as they are.",
                              "x.redistribute(placements=...)")

    def infer_ops_list(self, rank: int, rank_list: Sequence[int]) -> list[Op]:
        """For each axis to gather over, innermost first: ("all_concat", (dim, number of ranks, the ranks))."""
        last, ops = len(self._mesh.shape) - 1, []
        for dim, (before, after) in enumerate(zip(self._before, self._after)):
            for axis in reversed(_axes(before, last) if before != after else ()):
                ops.append(("all_concat", (dim, self._mesh.shape[axis],
                                           self._mesh.get_devices_along_dim(rank, rank_list, axis))))
        return ops


def _axes(entry: Any, last: int) -> list[int]:
    """The axes of an entry of a tensor map, outermost first."""
    return [last - int(m) for m in (entry if isinstance(entry, tuple | list) else [entry]) if m != -1]


def _infer_slice_area_by_rank(mesh_shape: Sequence[int], tensor_map: Sequence, rank_id: int,
                              full_shape: Sequence[int]) -> list[tuple[int, int]]:
    """Of each dim begin and end of what the rank at this place of the mesh has; shards are alike."""
    here, area = np.unravel_index(rank_id, tuple(mesh_shape)), []
    for size, entry in zip(full_shape, tensor_map, strict=True):
        axes, at = _axes(entry, len(mesh_shape) - 1), 0
        for axis in axes:
            at = at * mesh_shape[axis] + int(here[axis])
        each, rest = divmod(int(size), prod(mesh_shape[a] for a in axes))
        if rest:
            raise LayoutError("For '_infer_slice_area_by_rank', a dim does not split evenly.",
                              f"{list(full_shape)} as {list(tensor_map)} on {tuple(mesh_shape)}",
                              "The pieces that hyper_parallel's programs send are alike.", "x.full_tensor()")
        area.append((at * each, (at + 1) * each))
    return area


# -- what a DTensor's layout is asked for -------------------------------------------------------------------------------


def _global_shape(layout: CoreLayout, local_shape: Sequence[int]) -> tuple[int, ...]:
    if tuple(local_shape) == layout.local_shape():
        return layout.shape  # also where shards are not alike
    return tuple(n * layout.divisor(d) for d, n in enumerate(local_shape))


def _split_id(layout: CoreLayout, dim: int) -> int:
    here, at = layout.mesh.get_coordinate(), 0
    if here is None:
        raise LayoutError("For 'get_split_id', this process has no piece.", layout.describe(), "It is not part of the mesh.")
    for axis in layout.dim_axes[dim]:
        at = at * layout.mesh.shape[axis] + here[axis]
    return at


_ON_LAYOUTS: dict[str, Any] = {
    "rank_list": property(lambda self: self.mesh.rank_list),
    "mesh_shape": property(lambda self: self.mesh.shape),
    "tensor_map": property(lambda self: Layout.of(self).tensor_map),
    "alias_tensor_map": property(lambda self: Layout.of(self).alias_tensor_map),
    "alias_placements": property(lambda self: self.placements),
    "get_global_shape": _global_shape, "get_split_id": _split_id,
    "__deepcopy__": lambda self, memo: Layout.of(self)}
_named = Patched()


def names_on_layouts(on: bool) -> None:
    """Gives our layouts hyper_parallel's names, or takes them back."""
    if not on:
        _named.take_back()
    elif not _named:
        for name, value in _ON_LAYOUTS.items():
            _named.put(CoreLayout, name, value)
