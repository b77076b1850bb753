# SPDX-License-Identifier: Apache-2.0
"""How the caches of plans fare: a program that keeps missing them pays for planning at every call."""
from __future__ import annotations

from typing import NamedTuple

from ..core import layout
from ..dispatch import dispatcher
from ..redistribute import plan


class CacheInfo(NamedTuple):
    """One bounded cache: how often it knew the answer and did not, how much it holds and may hold.

    Attributes:
        hits: calls answered from the cache; None where they are not counted.
        misses: answers that had to be worked out; None where they are not counted.
        size: entries now.
        limit: entries at most; then the oldest, or all, are forgotten.
    """

    hits: int | None
    misses: int | None
    size: int
    limit: int


def cache_info() -> dict[str, CacheInfo]:
    """What the library remembers: "dispatch" (calls), "redistribute" (moves), "layouts" (placements given by a user).

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from ms_dtensor.debug import cache_info
        >>> mesh = md.init_device_mesh("cpu", (1,))
        >>> x = md.distribute_tensor(ms.Tensor([1.0, 2.0]), mesh, [md.Shard(0)])
        >>> before = cache_info()["dispatch"].hits
        >>> for _ in range(3):
        ...     y = x.exp()
        >>> cache_info()["dispatch"].hits - before >= 2
        True
    """
    moves = plan.remembered()
    return {"dispatch": CacheInfo(**dispatcher.cache_info()),
            "redistribute": CacheInfo(moves.hits, moves.misses, moves.currsize, moves.maxsize),
            "layouts": CacheInfo(None, None, *layout.remembered())}
