# SPDX-License-Identifier: Apache-2.0
"""Random collectives on random groups and sizes for a long time, every result checked, memory and handles watched.

    python -m tests.long.soak [--minutes 10] [--ranks 4] [--seed 0]

Ranks are forked processes on the shm engine, without MindSpore. Every call is made by all members of a group in one order,
which all derive from the seed; a rank outside the group goes on, so ranks drift apart as far as their groups allow. Prints
JSON, exits non-zero on a wrong result, an error, or growth after the first fifth of the time. What libc keeps of freed
memory is given back before each look: how much it keeps depends on the order of sizes, up to 40 MiB here. Blocks for
results are kept on purpose, so shared memory is compared with the most that all ranks may keep.
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
from tests.long.forked import Job, left_over

DTYPES = ("float32", "float64", "float16", "int64", "int32", "uint8", "bool")
COUNTS = (0, 1, 7, 300, 5_000, 60_000, 400_000)
WHAT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter", "exchange", "objects", "barrier")
EVERY = 200  # steps between looks at the clock and at memory
GROWTH = 16 << 20  # bytes that a rank's memory may differ by
IN_USE = 32 << 20  # shared memory of a rank beside the blocks it keeps: buffers of the engine, results that are alive


class Rank:
    """One rank of the soak."""

    def __init__(self, engine: Engine, rank: int, size: int, seed: int):
        self.e, self.rank, self.size, self.seed = engine, rank, size, seed
        self.pending: list = []
        self.checked = 0

    def data(self, step: int, rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """What a rank gives in a step; small integers, so that sums are exact in any order and dtype."""
        n = int(np.prod(shape))
        x = (np.arange(n, dtype=np.int64) * 7 + 3 * step + 5 * rank) % 4
        return x.astype(dtype).reshape(shape)

    def same(self, what: str, got: np.ndarray, want: np.ndarray) -> None:
        self.checked += 1
        if got.shape != want.shape or got.dtype != want.dtype or not np.array_equal(got, want):
            raise AssertionError(f"{what}: wrong result {got.dtype}{got.shape}, expected {want.dtype}{want.shape}")

    def step(self, number: int) -> None:
        """One call, the same on all members of its group."""
        rng = random.Random((self.seed << 32) + number)
        size = rng.randint(2, self.size)
        group = tuple(rng.sample(range(self.size), size)) if rng.random() < 0.5 else tuple(range(self.size))
        what, dtype, later = rng.choice(WHAT), rng.choice(DTYPES), rng.random() < 0.2
        sizes = [rng.randrange(4) for _ in group] if rng.random() < 0.5 else [rng.randrange(1, 3)] * len(group)
        inner, src, op, wait = rng.choice(COUNTS), rng.choice(group), rng.choice(("sum", "max", "min")), rng.random() < 0.7
        if self.rank not in group:
            return
        if op == "sum" and dtype == "bool":
            op = "max"
        x, want = self._call(what, number, group, dtype, sizes, inner, src, op, later)
        if x is None:
            return
        self.pending.append((what, x, want))
        if wait or not later:
            self.settle()

    def settle(self) -> None:
        """Checks the results that are due."""
        for what, x, want in self.pending:
            self.same(what, x.wait() if hasattr(x, "wait") else x, want)
        self.pending.clear()

    def _call(self, what, number, group, dtype, sizes, inner, src, op, later):
        """The result of a call (or a handle), and what it must be."""
        e, n, me = self.e, len(group), group.index(self.rank)

        def given(shape) -> list[np.ndarray]:
            return [self.data(number, r, shape(i), dtype) for i, r in enumerate(group)]
        at = np.cumsum([0, *sizes])

        def reduced(xs):
            return {"sum": sum, "max": np.maximum.reduce, "min": np.minimum.reduce}[op](xs).astype(dtype)
        if what == "all_reduce":
            xs = given(lambda i: (inner,))
            return e.all_reduce(xs[me], op, group, async_op=later), reduced(xs)
        if what == "all_gather":
            xs = given(lambda i: (2, sizes[i], inner // 8))
            return e.all_gather(xs[me], 1, sizes, group, async_op=later), np.concatenate(xs, 1)
        if what == "reduce_scatter":
            xs = given(lambda i: (sum(sizes), inner // 4))
            return e.reduce_scatter(xs[me], op, 0, sizes, group, async_op=later), reduced(xs)[at[me]:at[me + 1]]
        if what == "all_to_all":
            xs = given(lambda i: (sum(sizes), 1 + i % 2, inner // 8))
            joins = [1 + i % 2 for i in range(n)]
            return (e.all_to_all(xs[me], 0, sizes, 1, joins, group, async_op=later),
                    np.concatenate([x[at[me]:at[me + 1]] for x in xs], 1))
        if what == "broadcast":
            x = self.data(number, src, (inner,), dtype)
            return e.broadcast(x if self.rank == src else np.zeros_like(x), src, group, async_op=later), x
        if what == "scatter":
            x = self.data(number, src, (sum(sizes), inner // 4), dtype)
            return (e.scatter(x if self.rank == src else None, 0, sizes, src, group, shape=x.shape, dtype=x.dtype,
                              async_op=later), x[at[me]:at[me + 1]])
        if what == "exchange":
            xs = given(lambda i: (inner,))
            got = e.exchange([(group[(me + 1) % n], xs[me])], [(group[me - 1], (inner,), np.dtype(dtype))])
            return got[0], xs[me - 1]
        if what == "objects":
            got = e.all_gather_object([number, self.rank], group)
            self.same(what, np.array(got), np.array([[number, r] for r in group]))
            return None, None
        e.barrier(group)
        return None, None


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
        me.settle()
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
