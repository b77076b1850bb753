# SPDX-License-Identifier: Apache-2.0
"""Work that needs a whole matrix, divided over the ranks of its mesh: each matrix has one rank that works on it.

Shards travel to the owner, from the one copy of the matrix that the owner has a part of; the result's shards travel back
to all. So nothing is computed twice, and a rank receives its own matrices once and of the others its shards: an all-gather
of all would bring it every matrix whole. All matrices travel together, in two exchanges.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from ..core.layout import Layout
from ..core.mesh import DeviceMesh
from .arrays import Array, join, to_array, to_tensor

Coordinate = tuple[int, ...]


def assign(layouts: Sequence[Layout], cost: Callable[[Sequence[int]], float]) -> list[int]:
    """The owner, a rank of its mesh, of each matrix: the dearest first, each to the rank that has the least to do."""
    load: dict[int, float] = {}
    owners = [0] * len(layouts)
    for i in sorted(range(len(layouts)), key=lambda i: -cost(layouts[i].shape)):
        owners[i] = min(layouts[i].mesh.rank_list, key=lambda rank: load.get(rank, 0.0))
        load[owners[i]] = load.get(owners[i], 0.0) + cost(layouts[i].shape)
    return owners


def on_owners(mesh: DeviceMesh, items: Sequence[tuple[Layout, int, Array]],
              work: Sequence[Callable[[Array], Array]]) -> list[Array]:
    """This rank's shards of `work[i](whole matrix i)`, each of which runs on one rank.

    Args:
        mesh: of all items; the calling rank is one of it.
        items: layout, owner and this rank's shard of every matrix, all of one dtype.
        work: one per matrix, whose shape it keeps.
    """
    at = dict(zip(mesh.rank_list, itertools.product(*map(range, mesh.shape)), strict=True)).__getitem__
    me = mesh.get_rank()
    here = at(me)
    sends: dict[int, list[Array]] = {}
    recvs: dict[int, list[tuple[int, Sequence[int]]]] = {}
    for i, (layout, owner, shard) in enumerate(items):
        if owner == me:
            for rank in _copy_of(layout, here):
                recvs.setdefault(rank, []).append((i, layout.local_shape(at(rank))))
        elif me in _copy_of(layout, at(owner)):
            sends.setdefault(owner, []).append(shard)
    arrived = _exchange(mesh, sends, recvs, items[0][2])
    results: dict[int, Array] = {}
    sends, recvs = {}, {}
    for i, (layout, owner, shard) in enumerate(items):
        if owner != me:
            recvs.setdefault(owner, []).append((i, layout.local_shape()))
            continue
        shards = {at(rank): shard if rank == me else arrived[i, rank] for rank in _copy_of(layout, here)}
        whole = work[i](_assembled(layout, shards))
        results[i] = _cut(layout, here, whole)
        for rank in mesh.rank_list:
            sends.setdefault(rank, []).append(_cut(layout, at(rank), whole))
    arrived = _exchange(mesh, sends, recvs, items[0][2])
    return [results[i] if owner == me else arrived[i, owner] for i, (_, owner, _) in enumerate(items)]


def _copy_of(layout: Layout, coordinate: Coordinate) -> tuple[int, ...]:
    """The ranks that together hold one copy of the matrix, this coordinate among them."""
    cutting = [a for axes in layout.dim_axes for a in axes]
    return layout.mesh.ranks_along(cutting, coordinate)


def _exchange(mesh: DeviceMesh, sends: dict[int, list[Array]], recvs: dict[int, list[tuple[int, Sequence[int]]]],
              like: Array) -> dict[tuple[int, int], Array]:
    """What arrives, by (index, source), one message per pair of ranks."""
    me, dtype = mesh.get_rank(), to_tensor(like).dtype
    out = [(dst, to_tensor(join([x.reshape(-1) for x in arrays]))) for dst, arrays in sends.items() if dst != me]
    come = [(src, (sum(math.prod(shape) for _, shape in wanted),), dtype) for src, wanted in recvs.items() if src != me]
    messages = mesh.get_group().exchange([m for m in out if m[1].size], [m for m in come if m[1][0]])
    flat = dict(zip((src for src, size, _ in come if size[0]), map(to_array, messages), strict=True))
    result = {}
    for src, wanted in recvs.items():
        at = 0
        for i, shape in wanted if src != me else ():
            end = at + math.prod(shape)
            result[i, src] = (flat.get(src, like.reshape(-1)[:0])[at:end]).reshape(shape)
            at = end
    return result


def _assembled(layout: Layout, shards: dict[Coordinate, Array]) -> Array:
    """The whole matrix from the shards of one copy: their tiles stand in rows and columns."""
    tiles = {}
    for coordinate, shard in shards.items():
        rows, columns = layout.pieces(coordinate)
        top = 0
        for r0, r1 in rows:
            left = 0
            for c0, c1 in columns:
                if r0 < r1 and c0 < c1:
                    tiles[r0, c0] = shard[top:top + r1 - r0, left:left + c1 - c0]
                left += c1 - c0
            top += r1 - r0
    lefts = sorted({c for _, c in tiles})
    return join([join([tiles[r, c] for c in lefts], 1) for r in sorted({r for r, _ in tiles})], 0)


def _cut(layout: Layout, coordinate: Coordinate, whole: Array) -> Array:
    """The shard of a coordinate."""
    rows, columns = ([run for run in runs if run[0] < run[1]] or runs[:1] for runs in layout.pieces(coordinate))
    return join([join([whole[r0:r1, c0:c1] for c0, c1 in columns], 1) for r0, r1 in rows], 0)
