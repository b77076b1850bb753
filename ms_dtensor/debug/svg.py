# SPDX-License-Identifier: Apache-2.0
"""Small plots as inline SVG: lines over sizes, bars beside names, areas over time. No script, nothing from elsewhere.

Drawn for 340 px, so that text stays readable on a telephone and three fit beside each other on a desk. Colours are Okabe and
Ito's, which colour-blind people tell apart; lines differ in their marks and dashes as well.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
DASHES = ("", "5 3", "2 2", "8 3 2 3")
WIDTH, HEIGHT = 340, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 30, 34
Series = tuple[str, Sequence[tuple[float, float]]]


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def short(x: float) -> str:
    """A number as an axis shows it."""
    if x == 0:
        return "0"
    return f"{x:.2g}" if abs(x) < 10 else f"{x:.0f}" if abs(x) < 1e5 else f"{x:.1e}"


def bytes_short(x: float) -> str:
    for unit in ("B", "K", "M", "G"):
        if x < 1024 or unit == "G":
            return f"{x:.0f}{unit}"
        x /= 1024
    return ""


def ticks(top: float) -> list[float]:
    """Round numbers from 0 to at least `top`."""
    if top <= 0:
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(top / 4))
    step *= next(k for k in (1, 2, 2.5, 5, 10) if top / (step * k) <= 4)
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def mark(i: int, x: float, y: float, note: str) -> str:
    title = f"<title>{escape(note)}</title>"
    shapes = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2">{title}</circle>',
              f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6">{title}</rect>',
              f'<path d="M{x:.1f} {y - 4:.1f}l4 7h-8z">{title}</path>',
              f'<path d="M{x:.1f} {y - 4.4:.1f}l4.4 4.4l-4.4 4.4l-4.4 -4.4z">{title}</path>')
    return shapes[i % len(shapes)]


def lines(title: str, series: Sequence[Series], x_name: str, sizes: bool = True, top: float | None = None) -> str:
    """Lines over a logarithmic x axis. `sizes`: x is bytes. `top`: the y axis goes at least so far."""
    xs = sorted({x for _, points in series for x, _ in points})
    ys = [y for _, points in series for _, y in points]
    if not xs:
        return ""
    steps = ticks(max([*ys, top or 0]))
    low, high = math.log2(xs[0]), math.log2(xs[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = 0.5 if high == low else (math.log2(x) - low) / (high - low)
        return (LEFT + 6 + across * (WIDTH - LEFT - RIGHT - 12), HEIGHT - BOTTOM - y / steps[-1] * (HEIGHT - TOP - BOTTOM))
    out = [_open(title, HEIGHT)]
    for y in steps:
        _, py = at(xs[0], y)
        out.append(f'<path class="grid" d="M{LEFT} {py:.1f}H{WIDTH - RIGHT}"/>'
                   f'<text x="{LEFT - 5}" y="{py + 3.5:.1f}" text-anchor="end">{short(y)}</text>')
    wanted = xs if len(xs) <= 6 else xs[::math.ceil(len(xs) / 6)]
    for x in wanted:
        px, _ = at(x, 0)
        out.append(f'<text x="{px:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">'
                   f'{bytes_short(x) if sizes else short(x)}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_name)}</text>')
    for i, (name, points) in enumerate(series):
        if not points:  # another plot's, under the same legend
            continue
        places = [at(x, y) for x, y in points]
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
        out.append(f'<g stroke="{colour(i)}" fill="{colour(i)}"><path d="{path}" fill="none" stroke-width="1.8" '
                   f'stroke-dasharray="{DASHES[i % len(DASHES)]}"/>')
        out += [mark(i, px, py, f"{name}: {bytes_short(x) if sizes else short(x)}, {y:.4g}")
                for (px, py), (x, y) in zip(places, points, strict=True)]
        out.append("</g>")
    return "".join([*out, "</svg>"])


def bars(title: str, names: Sequence[str], series: Sequence[tuple[str, Sequence[float | None]]], unit: str) -> str:
    """Horizontal bars, one group a name; the number stands at its bar."""
    thick, gap, head = 13, 22, 28
    height = head + len(names) * (gap + thick * len(series)) + 4
    most = max([v for _, values in series for v in values if v is not None], default=0) or 1.0
    room = WIDTH - 74
    out = [_open(f"{title}, {unit}", height)]
    for k, name in enumerate(names):
        y = head + k * (gap + thick * len(series))
        out.append(f'<text x="4" y="{y + 12}">{escape(name)}</text>')
        for i, (label, values) in enumerate(series):
            value, py = values[k], y + 17 + i * thick
            long = 0.0 if value is None else max(1.0, value / most * room)
            word = "n/a" if value is None else f"{value:.4g}"
            out.append(f'<rect x="4" y="{py}" width="{long:.1f}" height="{thick - 3}" fill="{colour(i)}">'
                       f'<title>{escape(f"{label}: {name}: {word} {unit}")}</title></rect>'
                       f'<text x="{long + 8:.1f}" y="{py + 9}">{word}</text>')
    return "".join([*out, "</svg>"])


def areas(title: str, names: Sequence[str], points: Sequence[tuple[float, Sequence[float]]], x_name: str,
          width: int = 720) -> str:
    """What adds up to a whole, as it changes: areas on each other over x, a value for each name at each point.

    A value holds until the next point.
    """
    if not points:
        return ""
    steps, end = ticks(max(sum(values) for _, values in points)), max(points[-1][0], 1)
    out = [_open(title, HEIGHT, width)]

    def across(x: float) -> float:
        return LEFT + x / end * (width - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - y / steps[-1] * (HEIGHT - TOP - BOTTOM)
    for y in steps:
        out.append(f'<path class="grid" d="M{LEFT} {up(y):.1f}H{width - RIGHT}"/>'
                   f'<text x="{LEFT - 5}" y="{up(y) + 3.5:.1f}" text-anchor="end">{short(y)}</text>')
    below = [0.0] * len(points)
    for i, name in enumerate(names):
        above = [low + values[i] for low, (_, values) in zip(below, points, strict=True)]
        if any(a > b for a, b in zip(above, below, strict=True)):
            edge = _stairs([across(x) for x, _ in points], [up(y) for y in above])
            back = _stairs([across(x) for x, _ in points], [up(y) for y in below])[::-1]
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in (*edge, *back))
            out.append(f'<path d="{path}z" fill="{colour(i)}"><title>{escape(name)}</title></path>')
        below = above
    for x in ticks(end)[:-1]:
        out.append(f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{short(x)}</text>')
    out.append(f'<text x="{(LEFT + width - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_name)}</text>')
    return "".join([*out, "</svg>"])


def _stairs(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Corners of a line that keeps its height until the next x."""
    corners = [(xs[0], ys[0])]
    for x, y, before in zip(xs[1:], ys[1:], ys):
        corners += [(x, before), (x, y)]
    return corners


def _open(title: str, height: float, width: int = WIDTH) -> str:
    return (f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{escape(title)}">'
            f'<text class="title" x="4" y="15">{escape(title)}</text>')


def legend(names: Sequence[str], line: bool = False) -> str:
    """HTML: which colour is what."""
    out = []
    for i, name in enumerate(names):
        swatch = f'<svg width="12" height="12"><rect width="12" height="12" fill="{colour(i)}"/></svg>'
        if line:
            swatch = (f'<svg width="30" height="12"><g stroke="{colour(i)}" fill="{colour(i)}"><path d="M0 6H30" '
                      f'stroke-width="1.8" stroke-dasharray="{DASHES[i % len(DASHES)]}"/>{mark(i, 15, 6, name)}</g></svg>')
        out.append(f"<span>{swatch} {escape(name)}</span>")
    return f'<p class="legend">{"".join(out)}</p>'
