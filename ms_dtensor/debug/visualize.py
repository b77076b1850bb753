# SPDX-License-Identifier: Apache-2.0
"""`visualize_sharding`: which ranks hold which block of a tensor, as text, in colour, or as SVG.

A layout is all it needs, so any number of ranks can be drawn in one process and nothing communicates. Two dims are drawn;
the others are cut away at index 0 of each shard's range unless chosen. A cell lists its ranks: several are replicas, and
a partial axis is named beneath, for there a rank holds a summand of the block. Ranks that hold nothing are listed too.
"""
from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..core.layout import Layout
from ..core.mesh import coordinates
from ..errors import LayoutError

_COLOURS = ("#8dd3c7", "#ffffb3", "#bebada", "#fb8072", "#80b1d3", "#fdb462", "#b3de69", "#fccde5")
_RICH = ("cyan", "yellow", "magenta", "red", "blue", "green", "bright_yellow", "bright_magenta")


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of the drawn plane and the ranks that hold it."""

    rows: tuple[int, int]
    cols: tuple[int, int]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn: blocks in row-major order, ranks with empty shards, what the rest of the layout says."""

    layout: Layout
    dims: tuple[int | None, int | None]
    blocks: tuple[Block, ...]
    empty: tuple[int, ...]
    elsewhere: tuple[int, ...]
    title: str


def visualize_sharding(tensor_or_layout, *, dims: Sequence[int] | None = None, at: dict[int, int] | None = None,
                       style: str = "auto", file: str | Path | None = None, show: bool = True) -> str:
    """Draws how a tensor lies over its mesh.

    Args:
        tensor_or_layout: a DTensor or a `Layout`.
        dims: the two dims to draw, rows first; default: the first two that are sharded, else the first two.
        at: global index of the other dims (dim -> index) through which the plane is cut; default 0.
        style: "plain", "rich" (coloured, needs the `rich` package), "svg", or "auto": rich on a terminal that has it.
        file: where to write the picture (SVG if the name ends so) instead of printing it.
        show: print it.

    Returns:
        The picture as a string.

    Raises:
        LayoutError: dims or indices that are not there.

    Example:
        >>> from ms_dtensor import DeviceMesh, Layout, Replicate, Shard
        >>> from ms_dtensor.debug import visualize_sharding
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> text = visualize_sharding(Layout(mesh, [Replicate(), Shard(0)], (5, 4)), style="plain")
        f32[5@tp, 4] on mesh(dp=2, tp=2)
        +-----+-----------+
        |     | 0:4       |
        +-----+-----------+
        | 0:3 | ranks 0 2 |
        +-----+-----------+
        | 3:5 | ranks 1 3 |
        +-----+-----------+
    """
    layout = tensor_or_layout if isinstance(tensor_or_layout, Layout) else getattr(tensor_or_layout, "layout", None)
    if not isinstance(layout, Layout):
        raise LayoutError("For 'visualize_sharding', 'tensor_or_layout' must be a DTensor or a Layout, but got "
                          f"{type(tensor_or_layout).__name__}.")
    if style not in ("auto", "plain", "rich", "svg"):
        raise LayoutError(f"For 'visualize_sharding', 'style' must be auto, plain, rich or svg, but got {style!r}.")
    picture = plane(layout, dims, at or {})
    if style == "svg" or (file is not None and str(file).endswith(".svg")):
        out = svg(picture)
    else:
        coloured = style == "rich" or (style == "auto" and file is None and sys.stdout.isatty() and _has_rich())
        if coloured and not _has_rich():
            raise LayoutError("For 'visualize_sharding', style 'rich' needs the package rich.", "", "",
                              ("pip install rich", "style='plain'"))
        if coloured and show:
            return _print_rich(picture)
        out = plain(picture)
    if file is not None:
        Path(file).write_text(out + "\n", encoding="utf-8")
    elif show:
        print(out)
    return out


def plane(layout: Layout, dims: Sequence[int] | None, at: dict[int, int]) -> Picture:
    """The picture of two dims of a layout."""
    ndim = len(layout.shape)
    chosen = _chosen(layout, dims)
    for d, i in at.items():
        if not -ndim <= d < ndim or not 0 <= i < layout.shape[d] or d % ndim in chosen:
            raise LayoutError(f"For 'visualize_sharding', 'at' has index {i} of dim {d}.", layout.describe(),
                              f"Dims {chosen} are drawn; the others have an index within their extent.")
    cut = {d: 0 for d in range(ndim) if d not in chosen}
    cut.update((d % ndim, i) for d, i in at.items())
    held: dict[tuple, list[int]] = {}
    empty: list[int] = []
    elsewhere: list[int] = []
    for here in coordinates(layout.mesh):
        rank = int(layout.mesh.mesh[here])
        boxes = [box for box in itertools.product(*layout.pieces(here)) if all(lo < hi for lo, hi in box)]
        drawn = [box for box in boxes if all(box[d][0] <= i < box[d][1] for d, i in cut.items())]
        if not drawn:
            (elsewhere if boxes else empty).append(rank)
        for box in drawn:
            held.setdefault(tuple((0, 1) if d is None else box[d] for d in chosen), []).append(rank)
    blocks = tuple(Block(rows, cols, tuple(ranks)) for (rows, cols), ranks in sorted(held.items()))
    through = ", ".join(f"dim {d} at {i}" for d, i in sorted(cut.items()))
    title = layout.describe()
    if through and None not in chosen:
        title += f", dims {chosen[0]} and {chosen[1]}, through {through}"
    return Picture(layout, chosen, blocks, tuple(empty), tuple(elsewhere), title)


def _chosen(layout: Layout, dims) -> tuple[int | None, int | None]:
    ndim = len(layout.shape)
    if dims is not None:
        picked = [d % ndim if ndim and -ndim <= d < ndim else None for d in dims]
        if len(picked) != 2 or None in picked or picked[0] == picked[1]:
            raise LayoutError(f"For 'visualize_sharding', 'dims' must be two different dims, but got {tuple(dims)}.",
                              layout.describe())
        return picked[0], picked[1]
    if ndim < 2:  # a vector is drawn as one row, a scalar as one cell
        return None, 0 if ndim else None
    sharded = [d for d in range(ndim) if layout.dim_axes[d]]
    pair = sorted([*sharded, *(d for d in range(ndim) if d not in sharded)][:2])
    return pair[0], pair[1]


def _label(block: Block) -> str:
    return f"rank{'s' if len(block.ranks) > 1 else ''} " + _ranges(block.ranks)


def _ranges(ranks: Sequence[int]) -> str:
    """`0 2 4-7`: three or more in a row are shortened."""
    out: list[list[int]] = []
    for r in sorted(ranks):
        if out and r == out[-1][-1] + 1:
            out[-1].append(r)
        else:
            out.append([r])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in out)


def _notes(picture: Picture) -> list[str]:
    layout, notes = picture.layout, []
    names = layout.mesh.mesh_dim_names
    for a in layout.partial_axes:
        notes.append(f"each rank of {names[a]} holds a part of the {layout.placements[a].reduce_op}")
    if picture.empty:
        notes.append(f"nothing on rank{'s' if len(picture.empty) > 1 else ''} {_ranges(picture.empty)}")
    if picture.elsewhere:
        notes.append(f"not in this plane: rank{'s' if len(picture.elsewhere) > 1 else ''} {_ranges(picture.elsewhere)}")
    return notes


def _head(dim: int | None, bounds: tuple[int, int]) -> str:
    return "" if dim is None else f"{bounds[0]}:{bounds[1]}"


def _table(picture: Picture, show: Callable[[Block], str]) -> list[list[str]]:
    """Heads and blocks as rows of text, each block as `show` gives it; no rows if there is no block in this plane."""
    rows, cols = sorted({b.rows for b in picture.blocks}), sorted({b.cols for b in picture.blocks})
    cells = {(b.rows, b.cols): show(b) for b in picture.blocks}
    body = [[_head(picture.dims[0], r), *(cells.get((r, c), "") for c in cols)] for r in rows]
    return [["", *(_head(picture.dims[1], c) for c in cols)], *body] if body else []


def _palette(picture: Picture, colours: Sequence[str]) -> dict[tuple[int, ...], str]:
    """A colour for each set of ranks that hold a block."""
    return {ranks: colours[i % len(colours)] for i, ranks in enumerate(dict.fromkeys(b.ranks for b in picture.blocks))}


def plain(picture: Picture) -> str:
    """The picture in ASCII."""
    lines, table = [picture.title], _table(picture, _label)
    if table:
        width = [max(map(len, column)) for column in zip(*table)]
        rule = "+" + "+".join("-" * (w + 2) for w in width) + "+"
        for row in table:
            lines += [rule, "|" + "|".join(f" {cell:<{w}} " for cell, w in zip(row, width)) + "|"]
        lines.append(rule)
    return "\n".join([*lines, *_notes(picture)])


def svg(picture: Picture, width: int = 480, height: int = 320) -> str:
    """The picture as a self-contained SVG, blocks to scale."""
    rows, cols = ({b.rows for b in picture.blocks}, {b.cols for b in picture.blocks})
    high, wide = max((r[1] for r in rows), default=1), max((c[1] for c in cols), default=1)
    notes, left, top = _notes(picture), 60, 50
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" '
             f'width="{width + left + 20}" height="{height + top + 24 + 18 * len(notes)}" '
             'font-family="sans-serif" font-size="12">', f'<text x="{left}" y="18">{escape(picture.title)}</text>']
    colour = _palette(picture, _COLOURS)
    for block in picture.blocks:
        fill, x, y = colour[block.ranks], left + width * block.cols[0] / wide, top + height * block.rows[0] / high
        w, h = width * (block.cols[1] - block.cols[0]) / wide, height * (block.rows[1] - block.rows[0]) / high
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}" stroke="#333"/>'
                     f'<text x="{x + w / 2:.1f}" y="{y + h / 2:.1f}" text-anchor="middle">{escape(_label(block))}</text>')
    parts += [f'<text x="{left + width * (c[0] + c[1]) / 2 / wide:.1f}" y="{top - 8}" text-anchor="middle">'
              f"{_head(picture.dims[1], c)}</text>" for c in sorted(cols)]
    parts += [f'<text x="{left - 8}" y="{top + height * (r[0] + r[1]) / 2 / high:.1f}" text-anchor="end">'
              f"{_head(picture.dims[0], r)}</text>" for r in sorted(rows)]
    parts += [f'<text x="{left}" y="{top + height + 22 + 18 * i}">{escape(note)}</text>' for i, note in enumerate(notes)]
    return "\n".join([*parts, "</svg>"])


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def _print_rich(picture: Picture) -> str:
    from rich.console import Console
    from rich.table import Table
    colour = _palette(picture, _RICH)
    heads, *body = _table(picture, lambda block: f"[black on {colour[block.ranks]}]{_label(block)}[/]") or [[""]]
    table = Table(title=picture.title, show_lines=True)
    for text in heads:
        table.add_column(text)
    for row in body:
        table.add_row(*row)
    console = Console(record=True)
    console.print(table)
    for note in _notes(picture):
        console.print(note)
    return console.export_text()
