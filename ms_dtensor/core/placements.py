# SPDX-License-Identifier: Apache-2.0
"""Placements: what one mesh axis does to a tensor. Four tiny values, no tensor and no mesh in sight.

A placement belongs to one axis; a layout has one per axis. Placements are interned, so `is` and `==` agree for
normalised ones, and they print as they are written. Read next: `core/layout.py`.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from ..errors import LayoutError

REDUCE_OPS = ("sum", "avg", "max", "min", "prod")


def longest_chunk(size, parts):
    """Rows of the longest of `parts` chunks of `size` rows; of numbers or arrays.

    Chunks of chunks need no other formula: rounding up twice is rounding up once, by the product of the parts.
    """
    return -(-size // parts)


@lru_cache(maxsize=4096)
def chunk_bounds(size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Start and stop of each chunk of a dim: `longest_chunk` rows each until none are left.

    Example:
        >>> from ms_dtensor.core.placements import chunk_bounds
        >>> chunk_bounds(5, 4)
        ((0, 2), (2, 4), (4, 5), (5, 5))
    """
    step = longest_chunk(size, parts)
    return tuple((min(i * step, size), min((i + 1) * step, size)) for i in range(parts))


class Placement:
    """Base of `Shard`, `Replicate` and `Partial`; meanings follow `torch.distributed.tensor`.

    Example:
        >>> from ms_dtensor import Partial, Placement
        >>> isinstance(Partial(), Placement)
        True
    """

    __slots__ = ()
    _letter: str  # in case notation
    dim: int  # of a Shard
    reduce_op: str  # of a Partial
    parts: tuple[int, ...] = ()  # of a FusedShard

    def is_shard(self, dim: int | None = None) -> bool:
        """True for `Shard` (of this `dim`, if given)."""
        return False

    def is_replicate(self) -> bool:
        """True for `Replicate`."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """True for `Partial` (of this `reduce_op`, if given)."""
        return False

    @staticmethod
    def bounds(size: int, parts: int) -> tuple[tuple[int, int], ...]:
        """Start and stop of what each of `parts` ranks holds of a dim of `size` rows; all of it, but for `Shard`."""
        return ((0, size),) * parts

    def with_dim(self, dim: int) -> Placement:
        """Another dim, cut in the same way; itself, but for `Shard`."""
        return self


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """The axis splits tensor dim `dim` in chunks: each shard has ceil(n / axis size) rows until none are left.

    Another way to cut a dim is a subclass with `bounds` of its own: one chunk per rank, equal ones where they can be.
    Op rules need not know of it, see `ops/rules/spec.py`.

    Args:
        dim: tensor dim; may be negative until a layout, which knows the number of dims, normalises it.

    Example:
        >>> from ms_dtensor import Shard
        >>> Shard(0), Shard(0).is_shard(0), Shard(0) == Shard(1)
        (Shard(0), True, False)
    """

    dim: int
    _letter = "S"
    bounds = staticmethod(chunk_bounds)

    def __post_init__(self):
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            try:
                object.__setattr__(self, "dim", self.dim.__index__())
            except AttributeError:
                raise LayoutError(f"For 'Shard', 'dim' must be an int, but got {self.dim!r}.", "",
                                  "A shard splits one tensor dim.", "write Shard(0)") from None

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def with_dim(self, dim: int) -> Shard:
        return replace(self, dim=dim)

    def __repr__(self):
        return f"{type(self).__name__}({self.dim})"


@dataclass(frozen=True, slots=True, repr=False)
class FusedShard(Shard):
    """The dim is several parts one after the other, and the axis splits each: a shard is a chunk of every part.

    So is a fused projection laid out by head: rank 0 holds its rows of q, then of k, then of v. The tensor keeps its own
    order; `full_tensor`, indexing and checkpoints see nothing of the cut. Another axis may shard that dim if it does so by
    the same parts, and the ranks of both divide each of them. Ops that work row by row keep it, others bring it to `Shard`
    first.

    Args:
        dim: as for `Shard`.
        parts: how many rows each part has.

    Example:
        >>> from ms_dtensor import DeviceMesh, FusedShard, Layout
        >>> mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        >>> layout = Layout(mesh, [FusedShard(0, (4, 2, 2))], (8, 3))
        >>> layout, layout.pieces((1,))[0]
        (f32[4+2+2@tp, 3], ((2, 4), (5, 6), (7, 8)))
    """

    parts: tuple[int, ...] = field()

    def __post_init__(self):
        Shard.__post_init__(self)
        object.__setattr__(self, "parts", tuple(int(n) for n in self.parts))
        if not self.parts or min(self.parts) < 0:
            raise LayoutError(f"For 'FusedShard', 'parts' must be numbers of rows, but got {self.parts}.", "",
                              "The parts are all of the dim.", "write FusedShard(0, (q_rows, k_rows, v_rows))")

    def bounds(self, size: int, parts: int) -> tuple[tuple[int, int], ...]:  # type: ignore[override]  # knows its parts
        """Start and stop of each rank's rows once these are put one rank after the other.

        Of fewer rows than the parts have, another axis holds the others: all ranks have equally many.
        """
        if size != sum(self.parts):
            return chunk_bounds(size, parts)
        ends = np.cumsum([0, *(sum(hi - lo for lo, hi in held) for held in self.pieces(parts))]).tolist()
        return tuple(zip(ends, ends[1:]))

    def pieces(self, ranks: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Start and stop, per rank, of each chunk that it holds."""
        starts = np.cumsum((0, *self.parts)).tolist()
        chunks = [[(at + lo, at + hi) for lo, hi in chunk_bounds(n, ranks)] for at, n in zip(starts, self.parts)]
        return tuple(zip(*chunks))

    def __repr__(self):
        return f"FusedShard({self.dim}, {self.parts})"


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank of the axis holds the same data.

    Example:
        >>> from ms_dtensor import Replicate
        >>> Replicate().is_replicate()
        True
    """

    _letter = "R"

    def is_replicate(self) -> bool:
        return True

    def __repr__(self):
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Every rank of the axis holds a summand (or factor, or candidate); the value is their reduction.

    Args:
        reduce_op: one of "sum", "avg", "max", "min", "prod".

    Raises:
        LayoutError: `reduce_op` is none of these.

    Example:
        >>> from ms_dtensor import Partial
        >>> Partial(), Partial("max").is_partial("sum")
        (Partial('sum'), False)
    """

    reduce_op: str = "sum"
    _letter = "P"

    def __post_init__(self):
        if self.reduce_op not in REDUCE_OPS:
            raise LayoutError(f"For 'Partial', 'reduce_op' must be one of {', '.join(REDUCE_OPS)}, "
                              f"but got {self.reduce_op!r}.", "", "A partial value is defined by its reduction.",
                              "write Partial('sum')")

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def __repr__(self):
        return f"Partial({self.reduce_op!r})"


REPLICATE = Replicate()
PARTIAL = Partial()
