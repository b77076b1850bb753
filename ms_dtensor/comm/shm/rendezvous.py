# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a job find each other: abstract Unix sockets, and each rank's memory passed as a descriptor.

Not a store and not a service: after `connect` there is one socket per pair of ranks and nothing else. Abstract names
live in the kernel only and vanish with their process, so a crashed job leaves nothing behind.
The invariant: two ranks connect only if they agree on user, job, world size and library protocol.
"""
from __future__ import annotations

import errno
import json
import os
import socket
import struct
import time
from dataclasses import dataclass

from ...errors import ConfigError, PeerLost
from . import segment

PROTOCOL = 2
_RETRY = 0.01  # a peer that has not bound its name yet is asked again; start-up only


@dataclass
class Link:
    """One connected peer: its rank, its process, the socket for signals and its memory file."""

    rank: int
    pid: int
    sock: socket.socket
    fd: int


def job_name(port: str) -> str:
    """The name all workers of one job share: user, msrun's port and the msrun process that started them.

    Two jobs that use one port at a time are thus kept apart. Started by other means than msrun, workers may state
    a common `MS_DTENSOR_JOB`; without it a second job on the port is refused with a message.
    """
    job = os.environ.get("MS_DTENSOR_JOB") or _msrun_ancestor()
    return f"ms_dtensor-{os.getuid()}-{port}-{job}"


def _msrun_ancestor() -> str:
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
    rank, size, name = hello["rank"], hello["size"], hello["name"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(f"\0{name}-{rank}")
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
            raise ConfigError(f"For 'start', rank {rank} is taken by another process.", f"job name '{name}'",
                              "Each rank of a job has one process, and each job its own port.",
                              ("pass another --master_port to msrun", "end the job that runs on this port")) from e
        listener.listen(size)
        # Lower ranks are called, higher ranks are awaited. Rank 0 calls nobody, so the chain of waits always ends.
        for peer in range(rank):
            links[peer] = _call(f"\0{name}-{peer}", peer, hello, memory, deadline, timeout)
        while len(links) < size - 1:
            link = _answer(listener, hello, memory, deadline)
            if link is None:
                missing = [r for r in range(size) if r != rank and r not in links]
                raise _late(rank, missing, size, timeout)
            links[link.rank] = link


def _call(address: str, peer: int, hello: dict, memory: int, deadline: float, timeout: float) -> Link:
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            sock.connect(address)
            socket.send_fds(sock, [json.dumps(hello).encode()], [memory])
            return _greet(sock, hello, peer)
        except ConfigError:
            sock.close()
            raise
        except (ConnectionRefusedError, FileNotFoundError, BlockingIOError):  # not there yet, or its queue is full
            sock.close()
            time.sleep(_RETRY)
        except (TimeoutError, ConnectionError):  # it came, and went again or is stuck
            sock.close()
            raise _late(hello["rank"], [peer], hello["size"], timeout) from None
        if time.monotonic() > deadline:
            raise _late(hello["rank"], [peer], hello["size"], timeout)


def _answer(listener: socket.socket, hello: dict, memory: int, deadline: float) -> Link | None:
    listener.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        sock, _ = listener.accept()
    except TimeoutError:
        return None
    sock.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        link = _greet(sock, hello, None)
        socket.send_fds(sock, [json.dumps(hello).encode()], [memory])
    except (TimeoutError, ConnectionError):  # it came and went: perhaps it comes again
        sock.close()
        return _answer(listener, hello, memory, deadline)
    except ConfigError:
        sock.close()
        raise
    return link


def _greet(sock: socket.socket, hello: dict, expected: int | None) -> Link:
    data, fds, _, _ = socket.recv_fds(sock, 4096, 1)
    if not data:
        raise ConnectionResetError
    other = json.loads(data)
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    same = all(other.get(k) == hello[k] for k in ("protocol", "size", "name")) and uid == os.getuid() and len(fds) == 1
    rank = other.get("rank", -1)
    if not same or rank == hello["rank"] or (expected is not None and rank != expected):
        for fd in fds:
            os.close(fd)
        raise ConfigError(f"For 'start', rank {hello['rank']} met a process of another job (pid {pid}).",
                          f"ours {hello}, theirs {other}", "Ranks connect only within one job.",
                          "pass another --master_port to msrun")
    sock.setblocking(False)
    return Link(rank, other["pid"], sock, fds[0])


def _late(rank: int, missing: list[int], size: int, timeout: float) -> PeerLost:
    return PeerLost(f"For 'start', rank {rank} waited {timeout:g} s for rank(s) {', '.join(map(str, missing))}.",
                    f"world of {size}", "All ranks of the shared-memory backend start on one host.",
                    ("look at the missing ranks' logs (msrun --log_dir)",
                     'for several hosts call ms_dtensor.comm.set_cpu_backend("mccl") first'))
