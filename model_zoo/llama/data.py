# SPDX-License-Identifier: Apache-2.0
"""What a run reads: text as bytes (the Python standard library's own sources, or any file or folder), the token files of
`prepare_data.py`, or conversations (`chat.py`).

The one invariant: a batch is a pure function of (text, seed, step), so every rank computes the
same *global* batch with NumPy and takes its own rows; nothing is communicated and any mesh sees the same data.
"""
from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ms_dtensor.errors import ConfigError

from .chat import Conversations, end_of_answer
from .config import Config, DataConfig
from .token_file import TokenFile
from .tokens import Bytes, Tokens, decoded, load_tokens

BLOCK = 16384  # text is split into train and held-out in blocks of this many bytes
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Text:
    """Two token streams u8[n], disjoint."""

    train: np.ndarray
    held_out: np.ndarray

    def batch(self, seed: int, step: int, batch: int, seq: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and next-token labels of the global batch of `step`, i32[batch, seq] each."""
        return _windows(self.train, _drawn(self.train, seed, step, batch, seq), seq)

    def identity(self) -> int:
        """A number that another text would not have."""
        return zlib.crc32(self.train)

    def held_out_batch(self, index: int, count: int, batch: int, seq: int) -> tuple[np.ndarray, np.ndarray]:
        """Batch `index` of `count` that together spread evenly over the held-out text."""
        return _windows(self.held_out, _spread(self.held_out, index, count, batch, seq), seq)


@dataclass(frozen=True, slots=True)
class Files:
    """The same of two token files, which no rank reads whole."""

    train: TokenFile
    held_out: TokenFile
    documents: bool = False
    """A batch's third array tells each token's place in its document, of which a row may have the end only."""

    def batch(self, seed: int, step: int, batch: int, seq: int) -> tuple[np.ndarray, ...]:
        return self._read(self.train, _drawn(self.train, seed, step, batch, seq), seq)

    def identity(self) -> int:
        return self.train.identity()

    def held_out_batch(self, index: int, count: int, batch: int, seq: int) -> tuple[np.ndarray, ...]:
        return self._read(self.held_out, _spread(self.held_out, index, count, batch, seq), seq)

    def _read(self, file: TokenFile, starts: np.ndarray, seq: int) -> tuple[np.ndarray, ...]:
        both = np.stack([file.read(int(start), seq + 1) for start in starts]).astype(np.int32)
        ids, labels = np.ascontiguousarray(both[:, :-1]), np.ascontiguousarray(both[:, 1:])
        return (ids, labels, places(ids, file.end)) if self.documents else (ids, labels)


def places(ids: np.ndarray, end: int) -> np.ndarray:
    """i32[b, t]: how many tokens of its document are before each in its row; the token `end` is its document's last.

    Example:
        >>> import numpy as np
        >>> from model_zoo.llama.data import places
        >>> places(np.array([[5, 0, 7, 8, 0, 9]]), 0).tolist()
        [[0, 1, 0, 1, 2, 0]]
    """
    at = np.arange(ids.shape[1], dtype=np.int32)
    first = np.zeros(ids.shape, np.int32)
    first[:, 1:] = np.where(ids[:, :-1] == end, at[1:], 0)
    return at - np.maximum.accumulate(first, 1)


def _drawn(stream: Sized, seed: int, step: int, batch: int, seq: int) -> np.ndarray:
    """Where the rows of a step's batch start."""
    return np.random.Generator(np.random.Philox(key=[seed, step])).integers(0, len(stream) - seq, batch)


def _spread(stream: Sized, index: int, count: int, batch: int, seq: int) -> np.ndarray:
    """Where the rows of batch `index` start, of `count` batches spread evenly."""
    starts = np.linspace(0, len(stream) - seq - 1, count * batch).astype(np.int64)
    return starts[index * batch:(index + 1) * batch]


def _windows(stream: np.ndarray, starts: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray]:
    both = stream[starts[:, None] + np.arange(seq + 1)].astype(np.int32)
    return np.ascontiguousarray(both[:, :-1]), np.ascontiguousarray(both[:, 1:])


def load_text(cfg: DataConfig, vocab_size: int, seq: int) -> Text | Files | Conversations:
    """Opens what `cfg` names; raises `ConfigError` when it is missing, damaged or too short."""
    if cfg.format == "chat":
        tokens = load_tokens(cfg.tokenizer)
        _check_vocabulary(tokens.size, vocab_size)
        return Conversations(Path(cfg.path or "chat.jsonl"), tokens, cfg.template, seq, cfg.held_out_every)
    if cfg.path is not None and (Path(cfg.path) / "train.tokens").exists():
        files = Files(*(TokenFile(Path(cfg.path) / f"{name}.tokens") for name in ("train", "held_out")), cfg.documents)
        _check_vocabulary(files.train.vocab, vocab_size)
        _check_length(len(files.train), len(files.held_out), seq, cfg.path, "tokens")
        if cfg.documents and files.train.end is None:
            raise ConfigError("For the configuration, data.documents is set, and data.path does not tell documents apart.",
                              f"data.path = {cfg.path}", "Its tokenizer has a token that ends a text.",
                              "--data.documents false")
        return files
    if cfg.documents:
        raise ConfigError("For the configuration, data.documents is set, and data.path names no token files.",
                          f"data.path = {cfg.path}", "Token files tell documents apart.",
                          "python model_zoo/llama/prepare_data.py")
    if cfg.tokenizer is not None:
        raise ConfigError("For the configuration, data.tokenizer is set, and data.path names a text.",
                          f"data.path = {cfg.path}, data.tokenizer = {cfg.tokenizer}",
                          "A text is trained on as bytes; conversations and token files go through a tokenizer.",
                          ["python model_zoo/llama/prepare_data.py --tokenizer makes token files", "no data.tokenizer"])
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
    _check_length(len(text.train), len(text.held_out), seq, root, "bytes")
    return text


def _check_length(train: int, held_out: int, seq: int, root, unit: str) -> None:
    if min(train, held_out) < seq + 2:
        raise ConfigError(f"For the configuration, the text under '{root}' is too short.",
                          f"{train} {unit} to train on, {held_out} held out, train.seq = {seq}",
                          "Both parts hold at least one sequence and the token after it.",
                          "--data.path with more text, or a shorter --train.seq")


def _check_vocabulary(tokens: int, model: int) -> None:
    if tokens > model:
        raise ConfigError(f"For the configuration, model.vocab_size = {model} is too small.",
                          f"the tokenizer has {tokens} tokens", "The model has a row for each token.",
                          f"--model.vocab_size {tokens}")


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


def end_of(cfg: DataConfig, tokens: Tokens) -> int | None:
    """The token that ends a text for who was trained on it: the template's, that of the token files, or the tokenizer's."""
    if cfg.format == "chat":
        return end_of_answer(tokens, cfg.template)
    file = Path(cfg.path or "") / "train.tokens"
    return TokenFile(file).end if file.exists() else tokens.end


def read_tokens(source: str, path: str | None, tokenizer: str | None, own: Config, seq: int) -> np.ndarray:
    """What `evaluate.py` predicts: a text's tokens, a token file's, or the held-out ones of a run's own data."""
    if path is None:
        held = load_text(own.data, own.model.vocab_size, seq).held_out
        return held.read(0, len(held)) if isinstance(held, TokenFile) else np.asarray(held)
    if Path(path).suffix == ".tokens":
        file = TokenFile(path)
        return file.read(0, len(file))
    files, _ = _files(path)
    beside = Path(source) / "tokenizer.json"
    tokens = load_tokens(tokenizer or own.data.tokenizer or (beside if beside.is_file() else None))
    data = [file.read_bytes() if isinstance(tokens, Bytes) else decoded(file.read_bytes(), file) for file in files]
    return np.array(tokens.encode(data[0][:0].join(data)))
