# SPDX-License-Identifier: Apache-2.0
"""The page of a run: what a dry run predicts of its step beside what its files say was measured."""
from __future__ import annotations

import json

from model_zoo.llama.config import Config, ModelConfig, ParallelConfig, TrainConfig
from model_zoo.llama.configio import dump
from model_zoo.llama.dry import dry_step
from model_zoo.llama.tools import predict

CONFIG = Config(model=ModelConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=96, vocab_size=96),
                parallel=ParallelConfig(dp=2, tp=2), train=TrainConfig(batch=4, seq=16, compile=False))


def test_measured_are_the_later_steps():
    lines = [{"step": 1, "ms": 900.0, "comm": {"all_reduce dp": [9, 9, 1.0]}}, {"step": 1, "held_out_loss": 3.0},
             {"step": 2, "ms": 100.0, "comm": {}}, {"step": 3, "ms": 300.0, "comm": {"all_reduce dp": [2, 640, 1.0]}}]
    assert predict.measured(lines) == {"seconds": 0.2, "comm": {"all_reduce dp": (2, 640)}}
    assert predict.measured(lines[1:2]) == {} and predict.measured([{"ms": 5.0}]) == {"seconds": 0.005}


def test_the_page_of_a_run(tmp_path):
    sent: dict[str, list] = {}
    for e in dry_step(CONFIG, 4).communication:
        told = sent.setdefault(f"{e.op} {','.join(e.axes)}", [0, 0, 1.0])
        told[0], told[1] = told[0] + 1, told[1] + e.bytes
    assert {name.split()[1] for name in sent} == {"dp", "tp"}
    (tmp_path / "config.yaml").write_text(dump(CONFIG))
    lines = [json.dumps({"step": i, "ms": 250.0, "comm": sent}) + "\n" for i in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    page = predict.write_page(tmp_path, None, 3).read_text()
    assert 'href="metrics.jsonl"' in page and "rank 3 of 4" in page and "0.25" in page
    assert page.count("<td>1.000</td>") + page.count(">1.000<") >= 2 * len(sent), "calls and bytes, all as predicted"
