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
        dims: along which each is cut.
        starts: elements before each tensor.
        totals: elements that each member has.
        widths: elements of each tensor's largest piece; where pieces are packed, shorter ones are filled up to that, so
            that a tensor's pieces lie at the same place of every member's row.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dims: Sequence[int], sizes: Sequence[Sequence[int]]):
        self.shapes, self.dims, self.starts, self.members = list(shapes), list(dims), [0], len(sizes[0])
        self._sizes = [list(each) for each in sizes]
        self._index: list[list[Index]] = []
        self._shapes: list[list[tuple[int, ...]]] = []
        for shape, dim, each in zip(shapes, dims, sizes):
            at = itertools.accumulate(each, initial=0)
            self._index.append([(*(slice(None),) * dim, slice(a, a + n)) for a, n in zip(at, each)])
            self._shapes.append([(*shape[:dim], n, *shape[dim + 1:]) for n in each])
            self.starts.append(self.starts[-1] + math.prod(shape))
        self.totals = [self.total(range(len(self.shapes)), r) for r in range(self.members)]
        self.widths = [max(map(math.prod, pieces)) for pieces in self._shapes]

    def runs(self, i: int, first: int, stop: int) -> list[tuple[int, int, int, int]]:
        """Of members [first, stop), those side by side that have equal pieces of tensor `i`, empty ones left out.

        Of chunks there are two at most, however many members: full ones, and the last.

        Returns:
            (first member, how many, where in the dim their pieces begin, how much of it each has).
        """
        out, member, at = [], first, sum(self._sizes[i][:first])
        for size, alike in itertools.groupby(self._sizes[i][first:stop]):
            count = len(list(alike))
            if size and math.prod(self.shapes[i]):
                out.append((member, count, at, size))
            member, at = member + count, at + count * size
        return out

    def stretches(self, i: int) -> int | None:
        """As how many stretches a member's piece lies in tensor `i`, where all members have as much of it; else None."""
        if min(self._sizes[i]) != max(self._sizes[i]) or not math.prod(self.shapes[i]):
            return None
        return math.prod(self.shapes[i][:self.dims[i]])

    def kind(self, i: int) -> tuple:
        """How pieces of tensor `i` lie: how wide, and in how many stretches; where they are uneven, as no other's do."""
        n = self.stretches(i)
        return (self.widths[i], n) if n is not None else (self.widths[i], None, i)

    def alike(self) -> list[list[int]]:
        """Neighbours whose pieces lie alike, together: one strided copy moves them all."""
        return [list(some) for _, some in itertools.groupby(range(len(self.shapes)), self.kind)]

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


def in_chains(kinds: Sequence[Sequence[tuple]]) -> list[int]:
    """An order of things in which equal kinds are neighbours, where that can be.

    Args:
        kinds: of each thing those of its tensors, which stay in their order; a kind begins with how wide it is.

    Returns:
        Numbers of the things. What consists of several kinds goes between what is of its first and of its last one; of the
        chains that this makes the one with the widest tensor comes first.

    Example:
        >>> from ms_dtensor.comm.parts import in_chains
        >>> a, b, c = (4, 1), (2, 1), (1, 1)
        >>> in_chains([[c], [a, b, b], [a], [b], [c]])
        [2, 1, 3, 0, 4]
    """
    alike, mixed, chains = dict[tuple, list[int]](), list[int](), list[list[int]]()
    for i, (first, *others) in enumerate(kinds):
        if any(kind != first for kind in others):
            mixed.append(i)
        else:
            alike.setdefault(first, []).append(i)
    while mixed:
        begins = [i for i in mixed if all(kinds[i][0] != kinds[j][-1] for j in mixed)]
        following = [*begins, *mixed][:1]
        chain = alike.pop(kinds[following[0]][0], [])
        while following:
            i = following[0]
            mixed.remove(i)
            chain += [i, *alike.pop(kinds[i][-1], [])]
            following = [j for j in mixed if kinds[j][0] == kinds[i][-1]]
        chains.append(chain)
    chains += alike.values()
    return [i for chain in sorted(chains, key=lambda some: -max(kind[0] for i in some for kind in kinds[i])) for i in chain]
