# SPDX-License-Identifier: Apache-2.0
"""Whether the layout that `suggest` puts first is the quickest of those that were measured on this machine, as JSON.

    python scripts/bench/predicted.py --measured measured.json --measure-only seconds --only "tp2;sp2;dp2;fsdp2;zero1;pp2"
    python scripts/bench/suggested.py --measured measured.json --hardware two.yaml

The rows are those of `predicted.py` on two ranks of the narrow model, without recomputation; the first of `suggest`'s plans
that is among them counts. The machine's file is of two ranks.
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path

from predicted import MORE, NARROW, ROWS, config

from ms_dtensor.debug.predict import Plan, suggest


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
    parser.add_argument("--measured", type=Path, required=True)
    parser.add_argument("--hardware", required=True)
    args = parser.parse_args()
    train = config("dp2").train
    found = suggest(NARROW, 2, args.hardware, batch=train.batch, seq=train.seq, itemsize=4)
    estimated: dict[str, float] = {}
    for one in found.plans:
        name = name_of(one.plan)
        if name is not None:
            estimated.setdefault(name, one.seconds)
    measured = {name: row["seconds"] for name, row in json.loads(args.measured.read_text()).items()
                if name in estimated and "seconds" in row}
    estimated = {name: s for name, s in estimated.items() if name in measured}
    first, quickest = min(estimated, key=estimated.__getitem__), min(measured, key=measured.__getitem__)
    print(json.dumps({"suggested": str(found.plans[0].plan), "as a row": first, "estimated": estimated,
                      "measured": measured, "quickest measured": quickest,
                      "slower": round(measured[first] / measured[quickest] - 1, 4)}, indent=1))


if __name__ == "__main__":
    main()
