# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a job find each other: Unix sockets, and each rank's memory passed as a descriptor.

Not a store and not a service: after `connect` there is one socket per pair of ranks and nothing else (`address`: where
they are called until then). The invariant: two ranks connect only if they agree on user, job, world size and library
protocol; of the user the kernel vouches, before anything is said.
"""
from __future__ import annotations

import json
import math
import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import ConfigError, PeerLost
from . import address, segment

PROTOCOL = 3
_RETRY = 0.01  # a peer that has not bound its name yet is asked again; start-up only


@dataclass
class Link:
    """One connected peer: its rank, its process, the socket for signals and its memory file."""

    rank: int
    pid: int
    sock: socket.socket
    fd: int


def stated_timeout() -> float:
    """Seconds after which a wait for other ranks gives up: MS_DTENSOR_TIMEOUT, or 300."""
    text = os.environ.get("MS_DTENSOR_TIMEOUT", "300")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 1e6:
        raise ConfigError("For 'MS_DTENSOR_TIMEOUT', the value is no number of seconds.",
                          f"MS_DTENSOR_TIMEOUT={text[:40]!r}", "So many seconds a rank waits: above 0, at most 1000000.",
                          ("set it to 60, say", "leave it out for 300"))
    return seconds


def job_name(port: str) -> str:
    """The name all workers of one job share: user, msrun's port and the msrun process that started them.

    Two jobs that use one port at a time are thus kept apart. Started by other means than msrun, workers may state
    a common `MS_DTENSOR_JOB`; without it a second job on the port is refused with a message.
    """
    job = os.environ.get("MS_DTENSOR_JOB") or msrun_ancestor()
    return f"ms_dtensor-{os.geteuid()}-{port}-{job}"


def msrun_ancestor() -> str:
    pid = os.getpid()
    try:
        while pid > 1:
            with open(f"/proc/{pid}/stat", "rb") as f:
                pid = int(f.read().rpartition(b")")[2].split()[1])
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                words = f.read().split(b"\0")
            if any(w.rpartition(b"/")[2] == b"msrun" or b"mindspore/parallel/cluster" in w for w in words[:3]):
                return str(pid)
    except (OSError, ValueError, IndexError):  # /proc may be hidden; the port alone then names the job
        pass
    return ""


def connect(rank: int, size: int, name: str, timeout: float = 120.0) -> tuple[int, list[Link]]:
    """Connects this rank with every other one.

    Args:
        rank: this rank.
        size: number of ranks.
        name: the job's name, equal on every rank (`job_name`).
        timeout: seconds to wait for the others.

    Returns:
        This rank's memory file, and one link per peer in rank order.

    Raises:
        ConfigError: another job uses the name, or a peer disagrees about the job.
        PeerLost: some ranks did not come in time.
    """
    deadline = time.monotonic() + timeout
    memory = segment.create(size)
    hello = {"protocol": PROTOCOL, "size": size, "rank": rank, "pid": os.getpid(), "name": name}
    links: dict[int, Link] = {}
    try:
        _meet(hello, memory, links, deadline, timeout)
    except BaseException:  # a caller may catch it: nothing stays open, so the peers notice at once
        os.close(memory)
        for link in links.values():
            link.sock.close()
            os.close(link.fd)
        raise
    return memory, [links[r] for r in sorted(links)]


def _meet(hello: dict, memory: int, links: dict[int, Link], deadline: float, timeout: float) -> None:
    rank, size = hello["rank"], hello["size"]
    with address.listening(hello["name"], rank, size) as listener:
        # Lower ranks are called, higher ranks are awaited. Rank 0 calls nobody, so the chain of waits always ends.
        for peer in range(rank):
            link = _call(peer, hello, memory, deadline)
            if link is None:
                raise _late(rank, [peer], size, timeout)
            links[peer] = link
        _answer(listener, hello, memory, links, deadline)
    if missing := [r for r in range(size) if r != rank and r not in links]:
        raise _late(rank, missing, size, timeout)


def _call(peer: int, hello: dict, memory: int, deadline: float) -> Link | None:
    while (left := deadline - time.monotonic()) > 0:
        sock = address.open_to(hello["name"], peer, left)
        if sock is not None:
            return _greet(sock, hello, memory, (peer,), speaks_first=True)
        time.sleep(_RETRY)
    return None


def _answer(listener: socket.socket, hello: dict, memory: int, links: dict[int, Link], deadline: float) -> None:
    """Takes up the higher ranks as they come. A caller that is slow, or says nothing, keeps nobody else waiting."""
    higher = range(hello["rank"] + 1, hello["size"])
    listener.setblocking(False)
    with selectors.DefaultSelector() as waiting:
        waiting.register(listener, selectors.EVENT_READ)
        try:
            while (missing := [r for r in higher if r not in links]) and (left := deadline - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    sock: socket.socket = key.fileobj  # type: ignore[assignment]
                    if sock is listener:
                        _accept(listener, waiting)
                        continue
                    waiting.unregister(sock)
                    link = _greet(sock, hello, memory, missing, speaks_first=False)
                    if link is not None:
                        links[link.rank] = link
        finally:
            for key in waiting.get_map().values():
                if key.fileobj is not listener:
                    key.fileobj.close()  # type: ignore[union-attr]


def _accept(listener: socket.socket, waiting: selectors.BaseSelector) -> None:
    try:
        sock, _ = listener.accept()
    except (BlockingIOError, ConnectionError):  # gone again
        return
    if address.of_us(sock):
        sock.setblocking(False)
        waiting.register(sock, selectors.EVENT_READ)
    else:
        sock.close()


def _greet(sock: socket.socket, hello: dict, memory: int, expected: Sequence[int], speaks_first: bool) -> Link | None:
    """Trades hellos and memory files on a connection to a process of this user; None if it went away, or is stuck."""
    fds: list[int] = []
    try:
        if speaks_first:
            socket.send_fds(sock, [json.dumps(hello).encode()], [memory])
        data, fds, _, _ = socket.recv_fds(sock, 4096, 1)
        if data:
            link = _checked(data, fds, sock, hello, expected)
            if not speaks_first:
                socket.send_fds(sock, [json.dumps(hello).encode()], [memory])
            sock.setblocking(False)
            return link
    except BaseException as e:
        for fd in fds:
            os.close(fd)
        sock.close()
        if isinstance(e, OSError):
            return None
        raise
    sock.close()
    return None


def _checked(data: bytes, fds: list[int], sock: socket.socket, hello: dict, expected: Sequence[int]) -> Link:
    try:
        other = json.loads(data)
        same = all(other[k] == hello[k] for k in ("protocol", "size", "name")) and len(fds) == 1
        if same and other["rank"] in expected:
            return Link(other["rank"], int(other["pid"]), sock, fds[0])
    except (ValueError, TypeError, LookupError, RecursionError):  # no hello at all
        other = data
    raise ConfigError(f"For 'start', rank {hello['rank']} met a process of another job.", f"ours {hello}, theirs {other}",
                      "Ranks connect only within one job.", "pass another --master_port to msrun")


def _late(rank: int, missing: list[int], size: int, timeout: float) -> PeerLost:
    return PeerLost(f"For 'start', rank {rank} waited {timeout:g} s for rank(s) {', '.join(map(str, missing))}.",
                    f"world of {size}", "All ranks of the shared-memory backend start on one host.",
                    ("look at the missing ranks' logs (msrun --log_dir)",
                     f"if they only need longer: MS_DTENSOR_TIMEOUT={math.ceil(2 * timeout)} on every rank",
                     'for several hosts call ms_dtensor.comm.set_cpu_backend("mccl") first'))
