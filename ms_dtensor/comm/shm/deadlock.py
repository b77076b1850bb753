# SPDX-License-Identifier: Apache-2.0
"""Do ranks wait for each other in a circle? Answered from what each of them has published in shared memory.

A rank that waits for long states conditions, all of which it needs: a word in another rank's segment must reach a value.
Only that other rank writes the word, and a rank that waits writes nothing. So if every rank of a circle waits, each for a
word that has still not come when all have been looked at, and none of them has moved meanwhile, none ever will. This needs
no timeout and has no false alarms, however slowly the machine runs.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .segment import Segment


class Condition(NamedTuple):
    """Rank `rank` must bring the 32-bit word `word` of its segment to `value` or beyond."""

    rank: int
    word: int
    value: int


def reached(now: int, value: int) -> bool:
    """Whether a counter of 32 bits that only grows has reached a value.

    Example:
        >>> from ms_dtensor.comm.shm.deadlock import reached
        >>> reached(7, 7), reached(6, 7), reached(1, 0xFFFFFFFF)
        (True, False, True)
    """
    return not (now - value) & 0x80000000


def circle(me: int, segments: Mapping[int, Segment]) -> tuple[set[int], set[int]]:
    """The ranks of the circle that `me` is part of; empty if there is none, or somebody still moves.

    The second set has those of them without which nobody would have to wait: each alone closes every circle.
    """
    seen: dict[int, tuple[int, list[tuple[int, int, int]]]] = {}
    awaited: dict[int, set[int]] = {}
    todo = [me]
    while todo:
        rank = todo.pop()
        if rank not in seen:
            seen[rank] = segments[rank].waits()
            awaited[rank] = _missing(seen[rank][1], segments)
            todo.extend(awaited[rank])
    after = {r: _after(r, awaited) for r in seen}
    ranks = {r for r in after[me] if me in after[r]}
    # A word may have come since it was looked at, from one who began to wait only then: its reader sleeps on, all the same.
    if any(segments[r].waits()[0] != seen[r][0] or _missing(seen[r][1], segments) != awaited[r] for r in ranks):
        return set(), set()

    def opens(rank: int) -> bool:
        rest = {r: awaited[r] - {rank} for r in ranks if r != rank}
        return not any(r in _after(r, rest) for r in rest)
    return ranks, {r for r in ranks if opens(r)}


def _missing(conditions: Iterable[tuple[int, int, int]], segments: Mapping[int, Segment]) -> set[int]:
    """The ranks whose words have not come."""
    return {r for r, word, value in conditions if not reached(segments[r].words[word], value)}


def _after(rank: int, awaited: Mapping[int, set[int]]) -> set[int]:
    """Whom a rank waits for, directly or not."""
    out: set[int] = set()
    todo = [rank]
    while todo:
        new = awaited.get(todo.pop(), set()) - out
        out |= new
        todo.extend(new)
    return out
