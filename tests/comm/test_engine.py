# SPDX-License-Identifier: Apache-2.0
"""The shared-memory engine on real processes, without MindSpore: the contract, and every way a job can go wrong."""
import atexit
import errno
import functools
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from ms_dtensor.comm.shm import address, arena, rendezvous, segment
from ms_dtensor.errors import ConfigError, PeerLost
from ms_dtensor.redistribute.cost import sent_bytes
from tests.comm.left import left_of
from tests.msrun import PATIENCE

WORKER = pathlib.Path(__file__).parent / "worker.py"


@functools.cache
def worker():
    """A process for all scenarios of this file, which has imported what they need; it ends when its input does."""
    made = subprocess.Popen([sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(made.wait)
    atexit.register(made.stdin.close)
    return made


def run(scenario, size, *args, timeout="20"):
    """One line per rank, in rank order; extra lines the scenario printed come after."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as out:
        print(json.dumps({"args": [scenario, str(size), *args], "timeout": timeout, "out": out.name}), file=worker().stdin,
              flush=True)
        told, _, _ = select.select([worker().stdout], [], [], PATIENCE)
        said = out.read()
        assert told and worker().stdout.readline() == "done\n", said
        lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        ranks = sorted((line for line in lines if "rank" in line), key=lambda line: line["rank"])
        assert ranks, said
        return ranks, [line for line in lines if "rank" not in line]


def connect_all(name, size, late=0.0):
    """All ranks in threads, rank 0 before the others; the peers each of them found."""
    found = [None] * size

    def one(rank):
        memory, links = rendezvous.connect(rank, size, name, 5)
        found[rank] = [link.rank for link in links]
        os.close(memory)
        for link in links:
            link.sock.close()
            os.close(link.fd)
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for rank, thread in enumerate(threads):
        thread.start()
        time.sleep(late if rank == 0 else 0)
    for thread in threads:
        thread.join()
    return found


def succeed(scenario, size, *args):
    ranks, _ = run(scenario, size, *args)
    assert [r["rank"] for r in ranks] == list(range(size))
    for r in ranks:
        assert r.get("ok"), r.get("trace")
    return ranks


@pytest.mark.parametrize("size", [2, 3, 4])
def test_contract(size):
    succeed("suite", size)


@pytest.mark.parametrize(("scenario", "size"), [
    ("overtaking", 3), ("overtaking", 4), ("inplace", 2), ("inplace", 3), ("held", 2), ("held", 3), ("parted", 2),
    ("parted", 3), ("later", 2), ("later", 3), ("mismatch_and_on", 3), ("leaves_early", 3)])
def test_ranks_that_work_together(scenario, size):
    """Each is told in `scenarios.py` and `memory_scenarios.py`."""
    succeed(scenario, size)


def test_bfloat16_rounds_once():
    pytest.importorskip("ml_dtypes")
    succeed("bfloat16", 3)


def test_killed_peer_is_named_on_all_others_at_once():
    ranks, extra = run("killed", 4)
    victim = extra[0]["victim"]
    assert [r["rank"] for r in ranks] == [0, 1, 2], victim
    for r in ranks:
        assert "ok" in r, r.get("trace")
        assert r["ok"] < 2.0


LOST = {  # of a scenario its ranks, those that report the loss, and what they are told
    "killed_elsewhere": (4, (0, 1, 3), ("rank 2 (pid",)), "killed_with_a_child": (3, (0, 2), ("rank 1 (pid", "died")),
    "leaves_and_is_missed": (3, (0, 1), ("rank 2 (pid", "ended before")),
    "raises": (3, (0, 1), ("ended with ValueError: boom",)),
    "raises_with_unread_messages": (3, (1, 2), ("rank 0", "ended with ValueError: boom")),
    "sends_to_one_that_ended": (3, (1, 2), ("rank 0", "ended with ValueError: boom")),
    "late": (3, (0, 1), ("rank(s) 2 did not arrive within 0.5 s",))}


@pytest.mark.parametrize("scenario", LOST)
def test_a_lost_rank_is_named_on_those_that_miss_it(scenario):
    size, told, words = LOST[scenario]
    ranks, _ = run(scenario, size, timeout="0.5" if scenario == "late" else "20")
    ranks = {r["rank"]: r for r in ranks}
    for r in (ranks.pop(rank) for rank in told):
        assert r["error"] == "PeerLost" and all(word in r["text"] for word in words), r
    assert scenario not in ("late", "leaves_and_is_missed") or ranks[2]["ok"]


def test_ranks_that_wait_for_each_other_in_a_circle_are_told():
    ranks, _ = run("circle", 3)
    assert all(r["error"] == "CollectiveMismatch" and "wait for each other's messages" in r["text"] for r in ranks), ranks


def test_a_taken_rank_is_refused():
    name = f"ms_dtensor-test-{os.getpid()}-taken"
    with address.listening(name, 0, 2):
        with pytest.raises(ConfigError, match="rank 0 is taken by another process"):
            rendezvous.connect(0, 2, name, 0.2)
        with pytest.raises(PeerLost, match="rank\\(s\\) 1"):
            rendezvous.connect(0, 2, f"{name}-other", 0.2)


class _Full(socket.socket):
    """A file system without inodes."""

    folders: tuple[str, ...] = ()

    def bind(self, path):
        if str(path).startswith(self.folders):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().bind(path)


def test_where_the_first_folder_has_no_inodes_the_next_is_taken(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(address, "_FOLDERS", (str(tmp_path), "/tmp"))
    monkeypatch.setattr(address.socket, "socket", _Full)
    monkeypatch.setattr(_Full, "folders", (str(tmp_path),))
    name = f"ms_dtensor-test-{os.getpid()}-full"
    with caplog.at_level("WARNING", "ms_dtensor"):
        assert connect_all(name, 2) == [[1], [0]]
    assert "is in '/tmp'" in caplog.text and f"{tmp_path}: No space left" in caplog.text
    monkeypatch.setattr(_Full, "folders", (str(tmp_path), "/tmp"))
    with pytest.raises(ConfigError, match=f"(?s)no room for a socket file.*{tmp_path}: No space left.*df -i"):
        rendezvous.connect(0, 2, name, 0.2)


def test_what_a_killed_start_leaves_stands_in_nobodys_way_and_goes():
    name = f"ms_dtensor-test-{os.getpid()}-killed"
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        rendezvous.connect(0, 2, name, 20)
    while not (left := list(address._ours(address._start_of(name, 0)))):
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert connect_all(name, 2) == [[1], [0]]
    assert list(address._ours(address._start_of(name, 0))) == left  # young: its process may be about to listen
    os.utime(left[0], (0, 0))
    assert connect_all(f"{name}-next", 2) == [[1], [0]]
    assert not list(address._ours(address._start_of(name, 0)))


def test_a_caller_that_says_nothing_keeps_nobody_waiting():
    name, silent = f"ms_dtensor-test-{os.getpid()}-silent", []

    def say_nothing():
        while len(silent) < 5:
            sock = address.open_to(name, 0, 1)
            silent.extend([sock] if sock is not None else [])
    thread = threading.Thread(target=say_nothing)
    thread.start()
    try:
        assert connect_all(name, 3, late=0.3) == [[1, 2], [0, 2], [0, 1]]
    finally:
        thread.join()
        for sock in silent:
            sock.close()


@pytest.mark.parametrize("hello", [b"\0\xff", b"[]", b"7", b"{}", b"[" * 4000, b'{"rank": []}'])
def test_a_caller_that_speaks_another_language_is_named(hello):
    name = f"ms_dtensor-test-{os.getpid()}-strange"

    def call():
        while (sock := address.open_to(name, 0, 1)) is None:
            time.sleep(0.01)
        sock.send(hello)
        sock.recv(1)
        sock.close()
    thread = threading.Thread(target=call)
    thread.start()
    with pytest.raises(ConfigError, match="a process of another job"):
        rendezvous.connect(0, 2, name, 5)
    thread.join()


def test_a_forked_child_is_no_rank_and_its_end_is_its_own():
    for r in succeed("forks", 3):
        for what, text in zip(("all_reduce", "exchange", "all_reduce"), r["ok"]):
            assert text.startswith(f"CommError: For '{what}', this process is a forked child of the rank's."), text
            assert f"the rank's process is {r['pid']}, this is " in text and text.count("\n") == 4, text


def test_threads_without_a_common_order_are_refused():
    for r in succeed("threads", 2):
        for k in "01":
            assert r["ok"][k].startswith("CommError: For 'all_reduce', another thread communicates for this rank."), r
            assert f"thread 'MainThread' did, this is 'worker {k}'" in r["ok"][k] and r["ok"][k].count("\n") == 4


def test_threads_that_have_an_order_may_communicate():
    for r in succeed("threads_in_turn", 2):
        assert r["ok"] == ["nothing raised"] * 4, r


def test_objects_are_data():
    for r in succeed("objects", 3):
        for text in r["ok"]:
            assert text.startswith("CommError: For an exchange of objects, one of them cannot be sent.\n"
                                   "  on:   scenarios.Evil\n"), text


@pytest.mark.parametrize("rank, missing", [(0, "rank\\(s\\) 1, 2"), (2, "rank\\(s\\) 0")])
def test_missing_ranks_are_named(rank, missing):
    with pytest.raises(PeerLost, match=missing):
        rendezvous.connect(rank, 3, f"ms_dtensor-test-{os.getpid()}-missing", 0.2)


def test_worlds_of_different_size_do_not_connect():
    name, caught = f"ms_dtensor-test-{os.getpid()}-sizes", []

    def other():
        try:
            rendezvous.connect(0, 2, name, 1)
        except Exception as e:
            caught.append(e)
    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises((ConfigError, PeerLost)):
        rendezvous.connect(1, 3, name, 1)
    thread.join()
    assert isinstance(caught[0], ConfigError) and "another job" in str(caught[0])


def test_memory_stays_bounded():
    for r in succeed("bounded", 2):
        reducing, after = r["ok"]
        assert reducing < 2 * (2 * segment.CHUNK + (2 << 20)), r
        assert after - reducing < 2 * (arena.KEEP + (2 << 20)), r


def test_nothing_is_left_behind():
    ranks, _ = run("killed", 3)
    job = ranks[0]["name"]
    assert left_of([job]) == []
    with address.listening(job, 1, 2), address.listening(f"{job}-other", 0, 2):  # a leftover would be seen, others' are not
        file, its_socket = left_of([job])
        assert file == its_socket and address._start_of(job, 1) in file


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_sent_are_the_textbook_lower_bound(size):
    """Counted where they are copied from one rank's memory into another's."""
    ranks = [r["ok"] for r in succeed("counted", size)]
    uneven = [4 + i for i in range(size)]
    for name, rows in (("small", 1), ("large", 8192)):
        row = 4 * rows
        whole, sent = 64 * size * row, {what: [r.get(f"{what} {name}") for r in ranks] for what in {
            k.rpartition(" ")[0] for k in ranks[0]}}
        assert sent["all_reduce"] == [sent_bytes("all_reduce", size, whole, whole)] * size
        assert sent["all_gather"] == [sent_bytes("all_gather", size, 64 * row, whole)] * size
        assert sent["reduce_scatter"] == [sent_bytes("reduce_scatter", size, whole, 64 * row)] * size
        assert sent["all_to_all"] == [sent_bytes("all_to_all", size, 2 * whole, 2 * whole)] * size
        assert sum(sent["broadcast"]) == (size - 1) * whole
        assert sum(sent["uneven all_gather"]) == (size - 1) * sum(uneven) * row
        assert sum(sent["uneven reduce_scatter"]) == (size - 1) * sum(uneven) * row
        assert sum(sent["uneven all_to_all"]) == (size - 1) * sum(uneven) * row
        assert sum(sent["scatter"]) == sum(uneven[1:]) * row
