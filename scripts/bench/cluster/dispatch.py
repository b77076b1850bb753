# SPDX-License-Identifier: Apache-2.0
"""What a DTensor adds to an op on a 4 x 4 tensor: the cases of `scripts/bench/dispatch.py`, on every rank at once.

On a device the time to issue: the host goes on before the device is done, which is waited for between samples. On a CPU
MindSpore runs blocking. "floor" is the least that a Tensor subclass can add. Medians of the slowest rank.
"""
from __future__ import annotations

import statistics
import sys
from pathlib import Path

from .world import Bench

sys.path.append(str(Path(__file__).resolve().parents[1]))  # its modules name each other so
from scripts.bench.dispatch import ROWS, mindspore_cases, warm_sample  # noqa: E402


def run(bench: Bench, options: dict) -> list[dict]:
    """Options: rounds, calls, rows (all, if not given)."""
    cases = mindspore_cases(blocking=bench.device == "cpu", device=bench.device, ranks=(bench.rank,))
    rows = []
    for row in (*ROWS, *(f"fb {name}" for name in ROWS)):
        if row.removeprefix("fb ") not in options.get("rows", ROWS):
            continue
        seen: dict[str, list[float]] = {name: [] for name in cases[row]}
        for _ in range(options["rounds"]):
            for name, fn in cases[row].items():  # in turns: what else runs hits all alike
                seen[name].append(warm_sample(fn, options["calls"], bench.wait))
                bench.wait()
        mine = {name: statistics.median(values) for name, values in seen.items()}
        added = {name: statistics.median(v - p for v, p in zip(seen[name], seen["plain"], strict=True))
                 for name in seen if name != "plain"}
        worst = max(bench.each((added["ours"], mine, added)), key=lambda item: item[0])
        rows.append({"op": row, "mode": "blocking" if bench.device == "cpu" else "issue",
                     "plain": round(worst[1]["plain"], 2), "ours": round(worst[1]["ours"], 2),
                     "added": round(worst[2]["ours"], 2),
                     "floor added": round(worst[2]["floor"], 2) if "floor" in worst[2] else None})
    return rows
