# SPDX-License-Identifier: Apache-2.0
"""What a run reads: text as bytes (the Python standard library's own sources, or any file or folder), the token files of
`prepare_data.py`, Megatron's indexed data sets (`indexed_file.py`), or conversations (`chat.py`).

The one invariant: a batch is a pure function of (text, seed, step), so every rank computes the
same *global* batch with NumPy and takes its own rows; nothing is communicated and any mesh sees the same data.
"""
from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ms_dtensor.errors import ConfigError

from .chat import Conversations, end_of_answer
from .config import Config, DataConfig, TrainConfig
from .configio import unlike_held
from .indexed_file import IndexedFile
from .token_file import TokenFile, is_token_file
from .tokens import Bytes, Tokens, decoded, fingerprint, load_tokens

BLOCK = 16384  # text is split into train and held-out in blocks of this many bytes
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Text:
    """Two token streams u8[n], disjoint."""

    train: np.ndarray
    held_out: np.ndarray
    held_out_every: int = 0

    def batch(self, seed: int, step: int, batch: int, seq: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and next-token labels of the global batch of `step`, i32[batch, seq] each."""
        return _windows(self.train, _drawn(self.train, seed, step, batch, seq), seq)

    def identity(self) -> dict[str, Any]:
        """What batches depend on: settings, and sums that other contents would not have."""
        return {"format": "text", "text": zlib.crc32(self.train), "held_out": zlib.crc32(self.held_out),
                "held_out_every": self.held_out_every}

    def held_out_batch(self, index: int, count: int, batch: int, seq: int) -> tuple[np.ndarray, np.ndarray]:
        """Batch `index` of `count` that together spread evenly over the held-out text."""
        return _windows(self.held_out, _spread(self.held_out, index, count, batch, seq), seq)


@dataclass(frozen=True, slots=True)
class Files:
    """The same of two token files, which no rank reads whole."""

    train: TokenFile | IndexedFile
    held_out: TokenFile | IndexedFile
    documents: bool = False
    """A batch's third array tells each token's place in its document, of which a row may have the end only."""

    def batch(self, seed: int, step: int, batch: int, seq: int) -> tuple[np.ndarray, ...]:
        return self._read(self.train, _drawn(self.train, seed, step, batch, seq), seq)

    def identity(self) -> dict[str, Any]:
        kind = "indexed" if isinstance(self.train, IndexedFile) else "tokens"
        return {"format": kind, "text": self.train.identity(), "held_out": self.held_out.identity(),
                "documents": self.documents}

    def held_out_batch(self, index: int, count: int, batch: int, seq: int) -> tuple[np.ndarray, ...]:
        return self._read(self.held_out, _spread(self.held_out, index, count, batch, seq), seq)

    def _read(self, file: TokenFile | IndexedFile, starts: np.ndarray, seq: int) -> tuple[np.ndarray, ...]:
        both = np.stack([file.read(int(start), seq + 1) for start in starts]).astype(np.int32)
        ids, labels = np.ascontiguousarray(both[:, :-1]), np.ascontiguousarray(both[:, 1:])
        return (ids, labels, places(ids, file.end)) if self.documents and file.end is not None else (ids, labels)


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
        return Conversations(Path(cfg.path or "chat.jsonl"), tokens, cfg.template, seq, cfg.held_out_every,
                             fingerprint(cfg.tokenizer))
    train: TokenFile | IndexedFile | None = _train_file(cfg)
    if train is None and cfg.path is not None and (Path(cfg.path) / "train.idx").exists():
        train = IndexedFile(Path(cfg.path) / "train", vocab_size)
    if train is not None:
        held = TokenFile(train.path.parent / "held_out.tokens") if isinstance(train, TokenFile) else IndexedFile(
            train.path.parent / "held_out", vocab_size)
        files = Files(train, held, cfg.documents)
        _check_vocabulary(train.vocab, vocab_size)
        own_tokenizer(cfg)
        both = [f"{f.vocab} tokens, end {f.end}, tokenizer {f.tokenizer:#x}" for f in (train, held)]
        if both[0] != both[1] and (cfg.documents or isinstance(train, TokenFile)):
            raise ConfigError(f"For the configuration, the token files of data.path = '{cfg.path}' do not belong together.",
                              f"train: {both[0]}; held_out: {both[1]}", "One tokenizer made both.",
                              "make them again: python model_zoo/llama/prepare_data.py")
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
    text = Text(stream[~held], stream[held], cfg.held_out_every)
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
    if path is None:
        files = sorted(_sources(root))
    else:
        files = [root] if root.is_file() else sorted(f for f in root.rglob("*") if f.is_file())
    if not files:
        raise ConfigError(f"For the configuration, data.path = '{root}' holds no text.",
                          "no such file or folder" if not root.exists() else "the folder has no files",
                          "data.path is a text file, or a folder whose files are read in sorted order.",
                          "leave data.path out to train on the Python standard library's sources")
    tokens = None if path is None else next((file for file in files if is_token_file(file)), None)
    if tokens is not None:
        raise ConfigError(f"For '{root}', the file '{tokens}' is no text.", f"{len(files)} files",
                          "It is a token file of prepare_data.py: data.path names its folder, evaluate.py --text itself.",
                          [f"evaluate.py --text {tokens}", f"--data.path {tokens.parent}", "a folder of texts only"])
    return files, root


def stream_values(cfg: TrainConfig, text: Text | Files | Conversations | None) -> dict[str, Any]:
    """All that decides a run's batches, as a checkpoint holds it."""
    ramp = {"batch_ramp": [cfg.batch_ramp, cfg.micro_batches]} if cfg.batch_ramp else {}
    of_text: dict[str, Any] = {"text": 0} if text is None else text.identity()
    return {"seed": cfg.seed, "batch": cfg.batch, "seq": cfg.seq, **ramp, **of_text}


def check_same_data(cfg: TrainConfig, text: Text | Files | Conversations, held: dict[str, Any]) -> None:
    """Refuses to go on from a checkpoint of other `stream_values`; an older one has but some of them."""
    ours = stream_values(cfg, text)
    if "format" not in held:
        known = [key for key in ours if key in held]
        ours, held = ({key: some[key] for key in known} for some in (ours, held))
    unlike = unlike_held(ours, held)
    if unlike:
        raise ConfigError(f"For the configuration, the data are not those of the checkpoint: {', '.join(unlike)}.",
                          "\n".join(unlike.values()),
                          "The stream of batches goes on where it stopped; files are compared by sums over their bytes.",
                          ["the run's own settings and files", "--train.init_hf to begin a new run with its weights"])


# -- tokenizers --------------------------------------------------------------------------------------------------------
def _train_file(cfg: DataConfig) -> TokenFile | None:
    """Of a folder of token files."""
    file = None if cfg.path is None or cfg.format == "chat" else Path(cfg.path) / "train.tokens"
    return None if file is None or not file.exists() else TokenFile(file)


def own_tokenizer(cfg: DataConfig) -> str | None:
    """What the data go through, or have been through: data.tokenizer, or what lies beside the token files. None: bytes."""
    file, path = _train_file(cfg), cfg.tokenizer
    if file is not None:
        if path is None and file.tokenizer:
            path = str(file.path.parent / "tokenizer.json")
        if path is not None:
            _check_made_by(file, path)
    return path


def _check_made_by(file: TokenFile, path: str | Path | None) -> None:
    """An older file does not say by which tokenizer it was made: the number of tokens is compared."""
    if fingerprint(path) != file.tokenizer if file.tokenizer else load_tokens(path).size != file.vocab:
        raise ConfigError(f"For the token file '{file.path}', the tokenizer is not the one that made it.",
                          f"{'bytes' if path is None else f'{str(path)!r}'} here, {file.vocab} tokens there",
                          "Its numbers are tokens of prepare_data.py's --tokenizer.",
                          ["--tokenizer with that one (of train.py: --data.tokenizer)", "make the file again"])


def find_tokenizer(source: str | Path, own: DataConfig, given: str | None) -> str | Path | None:
    """A model's tokenizer: the given one, else that of its run's data, else the one beside its weights. None: bytes."""
    beside = Path(source) / "tokenizer.json"
    path = given or own_tokenizer(own) or (beside if beside.is_file() else None)
    file = None if path is not None else _train_file(own)
    if file is not None and file.vocab != Bytes.size:
        raise ConfigError(f"For '{source}', it is not known which tokenizer the model has.",
                          f"'{file.path}' of {file.vocab} tokens is older than prepare_data.py's note of its tokenizer",
                          "Token files bring theirs.", "--tokenizer with the one that made them")
    return path


def end_of(cfg: DataConfig, tokens: Tokens) -> int | None:
    """The token that ends a text for who was trained on it: the template's, that of the token files, or the tokenizer's."""
    if cfg.format == "chat":
        return end_of_answer(tokens, cfg.template)
    file = _train_file(cfg)
    return tokens.end if file is None else file.end


def read_tokens(source: str, path: str | None, tokenizer: str | None, own: Config, seq: int) -> np.ndarray:
    """What `evaluate.py` predicts: a text's tokens, a token file's, or the held-out ones of a run's own data."""
    if path is None:
        held = load_text(replace(own.data, tokenizer=tokenizer or own.data.tokenizer), own.model.vocab_size, seq).held_out
        return held.read(0, len(held)) if isinstance(held, TokenFile) else np.asarray(held)
    if Path(path).suffix == ".tokens" or Path(path).is_file() and is_token_file(Path(path)):
        file = TokenFile(path)
        if file.tokenizer:
            _check_made_by(file, find_tokenizer(source, own.data, tokenizer))
        return file.read(0, len(file))
    files, _ = _files(path)
    tokens = load_tokens(find_tokenizer(source, own.data, tokenizer))
    data = [file.read_bytes() if isinstance(tokens, Bytes) else decoded(file.read_bytes(), file) for file in files]
    return np.array(tokens.encode(data[0][:0].join(data)))
