# SPDX-License-Identifier: Apache-2.0
"""What every rank of a launch runs: `run.py` starts it under msrun with the launch as one JSON argument.

The pieces of a launch run one after another; rank 0 writes each one's file when it is done, so that what is done stays when
a later piece kills the job. How long the start took is written by every launch: from the runner's call to the process (by
the clock of the first host), to MindSpore, to the world, to a mesh, to its first collective; of the slowest rank each.
"""
from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path

BEGAN = time.time()
ROOT = Path(__file__).resolve().parents[3]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)


def write(path: Path, content: dict) -> None:
    """Whole or not at all."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    new.rename(path)


def main(launch: dict, node: int) -> None:
    if os.environ.get("MS_ROLE") == "MS_SCHED" and node > 0:
        return  # msrun starts a scheduler wherever the address is local, so on a second "node" of one host too
    import psutil

    marks = [("process", psutil.Process().create_time()), ("python", BEGAN)]
    from model_zoo.llama.ranks import start_device
    device = start_device()
    marks.append(("import mindspore", time.time()))
    import importlib

    from ms_dtensor import comm
    if device == "cpu":
        comm.set_cpu_backend(launch["cpu_backend"])
    from scripts.bench.cluster.world import Bench
    bench = Bench(device, launch["slots"], launch["peaks"])
    marks.append(("world", time.time()))
    mesh = bench.mesh(all=bench.size)
    group = mesh.get_group()
    marks.append(("mesh", time.time()))
    import mindspore as ms
    group.all_reduce(ms.Tensor([1.0])).asnumpy()
    marks.append(("first collective", time.time()))
    out = Path(launch["out"])
    rows = [{"stage": "launch to process", "seconds": round(marks[0][1] - launch["called"], 3)}]
    rows += [{"stage": name, "seconds": round(bench.slowest(at - before), 3)}
             for (_, before), (name, at) in zip(marks, marks[1:])]
    if bench.rank == 0:
        facts = {"device": bench.name, "kind": device, "backend": bench.backend.name, "ranks": bench.size}
        name = f"startup_{launch['name']}_{bench.size}"
        write(out / "pieces" / f"{name}.json",
              {"piece": name, "benchmark": "startup", "ranks": bench.size, "world": facts, "rows": rows})
    for piece in launch["pieces"]:
        if piece["benchmark"] == "startup":
            continue
        began = time.perf_counter()
        if bench.rank == 0:
            (out / "at_work").write_text(piece["name"], encoding="utf-8")
        found = importlib.import_module(f"scripts.bench.cluster.{piece['benchmark']}").run(bench, piece["options"])
        if bench.rank == 0:
            write(out / "pieces" / f"{piece['name']}.json",
                  {"piece": piece["name"], "benchmark": piece["benchmark"], "ranks": bench.size,
                   "seconds": round(time.perf_counter() - began, 2), "rows": found})
        gc.collect()  # before the next one fills the memory
    bench.everybody.barrier()


if __name__ == "__main__":
    from model_zoo.llama.ranks import guarded

    sys.exit(guarded(lambda: main(json.loads(sys.argv[1]), int(sys.argv[2]))))
