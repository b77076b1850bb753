# SPDX-License-Identifier: Apache-2.0
"""Hashes of pieces, written and read: every 256 KiB or so of a part have one of their own.

So a rank that reads a slice of a part verifies the pieces that it touches, and nothing else; and a piece is hashed while it
is in the processor's cache. Only sums of it are fit for reading at the speed of memory in Python: of a piece as rows of 512
words of 64 bits, the sums of its rows and of its columns, and the CRC-32 of both. No change of up to three words leaves all
sums as they were, and none of one block, nor do pages change places; chance leaves the 64 bits as they were once in 2**64.
In cache that is 14 GB/s, `zlib.crc32` of the bytes 5; of what has just been read from a file it takes half as long as the
reading. It tells damage, not forgery.
"""
from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

PIECE = 1 << 18  # with the page that it is read from, a few of them fit into a core's own cache
ROW, SMALL = 4096, 32768  # bytes


def piece_size(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of a piece of an array: whole rows of the first dim, where a row is not larger than a piece."""
    row = itemsize * math.prod(shape[1:])
    return PIECE // row * row if 0 < row <= PIECE else PIECE


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array."""
    flat: Any = array.reshape(-1).view(np.uint8) if array.size else b""
    return memoryview(flat)


def view(array: np.ndarray, index: Sequence[slice]) -> np.ndarray:
    """A view of a box of an array, also of one without dims."""
    cut: Any = (*index, ...)
    return array[cut]


def crc(data) -> int:
    """The CRC-32 of some bytes."""
    return zlib.crc32(data)


def piece_hash(data: memoryview) -> int:
    """The hash of a piece, of 64 bits; of a small one the CRC-32 of its bytes.

    Example:
        >>> from ms_dtensor.checkpoint.pieces import piece_hash
        >>> f"{piece_hash(memoryview(b'123456789')):016x}"
        '00000000cbf43926'
        >>> page = bytes(range(256)) * 16
        >>> piece_hash(memoryview(page * 9 + bytes(4096))) == piece_hash(memoryview(bytes(4096) + page * 9))
        False
    """
    if len(data) < SMALL:
        return zlib.crc32(data)
    whole = len(data) // ROW * ROW
    words = np.frombuffer(data, np.dtype("<u8"), whole // 8).reshape(-1, ROW // 8)
    columns = zlib.crc32(as_bytes(words.sum(0)), zlib.crc32(data[whole:]))  # what is left of a row goes with the columns
    return zlib.crc32(as_bytes(words.sum(1))) << 32 | columns


def pieces(array: np.ndarray, note: Callable[[memoryview], None]) -> Iterator[memoryview]:
    """The bytes of an array in row-major order, piece by piece; tells `note` of each before it is given."""
    size = piece_size(array.shape, array.itemsize)
    if not array.size:
        return
    rest = b""
    for block in (array,) if array.flags.c_contiguous else _blocks(array, size):
        data = as_bytes(np.ascontiguousarray(block))
        if rest:
            data = memoryview(rest + bytes(data))
        whole = len(data) // size * size
        for at in range(0, whole, size):
            note(data[at:at + size])
            yield data[at:at + size]
        rest = bytes(data[whole:])
    if rest:
        note(memoryview(rest))
        yield memoryview(rest)


def _blocks(array: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """An array in runs of rows of at most about this many bytes."""
    if array.ndim == 0 or array.nbytes <= size:
        yield array
        return
    row = array.nbytes // len(array)
    if row > size:
        for part in array:
            yield from _blocks(part, size)
        return
    step = size // row
    for at in range(0, len(array), step):
        yield array[at:at + step]
