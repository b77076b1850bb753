# SPDX-License-Identifier: Apache-2.0
"""What every rank of a launch runs: `run.py` starts it under msrun with the launch as one JSON argument.

The pieces of a launch run one after another; rank 0 writes each one's file when it is done, so that what is done stays when
a later piece kills the job. How long the start took is written by every launch: from the runner's call to the process (by
the clock of the first host), to MindSpore, to the world, to a mesh, to its first collective; of the slowest rank each.
"""
from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from .. import ranks
from . import suites
from .pieces import write

BEGAN = time.time()


def begin(launch: dict[str, Any]) -> Any:
    """This rank's `Bench`; how long that took is the launch's first piece."""
    import psutil

    marks = [("process", psutil.Process().create_time()), ("python", BEGAN)]
    device = ranks.start_device()
    marks.append(("import mindspore", time.time()))
    from ... import comm
    if device == "cpu":
        comm.set_cpu_backend(launch["cpu_backend"])
    from .world import Bench
    bench = Bench(device, launch["slots"], launch["peaks"])
    marks.append(("world", time.time()))
    group = bench.mesh(all=bench.size).get_group()
    marks.append(("mesh", time.time()))
    import mindspore as ms
    group.all_reduce(ms.Tensor([1.0])).asnumpy()
    marks.append(("first collective", time.time()))
    called = launch.get("called")  # nobody knows of a job that was started by others
    rows = [{"stage": "launch to process", "seconds": round(marks[0][1] - called, 3)}] if called else []
    rows += [{"stage": name, "seconds": round(bench.slowest(at - before), 3)}
             for (_, before), (name, at) in zip(marks, marks[1:])]
    if bench.rank == 0:
        facts = {"device": bench.name, "kind": device, "backend": bench.backend.name, "ranks": bench.size}
        name = f"startup_{launch['name']}_{bench.size}"
        write(Path(launch["out"]) / "pieces" / f"{name}.json",
              {"piece": name, "benchmark": "startup", "ranks": bench.size, "world": facts, "rows": rows})
    return bench


def measure(bench: Any, out: Path, name: str, benchmark: str, options: dict[str, Any]) -> None:
    """One piece, and its file."""
    if benchmark == "startup":
        return
    began = time.perf_counter()
    if bench.rank == 0:
        (out / "at_work").write_text(name, encoding="utf-8")
    found = importlib.import_module(suites.home(benchmark)).run(bench, options)
    if bench.rank == 0:
        write(out / "pieces" / f"{name}.json", {"piece": name, "benchmark": benchmark, "ranks": bench.size,
                                                "seconds": round(time.perf_counter() - began, 2), "rows": found})
    gc.collect()  # before the next one fills the memory


def main(launch: dict[str, Any], node: int) -> None:
    if os.environ.get("MS_ROLE") == "MS_SCHED" and node > 0:
        return  # msrun starts a scheduler wherever the address is local, so on a second "node" of one host too
    bench = begin(launch)
    for piece in launch["pieces"]:
        measure(bench, Path(launch["out"]), piece["name"], piece["benchmark"], piece["options"])
    bench.everybody.barrier()


if __name__ == "__main__":
    sys.exit(ranks.guarded(lambda: main(json.loads(sys.argv[1]), int(sys.argv[2]))))
