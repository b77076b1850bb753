# SPDX-License-Identifier: Apache-2.0
"""A slice of what tests/long/check_failures.py, tests/long/soak.py and tests/long/fuzz_shm.py run in full."""
from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from tests.msrun import PATIENCE

SCRIPTS = pathlib.Path(__file__).resolve().parents[1] / "long"


def run(script, *args):
    done = subprocess.run([sys.executable, str(SCRIPTS / script), *args], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done


@pytest.mark.parametrize("args", [("kills", "--runs", "6"), ("desyncs",), ("stuck", "--every", "3")],
                         ids=lambda args: args[0])
def test_failures_speak_on_every_rank(args):
    out, done = run("check_failures.py", *args)
    assert done.returncode == 0, json.dumps(out, indent=1)
    assert out[args[0]]["right"] > 2 and out["left_over"] == []


def test_random_collectives_give_right_results():
    out, _ = run("soak.py", "--minutes", "0.01", "--seed", "7")
    assert out["errors"] == [] and out["left_over"] == []
    for r in out["per_rank"]:
        assert r["checked"] > 20 and r["last"]["handles"] <= r["first"]["handles"]


def test_every_collective_on_few_elements_is_numpys():
    out, done = run("fuzz_shm.py", "--ranks", "2", "3", "5", "--every", "41")
    assert out["cases"] > 600 and out["wrong"] == 0, done.stderr
