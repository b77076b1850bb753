# SPDX-License-Identifier: Apache-2.0
"""A Llama of 3 billion parameters, sharded over 8 ranks of this machine and stepped once; the curve of memory.

    python scripts/bench/three_billion.py [--size 3b] [--ranks 8] [--no-save]

bfloat16 parameters, deferred and cut (`memory.py` builds and measures), one step of plain SGD on 8 tokens a rank. Wants
about 17 GB and a quarter of an hour. No rank may hold more than its share and a group.
"""
from __future__ import annotations

import argparse

from common import finish
from memory import SIZES, measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="3b")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    answers = measured(args.size, args.ranks, "sgd", "bfloat16")
    table = [("rank", "parameters", "share MiB", "groups MiB", "measured MiB", "ratio", "in step")]
    for rank, a in enumerate(answers):
        mib = (round(a[k] / 2**20) for k in ("share", "groups", "most"))
        table.append((str(rank), a["parameters"], *mib, a["ratio"], a["in_step"]))
    finish("three_billion", {"ranks": [{**a, "curve": thinned(a["curve"])} for a in answers]}, table, not args.no_save)
    if any(a["in_step"] > 1.1 or not a["moved"] for a in answers):
        raise SystemExit("in the step a rank held more than its share and a group, or it did not step")


def thinned(curve: list, points: int = 120) -> list:
    """So many points, the named and the highest ones among them."""
    step = max(len(curve) // points, 1)
    top = max(range(len(curve)), key=lambda i: curve[i][2])
    named = {i for i, point in enumerate(curve) if point[1] not in ("finish", "reduce", "release")}
    return [point for i, point in enumerate(curve) if i % step == 0 or i == top or i in named]


if __name__ == "__main__":
    main()
