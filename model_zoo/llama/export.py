# SPDX-License-Identifier: Apache-2.0
"""Writes a run's model as a folder that `transformers` loads, adapters merged into their matrices.

    python model_zoo/llama/export.py --from runs/sft --out sft_hf [--dtype bfloat16] [--max_positions 8192]

The tokenizer goes with it: --tokenizer, else that of the run's data (data.tokenizer, or what lies beside its token files),
else the tokenizer.json beside the weights; none where tokens are bytes. As generate.py and evaluate.py find theirs.
"""
from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make the repository root importable, and not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from model_zoo.llama.ranks import script
from ms_dtensor.errors import ConfigError
from ms_dtensor.tools.ranks import rank, start_device, world_size


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", required=True, help="a run's folder, a checkpoint, or Hugging Face's")
    parser.add_argument("--out", required=True, help="a new folder")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--max_positions", type=int, help="the longest text it is meant for; default: that of the published "
                        "model that it is or began with, else train.seq")
    parser.add_argument("--pp", type=int, default=1, help="stages: for what fits no other way")
    parser.add_argument("--tokenizer", help="tokenizer.json or its folder; default: see above")
    o = parser.parse_args(argv)
    from model_zoo.llama import hf, lora
    from model_zoo.llama.data import find_tokenizer
    from model_zoo.llama.generate import parts
    from model_zoo.llama.restore import restore, source_config
    from model_zoo.llama.tokens import copy_tokenizer, tokenizer_file

    own = source_config(o.source)[0]  # what can be refused is, before weights are read
    positions = o.max_positions
    if positions is None:
        positions = own.train.seq if own.train.init_hf is None else hf.read_positions(own.train.init_hf)
    if positions < 1:
        raise ConfigError(f"For 'export.py', --max_positions = {positions} is out of range.", "", "It is 1 or more.",
                          "--max_positions 1 or more")
    tokenizer = find_tokenizer(o.source, own.data, o.tokenizer)
    if tokenizer is not None:
        tokenizer_file(tokenizer)
    there = sorted(os.listdir(o.out)) if Path(o.out).is_dir() else [o.out] if Path(o.out).exists() else []
    there = [name for name in there if name.endswith((".safetensors", ".bin", ".index.json")) or name == o.out]
    if there:
        raise ConfigError(f"For 'export.py', --out = '{o.out}' has a model already, or is a file.", ", ".join(there[:5]),
                          "Files of two models in one folder would be read as one.", "--out with a new folder")
    cfg, model, _, where = restore(o.source, start_device(), world_size(), pp=o.pp)
    for part in parts(model):
        lora.merge(part)
    with lora.without_adapters(*parts(model)):
        whole, over = (model, None) if o.pp == 1 else (list(model.stages.values()), model.mesh)
        hf.save(whole, cfg.model, o.out, max_positions=positions, dtype=o.dtype, over=over)
    if rank() == 0:
        if tokenizer is not None:
            try:
                copy_tokenizer(tokenizer, Path(o.out))
            except OSError as error:
                raise ConfigError(f"For 'export.py', the tokenizer cannot be copied into '{o.out}': {error.strerror}.", "",
                                  "The model is there whole, its tokenizer not.",
                                  f"copy '{tokenizer}' there by hand, or export again into another folder") from None
        print(f"{where} -> {o.out}")


if __name__ == "__main__":
    sys.exit(script(lambda: run(sys.argv[1:])))
