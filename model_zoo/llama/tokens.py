# SPDX-License-Identifier: Apache-2.0
"""Text as token ids and back: bytes, or a tokenizer's file (`tokenizer.json`) by the `tokenizers` package.

No import of MindSpore. Read next: `prepare_data.py`.
"""
from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ms_dtensor.errors import ConfigError

ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<|eot_id|>", "<|im_end|>")  # what families call the end of a document


class Tokens(Protocol):
    """What the recipe asks of a tokenizer."""

    size: int
    """ids are below it"""
    end: int | None
    """of a document, if there is a token for it"""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Bytes:
    """UTF-8, or bytes as they are. A zero ends a document."""

    size, end = 256, 0

    def encode(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class FromFile:
    """A `tokenizer.json`; no special tokens are put in by themselves."""

    def __init__(self, file: Path):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ConfigError(f"For the tokenizer '{file}', the package 'tokenizers' is not installed.", "",
                              "Bytes need nothing, other tokens this package.",
                              "pip install ms_dtensor[tokenizers]") from None
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # of its own: a bare Exception
            raise ConfigError(f"For the tokenizer '{file}', the file cannot be read.", str(error)[:300],
                              "It is a tokenizer.json of Hugging Face's.", "a folder or file that has one") from None
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        found = (self._tokenizer.token_to_id(name) for name in ENDS)
        self.end = next((i for i in found if i is not None), None)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def decoded(data: bytes, where: str | Path) -> str:
    """The text of a file, which a tokenizer other than bytes needs."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"For '{where}', it is not UTF-8.", f"byte {data[error.start]:#04x} at offset {error.start}",
                          "A tokenizer's file is for text; bytes are taken as they are.",
                          ["write the file as UTF-8", "no --tokenizer"]) from None


def load_tokens(path: str | Path | None) -> Tokens:
    """Bytes, or the tokenizer of a file or of the folder that it lies in.

    Example:
        >>> from model_zoo.llama.tokens import load_tokens
        >>> load_tokens(None).encode("ab")
        [97, 98]
    """
    return Bytes() if path is None else FromFile(tokenizer_file(path))


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
            shutil.copyfile(one, target)


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
