# SPDX-License-Identifier: Apache-2.0
"""Where the parts of a tensor lie, as a formula: the mesh, how each dim is cut over its axes, which copy wrote. Pure.

A list of parts grows with tensors times ranks, 56 million of a large model on 16,384; this is some hundred bytes a tensor,
whatever the ranks. Whoever wants a box computes which parts touch it; nothing is computed of others, so that a file which
claims a mesh of any size costs nothing. Invariant: the parts of a tensor are disjoint and cover it.
"""
from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ..redistribute.boxes import Box

Place = tuple[int, ...]  # a rank's place along some axes
Run = tuple[int, int]


@dataclass(frozen=True)
class Ranks:
    """Numbers of ranks in some order, as runs of (first, count, step).

    Example:
        >>> from ms_dtensor.checkpoint.spread import Ranks
        >>> ranks = Ranks.of([4, 6, 8, 1, 2])
        >>> ranks.runs, len(ranks), ranks[3], ranks.find(8)
        (((4, 3, 2), (1, 2, 1)), 5, 1, 2)
    """

    runs: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Ranks:
        """These."""
        runs: list[list[int]] = []
        for n in numbers:
            if runs and runs[-1][1] > 1 and n == runs[-1][0] + runs[-1][1] * runs[-1][2]:
                runs[-1][1] += 1
            elif runs and runs[-1][1] == 1 and n > runs[-1][0]:
                runs[-1][1:] = 2, n - runs[-1][0]
            else:
                runs.append([n, 1, 1])
        return cls(tuple((a, b, c) for a, b, c in runs))

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(count for _, count, _ in self.runs))

    def __len__(self) -> int:
        return self._ends[-1] if self.runs else 0

    def __getitem__(self, i: int) -> int:
        which = bisect.bisect_right(self._ends, i)
        first, count, step = self.runs[which]
        return first + (i - self._ends[which] + count) * step

    def __iter__(self) -> Iterator[int]:
        for first, count, step in self.runs:
            yield from range(first, first + count * step, step)

    def find(self, rank: int) -> int | None:
        """Which one a rank is, or None."""
        for (first, count, step), end in zip(self.runs, self._ends):
            i, rest = divmod(rank - first, step)
            if not rest and 0 <= i < count:
                return end - count + i
        return None


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks: numbers by row-major place."""

    shape: Place
    ranks: Ranks

    def place_of(self, rank: int) -> Place | None:
        """Where a rank is, or None."""
        return _place_of(self, rank)


@lru_cache(maxsize=64)
def _place_of(mesh: Mesh, rank: int) -> Place | None:
    i = mesh.ranks.find(rank)
    if i is None:
        return None
    place = []
    for n in reversed(mesh.shape):
        i, at = divmod(i, n)
        place.append(at)
    return tuple(reversed(place))


@dataclass(frozen=True)
class Cut:
    """How a dim is cut: in chunks of ceil(n / ranks) over each axis, outermost first; or in the runs that are told.

    Attributes:
        axes: of the mesh; none: the dim is whole.
        runs: by row-major place along the axes, of each rank the runs of rows that it holds; None: chunks.
    """

    axes: tuple[int, ...] = ()
    runs: tuple[tuple[Run, ...], ...] | None = None

    def at(self, size: int, shape: Place, place: Place) -> tuple[Run, ...]:
        """The runs of a dim of this size that the rank at a place of a mesh holds."""
        if self.runs is not None:
            i = 0
            for a in self.axes:
                i = i * shape[a] + place[a]
            return self.runs[i]
        lo, hi = 0, size
        for a in self.axes:
            step = -(-(hi - lo) // shape[a])
            lo, hi = min(lo + place[a] * step, hi), min(lo + (place[a] + 1) * step, hi)
        return ((lo, hi),) if lo < hi else ()

    def touching(self, size: int, shape: Place, wanted: Run) -> Iterator[tuple[Place, Run]]:
        """The runs that have something of a wanted one, and the places along the axes that hold them."""
        if self.runs is None:
            yield from _chunks([shape[a] for a in self.axes], 0, size, wanted, ())
            return
        for i, place in enumerate(itertools.product(*(range(shape[a]) for a in self.axes))):
            for run in self.runs[i]:
                if run[0] < wanted[1] and wanted[0] < run[1] and run[0] < run[1]:
                    yield place, run

    def count(self, size: int, shape: Place) -> int:
        """How many runs there are."""
        if self.runs is None:
            return _count([shape[a] for a in self.axes], size)
        return sum(lo < hi for runs in self.runs for lo, hi in runs)


def _chunks(parts: list[int], lo: int, hi: int, wanted: Run, place: Place) -> Iterator[tuple[Place, Run]]:
    if not parts:
        if lo < hi and lo < wanted[1] and wanted[0] < hi:
            yield place, (lo, hi)
        return
    step = -(-(hi - lo) // parts[0])
    if step:
        for i in range(max(wanted[0] - lo, 0) // step, min(parts[0], -(-(min(wanted[1], hi) - lo) // step))):
            yield from _chunks(parts[1:], lo + i * step, min(lo + (i + 1) * step, hi), wanted, (*place, i))


def _count(parts: list[int], size: int) -> int:
    if not parts or not size:
        return int(size > 0)
    step = -(-size // parts[0])
    full, rest = divmod(size, step)
    return full * _count(parts[1:], step) + _count(parts[1:], rest)


@dataclass(frozen=True)
class Spread:
    """How a tensor lies on ranks, and which of those that hold the same wrote it.

    Attributes:
        mesh: the ranks.
        cuts: one a dim.
        first: of the ranks that hold the same box, row-major over the axes that do not cut, the one that wrote its first
            part.
        parts: into how many runs of rows a box is cut, each of which the next of these ranks wrote.
    """

    mesh: Mesh
    cuts: tuple[Cut, ...]
    first: int = 0
    parts: int = 1

    @cached_property
    def cutting(self) -> frozenset[int]:
        """The axes that cut."""
        return frozenset(a for cut in self.cuts for a in cut.axes)

    @cached_property
    def copies(self) -> int:
        """How many ranks hold the same."""
        return math.prod(n for a, n in enumerate(self.mesh.shape) if a not in self.cutting)

    def boxes(self, shape: Sequence[int], wanted: Box | None = None) -> Iterator[tuple[Box, int]]:
        """The parts that have something of a box (of the whole), and which rank wrote each; in no order that matters.

        Example:
            >>> from ms_dtensor.checkpoint.spread import Cut, Mesh, Ranks, Spread
            >>> spread = Spread(Mesh((2, 3), Ranks.of(range(6))), (Cut((1,)), Cut()), first=1)
            >>> list(spread.boxes((7, 2), ((2, 4), (0, 2))))
            [(((0, 3), (0, 2)), 3), (((3, 6), (0, 2)), 4)]
        """
        wanted = tuple((0, n) for n in shape) if wanted is None else wanted
        place = [0] * len(self.mesh.shape)

        def along(dim: int, box: Box) -> Iterator[tuple[Box, int]]:
            if dim == len(shape):
                for i, part in _rows(box, self.parts, wanted):
                    yield part, self._writer(place, i)
                return
            cut = self.cuts[dim]
            for at, run in cut.touching(shape[dim], self.mesh.shape, wanted[dim]):
                for a, i in zip(cut.axes, at):
                    place[a] = i
                yield from along(dim + 1, (*box, run))
        return along(0, ()) if all(lo < hi for lo, hi in wanted) else iter(())

    def written_by(self, rank: int, shape: Sequence[int]) -> list[Box]:
        """The parts that a rank wrote."""
        place = self.mesh.place_of(rank)
        if place is None or not all(shape):
            return []
        copy = 0
        for a, n in enumerate(self.mesh.shape):
            if a not in self.cutting:
                copy = copy * n + place[a]
        number = (copy - self.first) % self.copies
        held = itertools.product(*(cut.at(n, self.mesh.shape, place) for cut, n in zip(self.cuts, shape)))
        return [part for box in held for i, part in _rows(box, self.parts, box) if i == number]

    def count(self, shape: Sequence[int]) -> int:
        """How many parts there are."""
        if self.parts > 1:
            return sum(1 for _ in self.boxes(shape))
        return math.prod(cut.count(n, self.mesh.shape) for cut, n in zip(self.cuts, shape))

    def _writer(self, place: list[int], part: int) -> int:
        copy = (self.first + part) % self.copies
        at, scale = 0, 1
        for a in reversed(range(len(place))):
            n = self.mesh.shape[a]
            if a in self.cutting:
                i = place[a]
            else:
                copy, i = divmod(copy, n)
            at += i * scale
            scale *= n
        return self.mesh.ranks[at]


def _rows(box: Box, parts: int, wanted: Box) -> Iterator[tuple[int, Box]]:
    """The runs of rows of a box that have something of another, and their numbers; all of it if it is not to be cut."""
    dim = next((d for d, (lo, hi) in enumerate(box) if hi - lo > 1), None) if parts > 1 else None
    if dim is None:
        yield 0, box
        return
    lo, hi = box[dim]
    count = min(parts, hi - lo)
    first = (max(wanted[dim][0], lo) - lo) * count // (hi - lo)
    for i in range(max(first - 1, 0), count):
        a, b = lo + (hi - lo) * i // count, lo + (hi - lo) * (i + 1) // count
        if a >= wanted[dim][1]:
            return
        if b > wanted[dim][0]:
            yield i, (*box[:dim], (a, b), *box[dim + 1:])
