# SPDX-License-Identifier: Apache-2.0
"""The shared-memory engine on real processes, without MindSpore: the contract, and every way a job can go wrong."""
from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import threading

import pytest

from ms_dtensor.comm.shm import arena, rendezvous, segment
from ms_dtensor.errors import ConfigError, PeerLost
from ms_dtensor.redistribute.cost import sent_bytes

WORKER = pathlib.Path(__file__).parent / "worker.py"


def run(scenario, size, *args, timeout="20"):
    """One line per rank, in rank order; extra lines the scenario printed come after."""
    env = dict(os.environ, TEST_TIMEOUT=timeout)
    done = subprocess.run([sys.executable, str(WORKER), scenario, str(size), *args], env=env, capture_output=True,
                          text=True, timeout=60)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    ranks = sorted((line for line in lines if "rank" in line), key=lambda line: line["rank"])
    assert ranks, done.stderr
    return ranks, [line for line in lines if "rank" not in line]


def succeed(scenario, size, *args):
    ranks, _ = run(scenario, size, *args)
    assert [r["rank"] for r in ranks] == list(range(size))
    for r in ranks:
        assert r.get("ok"), r.get("trace")
    return ranks


@pytest.mark.parametrize("size", [2, 3, 4])
def test_contract(size):
    succeed("suite", size)


@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_many_chunks(size):
    succeed("large", size)


def test_bfloat16_rounds_once():
    pytest.importorskip("ml_dtypes")
    succeed("bfloat16", 3)


@pytest.mark.parametrize("size", [3, 4])
def test_fast_ranks_do_not_overtake_slow_readers(size):
    succeed("overtaking", size)


def test_killed_peer_is_named_on_all_others_at_once():
    ranks, extra = run("killed", 4)
    victim = extra[0]["victim"]
    assert [r["rank"] for r in ranks] == [0, 1, 2], victim
    for r in ranks:
        assert "ok" in r, r.get("trace")
        assert r["ok"] < 2.0


def test_killed_peer_is_noticed_by_ranks_that_do_not_wait_for_it():
    ranks, _ = run("killed_elsewhere", 4)
    assert [r["rank"] for r in ranks] == [0, 1, 3]
    for r in ranks:
        assert r["error"] == "PeerLost" and "rank 2 (pid" in r["text"], r


def test_a_child_of_the_killed_rank_does_not_hide_its_death():
    ranks, _ = run("killed_with_a_child", 3)
    for r in ranks:
        assert r["error"] == "PeerLost" and "rank 1 (pid" in r["text"] and "died" in r["text"], r


@pytest.mark.parametrize("kind", ["shape", "op", "dtype", "root", "first"])
def test_mismatch_is_raised_on_every_rank_and_names_the_odd_one(kind):
    ranks, _ = run("mismatch", 3, kind)
    assert len({r["text"] for r in ranks}) == 1
    for r in ranks:
        assert r["error"] == "CollectiveMismatch", r
        assert "rank(s) 2 made another call" in r["text"]
        assert "rank 0: " in r["text"] and "rank 2: " in r["text"]


def test_mismatch_of_groups():
    ranks, _ = run("mismatch", 3, "group")
    assert [r["error"] for r in ranks] == ["CollectiveMismatch"] * 3


def test_mismatch_of_message_and_collective():
    ranks, _ = run("mismatch", 2, "message")
    assert [r["error"] for r in ranks] == ["CollectiveMismatch"] * 2


def test_ranks_that_wait_for_each_others_messages_are_told():
    ranks, _ = run("mismatch", 3, "circle")
    for r in ranks:
        assert r["error"] == "CollectiveMismatch" and "wait for each other's messages" in r["text"], r


def test_going_on_after_a_mismatch():
    succeed("mismatch_and_on", 3)


def test_a_rank_that_ends_early_harms_nobody():
    succeed("leaves_early", 3)


def test_a_rank_that_ends_early_is_named_when_missed():
    ranks, _ = run("leaves_and_is_missed", 3)
    assert ranks[2]["ok"]
    for r in ranks[:2]:
        assert r["error"] == "PeerLost" and "rank 2 (pid" in r["text"] and "ended before" in r["text"], r


def test_timeout_names_the_late_rank():
    ranks, _ = run("late", 3, timeout="0.5")
    assert ranks[2]["ok"]
    for r in ranks[:2]:
        assert r["error"] == "PeerLost" and "rank(s) 2 did not arrive within 0.5 s" in r["text"], r


def test_own_error_is_told_to_the_others():
    ranks, _ = run("raises", 3)
    for r in ranks[:2]:
        assert r["error"] == "PeerLost" and "ended with ValueError: boom" in r["text"], r


@pytest.mark.parametrize("scenario", ["raises_with_unread_messages", "sends_to_one_that_ended"])
def test_what_a_rank_said_last_is_read_after_all_it_said_before(scenario):
    ranks, _ = run(scenario, 3)
    for r in ranks[1:]:
        assert r["error"] == "PeerLost" and "rank 0" in r["text"] and "ended with ValueError: boom" in r["text"], r


def test_a_taken_rank_is_refused():
    name = f"ms_dtensor-test-{os.getpid()}-taken"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(f"\0{name}-0")
        with pytest.raises(ConfigError, match="rank 0 is taken by another process"):
            rendezvous.connect(0, 2, name, 0.2)


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


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduces_into_their_operand(size):
    succeed("inplace", size)


def test_memory_stays_bounded():
    for r in succeed("bounded", 2):
        reducing, after = r["ok"]
        assert reducing < 2 * (2 * segment.CHUNK + (2 << 20)), r
        assert after - reducing < 2 * (arena.KEEP + (2 << 20)), r


@pytest.mark.parametrize("size", [2, 3])
def test_results_own_their_memory_and_give_it_back(size):
    succeed("held", size)


@pytest.mark.parametrize("size", [2, 3])
def test_results_that_come_later(size):
    succeed("later", size)


def test_nothing_is_left_behind():
    ranks, _ = run("killed", 3)
    assert not [name for name in os.listdir("/dev/shm") if "ms_dtensor" in name]
    with open("/proc/net/unix") as f:
        assert ranks[0]["name"] not in f.read()  # other jobs may be running


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
