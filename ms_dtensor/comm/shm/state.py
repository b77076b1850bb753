# SPDX-License-Identifier: Apache-2.0
"""What a rank knows of another one, and of a group: where its words lie in shared memory, and how far its calls have come.

Nothing here waits. Invariant: of the words of a group's page each member writes its own.
"""
from __future__ import annotations

import os
from collections import deque
from collections.abc import Hashable
from typing import Any

from .futex import Word
from .rendezvous import Link
from .segment import PAGE, SLOT, Segment

# 32-bit words of a group's page: meetings so far; the call, for even and odd meetings; steps of a broadcast so far; page
# of the result, for even and odd calls; the last meeting that the first member refused; meetings after steps given up
_SEQ, _CALL, _STEPS, _RESULT, _REFUSED, AGAIN = 0, 1, 3, 4, 6, 7


class Peer:
    """What this rank knows of another one."""

    __slots__ = ("end", "inbox", "memory", "pid", "posted", "process", "rank", "sock", "taken")

    def __init__(self, link: Link, me: int):
        self.rank, self.pid, self.sock = link.rank, link.pid, link.sock
        self.memory = Segment(link.fd, own=False)
        self.inbox: deque[tuple[bytes, bytes, int]] = deque()  # messages: description, payload, or a memory file
        self.taken, self.posted = 0, self.memory.posted(me)  # messages for us that came; that it says it sent
        self.end: str | None = None                          # None: alive; "": left normally; text: how it ended
        try:
            self.process = os.pidfd_open(self.pid)           # says when it is gone, even if a child keeps its sockets
        except OSError:                                      # an old kernel, or gone already: the socket will say so
            self.process = -1


class GroupState:
    """A group as this rank sees it.

    Attributes:
        ranks: its members.
        index: which of them this rank is.
        members: their segments.
        peers: their `Peer`s; None at the own index.
        offsets: where each member keeps the group's page, in its segment.
        turn: flips with every call: which half of the slots, and which result, the call uses.
        described: calls of before, as text and checksum.
        cache: for the engine, views that calls of one kind use again.
    """

    __slots__ = ("_pages", "cache", "described", "index", "members", "meetings", "offsets", "others", "peers", "ranks",
                 "seq", "size", "steps", "turn")

    def __init__(self, ranks: tuple[int, ...], me: int, peers: dict[int, Peer], memory: Segment, offsets: list[int]):
        self.ranks, self.size, self.index = ranks, len(ranks), ranks.index(me)
        self.peers = [peers.get(r) for r in ranks]
        self.members = [p.memory if p else memory for p in self.peers]
        self.offsets = offsets
        self.meetings = [m.word(o + 4 * _SEQ) for m, o in zip(self.members, offsets)]
        self.steps = [m.word(o + 4 * _STEPS) for m, o in zip(self.members, offsets)]
        self._pages = [(m.words, o // 4) for m, o in zip(self.members, offsets)]
        self.others = tuple((i, w) for i, w in enumerate(self.meetings) if i != self.index)
        self.seq, self.turn = 0, 0
        self.described: dict = {}
        self.cache: dict = {}

    def keep(self, key: Hashable, made: Any) -> Any:
        """Puts something into the cache and returns it."""
        if len(self.cache) > 128:
            self.cache.clear()
        self.cache[key] = made
        return made

    def slots(self) -> list[int]:
        """Where each member's slot of this call is."""
        return [o + PAGE + self.turn * SLOT for o in self.offsets]

    def word(self, i: int, which: int) -> Word:
        """One of the words of member `i`'s page."""
        return self.members[i].word(self.offsets[i] + 4 * which)

    def begin(self) -> None:
        """Sets this member's counters to where they are at first, and so does every other member."""
        for which in (_SEQ, _STEPS, _REFUSED):
            self.word(self.index, which).set(0)
        self.seq = self.turn = 0

    def show_call(self, check: int) -> None:
        """Publishes the checksum of the call, before meeting."""
        words, at = self._pages[self.index]
        words[at + _CALL + (self.seq & 1)] = check

    def call_of(self, i: int) -> int:
        """The checksum member `i` published for this meeting; valid until it has met us once more."""
        words, at = self._pages[i]
        return words[at + _CALL + (self.seq & 1)]

    def refuse(self) -> None:
        """The first member, of this meeting: calls differ, and it has told the others how."""
        words, at = self._pages[0]
        words[at + _REFUSED] = self.seq

    def refused(self) -> bool:
        """Whether it has; after the meeting."""
        words, at = self._pages[0]
        return words[at + _REFUSED] == self.seq

    def show_result(self, offset: int) -> None:
        """Publishes where the result of this call is made."""
        words, at = self._pages[self.index]
        words[at + _RESULT + self.turn] = offset // PAGE

    def result_of(self, i: int) -> int:
        """Where member `i` makes its result, in its segment."""
        words, at = self._pages[i]
        return words[at + _RESULT + self.turn] * PAGE
