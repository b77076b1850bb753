# SPDX-License-Identifier: Apache-2.0
"""The script for a borrowed node: it runs to its end over the emulator, says at once that there is no NPU, and misses none
of what a node may lack. A part that fails stops no other. Its probes, against doubles that record what MindSpore is asked,
say of bad devices, too.
"""
import importlib.util
import inspect
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, profiler

from model_zoo.llama.tools import bf16_losses  # noqa: F401  its configuration is asked for
from ms_dtensor import comm
from ms_dtensor.debug.predict import load_hardware
from ms_dtensor.ops.local import varlen
from ms_dtensor.tools import ranks as started
from scripts.ascend import context, node, probes, ranks
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


ALONE = SimpleNamespace(rank=0, size=1)

ROOM = 4 * 16 * 16  # bytes


@pytest.mark.parametrize(("counted", "fault", "said"), [
    ((0, ROOM, ROOM), None, set()), ((0, 0, 0), None, {"held"}), ((0, ROOM, 2 * ROOM), None, {"after"}),
    ((0, ROOM, ROOM), "refused", {"refused, all"}), ((0, ROOM, ROOM), "stale", {"values, all"})])
def test_a_room_that_is_not_filled_anew_as_it_should_is_a_failure(counted, fault, said, monkeypatch):
    """On a device whose memory is counted: one that does not count, that takes other memory, that refuses, that forgets."""
    counts, filled, real = iter(counted), [], ms.Tensor.copy_

    def copy(into, values):
        filled.append(values)
        return into if len(filled) == 3 else real(into, values)
    monkeypatch.setattr(probes, "CHUNK", ROOM)
    monkeypatch.setattr(ms.runtime, "synchronize", lambda: None)
    monkeypatch.setattr(ms.runtime, "memory_allocated", lambda: next(counts))
    if fault == "refused":  # a tensor that shares the count of writes with the memory that it lies on
        monkeypatch.setattr(ms.ops, "stop_gradient", lambda x: x)
    if fault == "stale":  # what is brought back does not arrive
        monkeypatch.setattr(ms.Tensor, "copy_", copy)
    told = probes.memory(ALONE, SimpleNamespace(rehearse=False))
    assert set(told["failed"]) == said, told


def test_a_profile_is_asked_for_as_the_documents_say(monkeypatch, tmp_path):
    """Three steps after two; the names and keywords are those of the installed `mindspore.profiler`."""
    seen, taken, real = [], [], profiler.profile

    class Double:
        def __init__(self, **how):
            inspect.signature(real.__init__).bind(self, **how)
            seen.append(how)

        def __enter__(self):
            return self

        def step(self):
            taken.append("step")

        def __exit__(self, *error):
            folder = tmp_path / "profile/x_ascend_ms/ASCEND_PROFILER_OUTPUT"
            folder.mkdir(parents=True)
            (folder / "step_trace_time.csv").write_text("Step,Computing,Communication(Not Overlapped)\n2,1,0\n")
    monkeypatch.setattr(profiler, "profile", Double)
    monkeypatch.setattr(probes, "one_billion", lambda options: None)
    monkeypatch.setattr(probes, "recipe", lambda *args: SimpleNamespace(step=taken.append))
    told = probes.profile(ALONE, SimpleNamespace(rehearse=False, folder=tmp_path))
    assert taken == [0, "step", 1, "step", 2, "step", 3, "step", 4, "step"]
    assert told["failed"] == {} and told["tables"]["step_trace_time.csv"][1] == "2,1,0"
    assert set(seen[0]["activities"]) == {profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU}
    actions = [seen[0]["schedule"](i).name for i in range(6)]
    assert [a.startswith("RECORD") for a in actions] == [False, False, True, True, True, False], actions
    monkeypatch.setattr(Double, "__exit__", lambda self, *error: None)
    assert probes.profile(ALONE, SimpleNamespace(rehearse=False, folder=tmp_path / "none"))["failed"]


def test_a_refusal_is_written_down_and_a_silent_wrong_answer_is_a_failure():
    def asked(answer):
        def all_reduce(x, op, group):
            assert (op, group, x.dtype) == ("prod", "world", ms.bfloat16)
            if answer is None:
                raise RuntimeError("HcclAllReduce: data type bfp16 is not supported by prod")
            x.copy_(Tensor(answer, ms.bfloat16))
        backend = SimpleNamespace(communicator=lambda ranks: "world", _api=SimpleNamespace(all_reduce=all_reduce))
        return probes.refusal(SimpleNamespace(rank=0, size=2, backend=backend), None)
    assert "bfp16 is not supported" in asked(None)["text"]
    assert asked([2.25, 9.0])["failed"] == {} and asked([1.5, 3.0])["failed"]


def test_runs_that_differ_by_a_bit_are_a_failure(monkeypatch):
    runs = iter([1.0, 1.0, 1.0, np.nextafter(np.float32(1.0), np.float32(2.0))])

    class Param:
        def __init__(self, value):
            self.value = Tensor(np.float32([value]))

        def astype(self, dtype):
            return self

        def to_local(self):
            return self.value
    monkeypatch.setattr(probes, "recipe", lambda *args: SimpleNamespace(
        step=lambda i: SimpleNamespace(loss=0.5), params=[Param(next(runs))]))
    monkeypatch.setattr(probes, "world_view", lambda world, mine: [mine])
    options = SimpleNamespace(rehearse=False)
    assert probes.twice(ALONE, options)["failed"] == {} and probes.twice(ALONE, options)["failed"]


def test_a_death_that_nobody_is_told_of_is_a_failure(monkeypatch, tmp_path):
    ended = []
    monkeypatch.setattr(probes.os, "kill", lambda pid, how: ended.append(how))
    monkeypatch.setattr(probes.time, "sleep", lambda seconds: None)
    with comm.fake_world(2, 0):
        told = probes.killed(SimpleNamespace(rank=0, size=2), SimpleNamespace(folder=tmp_path))
        assert told["failed"] and not ended
        probes.killed(SimpleNamespace(rank=1, size=2), SimpleNamespace(folder=tmp_path))
    assert ended == [probes.signal.SIGKILL] and Path(tmp_path / "killed_at").exists()


def test_what_context_parallelism_asks_is_answered_and_a_kernel_that_mistakes_statistics_is_a_failure(monkeypatch):
    right = context.answers(ms.float32)
    assert len(right) == 4 and max(off for by in right.values() for off in by.values()) < 1e-5, right
    real = varlen.fused_grad
    monkeypatch.setattr(varlen, "fused_grad", lambda q, dout, whole, k, v, *rest: real(
        q, dout, varlen.fused(q, k, v, *rest)._replace(out=whole.out), k, v, *rest))  # those of the block alone
    told = context.context(ALONE, SimpleNamespace(rehearse=True))
    assert set(told["failed"]) == {"the gradient of a block from statistics of all blocks"}
    monkeypatch.setattr(varlen, "fused_grad", real)
    fused = varlen.fused
    monkeypatch.setattr(varlen, "fused", lambda *args: (lambda p: p._replace(
        top=p.top.swapaxes(0, 1).reshape(p.top.shape), total=p.total.swapaxes(0, 1).reshape(p.top.shape)))(fused(*args)))
    assert "statistics of packed tokens lie as [tokens, heads, 8]" in context.context(
        ALONE, SimpleNamespace(rehearse=True))["failed"]
