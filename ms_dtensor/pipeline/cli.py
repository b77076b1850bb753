# SPDX-License-Identifier: Apache-2.0
"""`python -m ms_dtensor pipeline`: makes a schedule or reads one, checks it, simulates it, draws it. No MindSpore, no ranks.

Exit codes: 0 all is well; 1 the order is wrong; 2 it could not be done.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ..core.refused import refused
from ..errors import ScheduleError
from .actions import Actions
from .builders import BUILDERS
from .check import check
from .draw import draw, summary
from .order import simulate

MOST = 1_000_000  # forwards of a schedule


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m ms_dtensor pipeline", description=(
        "Makes a pipeline schedule, or reads one, checks it, simulates it and draws it. Nothing is trained."))
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--schedule", choices=BUILDERS, help="make this one, for --pp ranks and --micro microbatches")
    source.add_argument("--check", type=Path, metavar="CSV", help="read this one: a row per rank, cells like 0F3")
    parser.add_argument("--pp", type=int, help="number of ranks")
    parser.add_argument("--micro", type=int, help="number of microbatches")
    parser.add_argument("--costs", type=times, default={}, metavar="F=1,I=1,W=1",
                        help="times of a rank's share of the model for one microbatch; B is I + W unless it is given")
    parser.add_argument("--hop", type=float, default=0.0, help="time of a message between ranks")
    for form in ("svg", "html", "csv"):
        parser.add_argument(f"--{form}", type=Path, metavar="FILE", help=f"write it as {form.upper()}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    if args.schedule and None in (args.pp, args.micro):
        parser.error("--schedule needs --pp and --micro")
    if args.check and (args.pp, args.micro) != (None, None):
        parser.error("--check takes both numbers from the file: leave --pp and --micro out")
    try:
        return _run(args)
    except ScheduleError as error:
        return refused(error, args.json)


def times(text: str) -> dict[str, float]:
    """`F=1,I=0.5` as numbers.

    Example:
        >>> times("F=1,I=0.5")
        {'F': 1.0, 'I': 0.5}
    """
    out: dict[str, float] = {}
    for item in text.split(","):
        key, _, value = item.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{item!r} is no time, such as F=1") from None
        if key in out:
            raise argparse.ArgumentTypeError(f"{key} is given twice")
        out[key] = number
    return out


def _run(args: argparse.Namespace) -> int:
    if args.schedule and args.pp > 0 and args.pp * args.micro > MOST:
        raise ScheduleError("For 'pipeline', the schedule is too large to look at.",
                            f"--pp {args.pp} and --micro {args.micro}: {args.pp * args.micro} forwards",
                            f"At most {MOST} are checked, simulated and drawn, which takes half a minute.",
                            "fewer of both: what a schedule does shows with few microbatches more than ranks")
    order = Actions.load(args.check) if args.check else BUILDERS[args.schedule](args.pp, args.micro)
    faults = check(order)
    if faults:
        print(json.dumps({"faults": [str(fault) for fault in faults]}) if args.json else "\n".join(
            [*map(str, faults), "1 fault" if len(faults) == 1 else f"{len(faults)} faults"]))
        return 1
    timeline = simulate(order, args.costs, args.hop)
    try:
        for path, make in ((args.svg, lambda: draw(timeline, "svg")), (args.html, lambda: draw(timeline, "html")),
                           (args.csv, order.csv)):
            if path:
                path.write_text(make(), "utf-8")
    except OSError as error:
        raise ScheduleError("For 'pipeline', a file cannot be written.", str(error), "Pictures and orders go there.",
                            "a folder of yours") from None
    numbers = {"faults": [], "ranks": len(order.ranks), "stages": len(order.owner), "microbatches": order.microbatches,
               "span": timeline.span, "idle": timeline.idle, "local_idle": timeline.local_idle, "held": timeline.held,
               "held_products": timeline.held_products}
    print(json.dumps(numbers) if args.json else f"{draw(timeline)}\n\n{summary(timeline)}")
    return 0
