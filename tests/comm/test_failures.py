# SPDX-License-Identifier: Apache-2.0
"""Slices of tests/long's check_failures, soak and fuzz_shm; steps that a rank leaves; another user's processes beside."""
import json
import os
import pathlib

import pytest

from tests.msrun import python


def run(*words):
    done = python(*words)
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done


@pytest.mark.parametrize("args", [("kills", "--runs", "6"), ("desyncs",), ("stuck", "--every", "3")],
                         ids=lambda args: args[0])
def test_failures_speak_on_every_rank(args):
    out, done = run("-m", "tests.long.check_failures", *args)
    assert done.returncode == 0, json.dumps(out, indent=1)
    assert out[args[0]]["right"] > 2 and out["left_over"] == []


def test_random_collectives_give_right_results():
    out, _ = run("-m", "tests.long.soak", "--minutes", "0.01", "--seed", "7")
    assert out["errors"] == [] and out["left_over"] == []
    for r in out["per_rank"]:
        assert r["checked"] > 20 and r["last"]["handles"] <= r["first"]["handles"]


def test_every_collective_on_few_elements_is_numpys():
    out, done = run("-m", "tests.long.fuzz_shm", "--ranks", "2", "3", "5", "--every", "41")
    assert out["cases"] > 600 and out["wrong"] == 0, done.stderr


def reports_of(name: str) -> dict[int, dict]:
    """In a process of its own, as it forks."""
    return {int(rank): report for rank, report in run("-m", "tests.comm.given_up_scenarios", name)[0].items()}


def test_a_step_that_is_left_leaves_nothing():
    """Also where a rank is told before it has begun the step; messages of that step are not taken for those of the next."""
    reports = reports_of("rounds")
    for rank in range(3):
        assert "error" not in reports[rank], reports[rank]
        for number, got in enumerate(reports[rank]["result"]):
            if number % 4 == 3:
                assert got == ([3.0 * number, 5000.0 * number] if rank == 2 else [2.0]), (rank, number, got)
            else:
                assert got == ([] if rank == number % 4 else f"step {number} was left by rank {number % 4}"), (rank, got)


def test_who_comes_late_leaves_the_same_step():
    reports = reports_of("late")
    got = [reports[r].get("result") for r in range(3)]
    assert got == ["[2.0]", "step 0 was left by rank 0[2.0]", "[3.0, 5000.0]"], reports


def test_who_does_not_come_back_is_named():
    reports = reports_of("dying")
    for rank in (0, 2):
        assert "rank 1 (pid" in reports[rank]["result"] and "ValueError" in reports[rank]["result"], reports


HERE = pathlib.Path(__file__).parent


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can")
@pytest.mark.parametrize("kind", ["garbage", "silence", "crowd", "squat"])
@pytest.mark.parametrize("let_in", [False, True], ids=["kept_off", "let_in"])
def test_job_among_strangers(kind, let_in):
    out, _ = run(HERE / "strangers.py", kind, "3", *["let_in"][:let_in])
    assert [r.get("sum") for r in out["ranks"]] == [6.0] * 3, out
    assert max(r["ready"] for r in out["ranks"]) < 3, out
    assert (out["bytes"], out["fds"], out["left"]) == (0, 0, []), out
    assert out["taken"] == (3 if kind == "squat" else 0)
    assert (out["made"] >= (1000 if kind == "crowd" else 1)) if let_in else out["made"] == 0, out
