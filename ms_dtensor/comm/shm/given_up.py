# SPDX-License-Identifier: Apache-2.0
"""A step that some rank has left by an exception: the others are told at once, and all of them can begin another.

What was in flight then is void: messages that nobody took, meetings to which some members came. So ranks meet twice. After
the first meeting none of them is in a call, and what has come is thrown away; after the second all have set the counters of
their groups back. Invariant: no rank reads a word of a group between the two.
"""
from __future__ import annotations

import os

from ...errors import CommError
from .deadlock import Condition, reached
from .engine import Engine, Ranks
from .signals import NAP
from .state import AGAIN


def tell(engine: Engine, error: CommError, ranks: Ranks) -> None:
    """Tells the ranks; and this one's own thread, which may wait for them."""
    signals = engine._signals
    error.given_up = signals.given_up = signals.left = True
    signals.tell([signals.peers.get(r) for r in ranks], error)
    signals.hear(error)
    engine._worker.drain()
    signals.hear(None)
    engine._broken = engine._broken or error


def resume(engine: Engine, ranks: Ranks) -> None:
    """Meets the others if a step was given up; afterwards all is as at the start, for groups within these ranks.

    Raises:
        PeerLost: one has ended, or does not come.
    """
    signals = engine._signals
    engine._owner.check("resume")
    if engine._worker.busy:  # who reads the sockets, too
        engine._worker.drain()
    signals.catch_up()
    if not signals.given_up:
        return
    if not signals.left:  # this rank begins the very step that others have left: it leaves it, too, and so all count alike
        signals.raise_told()
    engine._memory.enter(f"resume over ranks {ranks}".encode(), engine._site().encode())
    for first in (True, False):
        _meet(engine, ranks, first)
        if first:
            _begin(engine, ranks)
    engine._broken = None
    engine._memory.leave()


def _meet(engine: Engine, ranks: Ranks, first: bool) -> None:
    signals = engine._signals
    signals.hear(None)
    g = engine._groups.get(ranks)
    if g is None:
        g = engine._groups[ranks] = signals.group(ranks, "resume")
    words = [g.word(i, AGAIN) for i in range(g.size)]
    value = (words[g.index].get() + 1) & 0xFFFFFFFF
    words[g.index].set(value)

    def missing() -> list[Condition]:
        if first:  # what others told before they came is void, too
            signals.hear(None)
        return [Condition(r, w.index, value) for r, w in zip(ranks, words) if not reached(w.get(), value)]

    def sleep() -> None:
        late = next((w for w in words if not reached(w.get(), value)), None)
        if late is not None:
            late.sleep(late.get(), NAP)
    if missing():
        sleep()
        signals.wait_slow("resume", missing, sleep)


def _begin(engine: Engine, ranks: Ranks) -> None:
    """Throws away what has come, and what was counted."""
    signals = engine._signals
    signals.catch_up()
    signals.hear(None)
    for r in set(ranks) - {engine.rank}:
        inbox = signals.peers[r].inbox
        while inbox:
            fd = inbox.popleft()[2]
            if fd >= 0:
                os.close(fd)
    for group in engine._groups.values():
        if set(group.ranks) <= set(ranks):
            group.begin()
    signals.given_up = signals.left = False  # before the second meeting: who has left that may give up again
