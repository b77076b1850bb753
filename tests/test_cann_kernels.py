# SPDX-License-Identifier: Apache-2.0
"""Which kernels a copy is on Ascend: the views that CANN's `contiguous.cpp` gives as examples, and those of packing."""
from __future__ import annotations

import pytest

from tests.rehearsal.cann import before_joining, copied, ordered

ROWS, WIDE = 64, 200  # gathered rows of so many ranks, each of so many elements


@pytest.mark.parametrize(("view", "kernels"), [
    (((6, 7, 5, 4), (7, 1, 42, 210), 0, 840), ["Transpose"]),  # these three are CANN's own
    (((2, 2, 3), (42, 7, 1), 109, 210), ["Slice"]),
    (((3, 2, 2), (42, 28, 2), 46, 210), ["StridedSlice"]),
    (((4, 5), (5, 1), 40, 210), []),
    (((3, 1, 5), (5, 77, 1), 0, 15), []),  # a dim of one element lies anywhere
    (((3, 5), (0, 1), 0, 5), ["BroadcastTo"]),
    (((ROWS, 128), (WIDE, 1), 72, ROWS * WIDE), ["Slice"]),
    (((ROWS, 128), (WIDE, 1), 73, ROWS * WIDE), ["AsStrided"]),  # no box: it would reach over a row's end
    (((2, ROWS, 64), (64, WIDE, 1), 0, ROWS * WIDE), ["AsStrided"]),  # two tensors side by side, of long pieces
    (((2, ROWS, 8), (8, WIDE, 1), 0, ROWS * WIDE), ["Slice", "Transpose"])])
def test_a_view_is_put_in_order(view, kernels):
    assert ordered(*view) == kernels


def test_a_copy_is_as_many_kernels_as_it_has_to_cast_and_to_order():
    whole, place = ((ROWS, 8), (8, 1), 0, ROWS * 8), ((ROWS, 8), (WIDE, 1))
    assert copied((ROWS, 8), (8, 1), whole, False) == ["TensorMove"]
    assert copied((ROWS, 8), (8, 1), whole, True) == ["Cast"], "a cast writes where it goes"
    assert copied(*place, whole, False) == ["ViewCopy"]
    assert copied(*place, whole, True) == ["Cast", "ViewCopy"], "into a row it cannot"
    assert copied(*place, (*place, 0, ROWS * WIDE), True) == ["Slice", "Cast", "ViewCopy"]
    assert copied((8, ROWS), (1, 8), ((8, ROWS), (ROWS, 1), 0, ROWS * 8), False) == ["Transpose"]


def test_what_lies_in_order_is_joined_at_once():
    whole, strided = ((ROWS, 8), (8, 1), 0, ROWS * 8), ((ROWS, 8), (WIDE, 1), 0, ROWS * WIDE)
    assert before_joining([whole] * 32) == [] and before_joining([whole, strided]) == ["Slice"]
    assert before_joining([whole] * 33) == ["ConcatD"], "and what that gives with the last one"
