# SPDX-License-Identifier: Apache-2.0
"""The contract of collectives on random groups for a long time, every result checked, memory and handles watched.

    python -m tests.long.soak [--minutes 10] [--ranks 4] [--seed 0]

Ranks are forked processes on the shm engine, without MindSpore. Every case of `tests/comm/contract.py` is made by all
members of a group in one order, which all derive from the seed; a rank outside the group goes on, so ranks drift apart as
far as their groups allow. Prints JSON, exits non-zero on a wrong result, an error, or growth after the first fifth of the
time. What libc keeps of freed memory is given back before each look: how much it keeps depends on the order of sizes, up to
40 MiB here. Blocks for results are kept on purpose, so shared memory is compared with the most that all ranks may keep.
"""
import argparse
import ctypes
import gc
import json
import os
import random
import sys
import time

import numpy as np

from ms_dtensor.comm.shm.arena import KEEP
from ms_dtensor.comm.shm.engine import Engine
from tests.comm.contract import CASES, Arrays, reduced, same
from tests.long.forked import Job, left_over

DTYPES = ("float32", "float64", "float16", "int64", "int32", "uint8")
COUNTS = (0, 1, 7, 300, 5_000, 60_000, 400_000)
EVERY = 40  # steps between looks at the clock and at memory
GROWTH = 16 << 20  # bytes that a rank's memory may differ by
IN_USE = 32 << 20  # shared memory of a rank beside the blocks it keeps: buffers of the engine, results that are alive


class Rank:
    """One rank of the soak."""

    def __init__(self, engine: Engine, rank: int, size: int, seed: int):
        self.e, self.rank, self.size, self.seed = engine, rank, size, seed
        self.checked = 0

    def step(self, number: int, beside: bool = True) -> None:
        """A case of the contract, the same on all members of its group; `beside`: now and then while a sum is under way."""
        rng = random.Random((self.seed << 32) + number)
        size = rng.randint(2, self.size)
        group = tuple(rng.sample(range(self.size), size)) if rng.random() < 0.5 else tuple(range(self.size))
        case, later, count, dtype = rng.choice(CASES), rng.random() < 0.2, rng.choice(COUNTS), rng.choice(DTYPES)
        if self.rank not in group:
            return
        given = [(np.arange(count) % 4 + r).astype(dtype) for r in group]  # whole numbers: exact in any order and dtype
        total = self.e.all_reduce(given[group.index(self.rank)], "sum", group, async_op=True) if beside and later else None
        case(Arrays(self.e), self.rank, group)
        if total is not None:
            same(total.wait(), reduced(given, "sum"))
        self.checked += 1


def usage() -> dict[str, int]:
    """Private memory of this process, shared memory of all ranks (pages that exist, each once), open descriptors."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as f:
        fields = dict(line.split(":", 1) for line in f)
    handles = os.listdir("/proc/self/fd")
    shared = 0
    for fd in handles:
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:ms_dtensor"):
                shared += os.fstat(int(fd)).st_blocks * 512
        except OSError:  # the listing's own descriptor
            pass
    return {"anon": int(fields["RssAnon"].split()[0]) << 10, "shared": shared, "handles": len(handles),
            "threads": int(fields["Threads"])}


def soak(engine: Engine, rank: int, size: int, seed: int, seconds: float) -> dict:
    """Runs until rank 0's clock says enough."""
    me, world, started = Rank(engine, rank, size, seed), tuple(range(size)), time.monotonic()
    number, first, most, samples = 0, None, {}, []
    while True:
        for _ in range(EVERY):
            me.step(number)
            number += 1
        spent = engine.broadcast_object(time.monotonic() - started, 0, world)
        now = usage()
        if first is None and spent >= seconds / 5:
            first = now
        if first is not None:
            most = {k: max(v, most.get(k, 0)) for k, v in now.items()}
        samples.append(now)
        if spent >= seconds:
            break
    return {"steps": number, "checked": me.checked, "seconds": round(spent, 1), "first": first, "most": most, "last": now}


def grown(r: dict, size: int) -> list[str]:
    """What has grown since the first fifth of the time."""
    first, last = r["first"], r["last"]
    bad = [f"anon {first['anon']} -> {last['anon']}"] if last["anon"] > first["anon"] + GROWTH else []
    if r["most"]["shared"] > size * (KEEP + IN_USE):
        bad.append(f"shared {r['most']['shared']}")
    return bad + [f"{k} {first[k]} -> {last[k]}" for k in ("handles", "threads") if last[k] > first[k]]


def run(size: int, seed: int, seconds: float) -> dict:
    """Forks the ranks and collects what they report."""
    job = Job(size, lambda engine, rank: soak(engine, rank, size, seed, seconds))
    told = job.reports(time.monotonic() + 2 * seconds + 120)
    out = [told[rank]["result"] if "result" in told.get(rank, {}) else {
        "error": "{error}: {text}".format(**told[rank]) if rank in told else "it reported nothing"} for rank in range(size)]
    errors = [r["error"] for r in out if "error" in r]
    growth = {rank: grown(r, size) for rank, r in enumerate(out) if "error" not in r and grown(r, size)}
    return {"ranks": size, "seed": seed, "errors": errors, "growth": growth, "per_rank": out,
            "left_over": left_over()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    out = run(args.ranks, args.seed, args.minutes * 60)
    print(json.dumps(out, indent=1))
    return int(bool(out["errors"] or out["growth"] or out["left_over"]))


if __name__ == "__main__":
    sys.exit(main())
