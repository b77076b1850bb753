# SPDX-License-Identifier: Apache-2.0
"""The page of a run: what a dry run predicts of its step, beside what was measured; `predicted.html` in the run's folder.

    python model_zoo/llama/tools/predict.py RUN_DIR [--hardware 910b|FILE.yaml] [--rank 0]

Reads `config.yaml` and `metrics.jsonl`, which a run writes, and starts no rank. Without a machine no time is predicted.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(ROOT)

from model_zoo.llama.config import Config  # noqa: E402
from model_zoo.llama.configio import load  # noqa: E402

DEVICE = {"910b": "Ascend", "910c": "Ascend", "a100": "GPU", "h100": "GPU"}


def measured(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the steps of a `metrics.jsonl`: the median of their seconds but the first's, and the last one's communication."""
    steps = [line for line in lines if "ms" in line]
    if not steps:
        return {}
    out: dict[str, Any] = {"seconds": statistics.median(line["ms"] for line in steps[1:] or steps) / 1e3}
    if "comm" in steps[-1]:
        out["comm"] = {name: tuple(told[:2]) for name, told in steps[-1]["comm"].items()}
    return out


def world_of(cfg: Config) -> int:
    """Ranks of a resolved configuration."""
    p = cfg.parallel
    return p.dp * p.tp * p.cp * p.pp


def write_page(folder: Path, hardware: str | None, rank: int) -> Path:
    """`predicted.html` of a run's folder."""
    from model_zoo.llama.dry import dry_step
    cfg, _ = load(["--config", str(folder / "config.yaml")])
    run = dry_step(cfg, world_of(cfg), rank, DEVICE.get(str(hardware), "CPU"))
    known = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    run.report(folder / "predicted.html", title=f"A step of {folder.name}, rank {rank} of {run.world}", hardware=hardware,
               measured=measured(known), links=[("metrics.jsonl", "what was measured"), ("config.yaml", "of the run")])
    return folder / "predicted.html"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hardware")
    parser.add_argument("--rank", type=int, default=0)
    args = parser.parse_args()
    import mindspore as ms
    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    print(write_page(args.folder, args.hardware, args.rank))


if __name__ == "__main__":
    main()
