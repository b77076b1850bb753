# SPDX-License-Identifier: Apache-2.0
"""Real text as bytes: the Python standard library's own sources, or any file or folder.

Not a data pipeline. The one invariant: a batch is a pure function of (text, seed, step), so every rank computes the
same *global* batch with NumPy and takes its own rows; nothing is communicated and any mesh sees the same data.
"""
from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ms_dtensor.errors import ConfigError

from .config import Config, DataConfig
from .tokens import load_tokens

BLOCK = 16384  # text is split into train and held-out in blocks of this many bytes
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Text:
    """Two token streams u8[n], disjoint."""

    train: np.ndarray
    held_out: np.ndarray

    def batch(self, seed: int, step: int, batch: int, seq: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and next-token labels of the global batch of `step`, i32[batch, seq] each."""
        draw = np.random.Generator(np.random.Philox(key=[seed, step]))
        return _windows(self.train, draw.integers(0, len(self.train) - seq, batch), seq)

    def held_out_batch(self, index: int, count: int, batch: int, seq: int) -> tuple[np.ndarray, np.ndarray]:
        """Batch `index` of `count` that together spread evenly over the held-out text."""
        starts = np.linspace(0, len(self.held_out) - seq - 1, count * batch).astype(np.int64)
        return _windows(self.held_out, starts[index * batch:(index + 1) * batch], seq)


def _windows(stream: np.ndarray, starts: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray]:
    both = stream[starts[:, None] + np.arange(seq + 1)].astype(np.int32)
    return np.ascontiguousarray(both[:, :-1]), np.ascontiguousarray(both[:, 1:])


def load_text(cfg: DataConfig, vocab_size: int, seq: int) -> Text:
    """Reads the text and splits it; raises `ConfigError` when it is missing or too short."""
    if vocab_size < 256:
        raise ConfigError(f"For the configuration, model.vocab_size = {vocab_size} is too small.", "",
                          "Tokens are bytes.", "--model.vocab_size 256 or more")
    files, root = _files(cfg.path)
    raw, left = [], cfg.max_bytes
    for file in files:
        if left <= 0:
            break
        piece = file.read_bytes()[:left]
        raw.append(piece)
        left -= len(piece)
    stream = np.frombuffer(b"".join(raw), np.uint8)
    # a short text is cut into smaller blocks, so that one block in `held_out_every` still exists
    block = max(1, min(BLOCK, len(stream) // (2 * cfg.held_out_every)))
    held = np.arange(len(stream)) // block % cfg.held_out_every == cfg.held_out_every - 1
    text = Text(stream[~held], stream[held])
    if min(len(text.train), len(text.held_out)) < seq + 2:
        raise ConfigError(f"For the configuration, the text under '{root}' is too short.",
                          f"{len(text.train)} bytes to train on, {len(text.held_out)} held out, train.seq = {seq}",
                          "Both parts hold at least one sequence and the token after it.",
                          "--data.path with more text, or a shorter --train.seq")
    return text


def _sources(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in SKIPPED]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _files(path: str | None) -> tuple[list[Path], Path]:
    """Files in a fixed order. Inside the default folder tests and installed packages are left out."""
    root = Path(path) if path is not None else Path(sysconfig.get_paths()["stdlib"])
    if root.is_file():
        return [root], root
    if path is None:
        files = sorted(_sources(root))
    else:
        files = sorted(f for f in root.rglob("*") if f.is_file()) if root.is_dir() else []
    if not files:
        raise ConfigError(f"For the configuration, data.path = '{root}' holds no text.",
                          "no such file or folder" if not root.exists() else "the folder has no files",
                          "data.path is a text file, or a folder whose files are read in sorted order.",
                          "leave data.path out to train on the Python standard library's sources")
    return files, root


def read_tokens(source: str, path: str | None, tokenizer: str | None, own: Config, seq: int) -> np.ndarray:
    """What `evaluate.py` predicts: a text's tokens, or the held-out ones of a run's own data."""
    if path is None:
        return load_text(own.data, own.model.vocab_size, seq).held_out
    files, _ = _files(path)
    beside = Path(source) / "tokenizer.json"
    tokens = load_tokens(tokenizer or (beside if beside.is_file() else None))
    text = b"".join(file.read_bytes() for file in files).decode(errors="surrogateescape")
    return np.array(tokens.encode(text))
