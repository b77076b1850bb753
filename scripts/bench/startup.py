# SPDX-License-Identifier: Apache-2.0
"""What the library adds to MindSpore's start: the import, and a mesh with its first collective on 8 ranks.

    python scripts/bench/startup.py [--rounds 5] [--ranks 8] [--no-save]

The import is timed inside a fresh process, after `import mindspore`. On ranks the time runs from the moment when the last
one has imported everything (the first cannot go on before) until the last one has the result of its first all-reduce.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, finish, one_thread, summary

one_thread()
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # files compiled already, as pip leaves them; the first round compiles
IMPORTS = """
import time; a = time.perf_counter()
import mindspore; b = time.perf_counter()
import ms_dtensor; c = time.perf_counter()
ms_dtensor.DTensor, ms_dtensor.distribute_tensor, ms_dtensor.init_device_mesh, ms_dtensor.value_and_grad
d = time.perf_counter(); print((b - a) * 1e3, (c - b) * 1e3, (d - b) * 1e3)
"""


def rank_main(folder: str) -> None:
    import mindspore as ms

    from ms_dtensor import DTensor, Partial, init_device_mesh

    ones = ms.Tensor([1.0])
    start = time.monotonic()
    mesh = init_device_mesh("cpu", (int(os.environ["MS_WORKER_NUM"]),), mesh_dim_names=("tp",))
    made = time.monotonic()
    total = DTensor.from_local(ones, mesh, [Partial()]).full_tensor()
    end = time.monotonic()
    assert float(total) == mesh.size()
    Path(folder, f"{mesh.get_rank()}.json").write_text(json.dumps([start, made, end]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--rank", metavar="FOLDER")
    args = parser.parse_args()
    if args.rank:
        rank_main(args.rank)
        return
    from model_zoo.llama.launch import environment, msrun_command

    taken = []
    for _ in range(args.rounds):
        done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, check=True)
        taken.append([float(v) for v in done.stdout.split()[-3:]])
    mindspore, package, everything = zip(*taken)
    first = []
    for _ in range(args.rounds):
        folder = tempfile.mkdtemp(prefix="ms_dtensor_startup_")
        subprocess.run(msrun_command(Path(__file__).resolve(), args.ranks, Path(folder), ["--rank", folder]),
                       env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, timeout=200, check=True)
        start, made, end = zip(*(json.loads(p.read_text()) for p in Path(folder).glob("*.json")))
        first.append([(max(made) - max(start)) * 1e3, (max(end) - max(start)) * 1e3])
    result = {"import mindspore": summary(mindspore), "import ms_dtensor": summary(package),
              "import ms_dtensor, first use of its names": summary(everything),
              f"mesh of {args.ranks} ranks": summary([m for m, _ in first]),
              f"mesh of {args.ranks} ranks and first collective": summary([e for _, e in first])}
    finish("startup", {"unit": "ms", "rounds": args.rounds, "rows": result},
           [("", "ms", "least"), *((k, v["median"], v["least"]) for k, v in result.items())], not args.no_save)


if __name__ == "__main__":
    main()
