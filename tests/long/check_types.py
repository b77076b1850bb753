# SPDX-License-Identifier: Apache-2.0
"""The table of types over the whole corpus, and random programs that it accepts; a line of JSON, fails if any is wrong.

    python -m tests.long.check_types [--workers 2] [--programs 5000]
    python -m tests.long.check_types --programs 0 --parts 64 --only 3,17          these parts of the corpus again
    python -m tests.long.check_types --parts 0 --programs 2500 --first 100000     programs alone, from this one on

Enumerated: for each call of the corpus all types of all operands on an axis of 2 ranks and on one of 3, and on two axes at
once (up to `MOST` of many operands, drawn). Programs have up to 8 ops on 2 ranks or 2 x 2, and are compared with one device,
value and gradients. Forms and programs go to as many processes as there are workers.
"""
import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import get_context

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.long import forked  # noqa: E402

EACH = 100  # programs of one start of ranks
MOST = {(2,): 64, (3,): 64, (2, 2): 256}  # cells of a call on a mesh; all of them of two operands
MESHES = ((2,), (2, 2))


def of_corpus(part: int, parts: int) -> dict:
    """One part of the forms."""
    from ms_dtensor.ops.rules import spmd
    from tests.spmd import proof
    from tests.spmd.test_table import corpus
    tally = proof.Tally()
    forms = corpus()[part::parts]
    for form in forms:
        for args in form.variants():
            for one in proof.calls_of(form.fn, args, tally):
                for shape, most in MOST.items():
                    if len(one.arrays) < 3 or shape == (2,):
                        proof.prove(one, shape, spmd.results, tally, most)
                proof.prove_reads(one, 2, spmd.results, tally)
    return {"forms": len(forms), "calls": tally.calls, "cells": tally.cells, "accepted": tally.accepted,
            "compared": tally.compared, "wrong": tally.wrong}


def of_programs(shape: tuple[int, ...], first: int, count: int) -> dict:
    """So many programs, on ranks that are forked; all ranks compare, the first one tells."""
    def run(rank: int) -> dict:
        import ms_dtensor as md
        from tests.spmd.programs import Program
        mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[:len(shape)])
        steps = [Program(seed, mesh).compare() for seed in range(first, first + count)]
        return {"programs": len(steps), "without placements": steps.count(0), "ops": sum(steps), "longest": max(steps)}
    told = forked.world(len(shape) * 2, run, 20 * count)
    failed = [f"programs from {first} on {shape}, rank {rank}: {t.get('error', 'killed')} {t.get('text', '')}"
              for rank, t in told.items() if "result" not in t]
    return {**told[0].get("result", {"programs": 0}), "wrong": failed}


def work(job: tuple[Callable[..., dict], tuple]) -> dict:
    """In a process of a worker."""
    what, args = job
    began = time.monotonic()
    if what is of_corpus:  # who forks ranks has run nothing
        import mindspore as ms

        from ms_dtensor.comm.cores import end_spinning
        from ms_dtensor.dispatch import patches
        ms.set_device("CPU")
        ms.runtime.launch_blocking()
        end_spinning()
        patches.install()
    else:
        import ms_dtensor  # noqa: F401  ranks are forks of this
    return {**what(*args), "what": [what.__name__, *args], "cpu_seconds": round(time.monotonic() - began)}


def jobs(options: argparse.Namespace) -> Iterator[tuple]:
    """Programs of both meshes in turn, and parts of the corpus."""
    parts = range(options.parts) if not options.only else map(int, options.only.split(","))
    yield from ((of_corpus, (part, options.parts)) for part in parts)
    for at, shape in enumerate(MESHES):
        begin, end = options.first + at * 100_000, options.first + at * 100_000 + options.programs // len(MESHES)
        yield from ((of_programs, (shape, first, min(EACH, end - first))) for first in range(begin, end, EACH))


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--parts", type=int, default=64, help="of the corpus; 0: none of it")
    parser.add_argument("--only", help="these parts, comma-separated")
    parser.add_argument("--programs", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    began, sums, wrong, longest = time.monotonic(), Counter[str](), list[str](), 0
    with get_context("spawn").Pool(options.workers, maxtasksperchild=1) as pool:
        for told in pool.imap_unordered(work, jobs(options)):
            print(json.dumps(told), file=sys.stderr, flush=True)
            wrong += told.pop("wrong")
            longest = max(longest, told.pop("longest", 0))
            sums.update({k: v for k, v in told.items() if isinstance(v, int)})
    print(json.dumps({"seconds": round(time.monotonic() - began), **sums, "longest program": longest, "wrong": wrong}))
    return 1 if wrong or not sums["cells"] + sums["programs"] else 0


if __name__ == "__main__":
    sys.exit(main())
