# SPDX-License-Identifier: Apache-2.0
"""The script for a borrowed node: it runs to its end over the emulator, says at once that there is no NPU, and misses none
of what a node may lack. A part that fails stops no other.
"""
import importlib.util
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ms_dtensor.debug.predict import load_hardware
from ms_dtensor.tools import ranks as started
from scripts.ascend import node, ranks
from tests.msrun import PATIENCE

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
    assert text.startswith("REHEARSED") and "FAILED" not in text
    here = [name for name in ascend_first.SECONDS if name not in ("device", "profile")]  # these need an NPU
    assert re.findall(r"^==== (\w+)", text, re.M) == [*here, "summary"]
    for name in ("mindspore 2", "flash_attention_score gradient 2", "by_formula_MiB", "losses_of_a_cpu", "aveg_time(us)",
                 "experts gradient 4", "flash_attention_score TND gradient 2", "attention of documents value", "fb add",
                 "does not reduce prod BFloat16", "s after the death", "by_rank", '"bytes": 16384'):
        assert name in text, name
    machine = load_hardware(tmp_path / "report.machine.yaml")
    assert machine.source.startswith("measured on 2 ranks") and {*machine.asking} == {"op", "collective"}


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_without_an_npu_it_says_why_and_fails_within_a_second(tmp_path):
    """It used to run on the CPU and say ok: MindSpore falls back without a word, as on many a borrowed node."""
    out, start = tmp_path / "report.txt", cpu_of_children()
    done = subprocess.run([str(SCRIPT.with_suffix(".sh")), "--out", str(out)], capture_output=True, text=True,
                          timeout=PATIENCE, env={**os.environ, "PYTHON": sys.executable})
    took = cpu_of_children() - start
    assert done.returncode == 2 and took < 3, (done, took)  # 0.2 s of CPU; MindSpore alone takes three
    for text in (done.stderr, out.read_text()):
        assert "no NPU can be used here" in text and "/dev/davinci0" in text and "libascendcl.so" in text, text
    assert done.stdout == "" and "compiled with CANN 9.1.0" in out.read_text()


def test_a_rank_that_mindspore_starts_for_the_cpu_runs_nothing(monkeypatch):
    monkeypatch.setattr(started, "start_device", lambda: "cpu")
    with pytest.raises(RuntimeError, match="started for 'cpu' on this rank, not for an NPU"), ranks.world_of(False):
        raise AssertionError("ran")


# -- what a node may lack, on trees of files -------------------------------------------------------------------------------
def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


NODE = {"dev/davinci0": "", "dev/davinci10": "", "dev/davinci2": "", "dev/davinci_manager": "",
        "ms/lib/plugin/libmindspore_ascend.so.2": ""}


def test_each_thing_that_a_node_lacks_is_said(tmp_path, monkeypatch):
    root = tree(tmp_path, NODE)
    assert [f.name for f in node.devices(root)] == ["davinci0", "davinci2", "davinci10"]
    assert node.missing(root, root / "ms", lambda command: "libascendcl.so => /usr/lib/libascendcl.so") == []
    assert "has no MindSpore" in node.missing(root, None)[0]
    assert "no plug-in for Ascend" in node.missing(root, root / "dev")[0]
    lost = node.missing(root, root / "ms", lambda command: "\tlibhccl.so => not found\n\tlibc.so.6 => /lib/libc.so.6\n"
                        "\tlibruntime.so => not found\n\tlibhccl.so => not found")
    assert len(lost) == 1 and "libhccl.so, libruntime.so not found" in lost[0] and "set_env.sh" in lost[0]
    (root / "dev/davinci0").chmod(0)
    monkeypatch.setattr(node.os, "access", lambda file, how: file.name != "davinci0")  # root may open anything
    assert "HwHiAiUser" in node.missing(root, root / "ms", lambda command: "")[0]
    assert "/dev/davinci0" in node.missing(root / "ms", root / "ms", lambda command: "")[0]
    said = node.refusal(["one", "two"])
    assert "nothing is shown" in said and "  - one\n  - two\n" in said and "--rehearse" in said


def test_more_ranks_than_npus_are_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ascend_first.node, "missing", lambda package: [])
    monkeypatch.setattr(ascend_first.node, "devices", lambda: [Path("/dev/davinci0")])
    monkeypatch.setattr(sys, "argv", ["ascend_first.py", "--ranks", "8", "--out", str(tmp_path / "out.txt")])
    assert ascend_first.main() == 2 and "--ranks 8, and this machine has 1 NPUs" in capsys.readouterr().err


CANN = "usr/local/Ascend/ascend-toolkit/latest"
VERSIONS = {f"{CANN}/compiler/version.info": "Version=9.1.0.1\nversion_dir=9.1.0\n",
            f"{CANN}/hccl/version.info": "Version=9.1.0\n", f"{CANN}/runtime/version.info": "Version=9.1.0\n",
            "usr/local/Ascend/driver/version.info": "Version=25.0.rc1\n",
            "usr/local/Ascend/firmware/version.info": "Version=7.7.0\n",
            "ms/lib/plugin/ascend/custom_ascendc_910b/version.info": "custom_opp_compiler_version=9.1.0\n"}


def test_versions_are_told_and_compared(tmp_path, monkeypatch):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    root = tree(tmp_path, VERSIONS)
    lines, wrong = node.versions(root, root / "ms")
    assert wrong == [] and {"hccl         9.1.0", "driver       25.0.rc1"} <= set(lines), lines
    (root / f"{CANN}/hccl/version.info").write_text("Version=8.2.RC1\n")
    assert "parts of CANN are of different versions" in node.versions(root, root / "ms")[1][0]
    for part in ("compiler", "runtime"):
        (root / f"{CANN}/{part}/version.info").write_text("Version=8.2.RC1\n")
    assert node.versions(root, root / "ms")[1] == ["CANN is 8.2, MindSpore's own operators are for 9.1.0"]
    monkeypatch.setenv("ASCEND_HOME_PATH", str(root / "dev"))  # not there: the usual folder
    assert node.home(root) == root / CANN
    assert len(node.versions(root / "ms", root / "ms")[1]) == 2, "neither CANN nor a driver"


def test_what_cann_logged_is_counted_and_its_errors_are_shown(tmp_path):
    assert node.plog(tmp_path) == "plog: CANN wrote none"
    lines = "[INFO] HCCL(1,python): fine\n[ERROR] HCCL(1,python): the peer is gone\n"
    tree(tmp_path, {"debug/plog/plog-1_2.log": lines, "run/plog/plog-1_2.log": "[EVENT] started\n"})
    assert node.plog(tmp_path) == "plog: 2 files, 1 lines of ERROR, the last:\n[ERROR] HCCL(1,python): the peer is gone"


def test_where_the_plug_in_does_not_load_its_loader_says_why():
    """Run here, for real: MindSpore is asked to start on Ascend and names the library that is not there."""
    text, fine = node.plugin_loads()
    assert not fine and "libmindspore_ascend.so.2 failed" in text and "cannot open shared object file" in text, text


def test_versions_that_mindspore_warns_of_are_a_failure(monkeypatch):
    monkeypatch.setattr(node, "LOADS", "print('set_device: Ascend; version 8.0 does not match')")
    text, fine = node.plugin_loads()
    assert not fine and node.SUPPORTED in text
    monkeypatch.setattr(node, "LOADS", "print('set_device: Ascend')")
    assert node.plugin_loads()[1]


def test_a_part_that_fails_is_written_down_and_the_rest_goes_on(tmp_path):
    file = ascend_first.Report(tmp_path / "report.txt", tmp_path)

    def raises():
        raise RuntimeError("no such kernel")
    file.part("first", raises)
    file.part("second", lambda: ("numbers", False))
    file.part("third", lambda: ("fine", True))
    text = file.file.read_text()
    assert "RuntimeError: no such kernel" in text and "numbers" in text and "\nfine\n" in text
    assert [fine for _, fine in file.summary] == [False, False, True]


def test_off_ops_and_missing_ones_are_failures(tmp_path, monkeypatch):
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


def test_a_part_that_ends_its_launch_is_judged_by_how_it_ends(tmp_path, monkeypatch):
    answer = {}
    monkeypatch.setattr(ascend_first, "on_ranks", lambda *args: answer["launch"])
    for launched, dead, fine in (
            (([{"rank": 0, "told_after_s": 2}], "2 ranks: msrun exited with 1; ..."), True, True),
            (([], "2 ranks: not done after 150 s, ended; ..."), True, False),  # nobody noticed the death
            (([{"failed": {"killed": "1000 all-reduces went through"}}], None), True, False),
            (([], None), False, False)):  # nobody died
        (tmp_path / "killed_at").unlink(missing_ok=True)
        if dead:
            (tmp_path / "killed_at").write_text(str(time.time()))
        answer["launch"] = launched
        text, well = ascend_first.ending_part("killed", 2, None, tmp_path)
        assert well is fine and (not dead or "s after the death" in text), (launched, text)
    answer["launch"] = ([], None)
    assert not ascend_first.ending_part("refusal", 2, None, tmp_path)[1], "a refusal that nobody reports"
