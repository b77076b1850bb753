# SPDX-License-Identifier: Apache-2.0
"""A timeline as a picture: text for terminals, SVG, or an HTML page of SVG and numbers. One string; no other library.

Time runs to the right, a row is a rank, a box is an action and says its microbatch. Colours are told apart with any kind of
colour vision; a rank's second stage is striped below, a pair has one frame.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ..errors import ScheduleError
from .actions import Overlap
from .order import Slot, Timeline

COLOURS = {"F": "#8ecae6", "B": "#f4a259", "I": "#f6d365", "W": "#95d5b2"}
NAMES = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradients of the weights"}
UNIT, ROW, LEFT, TOP = 26, 24, 52, 40  # pixels of an action of average length, of a row, and before the first of each


def draw(timeline: Timeline, form: Literal["ascii", "svg", "html"] = "ascii") -> str:
    """Draws a timeline.

    Args:
        timeline: of `simulate`.
        form: `ascii`: a column is the shortest action, `-` goes on with what runs, `.` is idle; `svg`; or `html`, a page.

    Example:
        >>> from ms_dtensor.pipeline import draw, one_f_one_b, simulate
        >>> print(draw(simulate(one_f_one_b(2, 2))))
        rank 0  F0 F1 .  .  B0 -- .  B1 --
        rank 1  .  F0 B0 -- F1 B1 -- .  .
        >>> draw(simulate(one_f_one_b(2, 2)), "svg")[:4]
        '<svg'
    """
    forms = {"ascii": _ascii, "svg": _svg, "html": _html}
    if form not in forms:
        raise ScheduleError(f"For 'draw', there is no form {form!r}.", "", "A form is a name.", tuple(map(repr, forms)))
    return forms[form](timeline)


def summary(timeline: Timeline) -> str:
    """The span, and what differs from rank to rank."""
    titles = ("rank", "idle", "idle within its own work", "most forwards held", "most weight parts waiting")
    numbers = zip(range(len(timeline.slots)), timeline.idle, timeline.local_idle, timeline.held, timeline.held_products)
    rows = [titles, *([f"{number:g}" for number in row] for row in numbers)]
    return f"span {timeline.span:g}\n" + "\n".join("  ".join(c.rjust(len(h)) for c, h in zip(row, titles)) for row in rows)


def _label(timeline: Timeline, slot: Slot) -> str:
    """The action, without its stage where each rank has one."""
    return str(slot.action)[0 if len(timeline.actions.owner) > len(timeline.slots) else len(str(slot.action.stage)):]


def _ascii(timeline: Timeline) -> str:
    unit = max(timeline.span / 4000, min(slot.end - slot.start for rank in timeline.slots for slot in rank))
    lines = []
    for rank in timeline.slots:
        cells: list[str] = []
        for slot in rank:
            cells += ["."] * (round(slot.start / unit) - len(cells))
            cells.append(_label(timeline, slot))
            cells += ["-"] * (round(slot.end / unit) - len(cells))
        lines.append(cells)
    columns, width = max(map(len, lines)), max(len(cell) for cells in lines for cell in cells)
    digits = len(str(len(lines) - 1))
    return "\n".join(f"rank {r:{digits}}  " + " ".join((cell * width if cell == "-" else cell.ljust(width)) for cell in (
        *cells, *["."] * (columns - len(cells)))).rstrip() for r, cells in enumerate(lines))


def _svg(timeline: Timeline) -> str:
    rows = len(timeline.slots)
    # in any unit of time: a third of what a rank computes for a microbatch has a width, or more where stages are many
    busy = sum(slot.end - slot.start for rank in timeline.slots for slot in rank) / rows
    scale = UNIT * max(1.0, len(timeline.actions.owner) / rows / 2) * 3 * timeline.actions.microbatches / busy
    end = max(rank[-1].end for rank in timeline.slots if rank)
    width, height = LEFT + end * scale + 16, TOP + rows * ROW + 30
    styles = {".pair": "fill:none;stroke:#222;stroke-width:1.5", ".deep": "fill:#000;fill-opacity:.18;stroke:none",
              "text": "text-anchor:middle", **{f".{kind}": f"fill:{colour}" for kind, colour in COLOURS.items()}}
    text = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="sans-serif" font-size="10" fill="#222">',
            "<style>rect{stroke:#fff}" + "".join(f"{key}{{{value}}}" for key, value in styles.items()) + "</style>",
            f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>']
    used = {slot.action.kind for rank in timeline.slots for slot in rank}
    x = LEFT
    for kind in (kind for kind in COLOURS if kind in used):
        text.append(f'<rect class="{kind}" x="{x}" y="10" width="14" height="14"/>'
                    f'<text x="{x + 18}" y="21" style="text-anchor:start">{kind} {NAMES[kind]}</text>')
        x += 40 + 6 * len(NAMES[kind])
    for rank, slots in enumerate(timeline.slots):
        y = TOP + rank * ROW
        text.append(f'<text x="{LEFT - 26}" y="{y + 15}">rank {rank}</text>'
                    f'<rect x="{LEFT}" y="{y}" width="{end * scale:g}" height="{ROW - 2}" fill="#eee"/>')
        text += [_box(timeline, slot, y, scale) for slot in slots]
        text += [f'<rect class="pair" x="{LEFT + a * scale:g}" y="{y}" width="{(b - a) * scale:g}" height="{ROW - 2}"/>'
                 for a, b in _pairs(timeline, rank)]
    step = next(digit * 10.0**k for k in range(-300, 300) for digit in (1, 2, 5) if end / 10.0**k <= 20 * digit)
    ticks = (i * step for i in range(int(end / step) + 1))
    text += [f'<text x="{LEFT + tick * scale:g}" y="{TOP + rows * ROW + 12}">{tick:g}</text>' for tick in ticks]
    return "\n".join([*text, "</svg>\n"])


def _box(timeline: Timeline, slot: Slot, y: int, scale: float) -> str:
    x, width = LEFT + slot.start * scale, (slot.end - slot.start) * scale
    owner, stage = timeline.actions.owner, slot.action.stage
    deep = owner[stage] in owner[:stage]  # not the rank's first stage
    stripe = f'<rect class="deep" x="{x:g}" y="{y + ROW - 7}" width="{width:g}" height="5"/>' if deep else ""
    label = f'<text x="{x + width / 2:g}" y="{y + 13}">{slot.action.microbatch}</text>' if width >= 11 else ""
    return (f'<rect class="{slot.action.kind}" x="{x:g}" y="{y}" width="{width:g}" height="{ROW - 2}">'
            f"<title>{slot.action}, {slot.start:g} to {slot.end:g}</title></rect>{stripe}{label}")


def _pairs(timeline: Timeline, rank: int) -> Iterator[tuple[float, float]]:
    when = {slot.action: slot for slot in timeline.slots[rank]}
    for action in timeline.actions.ranks[rank]:
        if isinstance(action, Overlap):
            yield when[action.forward].start, when[action.backward].end


def _html(timeline: Timeline) -> str:
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Pipeline schedule</title>
<body style="font-family:sans-serif"><h1>Pipeline schedule</h1>
<div style="overflow-x:auto">
{_svg(timeline)}</div>
<pre>{summary(timeline)}</pre>
<h2>The order of each rank</h2>
<pre>{timeline.actions.csv()}</pre></body></html>
"""
