# SPDX-License-Identifier: Apache-2.0
"""A job of the shared-memory engine among processes of another user (65534) that want in; run as root.

`python strangers.py KIND RANKS [let_in]` prints one JSON object: what each rank reported, and what the strangers got.
KIND: "garbage", "silence", "crowd" (1,000 connections) or "squat" (sits on rank 0's names, as far as it can
guess them, before the ranks come).
With `let_in` the modes and owners of files, which keep strangers off, are undone while the ranks start.
"ready": seconds after the last rank was there.
"""
import contextlib
import glob
import importlib
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import time

import worker  # noqa: F401  the package without MindSpore

STRANGER = 65534
KIND, SIZE, LET_IN = sys.argv[1], int(sys.argv[2]), "let_in" in sys.argv
NAME = f"ms_dtensor-strangers-{os.getpid()}"
engine = importlib.import_module("ms_dtensor.comm.shm.engine")
address = importlib.import_module("ms_dtensor.comm.shm.address")
counts = mmap.mmap(-1, 4096)  # of the strangers: names taken, connections made, bytes received, descriptors received
TAKEN, MADE, BYTES, FDS = range(4)


def count(which, by=1):
    at = 4 * which
    counts[at:at + 4] = struct.pack("I", struct.unpack("I", counts[at:at + 4])[0] + by)


def received(sock):
    with contextlib.suppress(OSError):
        data, fds, _, _ = socket.recv_fds(sock, 4096, 4)
        count(BYTES, len(data))
        count(FDS, len(fds))


def addresses():
    """Where the job listens, as anybody can read it. Other jobs of the host are left alone."""
    marks = NAME, address._start_of(NAME, 0)[:-2]
    with open("/proc/net/unix") as f:
        found = [line.split()[7] for line in f if any(mark in line for mark in marks)]
    return [f"\0{a[1:]}" if a.startswith("@") else a for a in found]


def call():
    held = []
    while True:
        for where in addresses() * (100 if KIND == "crowd" else 1):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(0.2)
            try:
                sock.connect(where)
                count(MADE)
                if KIND == "garbage":
                    sock.send((b"[]", b"\0\xff", b"{}", b"[" * 4000)[len(held) % 4])
                held.append(sock)
                if KIND != "crowd":
                    received(sock)
            except OSError:
                sock.close()
        if len(held) > (1000 if KIND == "crowd" else 40):
            for sock in held:
                sock.settimeout(0.001)
                received(sock)
            while True:
                time.sleep(1)
        time.sleep(0.001)


def squat():
    folder, listeners = address._folder(), []
    for where in (f"\0{NAME}-0", *(f"{folder}/{address._start_of(NAME, 0)}{i}" for i in "0z")):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.bind(where)
        if where[0] == "/":
            os.chmod(where, 0o777)
        sock.listen(16)
        sock.settimeout(0.01)
        listeners.append(sock)
        count(TAKEN)
    while True:
        for listener in listeners:
            with contextlib.suppress(OSError):
                sock, _ = listener.accept()
                count(MADE)
                sock.settimeout(0.5)
                received(sock)


def stranger():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)
    (squat if KIND == "squat" else call)()


def rank(number):
    import numpy as np
    out = {"rank": number}
    try:
        e = engine.Engine(number, SIZE, NAME, timeout=10, start_timeout=10)
        out["ready"] = time.monotonic()
        out["sum"] = float(e.all_reduce(np.full(3, number + 1.0), "sum", tuple(range(SIZE)))[0])
        e.barrier(tuple(range(SIZE)))
        e.close()
    except BaseException as error:
        out["error"] = f"{type(error).__name__}: {error}"
    return out


def forked(run):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, json.dumps(run()).encode())
        os._exit(0)
    os.close(write)
    return pid, read


def main():
    strangers = [forked(stranger)[0] for _ in range(1 if KIND == "squat" else 2)]
    while KIND == "squat" and counts[0] < 3:
        time.sleep(0.01)
    first, *others = range(SIZE) if KIND != "squat" else reversed(range(SIZE))  # whom they sit on comes last
    ranks, since, enough = [forked(lambda: rank(first))], time.monotonic(), 1000 if KIND == "crowd" else 1
    while len(ranks) < SIZE or time.monotonic() < since + 0.3:
        if LET_IN:
            for path in glob.glob(f"{address._folder()}/{address._start_of(NAME, 0)[:-2]}*"):
                with contextlib.suppress(FileNotFoundError):
                    os.chmod(path, 0o777)
                    os.chown(path, 0, 0)
        made, waited = struct.unpack("4I", counts[:16])[MADE], time.monotonic() - since
        if len(ranks) < SIZE and waited > 0.3 and (made >= enough or not LET_IN or waited > 5):
            ranks, since = ranks + [forked(lambda n=n: rank(n)) for n in others], time.monotonic()
        time.sleep(0.002)
    reports = []
    for pid, read in ranks:
        with os.fdopen(read) as f:
            reports.append(json.loads(f.read()))
        reports[-1]["ready"] = reports[-1].get("ready", since) - since
        os.waitpid(pid, 0)
    for pid in strangers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    left = glob.glob(f"{address._folder()}/{address._start_of(NAME, 0)[:-2]}*")
    ours = [path for path in left if not path.endswith((".0", ".z"))]
    for path in left:
        os.unlink(path)
    taken, made, nbytes, fds = struct.unpack("4I", counts[:16])
    print(json.dumps({"ranks": reports, "taken": taken, "made": made, "bytes": nbytes, "fds": fds, "left": ours}))


if __name__ == "__main__":
    main()
