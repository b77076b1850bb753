# SPDX-License-Identifier: Apache-2.0
"""Rows of an array, as many at a time as a core's cache holds with what is made of them."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_ELEMENTS = 1 << 17  # of all that is made of rows at a time


def parts(x: np.ndarray, count: int = 1) -> Iterator[tuple[int, int, list[np.ndarray]]]:
    """(from, to, `count` arrays of the size of these rows to write into), one part of x [n, d] after another."""
    rows = max(1, min(len(x), _ELEMENTS // count // max(1, x.shape[1])))
    memory = [np.empty((rows, x.shape[1]), x.dtype) for _ in range(count)]
    for a in range(0, len(x), rows):
        b = min(a + rows, len(x))
        yield a, b, [m[:b - a] for m in memory]
