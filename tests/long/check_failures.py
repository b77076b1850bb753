# SPDX-License-Identifier: Apache-2.0
"""What the shm backend says when a job goes wrong: killed ranks, ranks that call different things, ranks that are stuck.

    python -m tests.long.check_failures [kills] [desyncs] [stuck] [--runs 100] [--every 1] [--ranks 4] [--seed 0]

kills     SIGKILL of a random rank at a random moment of a random collective: every other rank must end within 5 s with
          PeerLost naming that rank and its pid
desyncs   ways in which one rank differs from the others (`desyncs.py`): CollectiveMismatch on every rank, naming the odd
          rank and both calls with their source lines (of two ranks none is odd; take four)
stuck     a rank that does not come: after the timeout the others say who, and where each rank last was

Prints JSON, exits non-zero if anything is missing, or if a shared-memory object or a socket is left over. Ranks are forked
processes on the engine alone, without MindSpore.
"""
import argparse
import itertools
import json
import os
import random
import signal
import sys
import time

import numpy as np

from ms_dtensor.comm.shm.engine import Engine
from tests.long.desyncs import KINDS, PAIRS
from tests.long.forked import Job, left_over
from tests.long.soak import Rank

LIMIT = 5.0


# -- killed --------------------------------------------------------------------------------------------------------------
def forever(me: Rank) -> None:
    """Random collectives over random groups and sizes; the same on every rank. Each is awaited before the next: what a
    pending one would raise is told by the next call otherwise, which says that this process's communication has ended."""
    for number in itertools.count():
        me.step(number, beside=False)


def kill_once(size: int, seed: int) -> dict:
    """One run; what was wrong with it, and how long the slowest survivor took."""
    rng = random.Random(seed)
    victim = rng.randrange(size)
    job = Job(size, lambda e, rank: forever(Rank(e, rank, size, seed)))
    time.sleep(rng.random() * 0.25)
    killed = time.monotonic()
    os.kill(job.pids[victim], signal.SIGKILL)
    reports = job.reports(killed + LIMIT)
    name, wrong = f"rank {victim} (pid {job.pids[victim]}) died", []
    for rank in range(size):
        r = reports.get(rank)
        if rank == victim:
            continue
        if r is None:
            wrong.append(f"rank {rank} did not end")
        elif r.get("error") != "PeerLost" or name not in r["text"]:
            wrong.append(f"rank {rank}: {r.get('error')}: {r.get('text')}")
    took = max((r["at"] - killed for r in reports.values()), default=LIMIT)
    return {"seed": seed, "wrong": wrong, "seconds": took}


def kills(args) -> dict:
    results = [kill_once(args.ranks, args.seed + i) for i in range(args.runs)]
    bad = [r for r in results if r["wrong"]]
    times = sorted(r["seconds"] for r in results)
    return {"runs": len(results), "right": len(results) - len(bad), "median_seconds": round(times[len(times) // 2], 3),
            "slowest_seconds": round(times[-1], 3), "failures": bad[:3]}


# -- different calls -------------------------------------------------------------------------------------------------------
def desync_once(name: str, size: int, odd: int) -> list[str]:
    """What is missing from the errors of one kind."""
    kind = KINDS[name]

    def run(e: Engine, rank: int) -> None:
        kind(e, rank, size, rank == odd)
        e.barrier(tuple(range(size)))
    reports = Job(size, run).reports(time.monotonic() + 20)
    wrong = []
    for rank in range(size):
        r = reports.get(rank, {"error": "nothing", "text": "it did not end"})
        text = r.get("text", "")
        if r.get("error") != "CollectiveMismatch":
            wrong.append(f"rank {rank}: {r.get('error')}: {text}")
        elif f"rank(s) {odd} made another call" not in text and not (
                (size == 2 or name in PAIRS) and "different calls" in text):
            wrong.append(f"rank {rank} does not name rank {odd} alone: {text}")
        elif f"rank {odd}: " not in text or not any(f"rank {r}: " in text for r in range(size) if r != odd) or \
                text.count("desyncs.py:") + text.count("check_failures.py:") < 2:
            wrong.append(f"rank {rank} does not show both calls with their lines: {text}")
    return wrong


def desyncs(args) -> dict:
    rng, bad, names = random.Random(args.seed), {}, list(KINDS)[::args.every]
    for name in names:
        wrong = desync_once(name, args.ranks, rng.randrange(args.ranks))
        if wrong:
            bad[name] = wrong[0]
    return {"kinds": len(names), "right": len(names) - len(bad), "failures": bad}


# -- stuck -----------------------------------------------------------------------------------------------------------------
def stuck_once(size: int, victim: int, how: str) -> list[str]:
    """One rank sleeps in the user's code, or is stopped inside a collective."""
    def run(e: Engine, rank: int) -> None:
        world = tuple(range(size))
        for _ in range(3):
            e.all_reduce(np.ones(5), "sum", world)
        if rank == victim and how == "sleeps":
            time.sleep(3)
            return
        if rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        e.all_gather(np.ones(5), 0, [5] * size, world)
    job = Job(size, run, timeout=0.6)
    until = time.monotonic() + 4
    reports, wrong = job.reports(until), []
    for rank in set(range(size)) - {victim}:
        r = reports.get(rank, {"error": "nothing", "text": "it did not end"})
        text = r.get("text", "")
        lines = [f"rank {i} (pid {job.pids[i]}) is " for i in range(size)]
        if r.get("error") != "PeerLost" or f"rank(s) {victim} did not arrive within 0.6 s" not in text or \
                any(line not in text for line in lines) or text.count("check_failures.py:") != size:
            wrong.append(f"rank {rank}: {r.get('error')}: {text}")
    return wrong


def stuck(args) -> dict:
    cases = [(victim, how) for victim in range(args.ranks) for how in ("sleeps", "stopped")][::args.every]
    bad = {f"rank {v} {how}": wrong[0] for v, how in cases if (wrong := stuck_once(args.ranks, v, how))}
    return {"cases": len(cases), "right": len(cases) - len(bad), "failures": bad}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=("kills", "desyncs", "stuck", []), default=[])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--every", type=int, default=1, help="only each so many-th desync and stuck rank")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    out: dict = {"ranks": args.ranks, "seed": args.seed}
    for name, part in (("kills", kills), ("desyncs", desyncs), ("stuck", stuck)):
        if not args.parts or name in args.parts:
            out[name] = part(args)
    out["left_over"] = left_over()
    print(json.dumps(out, indent=1))
    return int(bool(out["left_over"]) or any(p.get("failures") for p in out.values() if isinstance(p, dict)))


if __name__ == "__main__":
    sys.exit(main())
