# SPDX-License-Identifier: Apache-2.0
"""Each kind of bad input, on real ranks: a clear message on every rank, a non-zero exit, no hang, under 30 seconds.

    python -m tests.long.check_bad_input [--workers 4]

Prints a line per kind and exits non-zero if one misses. `--case NAME` is what a rank runs.
"""
from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from model_zoo.llama.launch import environment, msrun_command  # noqa: E402
from ms_dtensor.tools.ranks import guarded, world_size  # noqa: E402

LIMIT = 30.0
TRAIN = [str(ROOT / "model_zoo/llama/train.py"), "--config", str(ROOT / "model_zoo/llama/configs/tiny.yaml")]
COMMANDS = {
    "degrees that do not multiply to the world": (["--parallel.tp", "3"], "multiply"),
    "heads not divisible by tp": (["--parallel.tp", "4", "--model.n_heads", "6", "--model.n_kv_heads", "6"], "head"),
    "a missing data path": (["--parallel.tp", "4", "--data.path", "/no/such/file"], "/no/such/file"),
    "an unknown configuration key": (["--parallel.tp", "4", "--optim.learning_rate", "1"], "lr"),
}


CALLS = {  # of the package, MindSpore, a mesh of one axis, and a plain tensor
    "a pattern that matches no cell": (lambda md, ms, mesh, x: md.parallelize_module(
        ms.nn.SequentialCell(ms.nn.Dense(4, 4)), mesh, {"layer.*": md.ColwiseParallel()}), "matches no cell"),
    "a wrong number of placements": (lambda md, ms, mesh, x: md.distribute_tensor(x, mesh, [md.Shard(0), md.Shard(1)]),
                                     "one placement per mesh axis"),
    "a Shard dim out of range": (lambda md, ms, mesh, x: md.distribute_tensor(x, mesh, [md.Shard(2)]), "dims -2 to 1"),
    "a plain Tensor mixed with a DTensor": (lambda md, ms, mesh, x: md.distribute_tensor(x, mesh, [md.Shard(0)]) * x,
                                            "meets a DTensor"),
}


def call(name: str) -> None:
    """What a rank runs for one of `CALLS`."""
    import mindspore

    import ms_dtensor
    mesh = ms_dtensor.init_device_mesh("cpu", (world_size(),), mesh_dim_names=("tp",))
    CALLS[name][0](ms_dtensor, mindspore, mesh, mindspore.ops.arange(16).reshape(4, 4).astype(mindspore.float32))


def attempt(script: list[str], workers: int) -> tuple[int, float, list[str]]:
    """Exit code, seconds, and every rank's log."""
    with tempfile.TemporaryDirectory(prefix="ms_dtensor_bad_") as folder:
        start = time.time()
        done = subprocess.run(msrun_command(Path(script[0]), workers, Path(folder), script[1:]), env=environment(),
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=4 * LIMIT, check=False)
        return done.returncode, time.time() - start, [
            (Path(folder) / f"worker_{r}.log").read_text(errors="replace") for r in range(workers)]


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--case", choices=CALLS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        return guarded(lambda: call(options.case))
    kinds = {name: ([*TRAIN, *args], said) for name, (args, said) in COMMANDS.items()}
    kinds |= {name: ([__file__, "--case", name], said) for name, (_, said) in CALLS.items()}
    missed = 0
    for name, (script, said) in kinds.items():
        code, seconds, logs = attempt(script, options.workers)
        silent = [r for r, text in enumerate(logs) if said not in text]
        ok = code != 0 and seconds < LIMIT and not silent
        missed += not ok
        print(f"{'ok' if ok else 'MISSED':6} {name}: exit {code}, {seconds:.0f} s"
              + (f", not said by ranks {silent}" if silent else ", said by every rank"), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
