# SPDX-License-Identifier: Apache-2.0
"""Random data-parallel programs on real ranks against one device; ends with a line of JSON, fails if anything is wrong.

    python -m tests.long.fuzz_sharding [--ranks 2] [--first 0] [--programs 2000] [--minutes 10]
    python -m tests.long.fuzz_sharding --seeds 137,1173                these again
    python -m tests.long.fuzz_sharding --differs --programs 200        programs in which one rank does something else

A program is a nested model, how it is wrapped, a mesh and two to five steps (`tests/fuzz/sharding/programs.py`), in float64;
one device runs it without the wraps. Each failing seed is printed with its program, made small. A launch that ends early
costs the program it was in; the next launch goes on behind it.
With --differs the only right end is a `CollectiveMismatch` on all ranks.
"""
from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fuzz.command import parser_of, seeds_of  # noqa: E402
from tests.fuzz.sharding.programs import TRAITS  # noqa: E402
from tests.msrun import launch  # noqa: E402

SHOWN = 6  # programs of a class that are printed


def main() -> int:
    """Command line; returns the exit code."""
    parser = parser_of(__doc__, 2, 2000)
    parser.add_argument("--differs", action="store_true", help="one rank's last step is another")
    parser.add_argument("--without", default="", help="comma-separated traits to leave out: " + ", ".join(TRAITS))
    options = parser.parse_args()
    seeds = seeds_of(options)
    began, done, wrong, amiss = time.monotonic(), 0, [], 0
    stopped: Counter = Counter()
    limit = began + 60 * options.minutes
    while seeds and (left := limit - time.monotonic()) > 0:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({"seeds": seeds, "seconds": left, "differs": options.differs,
                       "without": list(filter(None, options.without.split(",")))}, file)
            file.flush()
            outcome = launch("tests.fuzz.sharding.ranks", options.ranks, [file.name], left + 120,
                             env={"MS_DTENSOR_TIMEOUT": "20"})
        judged: dict[int, list[dict]] = {}
        for lines in outcome.reports:
            for line in lines:
                if "seed" in line:
                    judged.setdefault(line["seed"], []).append(line)
        for lines in judged.values():
            done += 1
            stopped[lines[0].get("stopped", "")] += 1
            amiss += lines[0].get("amiss", False)
            if any(line["why"] for line in lines):
                wrong.append({"class": " <> ".join(sorted({line["why"] for line in lines})), **lines[0]})
        begun = [line["begins"] for lines in outcome.reports for line in lines if "begins" in line]
        last = max(begun, key=seeds.index, default=None)
        if outcome.failure is None:
            break
        if last is not None and (last not in judged or not options.differs):
            whys = {line["why"].split(": ")[0] for lines in outcome.reports for line in lines if "lost" in line}
            texts = [line.get("text", "") for lines in outcome.reports for line in lines if "lost" in line]
            wrong.append({"seed": last, "class": f"lost step: {' <> '.join(sorted(whys))}" if whys else "died or hung",
                          "why": "\n".join(texts) or outcome.failure[-2500:]})
            done += 1
        if last is None:
            print(outcome.failure)
            wrong.append({"seed": None, "class": "no launch", "why": outcome.failure[-2000:]})
            break
        seeds = seeds[seeds.index(last) + 1:]
    classes = Counter(w["class"] for w in wrong)
    shown: Counter = Counter()
    for w in sorted(wrong, key=lambda w: (-classes[w["class"]], len(w.get("program", "")))):
        shown[w["class"]] += 1
        if shown[w["class"]] <= SHOWN:
            print(f"\n# {w['class']}\n{w.get('program') or 'seed ' + str(w['seed'])}\n  -> {w.get('small_why', w['why'])}")
    print("\n" + json.dumps({
        "ranks": options.ranks, "without": options.without, "differs": options.differs,
        "programs": done, "seconds": round(time.monotonic() - began),
        "plain_mindspore_wrong": amiss, "one_device_refused": {k: n for k, n in stopped.most_common() if k},
        "wrong": len(wrong),
        "classes": dict(classes.most_common()), "seeds": [w["seed"] for w in wrong]}))
    return 1 if wrong or not done else 0


if __name__ == "__main__":
    sys.exit(main())
