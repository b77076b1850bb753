# SPDX-License-Identifier: Apache-2.0
"""Steps that ranks leave by an exception, on real ranks."""
import json
import subprocess
import sys
from pathlib import Path

from tests.msrun import PATIENCE


def test_killed_ranks_and_swapped_actions_are_named():
    """At each of the five points of a step: a slice of what the script runs in full. The seconds are not judged here."""
    script = Path(__file__).resolve().parents[2] / "tests/long/check_pipeline.py"
    done = subprocess.run([sys.executable, str(script), "kills", "orders", "--runs", "5", "--ranks", "2", "--limit", "60"],
                          capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout, done.stderr
    out = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert out["kills"]["measured"] == 5 and out["orders"]["runs"] == 1
