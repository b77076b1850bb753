# SPDX-License-Identifier: Apache-2.0
"""Signals between ranks: arrive and go, messages, farewells; and every way a wait can end badly.

One packet socket per pair of ranks. Waiting blocks in `poll` over *all* peers, so a dead process is noticed by every
rank that waits for anything, at once. Nothing here touches payload in shared memory.
The invariant: `sync` returns on a member only after every member of the group has called it, with the same call.
"""
from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable

from ...errors import CollectiveMismatch, CommError, PeerLost
from .rendezvous import Link
from .segment import Segment

_TOKEN = struct.Struct("<BxHI")          # kind, group, sequence number
_ARRIVE, _GO, _ERROR, _BYE, _DATA, _DATA_FD = range(6)
INLINE = 8 << 10                         # largest message that travels inside the socket
_PACKET = INLINE + 4096
_FD_SPACE = socket.CMSG_SPACE(4)
_IN = select.POLLIN
_CONSEQUENCES = ("PeerLost", "CommError", "CollectiveMismatch")
_ERRORS = {b"M": CollectiveMismatch, b"P": PeerLost, b"C": CommError}


class Peer:
    """What this rank knows of another one."""

    __slots__ = ("end", "inbox", "memory", "pid", "rank", "sock", "tokens")

    def __init__(self, link: Link):
        self.rank, self.pid, self.sock = link.rank, link.pid, link.sock
        self.memory = Segment(link.fd, writable=False)
        self.tokens: deque[tuple[int, int]] = deque()       # arrivals and goes, in order
        self.inbox: deque[tuple[bytes, bytes, int]] = deque()  # messages: description, payload, or a memory file
        self.end: str | None = None                          # None: alive; "": left normally; text: how it ended


def _has_token(peer: Peer) -> object:
    return peer.tokens


def _has_message(peer: Peer) -> object:
    return peer.inbox


class GroupState:
    """A group as this rank sees it: who, my index, and how many syncs have passed."""

    __slots__ = ("index", "key", "offsets", "peers", "ranks", "seq", "size", "slot", "turn")

    def __init__(self, ranks: tuple[int, ...], me: int, peers: dict[int, Peer]):
        self.ranks, self.size, self.index = ranks, len(ranks), ranks.index(me)
        self.key = zlib.crc32(repr(ranks).encode()) & 0xFFFF
        self.peers = [peers.get(r) for r in ranks]           # None at my own index
        self.seq = 0
        self.turn = 0                                        # which half of the slot the next small message uses
        self.slot = -1
        self.offsets: list[int] = []                         # each member's slot, in its own segment


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
        self.peers = {link.rank: Peer(link) for link in links}
        self._by_fd = {p.sock.fileno(): p for p in self.peers.values()}
        self._poll = select.poll()
        for fd in self._by_fd:
            self._poll.register(fd, _IN)
        self._narrow: dict[int, select.poll] = {}            # per peer: wakes for its packets, and for anybody's end
        self._told: Exception | None = None                  # what a peer told us went wrong
        self._alarm = False                                  # somebody ended or told us of an error

    # -- reading ---------------------------------------------------------------------------------------------------

    def _pump(self, milliseconds: float, first: Peer | None = None) -> bool:
        """Reads what has come; blocks up to the given time if nothing has.

        With `first`, packets of other peers stay where they are: a rank that needs several arrivals sleeps through
        all but the last instead of being woken for each.
        """
        poll = self._poll if first is None else self._narrow.get(first.rank) or self._make_narrow(first)
        events = poll.poll(milliseconds)
        for fd, event in events:
            if event != select.POLLOUT:
                self._read(self._by_fd[fd])
        return bool(events)

    def _make_narrow(self, first: Peer) -> select.poll:
        poll = self._narrow[first.rank] = select.poll()
        for peer in self.peers.values():
            if peer.end is None:
                poll.register(peer.sock.fileno(), _IN if peer is first else 0)  # hang-up is reported in any case
        return poll

    def _read(self, peer: Peer) -> None:
        try:
            data, control, _, _ = peer.sock.recvmsg(_PACKET, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._drop(peer, "died")
            return
        kind, key, seq = _TOKEN.unpack_from(data)
        if kind <= _GO:
            peer.tokens.append((key, seq))
        elif kind == _ERROR:
            attempt, operands, rule, *fixes = data[9:].decode(errors="replace").split("\0")
            self._told = _ERRORS[data[8:9]](attempt, operands, rule, fixes)
            self._told.in_step = bool(seq)
            self._alarm = True
        elif kind == _BYE:
            self._drop(peer, data[8:].decode(errors="replace"))
        else:
            fd = struct.unpack("i", control[0][2])[0] if control else -1
            peer.inbox.append((data[8:8 + seq], data[8 + seq:], fd))

    def _drop(self, peer: Peer, end: str) -> None:
        if peer.end is None:
            peer.end, self._alarm = end, True
            for poll in (self._poll, *self._narrow.values()):
                with contextlib.suppress(KeyError):
                    poll.unregister(peer.sock.fileno())

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
                self._poll.modify(peer.sock.fileno(), _IN | select.POLLOUT)
                self._pump(self.timeout * 1000)
                if peer.end is not None:
                    return False
                self._poll.modify(peer.sock.fileno(), _IN)
            except OSError:
                return False  # its farewell, if any, is still to be read

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _wait(self, waiting: list[Peer], what: str, deadline: float, g: GroupState | None = None) -> None:
        """One blocking step of a wait for `waiting` (in group `g`; or for a message); raises if it cannot end well."""
        ready = _has_token if g is not None else _has_message
        if self._alarm:
            self._check(waiting, what, ready)
        left = deadline - time.monotonic()
        if g is None:
            woken = self._pump(max(left, 0) * 1000)
        else:  # now and then also read the others: one of them may report an error
            woken = self._pump(max(min(left, 1.0), 0) * 1000, waiting[0]) or self._pump(0) or left > 1.0
        if not woken:
            if g is not None and g.index:  # the first member waits too: say who it waits for
                mine = self.memory.call()[0]
                waiting = [p for p in g.peers if p and p.memory.call()[::2] != (mine, True)] or waiting
            raise self._timed_out(waiting, what)
        if self._alarm:
            self._check(waiting, what, ready)

    def _check(self, waiting: list[Peer], what: str, ready: Callable[[Peer], object]) -> None:
        if self._told is None and all(not p.end for p in self.peers.values()) \
                and all(p.end is None or ready(p) for p in waiting):
            self._alarm = any(p.end is not None for p in self.peers.values())
            return
        while self._pump(0):  # several ends may have come at once: report the first cause, not its consequence
            pass
        if all(ready(p) for p in waiting):
            return  # complete after all; the end of a peer matters to the next wait
        if self._told is not None:  # the teller knows the cause, and may have ended since
            told, self._told = self._told, None
            raise told
        ended = sorted((p for p in self.peers.values() if p.end),
                       key=lambda p: (p.end.startswith(_CONSEQUENCES), p.end != "died"))
        if ended:
            raise self._lost(ended[0], what)
        gone = [p for p in waiting if p.end is not None and not ready(p)]
        if gone:
            raise self._lost(gone[0], what)

    def _lost(self, peer: Peer, what: str) -> PeerLost:
        how = {"died": "died", "": "ended before taking part"}.get(peer.end, f"ended with {peer.end}")
        text, site, _ = peer.memory.call()
        return PeerLost(f"For '{what}', rank {peer.rank} (pid {peer.pid}) {how}.",
                        f"its last call: {text} at {site}" if text else "it made no call",
                        "A collective needs every member of its group.", "look at that rank's log for the first error")

    def _timed_out(self, waiting: list[Peer], what: str) -> PeerLost:
        where = []
        for p in waiting:
            text, site, inside = p.memory.call()
            state = "is in" if inside else "is in user code after"
            where.append(f"rank {p.rank} (pid {p.pid}) {state} {text or 'start'} at {site or '?'}")
        return PeerLost(f"For '{what}', rank(s) {', '.join(str(p.rank) for p in waiting)} did not arrive within "
                        f"{self.timeout:g} s.", "\n".join(where), "All members call the same collectives in one order.",
                        ("look where the ranks named above are", "raise the timeout if the work before it is long"))

    # -- the two primitives ----------------------------------------------------------------------------------------

    def sync(self, g: GroupState, what: str, head: bytes | None = None) -> None:
        """Waits for every member; with `head`, the first member also compares the calls.

        A star through the group's first member: 2(n-1) packets. All-to-all packets would save one hop, but cost
        n(n-1) system calls, and on a host with fewer cores than ranks those calls are the time.
        """
        g.seq = seq = (g.seq + 1) & 0xFFFFFFFF
        deadline = time.monotonic() + self.timeout
        if g.index:
            root = g.peers[0]
            self._send(root, _TOKEN.pack(_ARRIVE, g.key, seq))
            while not root.tokens:
                self._wait([root], what, deadline, g)
            if root.tokens.popleft() != (g.key, seq):
                raise self._stray(g, root, what)
            return
        waiting = g.peers[1:]
        while True:
            waiting = [p for p in waiting if not p.tokens]
            if not waiting:
                break
            try:
                self._wait(waiting, what, deadline, g)
            except CommError as e:
                self._tell(g.peers[1:], e)
                raise
        token = (g.key, seq)
        for p in g.peers[1:]:
            if p.tokens.popleft() != token:
                raise self._stray(g, p, what)
        if head is not None and not all([p.memory.shows(head) for p in g.peers[1:]]):
            raise self._mismatch(g, what)
        go = _TOKEN.pack(_GO, g.key, seq)
        for p in g.peers[1:]:
            self._send(p, go)

    def post(self, dst: int, about: bytes, payload: bytes | memoryview, fd: int = -1) -> None:
        """Sends a message, not waiting for its receiver: small ones inside the socket, large ones as a memory file."""
        peer = self.peers[dst]
        packet = _TOKEN.pack(_DATA_FD if fd >= 0 else _DATA, 0, len(about)) + about + bytes(payload)
        if not self._send(peer, packet, (fd,) if fd >= 0 else ()):
            self._pump(0)
            peer.end = peer.end or ""
            raise self._lost(peer, "send")

    def take(self, src: int, what: str) -> tuple[bytes, bytes, int]:
        """The next message of a peer: its description, its payload, or the memory file that holds it."""
        peer = self.peers[src]
        deadline = time.monotonic() + self.timeout
        while not peer.inbox:
            if peer.tokens:  # it waits for us in a collective, and sent nothing before
                calls = [(self.rank, *self.memory.call()[:2]), (peer.rank, *peer.memory.call()[:2])]
                raise self.mismatch(calls, [peer], what)
            self._wait([peer], what, deadline)
        return peer.inbox.popleft()

    # -- errors told to the others ---------------------------------------------------------------------------------

    def _tell(self, peers: list[Peer], error: CommError) -> None:
        letter = next(k for k, v in _ERRORS.items() if isinstance(error, v))
        in_step = getattr(error, "in_step", False)
        text = "\0".join((error.attempt, error.operands, error.rule, *error.fix)).encode()[:INLINE]
        for p in peers:
            self._send(p, _TOKEN.pack(_ERROR, 0, in_step) + letter + text)

    def mismatch(self, calls: list[tuple[int, str, str]], tell: list[Peer], what: str,
                 in_step: bool = False) -> CollectiveMismatch:
        """Builds the error that names the odd ranks, and tells it to the others.

        `in_step`: every member was at the same sync, so the group may go on if the caller catches the error.
        """
        texts = [text for _, text, _ in calls]
        usual = max(texts, key=texts.count)
        odd = [rank for rank, text, _ in calls if text != usual]
        lines = [f"rank {rank}: {text} at {site}" for rank, text, site in calls]
        error = CollectiveMismatch(
            f"For '{what}', rank(s) {', '.join(map(str, odd))} made another call than the rest of the group.",
            "\n".join(lines), "All members of a group call the same collectives, in one order, with equal arguments.",
            "look for a branch that depends on the rank before these lines")
        error.in_step = in_step
        self._tell(tell, error)
        return error

    def _mismatch(self, g: GroupState, what: str) -> CollectiveMismatch:
        calls = [(r, *(p.memory if p else self.memory).call()[:2]) for r, p in zip(g.ranks, g.peers)]
        return self.mismatch(calls, g.peers[1:], what, in_step=True)

    def _stray(self, g: GroupState, p: Peer, what: str) -> CollectiveMismatch:
        """A signal of another group or another count: the two ranks are at different points of the program."""
        calls = [(self.rank, *self.memory.call()[:2]), (p.rank, *p.memory.call()[:2])]
        return self.mismatch(calls, [q for q in g.peers if q], what)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, reason: str = "") -> None:
        """Says farewell; `reason` is empty for a normal end."""
        packet = _TOKEN.pack(_BYE, 0, 0) + reason.encode()[:512]
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
