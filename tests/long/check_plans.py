# SPDX-License-Identifier: Apache-2.0
"""The planner against brute force, and its speed on a large mesh; prints JSON, exits non-zero on a gap or a wrong result.

    python -m tests.long.check_plans                 every pair on the small meshes: cost gap to the oracle, executed result
    python -m tests.long.check_plans --every 20      each 20th pair only; --mesh 2,2 --only costs: a part
    python -m tests.long.check_plans --speed         65,536 ranks on 4x8x8x16x16: CPU ms for a pair never seen before

Optimality: `tests/pure/oracle_plan.py` looks at all states and all single moves between them. Execution: NumPy shards,
move by move, against cutting the full array. No MindSpore, no ranks.
"""
from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ms_dtensor.core.layout import Layout  # noqa: E402
from ms_dtensor.core.mesh import DeviceMesh  # noqa: E402
from ms_dtensor.core.placements import Partial, Replicate, Shard  # noqa: E402
from ms_dtensor.redistribute.graph import graph_of  # noqa: E402
from ms_dtensor.redistribute.plan import plan  # noqa: E402
from tests.pure.plan_pairs import EXECUTED, MESHES, SHAPES, check_costs, check_results  # noqa: E402


def checked(check: Callable, shapes: dict, every: int, meshes: list[tuple[int, ...]]) -> list[dict]:
    """Of each mesh and shape the pairs, and their cost gap or what results are wrong."""
    out = []
    for mesh, shape in [(one, shape) for one in meshes for shape in shapes[one]]:
        started = time.process_time()
        pairs, found = check(mesh, shape, every)
        told = {"worst_relative_gap": found} if check is check_costs else {"wrong": len(found), "first": found[:1]}
        out.append({"mesh": mesh, "shape": shape, "pairs": pairs, **told,
                    "cpu_seconds": round(time.process_time() - started, 1)})
        print(json.dumps(out[-1]), file=sys.stderr, flush=True)
    return out


def random_layout(rng: random.Random, mesh: DeviceMesh, shape, partial: bool) -> Layout:
    """Any placement on each axis, any axis order."""
    kinds = [Replicate(), *map(Shard, range(len(shape)))] + [Partial()] * partial
    placements = [rng.choice(kinds) for _ in range(mesh.ndim)]
    return Layout(mesh, placements, shape, "float32", rng.sample(range(mesh.ndim), mesh.ndim))


def speed(pairs: int, seed: int) -> dict:
    """CPU milliseconds per pair; every pair is planned once, so nothing comes from a cache."""
    mesh = DeviceMesh("cpu", np.arange(65536).reshape(4, 8, 8, 16, 16), mesh_dim_names=("pp", "dp", "ep", "cp", "tp"))
    rng, out = random.Random(seed), {"mesh": mesh.shape, "ranks": mesh.size(), "pairs_each": pairs}
    for ndim in (2, 3):  # the graph of all states, once in the life of a process, when the first hard pair comes
        started = time.process_time()
        graph_of(mesh.ndim, ndim)
        out[f"once_for_{ndim}d_ms"] = round(1e3 * (time.process_time() - started), 1)
    for name, shapes in {"2d": [(16384, 8192), (131072, 16384), (1001, 770), (4096, 32)],
                         "3d": [(512, 4096, 8192), (64, 1000, 300), (16, 8192, 8192)]}.items():
        times = []
        for i in range(pairs):
            shape = shapes[i % len(shapes)]
            src, dst = random_layout(rng, mesh, shape, True), random_layout(rng, mesh, shape, False)
            started = time.process_time()
            plan(src, dst)
            times.append(1e3 * (time.process_time() - started))
        out[name] = {"median_ms": round(statistics.median(times), 2), "p95_ms": round(sorted(times)[int(0.95 * pairs)], 2),
                     "max_ms": round(max(times), 2)}
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--mesh", help="only this one, as 2,2,2")
    parser.add_argument("--only", choices=("costs", "results"))
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.speed:
        print(json.dumps(speed(args.pairs, args.seed), indent=1))
        return 0
    meshes = [tuple(map(int, args.mesh.split(",")))] if args.mesh else list(MESHES)
    costs = checked(check_costs, SHAPES, args.every, meshes) if args.only != "results" else []
    results = checked(check_results, EXECUTED, args.every, meshes) if args.only != "costs" else []
    worst, wrong = max((x["worst_relative_gap"] for x in costs), default=0.0), sum(x["wrong"] for x in results)
    print(json.dumps({"pairs_compared": sum(x["pairs"] for x in costs), "worst_relative_gap": worst,
                      "pairs_executed": sum(x["pairs"] for x in results), "wrong": wrong,
                      "costs": costs, "results": results}, indent=1))
    return int(worst != 0 or wrong != 0)


if __name__ == "__main__":
    sys.exit(main())
