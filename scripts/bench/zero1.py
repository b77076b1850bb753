# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a ZeRO-1 step go: each pass over memory that the bound has not, by name, with its bytes and time.

    python scripts/bench/zero1.py [--size small|medium] [--rounds 12] [--no-save]

The bound is "half at once" of llama_step.py: half the batch on each of two ranks, no communication, the whole model's
update. Both step in turns in the same two processes, one thread and one core each. Times are of the processor, which a busy
machine leaves alone but for its caches; what ranks wait for each other (asleep) is a row of its own, of the clock. A pass is
timed twice: inside the step, and alone over as much memory, both ranks at once.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from common import finish, one_thread

one_thread()
import numpy as np  # noqa: E402  after the number of threads is set
from llama_step import SIZES, config, data  # noqa: E402

from model_zoo.llama.config import ParallelConfig  # noqa: E402

MIB = 2.0**20


class Passes:
    """Seconds by name, of one step."""

    def __init__(self) -> None:
        self.now: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []

    def around(self, owner, method: str, name: str, clock: Callable[[], float] = time.process_time) -> None:
        """Times a method."""
        given = getattr(owner, method)

        def timed(*args, **kwargs):
            start = clock()
            try:
                return given(*args, **kwargs)
            finally:
                self.now[name] += clock() - start
        setattr(owner, method, timed)

    def end(self, **more: float) -> None:
        self.steps.append({**self.now, **more})
        self.now.clear()

    def told(self) -> dict[str, tuple[float, float]]:
        """By name."""
        names = {name for step in self.steps for name in step}
        return {n: told([s.get(n, 0.0) for s in self.steps]) for n in sorted(names)}


def told(seconds: list[float], less: list[float] | None = None) -> tuple[float, float]:
    """Milliseconds, the median and the least; less what was measured beside it."""
    rest = [0.0] * len(seconds) if less is None else less
    least = min(seconds) - (0.0 if less is None else min(less))
    return round(statistics.median(a - b for a, b in zip(seconds, rest)) * 1e3, 1), round(least * 1e3, 1)


def alone(barrier: Callable[[], None], run: Callable[[], object]) -> tuple[float, float]:
    """What both ranks do at once, 7 times."""
    took = []
    for _ in range(7):
        barrier()
        start = time.process_time()
        run()
        took.append(time.process_time() - start)
    return told(took)


def rank_main(size: str, rounds: str, out: str) -> None:
    from model_zoo.llama.trainer import Trainer
    from ms_dtensor import DeviceMesh, init_device_mesh
    from ms_dtensor.comm.shm import parted
    from ms_dtensor.comm.shm.reduce import reduce_into
    from ms_dtensor.comm.shm.signals import Signals

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    group = init_device_mesh("cpu", (2,)).get_group()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})  # each rank has its own already
    cfg = config(size, ParallelConfig(dp=2, zero1=True))
    batch = data(cfg)
    half = tuple(x[:len(x) // 2] for x in batch)
    one = DeviceMesh("cpu", [[group.rank_index]], mesh_dim_names=("dp", "tp"))
    trainers = {"zero1": (Trainer(cfg, None, mesh), batch), "bound": (Trainer(config(size), None, None), half),
                "bound on DTensors": (Trainer(config(size), None, one), half)}
    passes, updates = Passes(), {name: list[float]() for name in trainers}
    passes.around(Signals, "sync", "meetings")
    passes.around(Signals, "sync", "waits of a rank for the other", time.perf_counter)
    passes.around(parted.PartedEngine, "all_gather_into", "gather")
    passes.around(parted.PartedEngine, "reduce_scatter_from", "reduce")
    steps: dict[str, list[float]] = {name: [] for name in trainers}

    def step(name: str) -> None:
        trainer, rows = trainers[name]
        group.barrier()
        passes.now.clear()
        start = time.process_time()
        loss, grads = trainer.gradients(*rows)
        middle = time.process_time()
        trainer.optimizer(grads)
        float(loss)
        end = time.process_time()
        steps[name].append(end - start)
        updates[name].append(end - middle)
        if name == "zero1":
            passes.end()
    for number in range(int(rounds) + 2):
        for name in [*trainers][::-1 if number % 2 else 1]:
            step(name)
    del passes.steps[:2]
    # the same passes, alone
    elements = sum(int(np.prod(p.shape)) for p in trainers["zero1"][0].params)
    own, whole = np.ones(elements // 2, np.float32), np.ones(elements, np.float32)
    chunk = np.ones(1 << 20, np.float32)  # what a reduction has in flight; stays in the cache of neither
    total = np.empty_like(own)

    def through_chunks() -> None:
        for at in range(0, own.size, chunk.size):
            n = min(chunk.size, own.size - at)
            chunk[:n] = whole[at:at + n]

    def added() -> None:
        for at in range(0, own.size, chunk.size):
            n = min(chunk.size, own.size - at)
            reduce_into([total[at:at + n]], "sum", [own[at:at + n], chunk[:n]])
    alones = {
        "own shards into the own window": alone(group.barrier, lambda: np.copyto(whole[:own.size], own)),
        "own shards into the other's window": alone(group.barrier, lambda: np.copyto(whole[own.size:2 * own.size], own)),
        "the other's half of the gradients into shared memory": alone(group.barrier, through_chunks),
        "own half and the other's, added": alone(group.barrier, added),
        "memory for the sums, touched the first time": alone(group.barrier, lambda: np.empty_like(own).fill(0)),
    }
    if group.rank_index == 0:
        Path(out).write_text(json.dumps({
            "shards_mib": round(own.nbytes / MIB, 1), "steps": {k: v[2:] for k, v in steps.items()},
            "updates": {k: v[2:] for k, v in updates.items()}, "in_the_step": passes.told(), "alone": alones}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--rank", nargs=3, metavar=("SIZE", "ROUNDS", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(*args.rank)
        return
    from model_zoo.llama.launch import environment, msrun_command

    with tempfile.TemporaryDirectory(prefix="ms_dtensor_zero1_") as folder:
        out = Path(folder) / "result.json"
        command = msrun_command(Path(__file__).resolve(), 2, Path(folder), ["--rank", args.size, str(args.rounds), str(out)])
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1800, check=False)
        if not out.exists():
            sys.exit(done.stderr[-1000:] + (Path(folder) / "worker_0.log").read_text()[-3000:])
        got = json.loads(out.read_text())
    steps, updates, shards, inside = got["steps"], got["updates"], got["shards_mib"], got["in_the_step"]
    ratio = statistics.median(b / z for b, z in zip(steps["bound"], steps["zero1"]))

    table: list[tuple] = [("", "MiB read", "MiB written", "ms", "least")]
    for name, took in got["alone"].items():
        read = 2 * shards if "added" in name else 0 if "touched" in name else shards
        table.append((f"{name} (alone)", read, shards, *took))
    table += [("gather (in the step, awake in meetings too)", shards, 2 * shards, *inside["gather"]),
              ("reduce (in the step, awake in meetings too)", 3 * shards, 2 * shards, *inside["reduce"]),
              ("awake in meetings of these and other calls", "", "", *inside["meetings"]),
              ("asleep or awake in meetings, by the clock", "", "", *inside["waits of a rank for the other"]),
              ("DTensors: the bound's step on a mesh of one rank, less the bound's", "", "",
               *told(steps["bound on DTensors"], steps["bound"])),
              ("update of a shard, less the bound's", "", "", *told(updates["zero1"], updates["bound"])),
              ("zero1", "", "", *told(steps["zero1"])), ("bound", "", "", *told(steps["bound"])),
              ("bound / zero1", "", "", round(ratio, 3), round(min(steps["bound"]) / min(steps["zero1"]), 3)),
              ("bound / zero1, if gather and reduce took no time", "", "",
               *(round(of(steps["bound"]) / (of(steps["zero1"]) - (inside["gather"][k] + inside["reduce"][k]) / 1e3), 3)
                 for k, of in enumerate((statistics.median, min))))]
    result = {"unit": "ms", "rounds": args.rounds, "ratio": round(ratio, 4), "rows": table[1:], **got}
    finish(f"zero1_{args.size}", result, table, not args.no_save)


if __name__ == "__main__":
    main()
