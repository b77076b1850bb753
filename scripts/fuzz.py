# SPDX-License-Identifier: Apache-2.0
"""Random programs on real ranks against one device; prints JSON, fails on a wrong result or ranks that part.

    python scripts/fuzz.py [--ranks 4] [--programs 500] [--first 0] [--minutes 10]
    python scripts/fuzz.py --ranks 4 --first 137 --programs 1       one seed again

A program is 10 to 30 public calls on inputs of random layouts (`tests/fuzz/programs.py`). Failing ones are made small. A
launch that ends early costs the program it was in; the next launch goes on behind it.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.msrun import launch  # noqa: E402


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, choices=(4, 8))
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    limit = time.monotonic() + 60 * options.minutes
    seed, done, died = options.first, [], []
    while seed < options.first + options.programs and time.monotonic() < limit:
        left = limit - time.monotonic()
        outcome = launch("tests.fuzz.ranks", options.ranks, [seed, options.first + options.programs - seed, left],
                         left + 180)
        lines = outcome.reports[0]
        done += [line for line in lines if "steps" in line]
        begun = [line["begins"] for line in lines if "begins" in line]
        if outcome.failure is None:
            break
        last = max((b for rank in outcome.reports for line in rank if (b := line.get("begins")) is not None), default=seed)
        died.append({"seed": last, "how": outcome.failure[-3000:]})
        seed = last + 1
        if not begun:
            break
    wrong = [d for d in done if d["wrong"]]
    refusals: dict[str, int] = {}
    for d in done:
        if d["refused"]:
            refusals[d["refused"]] = refusals.get(d["refused"], 0) + 1
    print(json.dumps({
        "ranks": options.ranks, "first": options.first, "programs": len(done), "steps": sum(d["steps"] for d in done),
        "gradients": sum(d["gradients"] for d in done), "second": sum(d["second"] for d in done),
        "plain_mindspore_wrong": sum(d["plain_wrong"] for d in done), "refused": sum(refusals.values()),
        "refusals": dict(sorted(refusals.items(), key=lambda kv: -kv[1])), "wrong": wrong, "died": died}, indent=1))
    return 1 if wrong or died or not done else 0


if __name__ == "__main__":
    sys.exit(main())
