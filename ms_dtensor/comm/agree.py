# SPDX-License-Identifier: Apache-2.0
"""Do all members of a group make the same calls? Asked of backends that do not see it by themselves, every k-th time.

Each rank keeps the calls since the last check and their checksum. Every k-th call of a group first gathers the checksums,
which is one tiny collective; only if they differ are the calls themselves gathered. k is 1 on CPU and 4096 on devices, where
the answer makes the host wait; MS_DTENSOR_CHECK_EVERY sets it, 0 switches the check off. With k above 1 a device may hang in
a call that differs before the check comes to it. The invariant: members that agree do not notice.
"""
from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import CollectiveMismatch, ConfigError
from .protocol import Ranks
from .record import note, user_site


@dataclass
class _Calls:
    checksum: int = 0
    made: list[tuple[str, str]] = field(default_factory=list)  # text and line


def check_every(default: int) -> int:
    """How often to check: MS_DTENSOR_CHECK_EVERY, or the default."""
    text = os.environ.get("MS_DTENSOR_CHECK_EVERY", str(default))
    if not text.isdecimal() or len(text) > 9:
        raise ConfigError("For 'MS_DTENSOR_CHECK_EVERY', the value is no number of collectives.",
                          f"MS_DTENSOR_CHECK_EVERY={text[:40]!r}", "It is a whole number of at most nine digits.",
                          "set it to 1 for every one, to 64 for some, to 0 for none")
    return int(text)


class Agreement:
    """The calls of one rank, by group.

    Args:
        every: check each so many-th call of a group; 0 for never.
        gather: something hashable of each member, equal where their numbers are.
        gather_calls: their lists of calls.
    """

    def __init__(self, every: int, gather: Callable[[int, Ranks], Sequence[object]],
                 gather_calls: Callable[[list, Ranks], list[list]]):
        self.every, self._gather, self._gather_calls = every, gather, gather_calls
        self._groups: dict[Ranks, _Calls] = {}
        self._checking = False

    def call(self, what: str, about: str, group: Ranks) -> None:
        """Notes a call that is about to be made, and checks if it is time."""
        if not self.every or self._checking or len(group) == 1:
            return
        calls = self._groups.setdefault(group, _Calls())
        of = note().of
        text = f"{what} {of}{': ' if of else ''}{about} over ranks {group}"
        calls.checksum = zlib.crc32(text.encode(), calls.checksum)
        calls.made.append((text, user_site()))
        if len(calls.made) < self.every:
            return
        self._checking = True
        try:
            agree = len(set(self._gather(calls.checksum, group))) == 1
            if not agree:
                raise _mismatch(group, self._gather_calls(calls.made, group))
        finally:
            self._checking = False
            calls.made.clear()
            calls.checksum = 0


def _mismatch(group: Ranks, everybody: list[list]) -> CollectiveMismatch:
    first = next(i for i, calls in enumerate(zip(*everybody)) if len({text for text, _ in calls}) > 1)
    texts = [calls[first][0] for calls in everybody]
    usual = max(texts, key=texts.count)
    odd = [str(rank) for rank, text in zip(group, texts) if text != usual]
    lines = [f"rank {rank}: {text} at {calls[first][1]}" for rank, text, calls in zip(group, texts, everybody)]
    return CollectiveMismatch(
        f"For '{usual.split(' ')[0]}', rank(s) {', '.join(odd)} made another call than the rest of the group.",
        "\n".join(lines), "All members of a group call the same collectives, in one order, with equal arguments.",
        "look for a branch that depends on the rank before these lines")
