# SPDX-License-Identifier: Apache-2.0
"""A data set of Megatron's, NAME.bin and NAME.idx, read as a file of tokens: mapped into memory, in any order.

The index says how its tokens are written and where sequences and documents begin, and says nothing of the tokens themselves:
neither of how many there are, nor of a tokenizer, and it has no sums. So ids are compared with the model's vocabulary where
they are read, and `identity` knows the index, the length and the first and last block.

    9 bytes   b"MMIDIDX\\x00\\x00", then u64 version 1, u8 dtype, u64 sequences, u64 entries of the list of documents
    i32       tokens of each sequence
    i64       where each begins in NAME.bin, in bytes
    i64       the first sequence of each document, and one behind the last

No import of MindSpore.
"""
from __future__ import annotations

import struct
import zlib
from functools import cached_property
from pathlib import Path

import numpy as np

from ms_dtensor.errors import ConfigError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
KINDS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
BLOCK = 1 << 20  # tokens


class IndexedFile:
    """Tokens by their numbers, as `TokenFile` has them. What is wrong is one `ConfigError`, at once or where it is read.

    Args:
        path: without .bin and .idx.
        vocab: how many tokens there are.

    Attributes:
        tokenizer: 0: it is not known.
    """

    tokenizer = 0

    def __init__(self, path: str | Path, vocab: int):
        self.path, self.vocab = Path(path), vocab
        try:
            index = self.path.with_name(self.path.name + ".idx").read_bytes()
            length = self.path.with_name(self.path.name + ".bin").stat().st_size
        except OSError as error:
            raise ConfigError(f"For the data set '{self.path}', it cannot be read: {error.strerror}.", str(error.filename),
                              "Two files: NAME.bin and NAME.idx.", "Megatron's preprocess_data.py makes them") from None
        if len(index) < HEADER.size or index[:9] != MAGIC:
            raise self._damaged("its index does not begin as one", f"{index[:9]!r}")
        _, version, code, sequences, entries = HEADER.unpack_from(index)
        if version != 1 or code not in KINDS:
            raise self._damaged("its index is of another kind", f"version {version}, dtype {code}")
        if len(index) < HEADER.size + 12 * sequences + 8 * entries:
            raise self._damaged("its index is too short", f"{len(index)} bytes for {sequences} sequences")
        sizes = np.frombuffer(index, "<i4", sequences, HEADER.size)
        begins = np.frombuffer(index, "<i8", sequences, HEADER.size + 4 * sequences)
        self._documents = np.frombuffer(index, "<i8", entries, HEADER.size + 12 * sequences)
        kind = np.dtype(KINDS[code])
        self._ends = np.cumsum(sizes, dtype=np.int64)
        if sizes.min(initial=0) < 0 or not np.array_equal(begins, (self._ends - sizes) * kind.itemsize):
            raise self._damaged("its sequences do not lie one behind another", "")
        if entries and (self._documents[0] < 0 or self._documents[-1] > sequences or (np.diff(self._documents) < 0).any()):
            raise self._damaged("its documents do not follow one another", f"of {sequences} sequences")
        count = int(self._ends[-1]) if sequences else 0
        if length != count * kind.itemsize:
            raise self._damaged("its tokens are not as many as its index says",
                                f"{length} bytes for {count} tokens of {kind.itemsize} bytes")
        bin_file = self.path.with_name(self.path.name + ".bin")
        self._tokens = np.memmap(bin_file, kind, "r", 0, (count,)) if count else np.zeros(0, kind)
        self._verified = np.zeros(-(-count // BLOCK), bool)
        self._index = zlib.crc32(index, count)

    def __len__(self) -> int:
        return len(self._tokens)

    @cached_property
    def end(self) -> int | None:
        """The token that ends every document, if there is one."""
        last = self._documents[1:] - 1
        ends = self._ends[last[last >= 0]]
        found = np.unique(self._tokens[ends[ends > 0] - 1]) if len(ends) else np.zeros(0)
        return int(found[0]) if len(found) == 1 else None

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens `start` to `start + count`, each block of them compared with the vocabulary the first time."""
        for block in range(start // BLOCK, -(-(start + count) // BLOCK)):
            if not self._verified[block]:
                held = self._tokens[block * BLOCK:(block + 1) * BLOCK]
                low, high = int(held.min()), int(held.max())
                if low < 0 or high >= self.vocab:  # it would read rows that are not there
                    raise self._damaged(f"tokens {block * BLOCK} to {(block + 1) * BLOCK} have the ids {low} to {high}",
                                        f"the model's vocabulary has {self.vocab} tokens, 0 to {self.vocab - 1}")
                self._verified[block] = True
        return self._tokens[start:start + count]

    def identity(self) -> int:
        """A number that another index, or another first or last block, would not have."""
        return zlib.crc32(self._tokens[-BLOCK:].tobytes(), zlib.crc32(self._tokens[:BLOCK].tobytes(), self._index))

    def _damaged(self, what: str, seen: str) -> ConfigError:
        return ConfigError(f"For the data set '{self.path}', {what}.", seen, "Megatron's preprocess_data.py wrote it.",
                           "make it again, or token files: python model_zoo/llama/prepare_data.py")
