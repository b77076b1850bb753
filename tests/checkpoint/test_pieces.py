# SPDX-License-Identifier: Apache-2.0
"""Pure: pieces are an array's bytes in order, and no small change leaves a hash as it was."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_dtensor.checkpoint.pieces import PIECE, ROW, SMALL, piece_hash, piece_size, pieces

BIG = np.random.default_rng(0).normal(size=(5, 300, 1000)).astype(np.float32)
FORMS = {"whole": BIG, "rows": BIG[1:4], "columns": BIG[:, :, 3:900], "turned": BIG.transpose(2, 1, 0), "back": BIG[::-1],
         "strided": BIG[:, ::3], "none": BIG[:0], "one": BIG[0, 0, 0], "flat": BIG.reshape(-1)[1:],
         "bytes": BIG.view(np.uint8)}


@pytest.mark.parametrize("form", FORMS)
def test_pieces_are_the_bytes_in_order(form):
    noted: list[bytes] = []
    array = FORMS[form]
    got = [bytes(piece) for piece in pieces(array, lambda piece: noted.append(bytes(piece)))]
    size = piece_size(array.shape, array.itemsize)
    assert got == noted and b"".join(got) == array.tobytes()
    assert size <= PIECE and all(len(piece) == size for piece in got[:-1])
    assert array.ndim < 2 or size % (array.nbytes // max(len(array), 1) or 1) == 0 or array[:1].nbytes > PIECE


@settings(max_examples=300)
@given(st.integers(1, 5 * SMALL), st.integers(0, 2 ** 32), st.lists(st.tuples(st.integers(0), st.integers(0, 63)),
                                                                   min_size=1, max_size=3))
def test_a_change_of_up_to_three_words_is_seen(length, seed, flips):
    data = bytearray(np.random.default_rng(seed).bytes(length))
    before = piece_hash(memoryview(data))
    for word, bit in flips:
        at = word % -(-length // 8) * 8 + bit // 8
        if at < length:
            data[at] ^= 1 << bit % 8
    changed = any(sum((w % -(-length // 8), b) == (word % -(-length // 8), bit) for w, b in flips) % 2 and
                  word % -(-length // 8) * 8 + bit // 8 < length for word, bit in flips)
    assert (piece_hash(memoryview(data)) != before) == changed


@given(st.integers(0, 2 ** 32), st.sampled_from([1, 4, 8, 64, 512, ROW, 8 * ROW]))
def test_blocks_that_change_places_or_are_zeroed_are_seen(seed, size):
    rng = np.random.default_rng(seed)
    data = bytearray(rng.bytes(1 << 17))
    before = piece_hash(memoryview(data))
    a, b = rng.choice((1 << 17) // size, 2, replace=False) * size
    first, second = bytes(data[a:a + size]), bytes(data[b:b + size])
    if first != second:
        data[a:a + size], data[b:b + size] = second, first
        assert piece_hash(memoryview(data)) != before
        data[a:a + size], data[b:b + size] = first, second
    if any(first):
        data[a:a + size] = bytes(size)
        assert piece_hash(memoryview(data)) != before


def test_pairs_of_the_highest_bits_and_lengths_are_seen():
    data = np.zeros(1 << 16, np.uint64)
    before = piece_hash(memoryview(data.view(np.uint8)))
    for a, b in ((0, 1), (0, 512), (7, 7 + 512), (7, 1000), (1, 2)):
        data[[a, b]] ^= np.uint64(1 << 63)
        assert piece_hash(memoryview(data.view(np.uint8))) != before
        data[[a, b]] ^= np.uint64(1 << 63)
    lengths = (SMALL - 1, SMALL, SMALL + 1, SMALL + ROW, SMALL + ROW + 1)
    assert len({piece_hash(memoryview(bytes(n))) for n in lengths}) == len(lengths)
