# SPDX-License-Identifier: Apache-2.0
"""The script for a borrowed node, rehearsed: it runs to its end over the emulator, and a part that fails stops no other."""
from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/ascend_first.py"
spec = importlib.util.spec_from_file_location("ascend_first", SCRIPT)
ascend_first = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ascend_first)


@pytest.mark.dist
@pytest.mark.slow
def test_every_part_runs_here_over_the_emulator(tmp_path):
    out = tmp_path / "report.txt"
    done = subprocess.run([str(SCRIPT.with_suffix(".sh")), "--rehearse", "--out", str(out)], capture_output=True, text=True,
                          timeout=1100, env={**os.environ, "PYTHON": sys.executable})
    text = out.read_text()
    assert done.returncode == 0, text
    assert text.startswith("REHEARSED") and text.count("==== ") == 7 and "FAILED" not in text
    for name in ("mindspore 2", "flash_attention_score gradient 2", "by_formula_MiB", "losses_of_a_cpu", "aveg_time(us)"):
        assert name in text, name


def test_a_part_that_fails_is_written_down_and_the_rest_goes_on(tmp_path):
    file = ascend_first.Report(tmp_path / "report.txt")

    def raises():
        raise RuntimeError("no such kernel")
    file.part("first", raises)
    file.part("second", lambda: ("numbers", False))
    file.part("third", lambda: ("fine", True))
    text = file.file.read_text()
    assert "RuntimeError: no such kernel" in text and "numbers" in text and text.rstrip().endswith("fine")
    assert [fine for _, fine in file.summary] == [False, False, True]


def test_off_ops_and_missing_ones_are_failures(tmp_path, monkeypatch):
    import numpy as np

    given = {}
    right = {"a value": np.ones(3, np.float32), "b value": np.ones(2, np.float32)}

    def launched(name, ranks, options, folder):
        np.savez(folder / "cpu.npz", **right)
        np.savez(folder / "device.npz", **given["answers"])
        return [], None
    monkeypatch.setattr(ascend_first, "on_ranks", launched)
    monkeypatch.setattr(ascend_first.subprocess, "run", lambda *args, **how: subprocess.CompletedProcess(args, 0, "", ""))
    for answers, fine in ((right, True), ({**right, "b value": right["b value"] * 1.1}, False),
                          ({"a value": right["a value"]}, False)):
        given["answers"] = answers
        assert ascend_first.ops_part(None, tmp_path)[1] is fine
