# SPDX-License-Identifier: Apache-2.0
"""Writes a run's model as a folder that `transformers` loads, adapters merged into their matrices.

    python model_zoo/llama/export.py --from runs/sft --out sft_hf [--dtype bfloat16] [--max_positions 8192]
"""
from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make the repository root importable, and not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from model_zoo.llama.ranks import rank, script, start_device, world_size


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", required=True, help="a run's folder, a checkpoint, or Hugging Face's")
    parser.add_argument("--out", required=True, help="a new folder")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--max_positions", type=int, help="the longest text it is meant for; default: train.seq")
    o = parser.parse_args(argv)
    from model_zoo.llama.restore import restore

    cfg, model, _, where = restore(o.source, start_device(), world_size())

    from model_zoo.llama import hf, lora

    lora.merge(model)
    with lora.without_adapters(model):
        hf.save(model, cfg.model, o.out, max_positions=o.max_positions or cfg.train.seq, dtype=o.dtype)
    if rank() == 0:
        for folder in (o.source, cfg.train.init_hf, cfg.data.tokenizer):  # what says how its tokens are made
            for file in Path(folder or ".").glob("tokenizer*.json") if folder and Path(folder).is_dir() else ():
                shutil.copy(file, Path(o.out) / file.name)
        print(f"{where} -> {o.out}")


if __name__ == "__main__":
    sys.exit(script(lambda: run(sys.argv[1:])))
