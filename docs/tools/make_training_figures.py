# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/recipes_training.md: three short runs of the smallest recipe, drawn by `python -m ms_dtensor plot`.

    python docs/tools/make_training_figures.py [--steps 60] [--keep FOLDER]

A minute or two on two cores; needs matplotlib. `--keep` keeps the runs, and draws them again if they are there.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs/figures"
COMMON = ["2", "tiny", "--data.max_bytes", "400000", "--train.eval_every", "20"]
FSDP = ["--parallel.dp", "2", "--parallel.fsdp", "true"]
RUNS = {"tp2": ["--parallel.tp", "2", "--parallel.sequence_parallel", "true"], "fsdp2": FSDP,
        "fsdp2_bfloat16": [*FSDP, "--train.dtype", "bfloat16"]}


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    env = {**os.environ, "PYTHON": sys.executable}
    with tempfile.TemporaryDirectory() as made:
        folder = options.keep or Path(made)
        for name, words in RUNS.items():
            if not (folder / name / "metrics.jsonl").exists():
                command = ["bash", str(ROOT / "scripts/run_llama.sh"), *COMMON, *words, "--train.steps", str(options.steps),
                           "--train.log_dir", str(folder / name)]
                subprocess.run(command, env=env, check=True)
        several = [sys.executable, "-m", "ms_dtensor", "plot", *(str(folder / name) for name in RUNS), "--out", made]
        subprocess.run(several, env={**env, "PYTHONPATH": str(ROOT) + os.pathsep + env.get("PYTHONPATH", "")}, check=True)
        OUT.mkdir(exist_ok=True)
        for picture in ("loss", "throughput", "communication", "memory"):
            (OUT / f"training_{picture}.png").write_bytes((Path(made) / f"{picture}.png").read_bytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
