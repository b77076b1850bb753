# SPDX-License-Identifier: Apache-2.0
"""A training step of a recipe on one rank of a cluster that is not here: what it takes to find out, and what is found.

    python scripts/bench/dry_run.py model_zoo/llama/configs/llama3_405b.yaml --world 16384 \
        --parallel.dp 2048 --parallel.hsdp 16 --train.batch 2048

Prints one line of JSON (the plan goes to stderr): seconds and peak memory of this process, then what the rank does in
its second step; `seconds` are of laying out and two steps, of all ranks of a pipeline that it waits for. No rank is started.
"""
from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import mindspore as ms

from model_zoo.llama.configio import load
from model_zoo.llama.dry import dry_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--device", default="Ascend")
    parser.add_argument("--hardware", default="910b")
    args, options = parser.parse_known_args()  # the others are the recipe's
    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    cfg, began = load(["--config", args.config, *options], args.world)[0], time.perf_counter()
    with redirect_stdout(sys.stderr):
        run = dry_step(cfg, args.world, args.rank, args.device)
    memory = run.memory()
    moved: dict[str, int] = {}
    for (op, axes, *_), (_, size) in run.comms().items():
        moved[f"{op} {','.join(axes)}"] = moved.get(f"{op} {','.join(axes)}", 0) + size
    print(json.dumps({
        "world": args.world, "rank": args.rank, "seconds": round(time.perf_counter() - began, 1),
        "process GiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2), "events": len(run.events),
        "PFLOPs": round(run.flops() / 1e15, 3), "step seconds": round(run.seconds(args.hardware), 2),
        "peak GiB": {k: round(v / 2**30, 2) for k, v in memory.at_peak.items()} | {"all": round(memory.peak / 2**30, 2)},
        "GB sent": {k: round(v / 1e9, 3) for k, v in sorted(moved.items())}}))


if __name__ == "__main__":
    main()
