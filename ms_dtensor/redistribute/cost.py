# SPDX-License-Identifier: Apache-2.0
"""The stated cost of a move: alpha per collective + beta per byte sent by a rank + gamma per byte copied locally.

A model for choosing, not a clock: all ranks must choose alike, so it depends on layouts only, and on shards at
coordinate zero, which are the largest. Bytes are the textbook lower bounds (ring or direct). Read next: `plan.py`.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import prod

ITEMSIZE = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
            **{f"{u}int{b}": b // 8 for u in ("", "u") for b in (8, 16, 32, 64)}}


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds per collective, per byte on the wire, and per byte copied."""

    alpha: float = 20e-6
    beta: float = 1 / 5e9
    gamma: float = 1 / 20e9

    def seconds(self, kind: str, ranks: int, before: int, after: int, messages: int = 1) -> float:
        """Cost of one move of a shard of `before` bytes into one of `after` bytes over `ranks` ranks.

        An exchange pays alpha for each of `messages`, a collective once.
        """
        if kind == "cut":
            return self.gamma * after
        alphas = messages if kind == "exchange" else 1
        return self.alpha * alphas + self.beta * sent_bytes(kind, ranks, before, after) + self.gamma * after


def sent_bytes(kind: str, ranks: int, before: int, after: int) -> float:
    """Bytes a rank must at least send for one move.

    Example:
        >>> from ms_dtensor.redistribute.cost import sent_bytes
        >>> sent_bytes("all_gather", 4, 100, 400), sent_bytes("all_reduce", 4, 100, 100)
        (300, 150.0)
    """
    if kind == "cut":
        return 0
    if kind == "all_gather":
        return before * (ranks - 1)
    if kind == "all_reduce":
        return 2 * before * (ranks - 1) / ranks
    if kind in ("reduce_scatter", "all_to_all"):
        return before * (ranks - 1) / ranks
    return after  # exchange: at worst all of the new shard comes from elsewhere


def nbytes(shape, dtype: str) -> int:
    """Bytes of a dense tensor."""
    return prod(shape) * ITEMSIZE.get(dtype, 4)


DEFAULT = CostModel()
