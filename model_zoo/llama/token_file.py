# SPDX-License-Identifier: Apache-2.0
"""A file of tokens that is mapped into memory: written once, read in any order, and verified wherever it is read.

    64 bytes   magic, dtype, the token that ends a document, count, vocabulary, CRC-32 of the table, CRC-32 of all this,
               CRC-32 of the tokenizer.json; 0: tokens are bytes, or the file is older than this field
    tokens     little endian, u16 or u32
    table      u32: CRC-32 of each block of 2**20 tokens

No import of MindSpore.
"""
from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ms_dtensor.errors import ConfigError

MAGIC = b"MSDTOK01"
HEADER = struct.Struct("<8sIIQQIII20x")  # magic, bytes of a token, end, count, vocabulary, CRCs: table, these, tokenizer
BLOCK = 1 << 20  # tokens
NO_END = 2 ** 32 - 1


def write(out: BinaryIO, dtype: str, vocab: int, end: int | None, count: int, blocks: Iterator[np.ndarray],
          tokenizer: int = 0) -> None:
    """A whole file: `blocks` of BLOCK tokens, the last may be shorter; `tokenizer` is its `tokens.fingerprint`."""
    out.write(bytes(HEADER.size))
    table = []
    for block in blocks:
        data = np.ascontiguousarray(block, dtype).tobytes()
        table.append(zlib.crc32(data))
        out.write(data)
    sums = np.array(table, "<u4").tobytes()
    out.write(sums)
    out.seek(0)
    fields = (MAGIC, np.dtype(dtype).itemsize, NO_END if end is None else end, count, vocab, zlib.crc32(sums))
    out.write(HEADER.pack(*fields, zlib.crc32(HEADER.pack(*fields, 0, tokenizer)), tokenizer))


def is_token_file(path: Path) -> bool:
    """Whether a file begins as one."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class TokenFile:
    """Tokens by their numbers. What is wrong with a file is one `ConfigError`, at once or when the place is read.

    Args:
        path: of `prepare_data.py`.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                head, length = file.read(HEADER.size), file.seek(0, 2)
                if len(head) < HEADER.size or head[:8] != MAGIC:
                    raise self._damaged("it does not begin as a token file", f"{head[:8]!r}")
                _, size, end, count, vocab, table, own, tokenizer = HEADER.unpack(head)
                if size not in (2, 4) or \
                        own != zlib.crc32(HEADER.pack(MAGIC, size, end, count, vocab, table, 0, tokenizer)):
                    raise self._damaged("its header is damaged", f"CRC-32 {own:#x}")
                blocks = -(-count // BLOCK)
                if length != HEADER.size + count * size + 4 * blocks:
                    raise self._damaged("it is too short" if length < HEADER.size + count * size + 4 * blocks else
                                        "there is more in it", f"{length} bytes for {count} tokens of {size} bytes")
                file.seek(HEADER.size + count * size)
                sums = file.read()
            if zlib.crc32(sums) != table:
                raise self._damaged("its table is damaged", f"CRC-32 {table:#x}")
        except OSError as error:
            raise ConfigError(f"For the token file '{self.path}', it cannot be read: {error.strerror}.", "",
                              "It is made by prepare_data.py.", "python model_zoo/llama/prepare_data.py --help") from None
        self.end, self.vocab, self.table = None if end == NO_END else end, vocab, np.frombuffer(sums, "<u4")
        self.tokenizer = tokenizer
        self._tokens = np.memmap(self.path, f"<u{size}", "r", HEADER.size, (count,)) if count else np.zeros(0, f"<u{size}")
        self._verified = np.zeros(blocks, bool)

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens `start` to `start + count`, each block of them verified the first time."""
        for block in range(start // BLOCK, -(-(start + count) // BLOCK)):
            if not self._verified[block]:
                held = self._tokens[block * BLOCK:(block + 1) * BLOCK]
                if zlib.crc32(held.tobytes()) != self.table[block]:
                    raise self._damaged(f"tokens {block * BLOCK} to {(block + 1) * BLOCK} are damaged", "CRC-32 differs")
                if held.max() >= self.vocab:  # it would read rows that are not there
                    raise self._damaged(f"tokens {block * BLOCK} to {(block + 1) * BLOCK} have the id {held.max()}",
                                        f"its vocabulary has {self.vocab} tokens, 0 to {self.vocab - 1}")
                self._verified[block] = True
        return self._tokens[start:start + count]

    def verify(self) -> None:
        """Reads every byte."""
        for start in range(0, len(self), BLOCK):
            self.read(start, min(BLOCK, len(self) - start))

    def identity(self) -> int:
        """A number that another content would not have."""
        return zlib.crc32(self.table.tobytes(), len(self))

    def _damaged(self, what: str, seen: str) -> ConfigError:
        return ConfigError(f"For the token file '{self.path}', {what}.", seen, "It is as prepare_data.py wrote it.",
                           "make it again: python model_zoo/llama/prepare_data.py")
