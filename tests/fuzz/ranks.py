# SPDX-License-Identifier: Apache-2.0
"""What each rank of `scripts/fuzz.py` runs: `python -m tests.fuzz.ranks first count seconds`; reports a line a program."""
from __future__ import annotations

import faulthandler
import sys
import time

import numpy as np

from ms_dtensor import comm, init_device_mesh
from tests.fuzz.programs import agreed, check, generate, grids, minimised
from tests.msrun import report

LIMIT = 300  # seconds for one program and its minimisation; then every thread's stack is printed


def one(seed: int, world) -> dict:
    """Checks the program of a seed; the ranks agree about what came out."""
    program = generate(seed)
    shapes = grids(world.size)
    mesh = init_device_mesh("cpu", shapes[seed % len(shapes)])
    result = check(program, mesh)
    texts = agreed(world, f"{result.refused}|{bool(result.wrong)}")
    wrong = any(t.endswith("True") for t in texts)
    parted = len({t.split("|")[0] for t in texts}) > 1
    said = {"seed": seed, "mesh": list(mesh.shape), "steps": len(program.steps), "wrong": wrong or parted,
            "refused": result.refused, "plain_wrong": result.plain_wrong, "gradients": result.gradients,
            "second": result.seconds}
    if wrong:
        small = minimised(program, lambda p: any(t == "x" for t in agreed(world, "x" if check(p, mesh).wrong else "")))
        said["why"], said["program"] = (check(small, mesh).wrong or result.wrong)[:3], str(small)
    elif parted:
        said["why"], said["program"] = [f"the ranks parted: {texts}"], str(program)
    return said


def main(first: int, count: int, seconds: float) -> int:
    """Programs of seeds `first` to `first + count`, until the time is over; it is rank 0's time."""
    faulthandler.enable()
    world = comm.start("cpu")
    started = time.monotonic()
    np.seterr(all="ignore")
    for seed in range(first, first + count):
        if agreed(world, "stop" if time.monotonic() - started > seconds else "")[0]:
            break
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        report({"begins": seed})
        report(one(seed, world))
        faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
