# SPDX-License-Identifier: Apache-2.0
"""Our rules and CPU forms promise what MindSpore's own inference says, of the primitives that CPUs lack above all.

A slice: one call of each primitive, and one shard, where a form of ours stands in for the kernel. Everything, with more
calls and shards, runs in `tests/long/infer_gate.py`.
"""
from dataclasses import replace

import mindspore as ms
from mindspore import Tensor, mint, ops

from ms_dtensor.debug.verify.capture import capture
from ms_dtensor.ops.local import CPU
from ms_dtensor.ops.rules import RULES
from tests.coverage.infer import Gate, ask, calls_of_corpus, calls_of_llama


def test_primitives_without_a_cpu_kernel(tmp_path):
    gate = Gate()
    calls = calls_of_corpus(limit=1)
    ask({name: each for name, each in calls.items() if name in CPU}, gate, 1, tmp_path)
    assert not gate.wrong, gate.wrong[:5]
    assert len(gate.agree) > 190


def test_the_llama(tmp_path):
    gate = Gate()
    ask(calls_of_llama(), gate, 2, tmp_path)
    assert not gate.wrong, gate.wrong[:5]
    assert sum(gate.agree.values()) > 20


def test_words_that_mindspore_passes_as_numbers(tmp_path):
    gate = Gate()
    x = Tensor([[1.0, 2.0], [3.0, 4.0]])
    ask({"FFT2": capture(lambda x: ops.fft2(x, norm="ortho"), x),
         "IHFFTN": capture(lambda x: ops.ihfftn(x, norm="forward"), x)}, gate, 1, tmp_path)
    assert not gate.wrong and set(gate.agree) == {"FFT2", "IHFFTN"}, gate


def _asked_about_softmax(tmp_path) -> list[str]:
    gate = Gate()
    ask({"Softmax": capture(lambda x: mint.softmax(x, -1), Tensor([[1.0, 2.0], [3.0, 4.0]]))}, gate, 1, tmp_path)
    return gate.wrong


def test_a_wrong_shape_is_told(tmp_path, monkeypatch):
    assert not _asked_about_softmax(tmp_path)
    rule = RULES["softmax"]
    monkeypatch.setitem(RULES, "softmax", lambda call: replace(rule(call), shapes=((2, 3),)))
    assert "Softmax (whole): we say" in _asked_about_softmax(tmp_path)[0]


def test_a_result_too_many_is_told(tmp_path, monkeypatch):
    rule = RULES["softmax"]
    monkeypatch.setitem(RULES, "softmax", lambda call: replace(rule(call), shapes=((2, 2), (2,))))
    assert _asked_about_softmax(tmp_path)


def test_a_wrong_dtype_is_told(tmp_path):
    c = capture(lambda x: mint.softmax(x, -1), Tensor([[1.0, 2.0], [3.0, 4.0]]))[0]
    gate = Gate()
    ask({"Softmax": [replace(c, result=ops.cast(c.result, ms.int32))]}, gate, 0, tmp_path)
    assert "Softmax (whole): we say" in gate.wrong[0]
