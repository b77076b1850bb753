# SPDX-License-Identifier: Apache-2.0
"""Text as token ids and back: bytes, or a tokenizer's file (`tokenizer.json`) by the `tokenizers` package.

No import of MindSpore. Read next: `prepare_data.py`.
"""
from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from ms_dtensor.core.files import replacing
from ms_dtensor.errors import ConfigError

# what families call the end of a document, for a tokenizer.json that lies alone
ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<|eot_id|>", "<|im_end|>")


class Tokens(Protocol):
    """What the recipe asks of a tokenizer."""

    size: int
    """ids are below it"""
    end: int | None
    """of a document, if there is a token for it"""

    def encode(self, text: str) -> list[int]: ...
    def plain(self, text: str) -> list[int]: ...  # `encode`, but what spells a special token is text
    def marks(self, text: str) -> frozenset[int]: ...  # special tokens, and added ones that `text` has
    def decode(self, ids: Sequence[int]) -> str: ...


class Bytes:
    """UTF-8, or bytes as they are. A zero ends a document."""

    size, end = 256, 0

    def encode(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    plain = encode

    def marks(self, text: str) -> frozenset[int]:
        return frozenset()

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class FromFile:
    """A `tokenizer.json`; no special tokens are put in by themselves."""

    def __init__(self, file: Path, end: str | None = None):
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(f"For the tokenizer '{file}', the package 'tokenizers' cannot be imported.", str(error)[:300],
                              "Bytes need nothing, other tokens this package.",
                              "in the checkout: pip install '.[tokenizers]'") from None
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # of its own: a bare Exception
            raise ConfigError(f"For the tokenizer '{file}', the file cannot be read.", str(error)[:300],
                              "It is a tokenizer.json of Hugging Face's.", "a folder or file that has one") from None
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        ends = self._ends(file.parent) if end is None else [self._id(end)]
        self.end = next((i for i in ends if i is not None), None)
        if end is not None and self.end is None:
            raise ConfigError(f"For the tokenizer '{file}', there is no token '{end}'.", f"{self.size} tokens",
                              "What ends a document is one token.", "--end_token with one of the tokenizer's")

    def _ends(self, folder: Path) -> Iterator[int | None]:
        """What may end a document: as the files beside say it, then by known names."""
        said = _json(folder / "tokenizer_config.json").get("eos_token")
        yield self._id(said.get("content") if isinstance(said, dict) else said)
        for name in ("generation_config.json", "config.json"):
            ids = _json(folder / name).get("eos_token_id")
            yield from (i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int and 0 <= i < self.size)
        yield from map(self._id, ENDS)

    def _id(self, name: object) -> int | None:
        return self._tokenizer.token_to_id(name) if isinstance(name, str) else None

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def plain(self, text: str) -> list[int]:
        self._tokenizer.encode_special_tokens = True
        try:
            return self.encode(text)
        finally:
            self._tokenizer.encode_special_tokens = False

    def marks(self, text: str) -> frozenset[int]:
        there = self.encode(text)
        return frozenset(i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special or i in there)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def _json(file: Path) -> dict:
    """A file beside a tokenizer.json; {} if there is none."""
    try:
        said = json.loads(file.read_bytes()) if file.is_file() else {}
        if not isinstance(said, dict):
            raise ValueError("no object")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"For the tokenizer, '{file}' cannot be read.", str(error)[:200],
                          "It says which token ends a text.", "mend it, or take it out") from None
    return said


def decoded(data: bytes, where: str | Path) -> str:
    """The text of a file, which a tokenizer other than bytes needs."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"For '{where}', it is not UTF-8.", f"byte {data[error.start]:#04x} at offset {error.start}",
                          "A tokenizer's file is for text; bytes are taken as they are.",
                          ["write the file as UTF-8", "no --tokenizer"]) from None


def load_tokens(path: str | Path | None, end: str | None = None) -> Tokens:
    """Bytes, or the tokenizer of a file or of the folder that it lies in.

    `end` names the token that ends a document. None: `eos_token` of the tokenizer_config.json beside, or `eos_token_id` of
    generation_config.json or config.json, or the first of `ENDS` that the tokenizer has.

    Example:
        >>> from model_zoo.llama.tokens import load_tokens
        >>> load_tokens(None).encode("ab")
        [97, 98]
    """
    return Bytes() if path is None else FromFile(tokenizer_file(path), end)


def tokenizer_file(path: str | Path) -> Path:
    """A tokenizer's file, of which the folder may be given."""
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ConfigError(f"For the tokenizer, there is no file '{file}'.", "", "It is a tokenizer.json, or its folder.",
                          ["put it there again", "--tokenizer with where it is now (of train.py: --data.tokenizer)"])
    return file


def fingerprint(path: str | Path | None) -> int:
    """A number that another tokenizer would not have; of bytes 0."""
    return 0 if path is None else zlib.crc32(tokenizer_file(path).read_bytes())


def copy_tokenizer(path: str | Path, folder: Path) -> None:
    """A tokenizer and what is published beside it (`tokenizer_config.json`), into a folder."""
    file = tokenizer_file(path)
    beside = file.parent.glob("tokenizer*.json") if file.name == "tokenizer.json" else [file]
    for one in beside:
        target = folder / (one.name if one != file else "tokenizer.json")
        if not (target.exists() and target.samefile(one)):
            with open(one, "rb") as source, replacing(target) as new:
                shutil.copyfileobj(source, new)


def json_row(line: bytes) -> Any:
    """A line of a .jsonl file; raises `ValueError` where it is no JSON, or has a key twice.

    Example:
        >>> from model_zoo.llama.tokens import json_row
        >>> json_row(b'{"text": "a"}')
        {'text': 'a'}
    """
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for key, value in pairs:
            if key in row:
                raise ValueError(f"the key {key[:80]!r} is there twice")
            row[key] = value
        return row
    return json.loads(line.decode(), object_pairs_hook=once)
