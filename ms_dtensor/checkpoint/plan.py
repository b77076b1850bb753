# SPDX-License-Identifier: Apache-2.0
"""Which rank writes which part of which tensor. Pure: a function of layouts, so ranks agree without talking.

A part is a box of the global tensor. What several ranks hold is written by one of them, one that has the least to write so
far; a large box that several hold is cut into rows between them. What comes out is a formula for each tensor (`spread.py`),
so the work grows with tensors and with ranks, not with their product.
"""
from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from typing import NamedTuple

import numpy as np

from ..core.layout import Layout
from ..core.mesh import DeviceMesh
from ..core.placements import Shard
from ..redistribute.boxes import Box
from .spread import Cut, Mesh, Ranks, Run, Spread

SPLIT = 4 << 20  # bytes from which a box that several ranks hold is cut between them
SHARE = 1 << 20  # bytes of the pieces, if there are ranks enough
Held = tuple[tuple[Box, tuple[int, ...]], ...]  # boxes of a tensor, and who holds each


class Request(NamedTuple):
    """A tensor to write; of its spread who writes is not yet known."""

    key: str
    itemsize: int
    shape: tuple[int, ...]
    spread: Spread


class Part(NamedTuple):
    """A box of a tensor that one rank writes."""

    key: str
    box: Box


@lru_cache(maxsize=64)
def mesh_of(mesh: DeviceMesh) -> Mesh:
    """A mesh as files have it."""
    return Mesh(mesh.shape, Ranks.of(mesh.rank_list))


@lru_cache(maxsize=4096)
def laid_out(layout: Layout) -> Spread:
    """How a tensor of a layout is cut.

    Example:
        >>> from ms_dtensor import DeviceMesh, Layout, Shard, Replicate
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> [cut.axes for cut in laid_out(Layout(mesh, [Replicate(), Shard(0)], (3, 2))).cuts]
        [(1,), ()]
    """
    return Spread(mesh_of(layout.mesh), tuple(_cut(layout, d) for d in range(len(layout.shape))))


def _cut(layout: Layout, dim: int) -> Cut:
    sizes = layout.mesh.shape
    axes = tuple(a for a in layout.dim_axes[dim] if sizes[a] > 1)
    if all(type(layout.placements[a]) is Shard for a in axes):
        return Cut(axes)
    return Cut(axes, _runs(layout, dim, axes))  # another way to cut, which a later reader need not know


def _runs(layout: Layout, dim: int, axes: Sequence[int]) -> tuple[tuple[Run, ...], ...]:
    at, found = [0] * layout.mesh.ndim, []
    for place in itertools.product(*(range(layout.mesh.shape[a]) for a in axes)):
        for a, i in zip(axes, place):
            at[a] = i
        found.append(tuple((lo, hi) for lo, hi in layout.pieces(at)[dim] if lo < hi))
    return tuple(found)


def whole_on(ranks: int | Sequence[int], shape: Sequence[int]) -> Spread:
    """A tensor that so many ranks, or these, hold whole."""
    held = Ranks.of(range(ranks) if isinstance(ranks, int) else ranks)
    return Spread(Mesh((len(held),), held), (Cut(),) * len(shape))


def assign(requests: Sequence[Request], ranks: int) -> dict[str, Spread]:
    """Who writes what: each request's spread, completed."""
    load = np.zeros(ranks, np.int64)
    plan = {request.key: request.spread for request in requests}
    alone = Counter((r.itemsize, r.shape, r.spread) for r in requests if r.spread.copies == 1)
    for (itemsize, shape, spread), count in alone.items():  # what only one rank can write comes first
        holders, sizes = _holders(spread.mesh, spread.cutting), _sizes(spread, shape)
        load[holders[:, 0]] += itemsize * count * sizes
    shared = [r for r in requests if r.spread.copies > 1]
    shared.sort(key=lambda r: -r.itemsize * math.prod(r.shape))  # the largest first: the last and smallest even out
    for key, itemsize, shape, spread in shared:
        holders, sizes = _holders(spread.mesh, spread.cutting), itemsize * _sizes(spread, shape)
        largest = int(sizes.max(initial=0))
        parts = min(spread.copies, -(-largest // SHARE)) if largest >= SPLIT else 1
        first = 0 if parts == spread.copies else int(load[holders].max(0).argmin())
        load[holders[:, (first + np.arange(parts)) % spread.copies]] += (sizes // parts)[:, None]
        plan[key] = replace(spread, first=first, parts=parts)
    return plan


@lru_cache(maxsize=16)
def _holders(mesh: Mesh, cutting: frozenset[int]) -> np.ndarray:
    """The ranks that hold each box, [boxes, copies], both row-major over axes."""
    axes = [*sorted(cutting), *(a for a in range(len(mesh.shape)) if a not in cutting)]
    ranks = np.fromiter(mesh.ranks, np.int64, len(mesh.ranks)).reshape(mesh.shape).transpose(axes)
    return ranks.reshape(math.prod(mesh.shape[a] for a in cutting), -1)


@lru_cache(maxsize=64)
def _sizes(spread: Spread, shape: tuple[int, ...]) -> np.ndarray:
    """Elements of each box, row-major over the axes that cut."""
    mesh, cutting = spread.mesh.shape, sorted(spread.cutting)
    along = []
    for cut, size in zip(spread.cuts, shape):
        held = np.array([sum(hi - lo for lo, hi in cut.at(size, mesh, _place(mesh, cut.axes, place)))
                         for place in itertools.product(*(range(mesh[a]) for a in cut.axes))], np.int64)
        order = np.argsort(cut.axes)
        held = held.reshape([mesh[a] for a in cut.axes]).transpose(order) if cut.axes else held.reshape(())
        along.append(held.reshape([mesh[a] if a in cut.axes else 1 for a in cutting]))
    whole = reduce(np.multiply, along, np.ones((1,) * len(cutting), np.int64))
    return np.broadcast_to(whole, [mesh[a] for a in cutting]).reshape(-1)


def _place(shape: Sequence[int], axes: Sequence[int], place: Sequence[int]) -> tuple[int, ...]:
    at = [0] * len(shape)
    for a, i in zip(axes, place):
        at[a] = i
    return tuple(at)


def parts_of(rank: int, plan: Mapping[str, Spread], shapes: Mapping[str, Sequence[int]]) -> list[Part]:
    """What a rank writes, in the order of the plan."""
    return [Part(key, box) for key, spread in plan.items() for box in spread.written_by(rank, shapes[key])]


@lru_cache(maxsize=4096)
def held_boxes(layout: Layout) -> Held:
    """The boxes that a layout cuts a tensor into, and the ranks that hold each; empty ones are left out.

    Example:
        >>> from ms_dtensor import DeviceMesh, Layout, Shard, Replicate
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> held_boxes(Layout(mesh, [Replicate(), Shard(0)], (3, 2)))
        ((((0, 2), (0, 2)), (0, 2)), (((2, 3), (0, 2)), (1, 3)))
    """
    mesh = layout.mesh
    cutting = [a for a, p in enumerate(layout.placements) if p.is_shard()]
    copying = [a for a in range(mesh.ndim) if a not in cutting]
    found = []
    for sub in itertools.product(*(range(mesh.shape[a]) for a in cutting)):
        at = [0] * mesh.ndim
        for a, i in zip(cutting, sub):
            at[a] = i
        ranks = mesh.ranks_along(copying, at)
        found += [(box, ranks) for box in itertools.product(*layout.pieces(at)) if all(lo < hi for lo, hi in box)]
    return tuple(found)


def whole_box(shape: Sequence[int], ranks: Sequence[int]) -> Held:
    """A tensor that all of these ranks hold whole."""
    return ((tuple((0, n) for n in shape), tuple(ranks)),) if math.prod(shape) else ()


def volume(box: Box) -> int:
    """Number of elements."""
    return math.prod(hi - lo for lo, hi in box)


def common(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, None if there is none."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b))
    return both if all(lo < hi for lo, hi in both) else None


def within(box: Box, runs: Sequence[Sequence[tuple[int, int]]]) -> tuple[slice, ...]:
    """Where a box lies in an array that holds, on each dim, these runs of rows one after another."""
    index = []
    for (lo, hi), along in zip(box, runs):
        at = 0
        for a, b in along:
            if a <= lo < b:
                break
            at += b - a
        else:
            raise AssertionError((box, runs))
        index.append(slice(at + lo - a, at + hi - a))
    return tuple(index)


def part_name(key: str, shape: Sequence[int], box: Box) -> str:
    """The name of a part in its file: the tensor's own if it is all of it, else with the box: ``w[0:4,8:16]``."""
    if all((0, n) == extent for n, extent in zip(shape, box)):
        return key
    return f"{key}[{','.join(f'{lo}:{hi}' for lo, hi in box)}]"
