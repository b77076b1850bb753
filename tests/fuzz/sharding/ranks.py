# SPDX-License-Identifier: Apache-2.0
"""What each rank of `tests/long/fuzz_sharding.py` runs: `python -m tests.fuzz.sharding.ranks job.json`; reports lines.

Each program has a line "begins" and a line of its verdict. Ranks that lost step say so and end; the next launch goes on.
"""
from __future__ import annotations

import faulthandler
import json
import pickle
import sys
import time
from collections import Counter
from pathlib import Path

import mindspore as ms
import numpy as np

from ms_dtensor import comm
from ms_dtensor.errors import CollectiveMismatch, CommError
from tests.fuzz.check import agreed
from tests.fuzz.sharding.judge import check_seed, differing, headline, refer
from tests.fuzz.sharding.play import Player
from tests.fuzz.sharding.programs import generate
from tests.msrun import report

LIMIT = 90  # seconds for one program and its minimisation; then every thread's stack is printed
LOST_STEP = 3  # exit code
RIGHT = "a number, the sum of what each rank did"


def references(world, seeds: list[int], without: list[str]) -> list:
    """Of so many seeds as there are ranks, at most; every rank makes one of them."""
    mine = b""
    if world.rank < len(seeds):
        mine = pickle.dumps(refer(generate(seeds[world.rank], world.size, without=without)))
    made = comm.group(tuple(range(world.size))).all_gather_object(mine)
    return [pickle.loads(m) for m in made[:len(seeds)]]


def parted(world, seed: int) -> str:
    """What a program whose ranks differ showed on this rank; "" is the named mismatch."""
    program = generate(seed, world.size, differs=True)
    playing = Player(program, world.rank).play()
    try:
        for _ in program.steps[:-1]:
            next(playing)
    except Exception as e:
        return f"before: {headline(e)}"
    try:
        record = next(playing)
    except CollectiveMismatch as e:
        return "" if len(set(str(e).splitlines())) == len(str(e).splitlines()) else f"says nothing: {e}"
    except Exception as e:
        return headline(e)
    off = differing(program, record.values, refer(program).steps[-1])
    return f"a wrong number: {off.split(':')[0]}" if off else RIGHT


def main(job: dict) -> int:
    """Checks the programs of the seeds until the time is over; it is rank 0's time."""
    faulthandler.enable()
    world = comm.start("cpu")
    ms.runtime.launch_blocking()
    np.seterr(all="ignore")
    started, seeds = time.monotonic(), job["seeds"]
    classes: Counter = Counter()
    for k in range(0, len(seeds), world.size):
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        if agreed(world, "stop" if time.monotonic() - started > job["seconds"] else "")[0]:
            break
        some, seed = seeds[k:k + world.size], None
        try:
            made = [None] * len(some) if job["differs"] else references(world, some, job["without"])
            for seed, reference in zip(some, made):
                faulthandler.dump_traceback_later(LIMIT, exit=True)
                report({"begins": seed})
                if job["differs"]:
                    report({"seed": seed, "why": parted(world, seed),
                            "program": str(generate(seed, world.size, differs=True))})
                    agreed(world, str(seed))
                else:
                    said = check_seed(world, reference, classes)
                    report(said)
                    classes[said.get("class", "")] += 1
        except CommError as e:
            program = generate(seed, world.size, without=job["without"]) if seed is not None else ""
            report({"lost": seed, "why": headline(e), "text": f"{program}\n{e}"[:6000]})
            return LOST_STEP
        faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text())))
