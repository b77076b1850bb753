# SPDX-License-Identifier: Apache-2.0
"""Where the pieces of a tensor are that is cut along a dim: worked out once per shape, as loops repeat themselves.

Pure arithmetic. Invariant: the pieces are disjoint, in group order, and cover the whole.
"""
from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..protocol import cut, offsets, with_dim


class Pieces(NamedTuple):
    """A shape cut along one dim, a piece per member.

    Attributes:
        whole: the shape of all pieces together.
        shapes: of each piece.
        at: the index that takes each piece out of the whole.
        biggest: elements of the largest piece.
    """

    whole: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    at: tuple[tuple[slice, ...], ...]
    biggest: int

    def of(self, x: np.ndarray) -> list[np.ndarray]:
        """The pieces of an array of the whole's shape."""
        return [x[at] for at in self.at]


@lru_cache(4096)
def along(shape: tuple[int, ...], dim: int, sizes: tuple[int, ...]) -> Pieces:
    """Pieces of `sizes` on `dim`; what `shape` has there is not looked at."""
    starts = offsets(sizes)
    return Pieces(with_dim(shape, dim, starts[-1]), tuple(with_dim(shape, dim, s) for s in sizes),
                  tuple(cut(dim, a, b) for a, b in zip(starts, starts[1:])), math.prod(with_dim(shape, dim, max(sizes))))


@lru_cache(4096)
def across(shape: tuple[int, ...], split_dim: int, split_sizes: tuple[int, ...], concat_dim: int,
           concat_sizes: tuple[int, ...]) -> tuple[Pieces, Pieces, int]:
    """Of an all-to-all in which this member brings `shape`: how the whole is split, where in a result what each member
    brings is put, and the elements of the largest piece that goes from one member to another."""
    brought = along(shape, concat_dim, concat_sizes)
    biggest = with_dim(with_dim(shape, split_dim, max(split_sizes)), concat_dim, max(concat_sizes))
    return along(brought.whole, split_dim, split_sizes), brought, math.prod(biggest)
