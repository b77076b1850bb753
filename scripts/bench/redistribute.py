# SPDX-License-Identifier: Apache-2.0
"""`DTensor.redistribute` on CPU against PyTorch's, same moves and sizes, both sides in one run, cell by cell.

    python scripts/bench/redistribute.py [--worlds 2,4,8] [--json out.json]

A mesh of one axis over all ranks, global tensors of 4 and 32 MiB (fp32), 1024 columns or 2048. One sample is a barrier and
one call with its wait, and counts as the slowest rank's time; see comm.py, which this shares its processes with.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

from comm import Gloo, Shm, Team, mean, work

SHAPES = {4 << 20: (1024, 1024), 32 << 20: (4096, 2048)}
MOVES = ("Shard(0)->Replicate", "Replicate->Shard(0)", "Partial->Replicate", "Partial->Shard(0)", "Shard(0)->Shard(1)")
TARGETS = {"geometric_mean": 0.4, "Shard(0)->Shard(1)": 0.2}


class Ours(Shm):
    """ms_dtensor."""

    def __init__(self, rank: int, size: int, address: str):
        super().__init__(rank, size, address)
        import ms_dtensor
        self.lib = ms_dtensor
        self.mesh = ms_dtensor.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))

    def call(self, what: str, n: int):
        rows, columns = SHAPES[4 * n]
        src, dst = ([getattr(self.lib, kind)(*dim)] for kind, dim in parts(what))
        held = rows // self.size if src[0].is_shard() else rows
        local = self.tensor.from_numpy(self.np.ones((held, columns), self.np.float32))
        x = self.lib.DTensor.from_local(local, self.mesh, src)
        return lambda: x.redistribute(placements=dst)


class Torch(Gloo):
    """torch.distributed.tensor."""

    def __init__(self, rank: int, size: int, address: str):
        super().__init__(rank, size, address)
        import torch.distributed.tensor as lib
        from torch.distributed.device_mesh import init_device_mesh
        self.lib, self.mesh = lib, init_device_mesh("cpu", (size,))

    def call(self, what: str, n: int):
        rows, columns = SHAPES[4 * n]
        src, dst = ([getattr(self.lib, kind)(*dim)] for kind, dim in parts(what))
        local = self.torch.ones(rows // self.size if src[0].is_shard() else rows, columns)
        x = self.lib.DTensor.from_local(local, self.mesh, src, run_check=False)

        def move():
            local = x.redistribute(placements=dst).to_local()
            return local.wait() if hasattr(local, "wait") else local  # functional collectives end on use
        return move


def parts(move: str) -> list[tuple[str, tuple[int, ...]]]:
    """`"Shard(0)->Replicate"` -> `[("Shard", (0,)), ("Replicate", ())]`."""
    return [(p.split("(")[0], tuple(map(int, p.split("(")[1][:-1])) if "(" in p else ()) for p in move.split("->")]


def compare(world: int, args) -> list[dict]:
    """Every cell of one world size."""
    ours, theirs, cells = Team("ours", world, __file__), Team("torch", world, __file__), []
    for move in MOVES:
        for nbytes in SHAPES:
            turns = [(theirs.run(move, nbytes, args.seconds), ours.run(move, nbytes, args.seconds))
                     for _ in range(args.turns)]
            t, m = (statistics.median(sum(x, [])) for x in zip(*turns))
            cells.append({"world": world, "move": move, "bytes": nbytes, "ours_us": round(m, 1), "torch_us": round(t, 1),
                          "ratio": round(m / t, 4)})
            print(f"{world} {move:20s} {nbytes >> 20:3d} MiB  ours {m:10.1f}  torch {t:10.1f}  ratio {m / t:6.3f}",
                  file=sys.stderr, flush=True)
    ours.end()
    theirs.end()
    return cells


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        work({"ours": Ours, "torch": Torch}[sys.argv[2]](int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
        return 0
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--worlds", type=lambda text: [int(x) for x in text.split(",")], default=[2, 4, 8])
    p.add_argument("--seconds", type=float, default=0.2, help="per side and turn of a cell; 3 samples at least")
    p.add_argument("--turns", type=int, default=3)
    p.add_argument("--json", type=Path)
    args = p.parse_args()
    cells = [c for world in args.worlds for c in compare(world, args)]
    out = {"targets": TARGETS, "geometric_mean": round(mean([c["ratio"] for c in cells]), 4),
           "by_move": {m: round(mean([c["ratio"] for c in cells if c["move"] == m]), 4) for m in MOVES},
           "worst_cell": max(cells, key=lambda c: c["ratio"])}
    print(json.dumps(out, indent=1))
    if args.json:
        args.json.write_text(json.dumps({**out, "cells": cells, "cpus": os.cpu_count(), "date": time.strftime("%Y-%m-%d")},
                                        indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
