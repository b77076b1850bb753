# SPDX-License-Identifier: Apache-2.0
"""Perplexity of a trained model on a text or a token file, on one process or many.

    python model_zoo/llama/evaluate.py --from runs/quickstart                      # its own held-out text
    msrun --worker_num=4 --local_worker_num=4 --join=True model_zoo/llama/evaluate.py --from Qwen3-0.6B --text book.txt

`--from` is what `generate.py` takes. The text is cut into windows of --seq tokens and each token but the first of all is
predicted once, from those before it in its window. Ranks share the windows out; the sum is the same on any mesh.
Of a run on conversations it is the held-out ones, one a window of train.seq, and only what the assistant says counts.

Text becomes tokens by --tokenizer, else by that of the run's data (data.tokenizer, or what lies beside its token files),
else by the tokenizer.json beside the weights, else as bytes: in generate.py, evaluate.py and export.py alike.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

if __package__ in (None, ""):  # run as a script: make the repository root importable, and not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from model_zoo.llama.chat import IGNORED
from model_zoo.llama.ranks import script
from ms_dtensor.errors import ConfigError
from ms_dtensor.tools.ranks import rank, start_device, world_size


def windows(tokens: np.ndarray, seq: int, batch: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and labels i32[batch, seq] that predict each token but the first once; what is missing in the last is ignored.

    Example:
        >>> import numpy as np
        >>> from model_zoo.llama.evaluate import windows
        >>> [labels.tolist() for _, labels in windows(np.arange(6), 2, 2)]
        [[[1, 2], [3, 4]], [[5, -100], [-100, -100]]]
    """
    count = -(-(len(tokens) - 1) // (seq * batch)) * batch
    ids, labels = np.zeros(count * seq, np.int32), np.full(count * seq, IGNORED, np.int32)
    ids[:len(tokens) - 1], labels[:len(tokens) - 1] = tokens[:-1], tokens[1:]
    return list(zip(*(x.reshape(-1, batch, seq) for x in (ids, labels)), strict=True))


def loss_of(model, mesh, batches: list[tuple[np.ndarray, np.ndarray]], loss_parallel: bool = False) -> float:
    """Nats a label that counts, of inputs and labels; `model` and `mesh` as for `generate`."""
    import ms_dtensor as md
    from model_zoo.llama.model import cross_entropy
    from model_zoo.llama.parallelize import own_rows
    from ms_dtensor.pipeline import Schedule, ScheduleGPipe

    def mean_of(out, target):
        logits = out[0] if isinstance(out, tuple) else out
        return md.loss_parallel(logits, target.reshape(-1)) if loss_parallel else cross_entropy(logits, target)

    def mean(ids, target):
        if stages is None:
            return mean_of(model(ids), target)
        return stages.eval(ids, target=target, length=ids.shape[1])
    stages = ScheduleGPipe(list(model.stages.values()), 1, mean_of) if isinstance(model, Schedule) else None
    total, count = 0.0, 0
    for ids, labels in batches:
        counted = int((labels != IGNORED).sum())
        total, count = total + float(mean(own_rows(ids, mesh), own_rows(labels, mesh))) * counted, count + counted
    return total / count


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", required=True, help="a run's folder, a checkpoint, or Hugging Face's")
    parser.add_argument("--text", help="a file or folder of text, or a token file; default: the held-out part of "
                        "the run's own data, text or conversations")
    parser.add_argument("--tokenizer", help="tokenizer.json or its folder; default: see above")
    parser.add_argument("--seq", type=int, help="tokens in a window, figures depend on it; default: the run's; 128 of "
                        "a Hugging Face folder")
    parser.add_argument("--batch", type=int, default=8, help="windows at a time to a data-parallel rank")
    parser.add_argument("--max_tokens", type=int, help="of the text's beginning")
    parser.add_argument("--tp", type=int, help="ranks to a stage of the model; default: as many as divide its heads")
    parser.add_argument("--pp", type=int, default=1, help="stages")
    parser.add_argument("--json", help="also write the figures there")
    o = parser.parse_args(argv)
    _check_options(o)
    from model_zoo.llama.data import find_tokenizer, load_text, read_tokens
    from model_zoo.llama.restore import restore, source_config

    own = source_config(o.source)[0]
    seq, talks = o.seq or own.train.seq, None
    if own.data.format == "chat" and o.text is None:
        if o.seq not in (None, own.train.seq) or o.max_tokens:
            raise ConfigError("For 'evaluate.py', held-out conversations are those of the run.", " ".join(argv),
                              "They are cut at train.seq and chosen as in training; --seq and --max_tokens are for texts.",
                              ["leave the option out", "--text with a text"])
        data = replace(own.data, tokenizer=find_tokenizer(o.source, own.data, o.tokenizer))
        talks = load_text(data, own.model.vocab_size, seq)
        tokens = np.concatenate([np.asarray(ids, np.int64) for ids, _ in talks.held_out])
    else:
        tokens = read_tokens(o.source, o.text, o.tokenizer, own, seq)
        tokens = tokens[:None if o.max_tokens is None else o.max_tokens + 1]
        if len(tokens) < 2:
            raise ConfigError("For 'evaluate.py', there is nothing to predict.", f"{len(tokens)} tokens",
                              "The first token is not predicted: there are two or more.", "a longer --text")
    cfg, model, mesh, where = restore(o.source, start_device(), world_size(), tp=o.tp, pp=o.pp)
    if int(np.max(tokens)) >= cfg.model.vocab_size:
        raise ConfigError("For 'evaluate.py', the tokens are not this model's.", f"token {np.max(tokens)}",
                          f"Ids are below model.vocab_size = {cfg.model.vocab_size}.", "--tokenizer with the model's own")
    sharded = mesh is not None and cfg.parallel.loss_parallel and cfg.parallel.tp > 1
    batch = o.batch * cfg.parallel.dp
    batches = windows(tokens, seq, batch) if talks is None else talks.held_out_batches(batch, seq)
    loss = loss_of(model, mesh, batches, sharded)
    if rank() == 0:
        counted = sum(int((labels != IGNORED).sum()) for _, labels in batches)
        result = {"from": where, "tokens": counted, "seq": seq, "loss": loss, "perplexity": math.exp(loss)}
        print(f"{counted:,} tokens: {loss:.4f} nats each, perplexity {math.exp(loss):.4f}, in windows of {seq}  [{where}]")
        if o.json:
            try:
                Path(o.json).write_text(json.dumps(result) + "\n")
            except OSError as error:
                raise ConfigError(f"For 'evaluate.py', --json = '{o.json}' cannot be written: {error.strerror or error}.",
                                  "they are printed above", "The figures go into a file.",
                                  "--json with another file") from None


def _check_options(o: argparse.Namespace) -> None:
    """Before anything is read or computed."""
    for name in ("seq", "batch", "max_tokens", "tp", "pp"):
        if getattr(o, name) is not None and getattr(o, name) < 1:
            raise ConfigError(f"For 'evaluate.py', --{name} = {getattr(o, name)} is out of range.", "", "It is 1 or more.",
                              f"--{name} 1 or more")
    if o.json:
        file = Path(o.json)
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            why = "no such folder" if not file.parent.is_dir() else "a folder" if file.is_dir() else "no permission"
            raise ConfigError(f"For 'evaluate.py', --json = '{file}' cannot be written.", why, "The figures go into a file.",
                              "--json with a file in a folder that is there")


if __name__ == "__main__":
    sys.exit(script(lambda: run(sys.argv[1:])))
