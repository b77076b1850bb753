# SPDX-License-Identifier: Apache-2.0
"""Processes of another user on the host: a job starts and ends as if it were alone, and they receive nothing."""
from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.msrun import PATIENCE

HERE = pathlib.Path(__file__).parent


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can")
@pytest.mark.parametrize("kind", ["garbage", "silence", "crowd", "squat"])
@pytest.mark.parametrize("let_in", [False, True], ids=["kept_off", "let_in"])
def test_job_among_strangers(kind, let_in):
    done = subprocess.run([sys.executable, str(HERE / "strangers.py"), kind, "3", *["let_in"][:let_in]],
                          capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout, done.stderr
    out = json.loads(done.stdout)
    assert [r.get("sum") for r in out["ranks"]] == [6.0] * 3, out
    assert max(r["ready"] for r in out["ranks"]) < 3, out
    assert (out["bytes"], out["fds"], out["left"]) == (0, 0, []), out
    assert out["taken"] == (3 if kind == "squat" else 0)
    assert (out["made"] >= (1000 if kind == "crowd" else 1)) if let_in else out["made"] == 0, out
