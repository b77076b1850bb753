# SPDX-License-Identifier: Apache-2.0
"""A few of the kills and of the changed headers; all of them are `python -m tests.long.check_checkpoints kills`, `fuzz`."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", [("kills", "--runs=6"), ("fuzz", "--runs=300"), ("memory", "--gib=0.25")],
                         ids=lambda what: what[0])
def test_a_slice_of(what):
    done = subprocess.run([sys.executable, str(ROOT / "tests/long/check_checkpoints.py"), *what], cwd=ROOT, timeout=220,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert not json.loads(done.stdout)["wrong"]
