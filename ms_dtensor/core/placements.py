# SPDX-License-Identifier: Apache-2.0
"""Placements: what one mesh axis does to a tensor. Three tiny values, no tensor and no mesh in sight.

A placement belongs to one axis; a layout has one per axis. Placements are interned, so `is` and `==` agree for
normalised ones, and they print as they are written. Read next: `core/layout.py`.
"""
from __future__ import annotations

from dataclasses import dataclass

from ..errors import LayoutError

REDUCE_OPS = ("sum", "avg", "max", "min", "prod")


class Placement:
    """Base of `Shard`, `Replicate` and `Partial`; meanings follow `torch.distributed.tensor`.

    Example:
        >>> from ms_dtensor import Partial, Placement
        >>> isinstance(Partial(), Placement)
        True
    """

    __slots__ = ()
    dim: int  # of a Shard
    reduce_op: str  # of a Partial

    def is_shard(self, dim: int | None = None) -> bool:
        """True for `Shard` (of this `dim`, if given)."""
        return False

    def is_replicate(self) -> bool:
        """True for `Replicate`."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """True for `Partial` (of this `reduce_op`, if given)."""
        return False


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """The axis splits tensor dim `dim` in chunks: each shard has ceil(n / axis size) rows until none are left.

    Args:
        dim: tensor dim; may be negative until a layout, which knows the number of dims, normalises it.

    Example:
        >>> from ms_dtensor import Shard
        >>> Shard(0), Shard(0).is_shard(0), Shard(0) == Shard(1)
        (Shard(0), True, False)
    """

    dim: int

    def __post_init__(self):
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            try:
                object.__setattr__(self, "dim", self.dim.__index__())
            except AttributeError:
                raise LayoutError(f"For 'Shard', 'dim' must be an int, but got {self.dim!r}.", "",
                                  "A shard splits one tensor dim.", "write Shard(0)") from None

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __repr__(self):
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank of the axis holds the same data.

    Example:
        >>> from ms_dtensor import Replicate
        >>> Replicate().is_replicate()
        True
    """

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
