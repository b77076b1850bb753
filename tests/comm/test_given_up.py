# SPDX-License-Identifier: Apache-2.0
"""A step that one rank leaves: who waits is told, what was in flight is void, and afterwards all is as at the start."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.msrun import PATIENCE


def reports_of(name: str) -> dict[int, dict]:
    """In a process of its own, as it forks."""
    script = Path(__file__).with_name("given_up_scenarios.py")
    done = subprocess.run([sys.executable, str(script), name], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout, done.stderr
    return {int(rank): report for rank, report in json.loads(done.stdout).items()}


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
