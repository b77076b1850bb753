# SPDX-License-Identifier: Apache-2.0
"""Random programs on real ranks against one device; prints JSON, fails on a wrong result or ranks that part.

    python -m tests.long.fuzz [--ranks 4] [--programs 500] [--first 0] [--minutes 10]
    python -m tests.long.fuzz --seeds 137,1173                         these again

A program is 10 to 30 public calls on inputs of random layouts (`tests/fuzz/programs.py`). Failing ones are made small. A
launch that ends early costs the program it was in; the next launch goes on behind it.
"""
from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fuzz.command import parser_of, seeds_of  # noqa: E402
from tests.msrun import Outcome, launch  # noqa: E402


def died_in(outcome: Outcome) -> int | None:
    """The seed that the first failing rank was busy with, if it had begun with one."""
    named = re.search(r"rank (\d+) failed first", outcome.failure or "")
    lines = outcome.reports[int(named[1]) if named else 0]
    begun = [seed for line in lines for seed in (line.get("begins"), line.get("makes")) if seed is not None]
    return begun[-1] if begun else None


def main() -> int:
    """Command line; returns the exit code."""
    options = parser_of(__doc__, 4, 500, only=(4, 8)).parse_args()
    seeds = seeds_of(options)
    began, done, died = time.monotonic(), {}, []
    limit = began + 60 * options.minutes
    while seeds and (left := limit - time.monotonic()) > 0:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(seeds, file)
            file.flush()
            outcome = launch("tests.fuzz.ranks", options.ranks, [left, file.name], left + 300)
        done |= {line["seed"]: line for line in outcome.reports[0] if "steps" in line}
        if outcome.failure is None:
            break
        last = died_in(outcome)
        died.append({"seed": last, "how": outcome.failure[-3000:]})
        if last is None:
            break
        seeds = [s for s in seeds if s not in done and s != last]
    lines = list(done.values())
    wrong = [d for d in lines if d["wrong"]]
    refusals = Counter(r for d in lines for r in d["refused"])
    print(json.dumps({
        "ranks": options.ranks, "first": min(done, default=None), "programs": len(lines),
        "seconds": round(time.monotonic() - began), "steps": sum(d["steps"] for d in lines),
        "gradients": sum(d["orders"] > 0 for d in lines), "second": sum(d["orders"] > 1 for d in lines),
        "plain_mindspore_wrong": sum(d["plain_wrong"] for d in lines), "refused": sum(refusals.values()),
        "refusals": dict(refusals.most_common()), "wrong": wrong, "died": died}, indent=1))
    return 1 if wrong or died or not lines else 0


if __name__ == "__main__":
    sys.exit(main())
