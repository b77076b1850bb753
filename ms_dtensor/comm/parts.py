# SPDX-License-Identifier: Apache-2.0
"""Tensors side by side in one piece of memory, each cut along a dim among the members of a group.

Pure arithmetic. Invariant: of each tensor the members' pieces are disjoint and cover it, in group order.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Index = tuple[slice, ...]


class Parts:
    """Where the pieces are.

    Args:
        shapes: of the whole tensors.
        dims: along which each is cut.
        sizes: of each, what each member has of that dim.

    Attributes:
        shapes: of the whole tensors.
        starts: elements before each tensor.
        totals: elements that each member has.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dims: Sequence[int], sizes: Sequence[Sequence[int]]):
        self.shapes, self.starts, self.members = list(shapes), [0], len(sizes[0])
        self._index: list[list[Index]] = []
        self._shapes: list[list[tuple[int, ...]]] = []
        for shape, dim, each in zip(shapes, dims, sizes):
            at = itertools.accumulate(each, initial=0)
            self._index.append([(*(slice(None),) * dim, slice(a, a + n)) for a, n in zip(at, each)])
            self._shapes.append([(*shape[:dim], n, *shape[dim + 1:]) for n in each])
            self.starts.append(self.starts[-1] + math.prod(shape))
        self.totals = [self.total(range(len(self.shapes)), r) for r in range(self.members)]

    def index(self, i: int, member: int) -> Index:
        """What takes a member's piece out of tensor `i`."""
        return self._index[i][member]

    def shape(self, i: int, member: int) -> tuple[int, ...]:
        """Of a member's piece of tensor `i`."""
        return self._shapes[i][member]

    def count(self, i: int, member: int) -> int:
        """Elements of a member's piece of tensor `i`."""
        return math.prod(self._shapes[i][member])

    def total(self, tensors: Sequence[int], member: int) -> int:
        """Elements of a member's pieces of some of the tensors."""
        return sum(self.count(i, member) for i in tensors)
