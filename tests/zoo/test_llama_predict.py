# SPDX-License-Identifier: Apache-2.0
"""What a dry run predicts of a run's step beside what its files say was measured; scripts/bench/mfu.py, whose counts do not
grow with the ranks that share a layer.
"""
import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from model_zoo.llama.config import Config, ModelConfig, ParallelConfig, TrainConfig
from model_zoo.llama.configio import dump
from model_zoo.llama.dry import dry_stages, dry_step
from model_zoo.llama.tools import predict
from ms_dtensor.debug.predict import load_hardware
from scripts.bench import mfu

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


def test_ranks_of_several_stages_tell_each_other_what_comes():
    """Rank 0 waits in its second stage for rank 1, which waits for its first: each runs until both are told everything."""
    parallel = ParallelConfig(pp=2, pp_schedule="interleaved", pp_stages_per_rank=2)
    train = replace(CONFIG.train, micro_batches=2)
    cfg = replace(CONFIG, parallel=parallel, model=replace(CONFIG.model, n_layers=4), train=train)
    runs = dry_stages(cfg, 2)
    sent, taken = ([sum(len(getattr(e, way)) for e in run.events) for run in runs] for way in ("sends", "takes"))
    assert sent == taken[::-1] == [2 * 2 + 2, 2 + 2 * 2], "F over the borders 0-1, 2-3 and 1-2, twice, and back"
    size = train.batch // 2 * train.seq * cfg.model.dim * 4
    assert [sum(e.payload for e in run.events if e.sends) for run in runs] == [6 * size, 6 * size]
    assert all(run.flops() for run in runs) and dry_step(cfg, 2, 0).flops() == runs[0].flops()


@pytest.mark.parametrize("schedule, stages, alike", [("zbh1", 1, "1f1b"), ("zbv", 2, "interleaved")])
def test_a_backward_in_two_parts_computes_what_one_does(schedule, stages, alike):
    """A product of an activation and a weight has two events."""
    cfg = replace(CONFIG, model=replace(CONFIG.model, n_layers=4), train=replace(CONFIG.train, micro_batches=4))
    parts, whole = (dry_stages(replace(cfg, parallel=ParallelConfig(pp=2, pp_schedule=name, pp_stages_per_rank=stages)), 2)
                    for name in (schedule, alike))
    products, twice = (sum(bool(e.flops) for run in runs for e in run.events if e.phase == "backward")
                       for runs in (whole, parts))
    assert twice - products == 4 * (4 * 7 + 1), "those of seven weights a layer and the head's, of each microbatch"
    assert sum(run.flops() for run in parts) == sum(run.flops() for run in whole)


def test_the_command_runs_experts_on_several_stages(monkeypatch, capsys, tmp_path):
    (tmp_path / "moe.yaml").write_text("""
model: {dim: 32, n_layers: 4, n_heads: 4, n_kv_heads: 2, ffn_dim: 16, vocab_size: 64, experts: {count: 8, per_token: 2}}
parallel: {dp: 2, ep: 2, pp: 2, pp_schedule: interleaved, pp_stages_per_rank: 2}
train: {batch: 8, seq: 16, micro_batches: 2}
""")
    script = Path(__file__).parents[2] / "scripts" / "bench" / "dry_run.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "moe.yaml"), "--world", "4", "--device", "CPU"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(script), run_name="__main__")
    told = json.loads(capsys.readouterr().out)
    assert told["events"] > 0 and any(name.startswith("all_to_all") for name in told["GB sent"])


@pytest.mark.parametrize(("name", "collectives", "device", "hidden", "fits"), [
    ("tp8", 10, (11, 13), 0.0, True), ("tp8 x fsdp64", 13, (12, 15), 0.6, True), ("fsdp8", 3, (50, 70), 0.9, False)])
def test_mfu_of_the_8b(name, collectives, device, hidden, fits):
    """Of tp8 each half of a block gathers and scatters, forward and backward, and gathers once more for weights' gradients;
    of fully_shard there are two gathers and a reduction a unit, over 8 ranks as over 64."""
    config = mfu.ROOT / "model_zoo/llama/configs/llama3_8b.yaml"
    machine = load_hardware("910b")
    of = mfu.counted(config, name, machine)
    made = mfu.row(name, of, machine, {"op": 25.0, "collective": 130.0}, slower=2.2)
    asked = 44 + 12 * ("fsdp" in name)  # `fully_shard`'s kernels, as `fsdp_kernels.py` counts them; docs/support.md
    assert (made["operations a layer"], made["collectives a layer"]) == (asked, collectives)
    assert device[0] < made["device ms a layer"] < device[1]
    assert hidden <= made["hidden"] < hidden + 0.11
    assert made["fits"] is fits
    assert made["host ms a layer, here"] == pytest.approx((asked * 25 + collectives * 130) / 1000, abs=0.06)
    assert made["host ms a layer, slower"] < made["device ms a layer"]
    assert made["MFU, here"] == made["MFU, slower"] > 0.25
    behind = mfu.row(name, of, machine, {"op": 2500.0, "collective": 130.0}, slower=2.2)
    assert behind["MFU, slower"] < behind["MFU, here"] < made["MFU, here"], "a host that is too slow decides"


def test_mfu_takes_a_file_of_a_node_and_no_more(tmp_path, monkeypatch, capsys):
    """What the host costs is its own then, and nothing is measured here."""
    from ms_dtensor.debug.predict.hardware import MACHINES

    told = yaml.safe_load((MACHINES / "910b.yaml").read_text()) | {"asking_us": {"op": 30.0, "collective": 200.0},
                                                                  "source": "a node"}
    (file := tmp_path / "node.yaml").write_text(yaml.safe_dump(told))
    monkeypatch.setattr(mfu, "host", lambda: {"op": 1.0, "collective": 1.0})
    monkeypatch.setattr(sys, "argv", ["mfu.py", "--machine", str(file), "--rows", "tp8"])
    mfu.main()
    made = json.loads(capsys.readouterr().out)
    assert made["source"] == "a node" and made["host us"] == {"op": 30.0, "collective": 200.0}
    assert made["rows"][0]["host ms a layer, here"] == pytest.approx((44 * 30 + 10 * 200) / 1000, abs=0.06)
    monkeypatch.setattr(sys, "argv", ["mfu.py", "--host"])
    mfu.main()
    assert json.loads(capsys.readouterr().out) == {"op": 1.0, "collective": 1.0}


def test_mfu_of_zero1_hides_what_it_sends_as_fully_shard_does():
    """Its units are the blocks, so that the gathering of the next and the reduction of the last go beside this one."""
    of = mfu.counted(mfu.ROOT / "model_zoo/llama/configs/llama3_8b.yaml", "zero1 on 8, recomputed", load_hardware("910b"))
    assert of.moves == 2 and of.still < 0.1 * of.sent
    assert of.packed == 8, "it gathers once, and fully_shard once more for the backward"
