# SPDX-License-Identifier: Apache-2.0
"""Meeting points of ranks, messages between them, goodbyes; and every way a wait can end badly.

Ranks meet at words of shared memory (`futex`). One packet socket per pair of ranks carries messages and bad news, and is
closed by the kernel when its process dies: a rank that has slept for `_SLICE` looks at all sockets, so every rank that
waits for anything notices every death. Nothing here touches payload in shared memory.
Invariant: `sync` returns on a member only after every member of the group has called it, with the same call.
"""
from __future__ import annotations

import hashlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from ...errors import CollectiveMismatch, CommError, PeerLost
from .deadlock import Condition, circle, reached
from .desync import differing, odd_ranks
from .futex import Word, duration
from .rendezvous import Link
from .segment import Segment
from .state import GroupState, Peer

_PACKET_START = struct.Struct("<BxHI")    # kind, unused, a number
_ERROR, _BYE, _DATA, _DATA_FD = range(4)
_IN_STEP, _GIVEN_UP = 1, 2               # the number of an error
INLINE = 8 << 10                         # largest message that travels inside the socket
_PACKET = INLINE + 4096
_FD_SPACE = socket.CMSG_SPACE(4)
_IN = select.POLLIN
_CONSEQUENCES = ("PeerLost", "CommError", "CollectiveMismatch")
_ERRORS = {b"M": CollectiveMismatch, b"P": PeerLost, b"C": CommError}
_SLICE = 0.05                            # seconds of sleep after which a rank looks around
NAP = duration(_SLICE)


class Signals:
    """The sockets of one rank.

    Args:
        rank: this rank.
        memory: its own segment.
        links: its peers.
        timeout: seconds after which a wait gives up.
    """

    def __init__(self, rank: int, memory: Segment, links: list[Link], timeout: float):
        self.rank, self.memory, self.timeout = rank, memory, timeout
        self.peers = {link.rank: Peer(link, rank) for link in links}
        self._by_fd = {fd: p for p in self.peers.values() for fd in (p.sock.fileno(), p.process) if fd >= 0}
        self._poller = select.poll()
        for fd in self._by_fd:
            self._poller.register(fd, _IN)
        self._told: CommError | None = None                  # what a peer told us went wrong
        self.given_up = self.left = False                    # a step, by somebody; and by this rank; see `given_up.py`

    # -- reading ---------------------------------------------------------------------------------------------------

    def _poll(self, seconds: float) -> bool:
        """Reads what has come; blocks up to the given time if nothing has."""
        events = self._poller.poll(seconds * 1000)
        for fd, event in events:
            peer = self._by_fd.get(fd)
            if peer is not None and event != select.POLLOUT:  # None: dropped by an event before this one
                more = self._read(peer)
                while fd == peer.process and more:  # gone: what it said last comes first
                    more = self._read(peer)
                if fd == peer.process:
                    self._drop(peer, "died")
        return bool(events)

    def catch_up(self) -> None:
        """Reads all that has come."""
        while self._poll(0):
            pass

    def _read(self, peer: Peer) -> bool:
        """Reads a packet; False if there is none, or the peer has ended."""
        if peer.end is not None:
            return False
        try:
            data, control = self._receive(peer)
        except BlockingIOError:
            return False
        if not data:
            self._drop(peer, "died")
            return False
        kind, _, number = _PACKET_START.unpack_from(data)
        if kind == _ERROR:
            attempt, operands, rule, *fixes = data[9:].decode(errors="replace").split("\0")
            told = _ERRORS[data[8:9]](attempt, operands, rule, fixes)
            told.in_step, told.given_up = number == _IN_STEP, number == _GIVEN_UP
            self.given_up = self.given_up or told.given_up
            if self._told is None or not told.given_up:  # that is a consequence, and seldom of what ranks have in common
                self._told = told
        elif kind == _BYE:
            self._drop(peer, data[8:].decode(errors="replace"))
        else:
            fd = struct.unpack("i", control[0][2])[0] if control else -1
            peer.inbox.append((data[8:8 + number], data[8 + number:], fd))
            peer.taken = (peer.taken + 1) & 0xFFFFFFFF
        return True

    @staticmethod
    def _receive(peer: Peer) -> tuple[bytes, list]:
        """A packet; an empty one at the end."""
        for _ in range(2):
            try:
                return peer.sock.recvmsg(_PACKET, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)[:2]
            except ConnectionError:  # said once, and first, of a peer that left packets unread; what it sent comes after it
                continue
        return b"", []

    def _drop(self, peer: Peer, end: str) -> None:
        if peer.end is None:
            peer.end = end
            for fd in (peer.sock.fileno(), peer.process):
                if self._by_fd.pop(fd, None) is not None:
                    self._poller.unregister(fd)
            if peer.process >= 0:
                os.close(peer.process)
                peer.process = -1

    # -- writing ---------------------------------------------------------------------------------------------------

    def _send(self, peer: Peer, packet: bytes, fds: tuple[int, ...] = ()) -> bool:
        """False if the peer is gone. A full socket is waited for while reading, so two floods cannot lock up."""
        if peer.end is not None:
            return False
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fds[0]))] if fds else ()
        while True:
            try:
                peer.sock.sendmsg([packet], control) if fds else peer.sock.send(packet)
                return True
            except BlockingIOError:
                self._poller.modify(peer.sock.fileno(), _IN | select.POLLOUT)
                self._poll(self.timeout)
                if peer.end is not None:
                    return False
                self._poller.modify(peer.sock.fileno(), _IN)
            except OSError:
                return False  # its goodbye, if any, is still to be read

    # -- waiting ---------------------------------------------------------------------------------------------------

    def wait_slow(self, what: str, missing: Callable[[], list[Condition]], sleep: Callable[[], object],
                g: GroupState | None = None) -> None:
        """The rest of a wait that has taken a slice already: until nothing is missing, or it cannot end well.

        Args:
            missing: the conditions not fulfilled yet.
            sleep: sleeps a slice, or less if something has changed.
            g: the group that meets.
        """
        deadline = time.monotonic() + self.timeout - _SLICE
        try:
            while conditions := missing():
                self.catch_up()  # several ends may have come at once: report the first cause, not its consequence
                if not (conditions := missing()):  # complete after all; bad news matter to the next wait
                    return
                self._check(conditions, what)
                if time.monotonic() > deadline:
                    error = self._timed_out([c.rank for c in conditions], what, g)
                    self.tell(g.peers if g else [], error)  # whose own time is up a little later
                    raise error
                self.memory.wait_for(conditions)
                self._check_circle(what)
                sleep()
        finally:
            self.memory.wait_for([])

    def _check(self, conditions: list[Condition], what: str) -> None:
        """Raises if somebody told us of an error, or ended before its time."""
        ended = self._ended(conditions)
        if self._told is None and ended and ended[0].end and ended[0].end.startswith(_CONSEQUENCES):
            time.sleep(_SLICE)  # the cause's own end, or word of it, must be on its way
            self.catch_up()
            ended = self._ended(conditions)
        self.raise_told()  # the teller knows the cause, and may have ended since
        if ended:
            raise self._lost(ended[0], what)

    def hear(self, error: CommError | None) -> None:
        """What the next wait raises, or None: whatever has been told is forgotten."""
        self._told = error

    def raise_told(self) -> None:
        if self._told is not None:
            told, self._told = self._told, None
            self.left = self.left or told.given_up
            raise told

    def _ended(self, conditions: list[Condition]) -> list[Peer]:
        """Peers whose end is an error for this wait, likeliest cause first."""
        awaited = {c.rank for c in conditions}
        return sorted((p for p in self.peers.values() if p.end or (p.end == "" and p.rank in awaited)),
                      key=lambda p: ((p.end or "").startswith(_CONSEQUENCES), p.end == "", p.end != "died"))

    def _check_circle(self, what: str) -> None:
        """Raises if ranks wait for each other in a circle, at different points of the program."""
        segments = self._segments()
        ranks, keys = circle(self.rank, segments)
        if ranks and self.rank == min(ranks):  # one speaks
            calls = [(r, *segments[r].call()) for r in sorted(segments)]
            raise self.mismatch([c[:3] for c in calls if c[3]], list(self.peers.values()), what, keys)

    def _segments(self) -> dict[int, Segment]:
        return {self.rank: self.memory, **{r: p.memory for r, p in self.peers.items()}}

    def _lost(self, peer: Peer, what: str) -> CommError:
        kind, _, attempt = (peer.end or "").partition(": ")
        if kind == "CollectiveMismatch":  # it had no time to tell everybody: the same error here
            return differing(attempt, [(r, *m.call()[:2]) for r, m in sorted(self._segments().items())])
        how = {"died": "died", "": "ended before taking part"}.get(peer.end or "", f"ended with {peer.end}")
        text, site, _ = peer.memory.call()
        return PeerLost(f"For '{what}', rank {peer.rank} (pid {peer.pid}) {how}.",
                        f"its last call: {text} at {site}" if text else "it made no call",
                        "A collective needs every member of its group.", "look at that rank's log for the first error")

    def _timed_out(self, late: list[int], what: str, g: GroupState | None) -> PeerLost:
        ranks: Sequence[int] = late
        if g is not None:
            ranks, mine = g.ranks, self.memory.call()[0]
            late = [r for i, r in enumerate(ranks) if not reached(g.meetings[i].get(), g.seq)]
            text, _, inside = g.members[0].call()
            if g.size > 2 and inside and text == mine:  # the first member waits as we do: it moves its word last
                late = [r for r in late if r != ranks[0]]
        where = []
        for r in ranks:
            memory, pid = (self.memory, os.getpid()) if r == self.rank else (self.peers[r].memory, self.peers[r].pid)
            text, site, inside = memory.call()
            state = "is in" if inside else "is in user code after"
            where.append(f"rank {r} (pid {pid}) {state} {text or 'start'} at {site or '?'}")
        return PeerLost(f"For '{what}', rank(s) {', '.join(map(str, late))} did not arrive within {self.timeout:g} s.",
                        "\n".join(where), "All members call the same collectives in one order.",
                        ("look where the ranks named above are", "raise the timeout if the work before it is long"))

    def _reach(self, g: GroupState, words: Iterable[tuple[int, Word]], value: int, what: str) -> None:
        """Sleeps until these words, each of a member, have reached a value."""
        for _, word in words:
            now = word.get()
            while not reached(now, value):
                word.sleep(now, NAP)
                before, now = now, word.get()
                if now == before:
                    def missing() -> list[Condition]:
                        return [Condition(g.ranks[j], w.index, value) for j, w in words if not reached(w.get(), value)]

                    def sleep(word: Word = word) -> None:
                        at = word.get()
                        if not reached(at, value):
                            word.sleep(at, NAP)
                    self.wait_slow(what, missing, sleep, g)
                    return

    # -- the meeting point -----------------------------------------------------------------------------------------

    def group(self, ranks: tuple[int, ...], what: str) -> GroupState:
        """Makes a group: each member learns where the others keep it. Nothing is sent."""
        key = hashlib.sha1(repr(ranks).encode()).digest()[:8]
        mine, offsets = self.memory.introduce(key), []
        for r in ranks:
            memory = self.memory if r == self.rank else self.peers[r].memory

            def missing(r: int = r, memory: Segment = memory) -> list[Condition]:
                known = memory.known.get()
                return [] if memory.group(key) is not None else [Condition(r, memory.known.index, known + 1)]

            def sleep(memory: Segment = memory) -> None:
                known = memory.known.get()
                if memory.group(key) is None:
                    memory.known.sleep(known, NAP)
            if r != self.rank and missing():
                sleep()
                self.wait_slow(what, missing, sleep)
            offsets.append(mine if r == self.rank else memory.group(key) or 0)
        return GroupState(ranks, self.rank, self.peers, self.memory, offsets)

    def sync(self, g: GroupState, what: str, check: int | None = None) -> None:
        """Waits for every member; with `check`, the checksum of the call, calls are compared.

        Two members look at each other. More meet at the first one, who sleeps through all but the last arrivals and
        wakes everybody with one system call: where ranks outnumber cores, wakes and switches are the time.
        """
        g.seq = seq = (g.seq + 1) & 0xFFFFFFFF
        if check is not None:
            g.show_call(check)
        words, me = g.meetings, g.index
        if g.size == 2:
            words[me].set(seq)
            self._reach(g, ((1 - me, words[1 - me]),), seq, what)
            if check is not None and g.call_of(1 - me) != check:
                error = self._mismatch(g, what)
                self.sync(g, what)  # who goes on writes over the call that the other is about to read
                raise error
        elif me:
            words[me].set(seq)
            self._reach(g, ((0, words[0]),), seq, what)
            if check is not None and g.refused():
                self.catch_up()  # it told us before it said that it refuses
                self.raise_told()
        else:
            try:
                self._reach(g, g.others, seq, what)
            except CommError as e:
                self.tell(g.peers[1:], e)
                words[0].wake()
                raise
            if check is not None:
                for i in range(1, g.size):
                    if g.call_of(i) != check:
                        error = self._mismatch(g, what)
                        g.refuse()  # the meeting ends: who went on while another still waits for it would close a circle
                        words[0].set(seq)
                        raise error
            words[0].set(seq)

    def step(self, g: GroupState) -> None:
        """Tells the group that another step of this rank's broadcast can be read."""
        word = g.steps[g.index]
        word.set((word.get() + 1) & 0xFFFFFFFF)

    def await_step(self, g: GroupState, source: int, step: int, what: str) -> None:
        """Waits until member `source` has made that step, counted from the group's first one."""
        self._reach(g, ((source, g.steps[source]),), step & 0xFFFFFFFF, what)

    # -- messages --------------------------------------------------------------------------------------------------

    def post(self, dst: int, about: bytes, payload: bytes | memoryview, fd: int = -1) -> None:
        """Sends a message, not waiting for its receiver: small ones inside the socket, large ones as a memory file."""
        peer = self.peers[dst]
        packet = _PACKET_START.pack(_DATA_FD if fd >= 0 else _DATA, 0, len(about)) + about + bytes(payload)
        if not self._send(peer, packet, (fd,) if fd >= 0 else ()):
            self.catch_up()  # all that it said, and the end of another that may be the cause of its own
            self._drop(peer, "")
            self._check([Condition(dst, 0, 0)], "send")
        posted = self.memory.posted(dst)
        posted.set((posted.get() + 1) & 0xFFFFFFFF)

    def take(self, src: int, what: str) -> tuple[bytes, bytes, int]:
        """The next message of a peer: its description, its payload, or the memory file that holds it."""
        peer = self.peers[src]
        if not peer.inbox:
            self._poll(_SLICE)
        if not peer.inbox:
            def missing() -> list[Condition]:
                return [] if peer.inbox else [Condition(src, peer.posted.index, (peer.taken + 1) & 0xFFFFFFFF)]
            self.wait_slow(what, missing, lambda: peer.inbox or self._poll(_SLICE))
        return peer.inbox.popleft()

    # -- errors told to the others ---------------------------------------------------------------------------------

    def tell(self, peers: list[Peer | None], error: CommError) -> None:
        letter = next(k for k, v in _ERRORS.items() if isinstance(error, v))
        how = _GIVEN_UP if error.given_up else _IN_STEP if error.in_step else 0
        text = "\0".join((error.attempt, error.operands, error.rule, *error.fix)).encode()[:INLINE]
        for p in filter(None, peers):
            self._send(p, _PACKET_START.pack(_ERROR, 0, how) + letter + text)

    def tell_all(self, error: CommError) -> None:
        """Tells every other rank what ends this one."""
        error.in_step = False
        self.tell(list(self.peers.values()), error)

    def mismatch(self, calls: list[tuple[int, str, str]], tell: list[Peer | None], what: str, keys: Collection[int] = (),
                 in_step: bool = False) -> CollectiveMismatch:
        """Builds the error that names the odd ranks, and tells it to the others.

        Args:
            calls: rank, call and source line of those that take part.
            tell: whom to tell.
            what: the call this rank is in.
            keys: ranks without any of which nobody would have to wait.
            in_step: every member was at the same meeting, so the group may go on if the caller catches the error.
        """
        others = [(r, text) for r, m in self._segments().items() for text in m.last_calls()]
        usual, odd = odd_ranks([call[:2] for call in calls], others, keys)
        if all(text.startswith("exchange") for _, text, _ in calls):
            attempt = f"For '{what}', ranks wait for each other's messages."
        elif not odd:
            ops = " and ".join(dict.fromkeys(f"'{text.partition(' ')[0]}'" for _, text, _ in calls if text)) or f"'{what}'"
            attempt = f"For {ops}, ranks {', '.join(str(call[0]) for call in calls)} made different calls."
        else:
            attempt = f"For '{usual.split(' ')[0]}', rank(s) {', '.join(map(str, odd))} made another call than the rest " \
                      "of the group."
        error = differing(attempt, calls)
        error.in_step = in_step
        self.tell(tell, error)
        return error

    def _mismatch(self, g: GroupState, what: str) -> CollectiveMismatch:
        calls = [(r, *m.call()[:2]) for r, m in zip(g.ranks, g.members)]
        return self.mismatch(calls, g.peers[1:] if g.size > 2 else [], what, in_step=True)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, reason: str = "") -> None:
        """Says goodbye; `reason` is empty for a normal end."""
        packet = _PACKET_START.pack(_BYE, 0, 0) + reason.encode()[:512]
        for p in self.peers.values():
            self._send(p, packet)
        for p in self.peers.values():
            if p.end is None:
                self._drop(p, "")
            p.sock.close()
            for _, _, fd in p.inbox:
                if fd >= 0:
                    os.close(fd)
            p.memory.close()
        self.memory.close()
