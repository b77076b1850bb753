# SPDX-License-Identifier: Apache-2.0
"""Twelve training steps, dry and with kernels: communication, memory and time predicted beside measured, as JSON.

    python scripts/bench/predicted.py --measured measured.json [--hardware two.yaml --of1 one.yaml --of4 four.yaml]

Machines' files are this machine's, of as many ranks as a row has (`python -m ms_dtensor calibrate --hardware two.yaml`,
under `msrun --worker_num=2`, and of one under `taskset -c 0`: MindSpore's products take all cores that they may, whatever
OMP_NUM_THREADS says); nothing in them is fitted to these rows. Each row has processes of its own, one core each.
A machine's pace drifts by minutes: of several files, made in turns, each figure's median counts (`--measured a.json b.json`,
of the times too).
Of steps that are not the first are measured, on rank 0: calls and bytes by collective and axes (`comm.record`); the most
bytes that tensors lie on (`heap.py`, which knows nothing of dry runs); the most of the process's pages over those after a
step of a tiny model, less what malloc had free once the model had been made; and in processes that nobody watches the median
time. Needs a C compiler. Who is chosen among experts is fixed, as it is in a dry run.
"""
from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import one_thread
from heap import Heap, built
from llama_step import SIZES

one_thread()
import numpy as np  # noqa: E402  after the number of threads is set
import yaml  # noqa: E402

from model_zoo.llama.config import (  # noqa: E402
    Config,
    ExpertsConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)

NARROW = SIZES["small"][0]
WIDE = replace(SIZES["large"][0], n_layers=4)
EXPERTS = replace(SIZES["experts"][0], experts=ExpertsConfig(4, 2))
ROWS: dict[str, tuple[ModelConfig, dict, bool]] = {  # model, axes, whether layers are recomputed
    "single": (NARROW, {}, False), "single, recomputed": (NARROW, {}, True), "tp2": (NARROW, {"tp": 2}, False),
    "dp2": (NARROW, {"dp": 2}, False), "fsdp2": (NARROW, {"dp": 2, "fsdp": True}, False),
    "zero1": (NARROW, {"dp": 2, "zero1": True}, False), "tp2 x dp2": (NARROW, {"dp": 2, "tp": 2}, False),
    "pp2": (NARROW, {"pp": 2}, False), "cp2": (NARROW, {"cp": 2}, False),
    "ep2": (EXPERTS, {"dp": 2, "ep": 2, "fsdp": True}, False),
    "single, wide": (WIDE, {}, False), "fsdp2, wide, recomputed": (WIDE, {"dp": 2, "fsdp": True}, True)}
MORE = {"sp2": (NARROW, {"tp": 2, "sequence_parallel": True}, False),  # of `suggested.py`, which compares it with tp2
        "pp2, zbh1": (NARROW, {"pp": 2, "pp_schedule": "zbh1"}, False),  # whose memory alone is compared
        "pp2, zbv": (NARROW, {"pp": 2, "pp_schedule": "zbv", "pp_stages_per_rank": 2}, False)}


def config(row: str, compiled: bool = False) -> Config:
    model, axes, again = (ROWS | MORE)[row]
    return Config(model=model, parallel=ParallelConfig(**axes), optim=OptimConfig(clip_norm=1.0), train=TrainConfig(
        batch=4, seq=256, compile=compiled, recompute=again, micro_batches=4 if axes.get("pp", 1) > 1 else 1))


def world_of(cfg: Config) -> int:
    p = cfg.parallel
    return p.pp * p.dp * p.cp * p.tp


def resident() -> int:
    """Bytes of this process's pages but those of files, of which others have a part that come and go; of what ranks share
    its part."""
    return sum(int(line.split()[1]) << 10 for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
               if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def by_name(events) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    for e in events:
        one = out.setdefault(f"{e.op} {','.join(e.axes)}".rstrip(), [0, 0])
        one[0] += 1
        one[1] += e.bytes
    return out


class Watch:
    """The most pages of this process at one time, asked for every few milliseconds."""

    def __init__(self) -> None:
        self.most, self._ends = 0, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ends.wait(0.005):
            self.most = max(self.most, resident())

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ends.set()
        self._thread.join()


def real(row: str, steps: int, watched: bool, compiled: bool) -> dict[str, Any]:
    """On this rank, with kernels; where it is watched the tracker is loaded. `compiled`: attention is one node."""
    cfg = config(row, compiled)
    if world_of(cfg) == 1:  # before MindSpore has threads; of several ranks each is bound to one by the library
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import mindspore as ms

    from model_zoo.llama.parallelize import make_mesh
    from model_zoo.llama.trainer import Trainer
    from ms_dtensor import DTensor, comm
    from ms_dtensor.parallel import experts, experts_counts
    from ms_dtensor.parallel.sharding.memory import trim

    mesh = make_mesh("cpu", cfg.parallel)
    ms.runtime.launch_blocking()
    if cfg.model.experts is not None:  # as benchmarks of experts do: who is chosen is no matter of the data
        for place in (experts, experts_counts):
            assert hasattr(place, "on_host")
            place.on_host = lambda chosen: _in_turn(chosen.shape, cfg.model.experts.count)  # type: ignore[attr-defined]
    draw = (np.random.default_rng(0).random((4, 257)) ** 4 * 512).astype(np.int32)
    ids, labels = draw[:, :-1].copy(), draw[:, 1:].copy()

    def begun(cfg: Config, length: int = 256) -> Callable[[], None]:
        trainer = Trainer(cfg, None, mesh)

        def step() -> None:
            loss, grads = trainer.gradients(ids[:, :length].copy(), labels[:, :length].copy())
            trainer.update(grads, 0)
            float(loss.full_tensor() if isinstance(loss, DTensor) else loss)
        step()
        return step
    if not watched:
        step, times = begun(cfg), []
        for _ in range(steps + 1):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
        return {"seconds": statistics.median(times[1:])}
    heap = Heap()
    tiny = replace(cfg, model=replace(cfg.model, dim=64, ffn_dim=64, vocab_size=512), train=replace(cfg.train, seq=8))
    begun(tiny, 8)  # what a process has once; of the pool hardly a page
    gc.collect()
    before, shown = heap.now(), resident()
    step = begun(cfg)
    with comm.record() as events:
        step()
    gc.collect()
    trim()  # holes that making the model has left are no pages of a step
    heap.again()
    with Watch() as watch:
        for _ in range(2):
            step()
    return {"comm": by_name(events), "tensors": heap.most() - before, "rss": watch.most - shown}


def _in_turn(shape: tuple[int, ...], count: int) -> np.ndarray:
    return (np.arange(np.prod(shape)) % count).reshape(shape).astype(np.int32)


def dry(row: str, hardware: str | None = None) -> dict[str, Any]:
    """The same of rank 0, without."""
    import mindspore as ms

    from model_zoo.llama.dry import dry_stages
    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    cfg = config(row)
    run, *beside = dry_stages(cfg, world_of(cfg))
    memory = run.memory()
    return {"seconds": None if hardware is None else run.seconds(hardware, beside), "comm": by_name(run.communication),
            "tensors": memory.peak, "rss": memory.resident, "flops": run.flops(), "kinds": memory.at_peak,
            "assumed": list(run.assumed)}


def launched(row: str, steps: int, watched: bool, compiled: bool = False) -> dict[str, Any]:
    n = world_of(config(row))
    with tempfile.TemporaryDirectory() as folder:
        args = [str(Path(__file__).resolve()), "--real", row, "--steps", str(steps), "--out", f"{folder}/told.json",
                *["--watched"] * watched, *["--compiled"] * compiled]
        begin = [sys.executable] if n == 1 else [
            "msrun", f"--worker_num={n}", f"--local_worker_num={n}", "--join=True", f"--log_dir={folder}/log",
            f"--master_port={20000 + abs(hash((row, time.time_ns()))) % 20000}"]
        done = subprocess.run([*begin, *args], timeout=900, capture_output=True, text=True, check=False,
                              env=os.environ | ({"LD_PRELOAD": str(built())} if watched else {}))
        told = Path(f"{folder}/told.json")
        if not told.exists():
            logs = "".join(p.read_text()[-1500:] for p in Path(folder).glob("log/worker_*.log"))
            raise RuntimeError(f"{row}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}{logs}")
        return json.loads(told.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", nargs="+", default=[], help="this machine's files, of two ranks")
    parser.add_argument("--of1", nargs="+", default=[], help="of one; default: the same")
    parser.add_argument("--of4", nargs="+", default=[], help="of four; default: the same")
    parser.add_argument("--only", default=";".join(ROWS), help="rows, with ; between")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--measured", type=Path, nargs="+", default=[Path("measured.json")],
                        help="of real runs; those that the first lacks are run")
    parser.add_argument("--measure-only", choices=("seconds", "memory", "both"))
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--real", help=argparse.SUPPRESS)
    parser.add_argument("--dry", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.real or args.dry:
        told = real(args.real, args.steps, args.watched, args.compiled) if args.real else dry(args.dry, *args.hardware)
        from ms_dtensor import comm
        if args.dry or (world := comm.current_world()) is None or world.rank == 0:
            Path(args.out).write_text(json.dumps(told))
        return
    names, first = args.only.split(";"), args.measured[0]
    measured = json.loads(first.read_text()) if first.exists() else {}
    for name in names:
        own = measured.setdefault(name, {})
        for what, found in (("seconds", "seconds"), ("memory", "tensors")):
            if found not in own and args.measure_only in (None, "both", what):
                own |= launched(name, args.steps, what == "memory")
                first.write_text(json.dumps(measured, indent=1) + "\n")
                print("measured", what, name, file=sys.stderr, flush=True)
    if args.measure_only:
        return
    for name in names:
        measured[name]["seconds"] = statistics.median(json.loads(p.read_text())[name]["seconds"] for p in args.measured)
    rows = {}
    for name in names:
        machines = {1: args.of1, 4: args.of4}.get(world_of(config(name))) or args.hardware
        with tempfile.TemporaryDirectory() as folder:
            more = []
            if machines:
                more = ["--hardware", f"{folder}/machine.yaml"]
                Path(more[1]).write_text(yaml.safe_dump(middle([yaml.safe_load(Path(p).read_text()) for p in machines])))
            subprocess.run([sys.executable, __file__, "--dry", name, "--out", f"{folder}/told.json", *more], check=True,
                           timeout=240, stdout=subprocess.DEVNULL)
            predicted = json.loads(Path(f"{folder}/told.json").read_text())
        real_one = measured[name]
        over = {k: round(predicted[k] / real_one[k], 3) if predicted[k] and real_one.get(k) else None
                for k in ("seconds", "tensors", "rss")}
        rows[name] = {"communication equal": predicted["comm"] == real_one.get("comm"), **over, "predicted": predicted,
                      "measured": real_one}
        print(name, {k: v for k, v in rows[name].items() if k not in ("predicted", "measured")}, file=sys.stderr, flush=True)
    print(json.dumps({"rows": rows, **order(rows)}, indent=1))


def middle(told: list) -> Any:
    """Of machines' files, read, each figure's median."""
    one = told[0]
    if isinstance(one, dict):
        return {k: middle([t[k] for t in told]) for k in one}
    if isinstance(one, list):
        return [middle(list(each)) for each in zip(*told, strict=True)]
    return statistics.median(told) if isinstance(one, int | float) and not isinstance(one, bool) else one


def order(rows: dict[str, Any]) -> dict[str, Any]:
    """Of how many pairs the quicker one is told."""
    timed = [(r["predicted"]["seconds"], r["measured"]["seconds"]) for r in rows.values() if r["seconds"]]
    pairs = [(a, b) for i, a in enumerate(timed) for b in timed[i + 1:]]
    return {"pairs": len(pairs), "in order": sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)}


if __name__ == "__main__":
    main()
