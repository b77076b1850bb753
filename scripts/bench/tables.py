# SPDX-License-Identifier: Apache-2.0
"""Each layout of the recipe's tables: what the formula says that a rank needs, beside a dry run of the program.

    python scripts/bench/tables.py [--files llama3_8b ...] [--layers 8]

One line of JSON each, in GiB, on the branch for Ascend; communicators' buffers, of which a dry run knows nothing, apart.
A dry run takes three of the micro-batches, of a pipeline one more than it has stages, as those behind hold no more.
`--layers` takes so many of the model's, or the next lower number that a pipeline's stages share, and the formula of as many.
Of a pipeline "dry run" is what the stage takes that needs most.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import mindspore as ms  # noqa: E402

from model_zoo.llama.config import Config  # noqa: E402
from model_zoo.llama.configio import load  # noqa: E402
from model_zoo.llama.dry import dry_stages  # noqa: E402
from model_zoo.llama.memory import documented, per_rank  # noqa: E402

CONFIGS = ROOT / "model_zoo/llama/configs"
GIB = 2**30


def shorter(cfg: Config, layers: int | None) -> Config:
    """With so many layers, each stage as many, and no more micro-batches than show what they hold together."""
    t, p = cfg.train, cfg.parallel
    few = min(max(3, p.pp + 1), t.micro_batches)
    n = cfg.model.n_layers
    if layers is not None and layers < n:
        n = p.stages * max(1, layers // p.stages)
    return replace(cfg, model=replace(cfg.model, n_layers=n),
                   train=replace(t, batch=t.batch // t.micro_batches * few, micro_batches=few,
                                 recompute_gib=t.recompute_gib * n / cfg.model.n_layers))


def rows(file: Path, layers: int | None) -> Iterator[dict]:
    for npus, options, said in documented(file):
        cfg = load(["--config", str(file), *options], npus)[0]
        whole, short = per_rank(cfg), shorter(cfg, layers)
        parts = per_rank(short)
        buffers = parts.pop("communication buffers")
        began = time.process_time()
        with redirect_stdout(sys.stderr):
            dry = max((run.memory() for run in dry_stages(short, npus, device="Ascend")), key=lambda m: m.peak)
        formula = sum(parts.values())
        yield {"file": file.stem, "NPUs": npus, "options": " ".join(options), "in file": said,
               "by formula": round(sum(whole.values()) / GIB, 1), "layers": short.model.n_layers,
               "of these": round(formula / GIB, 2), "dry run": round(dry.peak / GIB, 2),
               "ratio": round(formula / dry.peak, 3),
               "buffers": round(buffers / GIB, 2), "parts": {k: round(v / GIB, 2) for k, v in parts.items() if v},
               "of the dry run": {k: round(v / GIB, 2) for k, v in dry.at_peak.items() if v},
               "seconds": round(time.process_time() - began)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--files", nargs="+", default=sorted(f.stem for f in CONFIGS.glob("*_*.yaml")))
    parser.add_argument("--layers", type=int)
    args = parser.parse_args()
    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    for name in args.files:
        for row in rows(CONFIGS / f"{name}.yaml", args.layers):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
