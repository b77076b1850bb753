# SPDX-License-Identifier: Apache-2.0
"""Collectives of the shm backend against gloo (PyTorch) and MCCL (MindSpore), both sides in one run, cell by cell.

    python scripts/bench/comm.py [--worlds 2,4,8] [--json out.json]      shm and gloo, in turns
    python scripts/bench/comm.py --mccl                                  shm and MCCL, 4 processes, under msrun
    python scripts/bench/comm.py --ours engine                           the shm engine on NumPy arrays, without MindSpore

All processes of both sides live at the same time; only one side works at a time. One sample is a barrier, then k calls
back to back (20 up to 64 KiB, else 1); it counts as the slowest rank's time by k. A cell's figure is the median over samples
taken in turns, gloo first. fp32, one thread per process. Sizes: what a rank holds; of an all-gather, its output.
Ours makes a new tensor per call, gloo writes into one made before. `copies` is the memory-copy bound: the time in which all
ranks at once copy that many bytes, twice for an all-reduce, which has to move everything twice.
Needs torch (CPU) beside MindSpore, which the library itself does not.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ms_dtensor.debug.text import human

ROOT = Path(__file__).resolve().parents[2]
KIB = 1024
SIZES = (64, 64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 16384 * KIB, 32768 * KIB)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
PASSES = {"all_reduce": 2}  # times that all data must be written by the ranks together, if not once
TARGETS = {"geometric_mean": 0.25, "worst_cell": 0.8, "at_64_bytes": 0.3, "mccl_4MiB_speedup": 10, "copies": 2.5}


# -- one rank ----------------------------------------------------------------------------------------------------------
class Shm:
    """The library's own path: `Group` on MindSpore tensors."""

    def __init__(self, rank: int, size: int, address: str):
        os.environ.update(MS_ROLE="MS_WORKER", MS_WORKER_NUM=str(size), MS_NODE_ID=str(rank), MS_SCHED_PORT="1",
                          MS_DTENSOR_JOB=address, GLOG_v="3")
        import numpy as np
        from mindspore import Tensor

        from ms_dtensor import comm
        comm.start("cpu")
        self.np, self.size, self.tensor = np, size, Tensor
        self._use(comm.group(range(size)))

    def _use(self, group):
        self.group = group

    def full(self, n: int, value: float):
        return self.tensor.from_numpy(self.np.full(n, value, self.np.float32))

    def call(self, what: str, n: int):
        """A function of no arguments that makes the collective on `n` elements."""
        g, w, x = self.group, self.size, self.full(n, 1.0)
        cut = [n // w] * w
        if what == "all_gather":
            part = self.full(n // w, 1.0)
            return lambda: g.all_gather(part, 0, cut)
        if what == "all_to_all":
            square = self.tensor.from_numpy(self.np.ones((w, n // w), self.np.float32))
            return lambda: g.all_to_all(square, 0, [1] * w, 1, cut)
        return {"all_reduce": lambda: g.all_reduce(x), "reduce_scatter": lambda: g.reduce_scatter(x, "sum", 0, cut),
                "broadcast": lambda: g.broadcast(x, 0), "copies": self._copies(n)}[what]

    def _copies(self, n: int):
        a, b = self.np.ones(n, self.np.float32), self.np.ones(n, self.np.float32)
        return lambda: self.np.copyto(b, a)

    def barrier(self):
        self.group.barrier()

    def greatest(self, value: float) -> float:
        return max(self.group.all_gather_object(value))


class Mccl(Shm):
    """MindSpore's own CPU backend under the same `Group`."""

    def __init__(self, group, np, tensor):
        self.np, self.size, self.tensor = np, group.size, tensor
        self._use(group)


class Engine(Shm):
    """The engine alone."""

    def __init__(self, rank: int, size: int, address: str):
        import numpy as np

        from ms_dtensor.comm.shm.engine import Engine as Core
        self.np, self.size, self.ranks = np, size, tuple(range(size))
        self.core = Core(rank, size, f"ms_dtensor-bench-{address}")

    def full(self, n: int, value: float):
        return self.np.full(n, value, self.np.float32)

    def call(self, what: str, n: int):
        e, w, r, x = self.core, self.size, self.ranks, self.full(n, 1.0)
        cut = [n // w] * w
        square, part = x.reshape(w, n // w), self.full(n // w, 1.0)
        return {"all_reduce": lambda: e.all_reduce(x, "sum", r), "all_gather": lambda: e.all_gather(part, 0, cut, r),
                "reduce_scatter": lambda: e.reduce_scatter(x, "sum", 0, cut, r),
                "all_to_all": lambda: e.all_to_all(square, 0, [1] * w, 1, cut, r),
                "broadcast": lambda: e.broadcast(x, 0, r), "copies": self._copies(n)}[what]

    def barrier(self):
        self.core.barrier(self.ranks)

    def greatest(self, value: float) -> float:
        return max(self.core.all_gather_object(value, self.ranks))


class Gloo:
    """torch.distributed on preallocated tensors."""

    def __init__(self, rank: int, size: int, address: str):
        import torch
        import torch.distributed as dist
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file:///tmp/{address}", rank=rank, world_size=size)
        self.torch, self.dist, self.size = torch, dist, size

    def call(self, what: str, n: int):
        d, x, y = self.dist, self.torch.zeros(n), self.torch.ones(n)  # zeros: in-place sums must stay finite
        part = self.torch.ones(n // self.size)
        return {"all_reduce": lambda: d.all_reduce(x), "all_gather": lambda: d.all_gather_into_tensor(y, part),
                "reduce_scatter": lambda: d.reduce_scatter_tensor(part, y),
                "all_to_all": lambda: d.all_to_all_single(y, x), "broadcast": lambda: d.broadcast(x, 0)}[what]

    def barrier(self):
        self.dist.barrier()

    def greatest(self, value: float) -> float:
        t = self.torch.tensor([value], dtype=self.torch.float64)
        self.dist.all_reduce(t, op=self.dist.ReduceOp.MAX)
        return t.item()


SIDES = {"shm": Shm, "engine": Engine, "gloo": Gloo}


def samples(side, what: str, nbytes: int, seconds: float, least: int = 3, most: int = 40) -> list[float]:
    """Microseconds per call, one figure per sample, the same on all ranks."""
    fn, k = side.call(what, nbytes // 4), 20 if nbytes <= 64 * KIB else 1
    fn()
    fn()
    out, spent = [], 0.0
    while len(out) < most and (spent < seconds or len(out) < least):
        side.barrier()
        started = time.perf_counter()
        for _ in range(k):
            fn()
        ended = time.perf_counter()
        if what == "copies":  # nothing makes the ranks wait for each other: from the first start to the last end
            worst = side.greatest(ended) + side.greatest(-started)
        else:
            worst = side.greatest(ended - started)
        out.append(1e6 * worst / k)
        spent += worst
    return out


def work(side: Any) -> None:
    """Serves cells named on stdin until it closes."""
    print("ready", flush=True)
    for line in sys.stdin:
        what, nbytes, seconds = line.split()
        times = samples(side, what, int(nbytes), float(seconds))
        print(json.dumps(times), flush=True)
    os._exit(0)  # gloo's threads may wait for each other at a tidy end


# -- all ranks -----------------------------------------------------------------------------------------------------------
class Team:
    """The processes of one side."""

    def __init__(self, kind: str, size: int, script: str = __file__):
        address = f"bench{os.getpid()}x{random.randrange(1 << 30)}"
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path)
        self.ranks = [subprocess.Popen([sys.executable, script, "--worker", kind, str(r), str(size), address], env=env,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                      for r in range(size)]
        for p in self.ranks:
            self._answer(p, "ready")

    def _answer(self, p, starts: str) -> str:
        for line in p.stdout:  # MindSpore prints on stdout as well
            if line.startswith(starts):
                return line
        raise SystemExit(f"a rank ended with {p.wait()}")

    def run(self, what: str, nbytes: int, seconds: float) -> list[float]:
        for p in self.ranks:
            p.stdin.write(f"{what} {nbytes} {seconds}\n")
            p.stdin.flush()
        return [json.loads(self._answer(p, "[")) for p in self.ranks][0]

    def end(self) -> None:
        for p in self.ranks:
            p.stdin.close()
        for p in self.ranks:
            p.wait(30)


def compare(world: int, args) -> list[dict]:
    """Every cell of one world size."""
    ours, gloo, cells = Team(args.ours, world), Team("gloo", world), []
    for what in args.collectives:
        for nbytes in args.sizes:
            turns = [(gloo.run(what, nbytes, args.seconds), ours.run(what, nbytes, args.seconds),
                      ours.run("copies", nbytes, args.seconds / 4)) for _ in range(args.turns)]
            theirs, mine, copies = (statistics.median(sum(x, [])) for x in zip(*turns))
            copies *= PASSES.get(what, 1)
            cells.append({"world": world, "collective": what, "bytes": nbytes, "ours_us": round(mine, 1),
                          "gloo_us": round(theirs, 1), "ratio": round(mine / theirs, 4), "copies_us": round(copies, 1),
                          "to_copies": round(mine / copies, 2)})
            c = cells[-1]
            print(f"{world} {what:15s} {human(nbytes):>8s}  ours {mine:10.1f}  gloo {theirs:10.1f}  "
                  f"ratio {c['ratio']:6.3f}  copies {copies:9.1f}  x{c['to_copies']:.2f}", file=sys.stderr, flush=True)
    ours.end()
    gloo.end()
    return cells


def mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values))) if values else float("nan")


def summary(cells: list[dict]) -> dict:
    """Geometric means and worst cells beside their targets."""
    large, small = [c for c in cells if c["bytes"] > 64], [c for c in cells if c["bytes"] == 64]
    heavy = [c for c in cells if c["bytes"] >= 16 << 20]
    out = {"targets": TARGETS}
    if large:
        worst = max(large, key=lambda c: c["ratio"])
        out.update(geometric_mean=round(mean([c["ratio"] for c in large]), 4), worst_cell=worst,
                   cells_above_worst=sum(c["ratio"] > TARGETS["worst_cell"] for c in large),
                   by_world={w: round(mean([c["ratio"] for c in large if c["world"] == w]), 4)
                             for w in sorted({c["world"] for c in large})})
    if small:
        out.update(at_64_bytes=round(mean([c["ratio"] for c in small]), 4), worst_at_64_bytes=max(c["ratio"] for c in small))
    if heavy:
        out.update(to_copies_mean=round(mean([c["to_copies"] for c in heavy]), 3),
                   worst_to_copies=max(heavy, key=lambda c: c["to_copies"]))
    return out


# -- MCCL ----------------------------------------------------------------------------------------------------------------
def mccl_rank(path: str, seconds: float) -> None:
    """One rank under msrun: MCCL's world, and a shared-memory world beside it."""
    import numpy as np
    from mindspore import Tensor

    from ms_dtensor import comm
    from ms_dtensor.comm.shm.backend import ShmBackend
    comm.set_cpu_backend("mccl")
    world = comm.start("cpu")
    shm = ShmBackend(world.rank, world.size, os.environ["MS_SCHED_PORT"])
    ranks, cells = tuple(range(world.size)), []
    sides = [Mccl(comm.Group(b, ranks), np, Tensor) for b in (world.backend, shm)]
    for what in COLLECTIVES:
        turns = [[samples(side, what, 4 << 20, seconds) for side in sides] for _ in range(3)]
        theirs, mine = (statistics.median(sum(x, [])) for x in zip(*turns))
        cells.append({"world": world.size, "collective": what, "bytes": 4 << 20, "ours_us": round(mine, 1),
                      "mccl_us": round(theirs, 1), "speedup": round(theirs / mine, 2)})
    if world.rank == 0:
        Path(path).write_text(json.dumps(cells))
    shm.close()


def mccl(world: int, seconds: float) -> dict:
    sys.path.insert(0, str(ROOT))
    from tests.msrun import run_ranks
    with tempfile.TemporaryDirectory() as d:
        run_ranks(__file__, world, ["--mccl-rank", f"{d}/cells.json", str(seconds)], log_dir=Path(d),
                  env={"MS_DTENSOR_CHECK_EVERY": "0"})  # MCCL alone, without our comparison of the calls
        cells = json.loads(Path(f"{d}/cells.json").read_text())
    return {"cells": cells, "geometric_mean_speedup": round(mean([c["speedup"] for c in cells]), 2),
            "worst_speedup": min(c["speedup"] for c in cells), "targets": TARGETS}


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        work(SIDES[sys.argv[2]](int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
        return 0
    if sys.argv[1:2] == ["--mccl-rank"]:
        mccl_rank(sys.argv[2], float(sys.argv[3]))
        return 0
    numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--worlds", type=numbers, default=[2, 4, 8])
    p.add_argument("--sizes", type=numbers, default=list(SIZES))
    p.add_argument("--collectives", type=lambda text: text.split(","), default=list(COLLECTIVES))
    p.add_argument("--seconds", type=float, default=0.15, help="per side and turn of a cell; 3 samples at least")
    p.add_argument("--turns", type=int, default=3)
    p.add_argument("--ours", choices=("shm", "engine"), default="shm")
    p.add_argument("--mccl", action="store_true")
    p.add_argument("--json", type=Path)
    args = p.parse_args()
    if args.mccl:
        out = mccl(4, args.seconds)
    else:
        cells = [c for world in args.worlds for c in compare(world, args)]
        out = {"ours": args.ours, "summary": summary(cells), "cells": cells}
    out.update(cpus=os.cpu_count(), date=time.strftime("%Y-%m-%d"))
    if args.json:
        args.json.write_text(json.dumps(out, indent=1) + "\n")
    print(json.dumps(out if args.mccl else out["summary"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
