# SPDX-License-Identifier: Apache-2.0
"""What a unigram and a bigram of bytes say of a recipe's held-out text, in nats a byte: what a model has to be below.

    python model_zoo/llama/tools/ngrams.py [--config model_zoo/llama/configs/quickstart.yaml] [--section.key value ...]

Both are counted on the training text, every byte once more than it was seen; a bigram falls back on the unigram.
"""
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(ROOT)

from model_zoo.llama.configio import load  # noqa: E402
from model_zoo.llama.data import Text, load_text  # noqa: E402


def losses(text: Text) -> dict[str, float]:
    """Mean of -log p over the held-out bytes."""
    train, held = text.train.astype(np.int64), text.held_out.astype(np.int64)
    unigram = np.bincount(train, minlength=256) + 1.0
    unigram /= unigram.sum()
    pairs = np.bincount(train[:-1] * 256 + train[1:], minlength=65536).reshape(256, 256) + unigram * 10
    bigram = pairs / pairs.sum(1, keepdims=True)
    return {"unigram": float(-np.log(unigram[held]).mean()), "bigram": float(-np.log(bigram[held[:-1], held[1:]]).mean())}


if __name__ == "__main__":
    argv = sys.argv[1:] or ["--config", str(ROOT / "model_zoo/llama/configs/quickstart.yaml")]
    cfg, _ = load(argv)
    text = load_text(cfg.data, cfg.model.vocab_size, cfg.train.seq)
    print(f"{len(text.train):,} bytes to train on, {len(text.held_out):,} held out")
    for name, loss in losses(text).items():
        print(f"{name:<8} {loss:.4f} nats a byte, {loss / np.log(2):.4f} bits")
