# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint planner asks a DTensor: which rectangles of the global tensor are here, and their data.

The method names on `DTensor` are those of PyTorch's checkpoint protocol, so a planner written for one finds them on the
other. A rectangle that several ranks hold is offered by all of them; `owner` says which one should write it, so that a
planner need not communicate to write everything once. Not here: files.
"""
from __future__ import annotations

from typing import NamedTuple

from mindspore import Tensor

from ..core.layout import Layout
from ..dispatch.operands import local_alias
from ..errors import LayoutError
from ..redistribute.boxes import relative
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
    """This rank's rectangle, or none where its shard is empty or it is outside the mesh."""
    _check_whole(layout)
    sizes = layout.local_shape()
    if layout.mesh.get_coordinate() is None or 0 in sizes:
        return []
    return [Chunk(layout.local_offset(), sizes)]


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
    box = layout.local_box()
    offsets = layout.local_offset() if offsets is None else tuple(offsets)
    sizes = getattr(index, "sizes", None) or tuple(hi - at for at, (_, hi) in zip(offsets, box))
    wanted = tuple((at, at + n) for at, n in zip(offsets, sizes))
    if len(wanted) != len(box) or any(not lo <= a <= b <= hi for (a, b), (lo, hi) in zip(wanted, box)):
        raise LayoutError(f"For 'DTensor', this rank does not hold the rectangle at {list(offsets)}.",
                          layout.describe(), "", "ask __create_chunk_list__() what it holds")
    return slice_local(local_alias(x), relative(wanted, box))


def _check_whole(layout: Layout) -> None:
    if layout.has_partial():
        raise LayoutError("For 'DTensor', summands are no rectangles of a tensor.", layout.describe(),
                          "A checkpoint holds values.", "x.reduce_partial() first")
