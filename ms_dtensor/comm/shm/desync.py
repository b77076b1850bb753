# SPDX-License-Identifier: Apache-2.0
"""Which rank is the odd one when ranks made different calls, and what is said of it. Pure; a vote, not a proof.

The call most members are in is the usual one; where a group is split evenly, calls of the same kind in other groups count.
Of the others, the odd rank is one that closes every circle of waits, and whose group cuts across the groups in which ranks
made the same call. Invariant: where the votes are equal nobody is named.
"""
from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ...errors import CollectiveMismatch

_OVER = " over ranks "


def _bare(text: str) -> str:
    return text.partition(_OVER)[0]


def _ranks(text: str) -> frozenset[int]:
    return frozenset(map(int, re.findall(r"\d+", text.partition(_OVER)[2])))


def odd_ranks(calls: Sequence[tuple[int, str]], others: Sequence[tuple[int, str]],
              keys: Collection[int] = ()) -> tuple[str, list[int]]:
    """The usual call, and the ranks that made another one (none where that cannot be told).

    Args:
        calls: (rank, call) of those that take part.
        others: (rank, call) that ranks of the world made last, those included.
        keys: ranks without any of which nobody would have to wait.

    Example:
        >>> from ms_dtensor.comm.shm.desync import odd_ranks
        >>> odd_ranks([(0, "barrier over ranks (0, 1, 2)"), (1, "barrier over ranks (0, 1, 2)"), (2, "exchange")], [])
        ('barrier over ranks (0, 1, 2)', [2])
    """
    texts = [text for _, text in calls]
    elsewhere = [_bare(text) for rank, text in others if rank not in dict(calls)]
    votes = {text: (texts.count(text), elsewhere.count(_bare(text))) for text in texts}
    most = max(votes.values())
    usual = next(text for text in texts if votes[text] == most)
    if list(votes.values()).count(most) > 1:
        return usual, []
    odd = [(rank, text) for rank, text in calls if text != usual]
    odd = [(rank, text) for rank, text in odd if rank in keys] or odd
    if len({text for _, text in odd}) > 1:
        cuts = [sum(_bare(text) == _bare(other) and _ranks(text) != _ranks(other) and bool(_ranks(text) & _ranks(other))
                    for _, other in (*others, *calls)) for _, text in odd]
        odd = [call for call, n in zip(odd, cuts) if n == max(cuts)]
    return usual, [rank for rank, _ in odd]


def differing(attempt: str, calls: Sequence[tuple[int, str, str]]) -> CollectiveMismatch:
    """The error that shows rank, call and source line of each."""
    return CollectiveMismatch(
        attempt, "\n".join(f"rank {rank}: {text} at {site}" for rank, text, site in calls),
        "All members of a group call the same collectives, in one order, with equal arguments.",
        "look for a branch that depends on the rank before these lines")
