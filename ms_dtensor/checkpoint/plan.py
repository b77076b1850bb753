# SPDX-License-Identifier: Apache-2.0
"""Which rank writes which part of which tensor. Pure: a function of layouts, so ranks agree without talking.

A part is a box of the global tensor. What several ranks hold is written by one of them, the one that has the least to
write so far; a large box that several hold is cut into rows between them. Invariant: the parts of a tensor are disjoint
and cover it.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..core.layout import Layout
from ..redistribute.boxes import Box

SPLIT = 4 << 20  # bytes from which a box that several ranks hold is cut between them
Held = tuple[tuple[Box, tuple[int, ...]], ...]  # boxes of a tensor, and who holds each


class Request(NamedTuple):
    """A tensor to write."""

    key: str
    itemsize: int
    held: Held


class Part(NamedTuple):
    """A box of a tensor that one rank writes."""

    key: str
    box: Box


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


def assign(requests: Sequence[Request]) -> dict[int, list[Part]]:
    """What each rank writes, in the order of the requests."""
    items = []  # (bytes, number of the request, box, holders)
    for number, request in enumerate(requests):
        for box, ranks in request.held:
            for part in _rows(box, request.itemsize, len(ranks)):
                items.append((request.itemsize * volume(part), number, part, ranks))
    load: dict[int, int] = {}
    mine: dict[int, list[tuple[int, Box]]] = {}
    # what only one rank can write first, then the largest: the last and smallest even out
    for size, number, box, ranks in sorted(items, key=lambda item: (len(item[3]) > 1, -item[0], item[1], item[2])):
        rank = min(ranks, key=lambda r: load.get(r, 0))
        load[rank] = load.get(rank, 0) + size
        mine.setdefault(rank, []).append((number, box))
    return {rank: [Part(requests[number].key, box) for number, box in sorted(parts)] for rank, parts in mine.items()}


def _rows(box: Box, itemsize: int, holders: int) -> list[Box]:
    """A box that several ranks hold, in as many runs of rows, if it is large."""
    dim = next((d for d, (lo, hi) in enumerate(box) if hi - lo > 1), None)
    if holders == 1 or dim is None or volume(box) * itemsize < SPLIT:
        return [box]
    lo, hi = box[dim]
    count = min(holders, hi - lo)
    ends = [lo + (hi - lo) * i // count for i in range(count + 1)]
    return [(*box[:dim], (a, b), *box[dim + 1:]) for a, b in zip(ends, ends[1:])]


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
