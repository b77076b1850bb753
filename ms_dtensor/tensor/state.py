# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint planner asks a DTensor: which rectangles of the global tensor are here, and their data.

The method names on `DTensor` are those of PyTorch's checkpoint protocol, so a planner written for one finds them on the
other. A rectangle that several ranks hold is offered by all of them; `owner` says which one should write it, so that a
planner need not communicate to write everything once. Not here: files.
"""
from __future__ import annotations

import itertools
from typing import NamedTuple

from mindspore import Tensor

from ..core.layout import Layout
from ..dispatch.operands import local_alias
from ..errors import LayoutError
from ..redistribute.execute import slice_local


class Chunk(NamedTuple):
    """A rectangle of a global tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class WriteItem(NamedTuple):
    """One rectangle to write: of which tensor, where in it, and whether this rank is the one to do it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk: Chunk
    owner: bool


def chunk_list(layout: Layout) -> list[Chunk]:
    """This rank's rectangle (of a `FusedShard` one per part), or none where it is empty or the rank outside the mesh."""
    _check_whole(layout)
    if layout.mesh.get_coordinate() is None:
        return []
    boxes = [box for box in itertools.product(*layout.pieces()) if all(lo < hi for lo, hi in box)]
    return [Chunk(tuple(lo for lo, _ in box), tuple(hi - lo for lo, hi in box)) for box in boxes]


def write_items(layout: Layout, name: str) -> list[WriteItem]:
    """`chunk_list` with what a planner needs to write; replicas at coordinate 0 of their axes own the rectangle."""
    here = layout.mesh.get_coordinate() or ()
    owner = all(c == 0 for c, p in zip(here, layout.placements) if p.is_replicate())
    return [WriteItem(name, layout.shape, layout.dtype, chunk, owner) for chunk in chunk_list(layout)]


def shard_at(x, index) -> Tensor:
    """The data of a rectangle, a view of this rank's shard.

    Args:
        x: a DTensor.
        index: a `Chunk`, anything with `.offsets` and `.sizes` or with `.offset` (of a whole shard), or offsets.

    Raises:
        LayoutError: the rectangle is not within this rank's shard.
    """
    layout = x._layout
    _check_whole(layout)
    offsets = getattr(index, "offsets", getattr(index, "offset", index))
    box, begin = layout.local_box(), [0] * len(layout.shape)
    if offsets is None:
        offsets = layout.local_offset()
    for d, runs in enumerate(layout.pieces() if len(offsets) == len(box) else ()):
        if len(runs) > 1:  # the run that has the rectangle, and where in the shard it begins
            at = next((i for i, (lo, hi) in enumerate(runs) if lo <= offsets[d] < hi), 0)
            begin[d] = sum(hi - lo for lo, hi in runs[:at])
            box = (*box[:d], runs[at], *box[d + 1:])
    sizes = getattr(index, "sizes", None) or tuple(hi - at for at, (_, hi) in zip(offsets, box))
    wanted = tuple((at, at + n) for at, n in zip(offsets, sizes))
    if len(wanted) != len(box) or any(not lo <= a <= b <= hi for (a, b), (lo, hi) in zip(wanted, box)):
        raise LayoutError(f"For 'DTensor', this rank does not hold the rectangle at {list(offsets)}.",
                          layout.describe(), "", "ask __create_chunk_list__() what it holds")
    return slice_local(local_alias(x), tuple(slice(a - lo + at, b - lo + at) for (a, b), (lo, _), at in
                                             zip(wanted, box, begin)))


def _check_whole(layout: Layout) -> None:
    if layout.has_partial():
        raise LayoutError("For 'DTensor', summands are no rectangles of a tensor.", layout.describe(),
                          "A checkpoint holds values.", "x.reduce_partial() first")
