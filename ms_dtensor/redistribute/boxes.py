# SPDX-License-Identifier: Apache-2.0
"""Who sends which slice to whom: box arithmetic behind moves with uneven shards and behind `exchange`. Pure.

A box is one (start, stop) per dim, in global indices. Every shard of a layout is one box, because chunks of chunks are
contiguous. Invariant: who sends what to whom is a function of two layouts, so ranks agree without talking.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from ..core.layout import Layout
from ..core.placements import Placement

Box = tuple[tuple[int, int], ...]


def sizes_along(layout: Layout, axes: Sequence[int], dim: int, coordinate: Sequence[int]) -> tuple[int, ...]:
    """Extent of `dim` on each rank of the group over `axes` through `coordinate`, in group order."""
    at, out = list(coordinate), []
    for sub in itertools.product(*(range(layout.mesh.shape[a]) for a in axes)):
        for a, i in zip(axes, sub):
            at[a] = i
        lo, hi = layout.local_box(at)[dim]
        out.append(hi - lo)
    return tuple(out)


def tensors_along(whole: Layout, cut: Layout, axes: Sequence[int],
                  coordinate: Sequence[int]) -> list[tuple[tuple[int, ...], int, tuple[int, ...]]]:
    """Of what lies as `whole` says, and over `axes` is cut as `cut` says: tensors one behind another that make it up.

    Returns:
        Of each, its shape here, the dim along which it is cut, and its extent there on each rank of the group over `axes`
        through `coordinate`: the tensor itself, or the parts of a `FusedShard`, which these ranks divide.
    """
    shape, placement = whole.local_shape(coordinate), cut.placements[axes[0]]
    if not placement.parts:
        return [(shape, placement.dim, sizes_along(cut, axes, placement.dim, coordinate))]
    ranks, others = prod(cut.mesh.shape[a] for a in axes), sum(placement.parts) // (shape[0] or 1) or 1
    rows = [n // others for n in placement.parts if n] or [0]
    return [((n, *shape[1:]), 0, (n // ranks,) * ranks) for n in rows]


def relative(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Slices that cut `inner` out of a local tensor that holds `outer`."""
    return tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(inner, outer))


def intersect(a: Box, b: Box) -> Box:
    """Common part of two boxes that have one."""
    return tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b))


class Transfers(NamedTuple):
    """What one rank gives and gets: (other rank, box) each, and the box it keeps."""

    sends: tuple[tuple[int, Box], ...]
    receives: tuple[tuple[int, Box], ...]
    keeps: Box | None


@lru_cache(maxsize=1024)
def transfers(src: Layout, dst: Layout, me: int) -> Transfers:
    """The slices of `src` that rank `me` gives to others, and those it needs for its shard of `dst`.

    A receiver that already holds a slice takes its own copy; other replicas take turns by receiver. On an axis that
    stays partial each rank holds another summand, so slices stay among ranks that agree on it. Two ranks exchange at
    most one slice each way. Work and memory grow with the ranks concerned, not with the mesh.
    """
    fixed = src.partial_axes if src.mesh == dst.mesh else ()
    from_, to = src.mesh.coordinate_of(me), dst.mesh.coordinate_of(me)
    turns = tuple(a for a in range(src.mesh.ndim) if a not in fixed and not src.placements[a].is_shard())
    replicas = tuple(src.mesh.shape[a] for a in turns)
    keeps, sends, receives = None, [], []
    if to is not None:
        need = dst.local_box(to)
        turn: Sequence = np.unravel_index(_number(dst, to) % prod(replicas), replicas) if turns else ()
        at = {**{a: to[a] for a in fixed}, **dict(zip(turns, turn))}
        for coordinate in _holders(src, need, at):
            part = intersect(src.local_box(coordinate), need)
            if from_ is not None and _same_slice(src, from_, coordinate, turns):
                keeps = part
            else:
                receives.append((int(src.mesh.mesh[coordinate]), part))
    if from_ is not None:
        held = src.local_box(from_)
        mine = int(np.ravel_multi_index([from_[a] for a in turns], replicas)) if turns else 0
        for coordinate in _holders(dst, held, {a: from_[a] for a in fixed}):
            other = int(dst.mesh.mesh[coordinate])
            if other == me or _number(dst, coordinate) % prod(replicas) != mine:
                continue
            there = src.mesh.coordinate_of(other)
            if there is None or not _same_slice(src, there, from_, turns):
                sends.append((other, intersect(held, dst.local_box(coordinate))))
    return Transfers(tuple(sends), tuple(receives), keeps)


def _number(layout: Layout, coordinate: Sequence[int]) -> int:
    return int(np.ravel_multi_index(coordinate, layout.mesh.shape)) if coordinate else 0


def _same_slice(src: Layout, a: Sequence[int], b: Sequence[int], turns: Sequence[int]) -> bool:
    """Whether two coordinates hold the same slice (and, of a partial value, the same summand)."""
    return all(i == j for axis, (i, j) in enumerate(zip(a, b)) if axis not in turns)


def _holders(layout: Layout, box: Box, at: dict[int, int]) -> Iterator[tuple[int, ...]]:
    """Coordinates whose shard has a part of `box`, with these coordinates on some axes."""
    mesh = layout.mesh
    choices: list[list[tuple[tuple[int, int], ...]]] = []
    for d, axes in enumerate(layout.dim_axes):
        start, stop = _extents(layout.shape[d], tuple((layout.placements[a], mesh.shape[a]) for a in axes))
        lo, hi = box[d]
        hit = np.flatnonzero((start < hi) & (stop > lo) & (start < stop) & (lo < hi))
        places = np.unravel_index(hit, [mesh.shape[a] for a in axes]) if axes else ()
        choices.append([tuple(zip(axes, place)) for place in zip(*(p.tolist() for p in places))] if axes else
                       [()] * len(hit))
    free = [a for a in range(mesh.ndim) if a not in at and not layout.placements[a].is_shard()]
    choices += [[((a, i),) for i in range(mesh.shape[a])] for a in free]
    coordinate = [at.get(a, 0) for a in range(mesh.ndim)]
    for choice in itertools.product(*choices):
        for a, i in itertools.chain.from_iterable(choice):
            coordinate[a] = int(i)
        yield tuple(coordinate)


@lru_cache(maxsize=1024)
def _extents(size: int, splits: tuple[tuple[Placement, int], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Start and stop of every shard of a dim that these placements split one after the other, each over so many ranks."""
    start, stop = np.array([0]), np.array([size])
    for p, n in splits:
        lengths, which = np.unique(stop - start, return_inverse=True)  # few: most chunks are equally long
        bounds = np.array([p.bounds(length, n) for length in lengths.tolist()])[which] + start[:, None, None]
        start, stop = bounds[..., 0].ravel(), bounds[..., 1].ravel()
    return start, stop
