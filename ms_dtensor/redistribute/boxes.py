# SPDX-License-Identifier: Apache-2.0
"""Who sends which slice to whom: box arithmetic behind moves with uneven shards and behind `exchange`. Pure.

A box is one (start, stop) per dim, in global indices. Every shard of a layout is one box, because nested chunks are
contiguous. Invariant: every rank computes the same table, so senders and receivers agree without talking.
"""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

from ..layout import Layout
from ..mesh import coordinates

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


def relative(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Slices that cut `inner` out of a local tensor that holds `outer`."""
    return tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(inner, outer))


def intersect(a: Box, b: Box) -> Box | None:
    """Common part of two boxes, or None if it has no element."""
    out = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b))
    return None if any(lo >= hi for lo, hi in out) else out


@lru_cache(maxsize=1024)
def transfers(src: Layout, dst: Layout) -> tuple[tuple[int, int, Box], ...]:
    """(sender, receiver, box) of every slice of `src` that a rank needs for its shard of `dst`, own slices included.

    A receiver that already holds a slice takes its own copy; other replicas take turns by receiver. On an axis that
    stays partial each rank holds another summand, so slices stay among ranks that agree on it.
    """
    partial = src.partial_axes if src.mesh == dst.mesh else ()
    owners: dict[tuple[int, ...], dict[Box, list[int]]] = {}
    for at in coordinates(src.mesh):
        box = src.local_box(at)
        if all(lo < hi for lo, hi in box):
            summand = owners.setdefault(tuple(at[a] for a in partial), {})
            summand.setdefault(box, []).append(int(src.mesh.mesh[at]))
    out = []
    for i, at in enumerate(coordinates(dst.mesh)):
        receiver, need = int(dst.mesh.mesh[at]), dst.local_box(at)
        for box, ranks in owners.get(tuple(at[a] for a in partial), {}).items():
            part = intersect(box, need)
            if part is not None:
                sender = receiver if receiver in ranks else ranks[i % len(ranks)]
                out.append((sender, receiver, part))
    return tuple(out)
