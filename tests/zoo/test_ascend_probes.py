# SPDX-License-Identifier: Apache-2.0
"""The probes of a borrowed node, against doubles that record what MindSpore is asked: what they say of bad devices, too."""
import inspect
from pathlib import Path
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, profiler

from model_zoo.llama.tools import bf16_losses  # noqa: F401  its configuration is asked for
from ms_dtensor import comm
from ms_dtensor.ops.local import varlen
from scripts.ascend import context, probes

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
