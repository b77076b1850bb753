# SPDX-License-Identifier: Apache-2.0
"""A dry run as one HTML page: how parameters lie, who communicates what, memory over time, predicted beside measured.

Pure: a page is a function of plain values, which `report.py` takes from a run. It stands alone: no script, nothing from
elsewhere, readable where nothing runs or loads. Invariant: all text that comes from a program (names, lines of code)
is escaped here or in `svg.py`.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any
from urllib.parse import quote

from .. import svg
from ..text import human

POINTS = 700  # of a plot; more than it is wide are not told apart
STYLE = """
body{font:15px/1.5 system-ui,"Noto Sans",sans-serif;color:#1b1f24;background:#fff;margin:0 auto;max-width:1180px}
body{padding:0 14px 60px}h1{font-size:1.5rem;margin:1.2rem 0 .3rem}
h2{font-size:1.2rem;border-top:1px solid #d5d9de;padding-top:1rem;margin-top:2rem}
.scroll{overflow-x:auto;margin:.4rem 0}.legend span{white-space:nowrap;margin-right:1.2em}
svg{max-width:100%;height:auto}.pipeline svg{max-width:none}svg .grid{stroke:#e3e6ea;fill:none}
svg text{font:11px system-ui,"Noto Sans",sans-serif;fill:#333}svg text.title{font-weight:600;font-size:12.5px}
table{border-collapse:collapse;font-size:13px}td,th{padding:2px 9px;text-align:right;border-bottom:1px solid #e8ebee}
th{background:#f3f5f7}td.word,th.word{text-align:left;overflow-wrap:anywhere}
"""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row: a parameter of this rank."""

    name: str
    shape: tuple[int, ...]
    layout: str
    local: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """One communication: the cell it happened in, or the line of code."""

    where: str
    op: str
    axes: tuple[str, ...]
    phase: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a page shows.

    Attributes:
        title: of the page.
        facts: name and value, in words.
        parameters, exchanges: see there.
        kinds: of memory.
        memory: (events that had happened, bytes of each kind).
        pipeline: the picture of a schedule, an SVG of our own, or nothing.
        compared: (what, unit, predicted, measured); None where one is not known.
        links: (file beside the page, what it is).
    """

    title: str
    facts: Sequence[tuple[str, str]]
    parameters: Sequence[Parameter]
    exchanges: Sequence[Exchange]
    kinds: Sequence[str]
    memory: Sequence[tuple[int, Sequence[int]]]
    pipeline: str = ""
    compared: Sequence[tuple[str, str, float | None, float | None]] = ()
    links: Sequence[tuple[str, str]] = field(default=())


def html(page: Facts) -> str:
    """The page.

    Example:
        >>> from ms_dtensor.debug.dryrun.page import Facts, html
        >>> text = html(Facts("a <step>", [("ranks", "8")], [], [], [], []))
        >>> "<h1>a &lt;step&gt;</h1>" in text and "<script" not in text
        True
    """
    parts = [f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(page.title)}</title>'
             f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
             f"<h1>{escape(page.title)}</h1>", table(("", ""), page.facts, words=2)]
    if page.links:
        parts.append("<p>" + ", ".join(f'<a href="{quote(file)}">{escape(what)}</a>' for file, what in page.links) + "</p>")
    if page.compared:
        titles = ("", "unit", "predicted", "measured", "predicted / measured")
        parts += ["<h2>Predicted beside measured</h2>", table(titles, map(_compared, page.compared), words=2)]
    if page.memory:
        points = thinned(page.memory, POINTS)
        plot = svg.areas("GiB of tensors", page.kinds, [(at, [b / 2**30 for b in kinds]) for at, kinds in points],
                         "events of the step (operations and communication)")
        most = max(page.memory, key=lambda point: sum(point[1]))
        parts += ["<h2>Memory over time</h2>", plot, svg.legend(page.kinds),
                  table(("at the peak", "bytes"), [
                      *((kind, human(size)) for kind, size in zip(page.kinds, most[1], strict=True)),
                      ("all tensors", human(sum(most[1]))), ("workspace of kernels", "not known")])]
    if page.pipeline:
        parts += ["<h2>Pipeline</h2>", "<p>All stages alike, a backward as long as two forwards.</p>",
                  f'<div class="scroll pipeline">{page.pipeline}</div>']
    parts += ["<h2>Communication by layer</h2>", *communication(page.exchanges)]
    rows = folded((p.name, (p.shape, p.layout, p.local, p.bytes)) for p in page.parameters)
    parts += ["<h2>How parameters lie</h2>", table(
        ("parameter", "layout", "how many", "shape", "shape here", "bytes here, each"),
        ((name, layout, count, list(shape), list(local), human(size)) for name, count, (shape, layout, local, size) in rows),
        words=2)]
    return "\n".join([*parts, "</body></html>\n"])


def communication(exchanges: Sequence[Exchange]) -> Iterable[str]:
    """A plot of bytes by layer, and a table by cell; cells that differ in numbers only, and do the same, are one row."""
    if not exchanges:
        return ["<p>None.</p>"]
    by_layer: dict[str, dict[str, float]] = {}
    by_cell: dict[str, dict[tuple, list[int]]] = {}
    for m in exchanges:
        axes = ", ".join(m.axes) or "no axis"
        layer = by_layer.setdefault(layer_of(m.where), {})
        layer[axes] = layer.get(axes, 0) + m.bytes / 2**20
        line = by_cell.setdefault(m.where, {}).setdefault((m.op, axes, m.phase), [0, 0])
        line[0] += 1
        line[1] += m.bytes
    axes_of = list(dict.fromkeys(a for layer in by_layer.values() for a in layer))
    alike = folded((name, tuple(sorted(layer.items()))) for name, layer in by_layer.items())
    series = [(a, [dict(layer).get(a) for _, _, layer in alike]) for a in axes_of]
    names = [name if count == 1 else f"{name}, each" for name, count, _ in alike]
    rows = folded((cell, tuple((key, *value) for key, value in lines.items())) for cell, lines in by_cell.items())
    return [svg.bars("sent by this rank in a step", names, series, "MiB"), svg.legend(axes_of),
            table(("where", "collective", "over", "phase", "cells", "calls, each", "sent, each"),
                  ((cell, op, axes, phase, count, calls, human(size)) for cell, count, lines in rows
                   for (op, axes, phase), calls, size in lines), words=4)]


def layer_of(where: str) -> str:
    """The cell whose name ends with the first number: a model's layer; else the cell itself.

    Example:
        >>> from ms_dtensor.debug.dryrun.page import layer_of
        >>> layer_of("layers.3.attention.wq"), layer_of("norm"), layer_of("")
        ('layers.3', 'norm', 'outside of cells')
    """
    if "/" in where or not where:  # a line of code
        return "outside of cells"
    found = re.match(r".*?\.?\d+(?=\.|$)", where)
    return found[0] if found else where


def folded(rows: Iterable[tuple[str, Any]]) -> list[tuple[str, int, Any]]:
    """(name, how many, value): names that differ in numbers only, and have equal values, as one.

    Example:
        >>> from ms_dtensor.debug.dryrun.page import folded
        >>> folded([("layers.0.w", 1), ("layers.1.w", 1), ("layers.2.w", 2), ("norm", 1)])
        [('layers.0-1.w', 2, 1), ('layers.2.w', 1, 2), ('norm', 1, 1)]
    """
    groups: dict[tuple, list[str]] = {}
    for name, value in rows:
        groups.setdefault((re.sub(r"\d+", "#", name), value), []).append(name)
    out = []
    for (_, value), names in groups.items():
        pieces = [re.split(r"(\d+)", name) for name in names]
        columns = [list(dict.fromkeys(column)) for column in zip(*pieces, strict=True)]
        name = "".join(c[0] if len(c) == 1 else f"{min(map(int, c))}-{max(map(int, c))}" for c in columns)
        out.append((name, len(names), value))
    return out


def thinned(points: Sequence[tuple[int, Sequence[int]]], most: int) -> list[tuple[int, Sequence[int]]]:
    """So many points at most, of each stretch that with the largest sum; the last one stays."""
    each = -(-len(points) // most)
    if each <= 1:
        return list(points)
    kept = [max(points[i:i + each], key=lambda point: sum(point[1])) for i in range(0, len(points), each)]
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]


def table(titles: Sequence[str], rows: Iterable[Sequence[Any]], words: int = 1) -> str:
    """Of rows; the first `words` columns are words, the others numbers."""
    def line(cells: Sequence[Any], tag: str) -> str:
        return "<tr>" + "".join(f'<{tag}{" class=word" * (i < words)}>{escape(str(c))}</{tag}>'
                                for i, c in enumerate(cells)) + "</tr>"
    top = line(titles, "th") if any(titles) else ""
    return f'<div class="scroll"><table>{top}{"".join(line(r, "td") for r in rows)}</table></div>'


def _compared(row: tuple[str, str, float | None, float | None]) -> tuple[str, ...]:
    what, unit, predicted, measured = row
    ratio = f"{predicted / measured:.3f}" if predicted is not None and measured else "n/a"
    return what, unit, *("n/a" if x is None else f"{x:,.4g}" if unit != "bytes" and x % 1 else f"{x:,.0f}"
                         for x in (predicted, measured)), ratio


def beside(predicted: Mapping[str, tuple[int, int]], measured: Mapping[str, Sequence[float]]) -> list[tuple]:
    """Rows of what was sent: calls and bytes by "collective axes", as the recipe's metrics name them."""
    rows: list[tuple] = []
    for name in sorted({*predicted, *measured}):
        mine, seen = predicted.get(name, (0, 0)), measured.get(name, (0, 0))
        rows += [(f"{name}, calls", "", float(mine[0]), float(seen[0])),
                 (f"{name}, sent", "bytes", float(mine[1]), float(seen[1]))]
    return rows
