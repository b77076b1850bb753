# SPDX-License-Identifier: Apache-2.0
"""What each rank of `tests/long/fuzz.py` runs: `python -m tests.fuzz.ranks seconds seeds.json`; reports a line a program.

Ranks make programs and their references by turns, each those of every so-many-th seed, and check all of them together.
"""
from __future__ import annotations

import faulthandler
import json
import pickle
import sys
import time
from pathlib import Path

import numpy as np

from ms_dtensor import comm
from tests.fuzz.check import agreed, check_seed
from tests.fuzz.programs import generate
from tests.fuzz.reference import refer
from tests.msrun import report

LIMIT = 240  # seconds for one program and its minimisation; then every thread's stack is printed


def references(world, seeds: list[int]) -> list:
    """Of so many seeds as there are ranks, at most; every rank makes one of them."""
    mine = b""
    if world.rank < len(seeds):
        mine = pickle.dumps(refer(generate(seeds[world.rank])))
    group = comm.group(tuple(range(world.size)))
    return [pickle.loads(made) for made in group.all_gather_object(mine)[:len(seeds)]]


def main(seconds: float, seeds: list[int]) -> int:
    """Checks the programs of the seeds until the time is over; it is rank 0's time."""
    faulthandler.enable()
    world = comm.start("cpu")
    started = time.monotonic()
    np.seterr(all="ignore")
    for k in range(0, len(seeds), world.size):
        if agreed(world, "stop" if time.monotonic() - started > seconds else "")[0]:
            break
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        some = seeds[k:k + world.size]
        report({"makes": some[world.rank] if world.rank < len(some) else None})
        for reference in references(world, some):
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            report({"begins": reference.program.seed})
            report(check_seed(world, reference))
        faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())))
