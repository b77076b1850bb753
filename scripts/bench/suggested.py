# SPDX-License-Identifier: Apache-2.0
"""Whether the layout that `suggest` puts first is the quickest of those that are measured on this machine, as JSON.

    python scripts/bench/suggested.py --hardware two.yaml [--turns 8] [--measured measured.json]

The rows are those of `predicted.py` on two ranks of the narrow model, without recomputation, as the recipe runs them by
default (attention is one node); the first of `suggest`'s plans that is among them counts. Rows are measured in turns, as a
machine's pace drifts, and each one's median counts; those that the JSON has are kept. The machine's file is of two ranks.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from predicted import MORE, NARROW, ROWS, config, launched

from ms_dtensor.debug.predict import Plan, suggest

TWO = ("tp2", "sp2", "dp2", "zero1", "fsdp2", "pp2", "cp2")


def name_of(plan: Plan) -> str | None:
    """The row of a plan, if it has one."""
    own = {"dp": plan.dp, "tp": plan.tp, "pp": plan.pp, "cp": plan.cp, "sharded": plan.sharded,
           "sequence_parallel": plan.sequence_parallel}
    for name, (model, axes, again) in (ROWS | MORE).items():
        sharded = "fsdp" if axes.get("fsdp") else "zero1" if axes.get("zero1") else "none"
        row = {axis: axes.get(axis, 1) for axis in ("dp", "tp", "pp", "cp")} | {
            "sharded": sharded, "sequence_parallel": axes.get("sequence_parallel", False)}
        if model is NARROW and not again and row == own and plan.recompute == "none":
            return name
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--measured", type=Path, default=Path("turns.json"))
    args = parser.parse_args()
    turns = json.loads(args.measured.read_text()) if args.measured.exists() else []
    while len(turns) < args.turns:
        turns.append({name: launched(name, 6, False, compiled=True)["seconds"] for name in TWO})
        args.measured.write_text(json.dumps(turns, indent=1) + "\n")
        print(turns[-1], file=sys.stderr, flush=True)
    train = config("dp2").train
    found = suggest(NARROW, 2, args.hardware, batch=train.batch, seq=train.seq, itemsize=4)
    estimated: dict[str, float] = {}
    for one in found.plans:
        name = name_of(one.plan)
        if name is not None:
            estimated.setdefault(name, one.seconds)
    measured = {name: statistics.median(turn[name] for turn in turns) for name in TWO}
    first, quickest = min(estimated, key=estimated.__getitem__), min(measured, key=measured.__getitem__)
    print(json.dumps({"suggested": str(found.plans[0].plan), "as a row": first, "estimated": estimated,
                      "measured": measured, "quickest measured": quickest,
                      "slower": round(measured[first] / measured[quickest] - 1, 4)}, indent=1))


if __name__ == "__main__":
    main()
