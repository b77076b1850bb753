# SPDX-License-Identifier: Apache-2.0
"""What watches a run of the recipe: metrics and their file, operations counted, guard, profile; in this process."""
import contextlib
import importlib.util
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from model_zoo.llama import trainer as module
from model_zoo.llama.config import ExpertsConfig, ModelConfig
from model_zoo.llama.configio import load
from model_zoo.llama.data import load_text
from model_zoo.llama.flops import flops_per_token, seen, weights_in_products
from model_zoo.llama.model import Llama
from model_zoo.llama.report import Reporter
from model_zoo.llama.train import prepare, run
from model_zoo.llama.trainer import Trainer
from ms_dtensor import DTensor, Router
from ms_dtensor.dispatch.dispatcher import dispatch
from ms_dtensor.errors import ConfigError
from ms_dtensor.tools import cli, trackers
from ms_dtensor.tools.guard import Diverged
from tests.jobs import metrics

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--config", str(ROOT / "model_zoo/llama/configs/tiny.yaml"), "--data.max_bytes", "200000",
        "--model.n_layers", "1", "--train.seq", "16"]


def train(folder: Path, *options: str) -> list[dict]:
    run([*TINY, "--train.log_dir", str(folder), *options])
    return metrics(folder)


def test_a_step_records_what_the_page_promises(tmp_path, cpu, capsys):
    rows = train(tmp_path / "run", "--train.steps", "3", "--train.eval_every", "2", "--metrics.peak_tflops", "0.5")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3] and [r["step"] for r in rows if "held_out_loss" in r] == [0, 2, 3]
    cfg = load([*TINY], 1)[0]
    page = (ROOT / "docs/recipes_training.md").read_text("utf-8").split("## The numbers of a step")[1].split("\n## ")[0]
    promised = set(re.findall(r"^\|[^|]*\| `(\w+)` \|", page, re.M))
    for row in steps:
        assert set(row) == promised - {"bubble", "held_out_loss"} | {"step"}, "a metric is a row of the page"
        assert row["tokens_per_s"] == pytest.approx(4 * 16 / row["ms"] * 1e3) and 0.1 < row["memory_gib"] < 20
        assert row["tflops_per_device"] == pytest.approx(flops_per_token(cfg.model, 16) * row["tokens_per_s"] / 1e12)
        assert row["mfu"] == pytest.approx(row["tflops_per_device"] / 0.5) and row["comm_share"] == 0
    out = capsys.readouterr().out
    assert "MFU" in out and "n/a" not in out and out.count("%") == 6
    kept = tmp_path / "run/config.yaml"
    assert load(["--config", str(kept)], 1)[0].train.steps == 3
    again = train(tmp_path / "run", "--train.steps", "1")  # an earlier run's file is put aside, not written over
    assert len([r for r in again if "loss" in r]) == 1 and again[1]["mfu"] is None
    (old,) = (tmp_path / "run").glob("metrics-*.jsonl")
    assert [json.loads(line) for line in old.read_text().splitlines()] == rows
    assert len(list((tmp_path / "run").glob("config-*.yaml"))) == 1
    assert yaml.safe_load(kept.read_text())["train"]["steps"] == 1


def test_the_load_of_experts_is_told_and_who_gets_nothing(tmp_path, cpu, capsys, monkeypatch):
    """Choices of the last expert go to the one before it, so that it has none; two steps are the limit."""
    right = Router.construct
    monkeypatch.setattr(Router, "construct", lambda self, *args: (
        lambda weights, chosen: (weights, chosen - (chosen == 3).astype(chosen.dtype)))(*right(self, *args)))
    rows = train(tmp_path / "run", "--train.steps", "3", "--model.experts.count", "4", "--model.experts.per_token", "2",
                 "--metrics.idle_expert", "2")
    told = [row for row in rows if "loss" in row]
    for row in told:
        (loads,) = row["experts"]["loads"]
        assert sum(loads) == 2 * 4 * 16 and loads[3] == 0
        assert row["experts"]["dropped"] == row["experts"]["dispatch_bytes"] == 0
    assert [row["experts"].get("idle_experts") for row in told] == [None, ["layer 0: expert 3"], None], "once, not each step"
    out = capsys.readouterr().out
    assert out.count("experts: no token for 2 steps: layer 0: expert 3") == 1
    assert "the least 0.00, in layer 0; 0.0% of choices dropped" in out


def test_a_window_of_steps_is_profiled(tmp_path, cpu):
    rows = train(tmp_path, "--train.steps", "3", "--train.dtype", "bfloat16", "--profile.first", "2", "--profile.steps", "1",
                 "--profile.mindspore", "false")
    assert len([r for r in rows if "loss" in r]) == 3
    events = json.loads((tmp_path / "profile/trace_rank0.json").read_text())["traceEvents"]
    ops = [e for e in events if e.get("cat") == "dispatch"]
    names = [e["name"] for e in ops]
    assert names.count("Gather") == 1 and names.count("RmsNorm") == 3 and "MatMul" in names, "a layer's two, the last"
    assert all(e["dur"] >= 0 for e in ops)
    assert DTensor.__fallback__ is dispatch


# -- operations --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"n_kv_heads": 2, "head_width": 24}, {"tied_head": True}], ids=str)
def test_weights_in_products_are_those_of_the_model(options, cpu):
    m = ModelConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=options.pop("n_kv_heads", 4), ffn_dim=96, **options)
    products = {p.name: int(np.prod(p.shape)) for p in Llama(m).trainable_params() if p.ndim == 2}
    tables = 0 if m.tied_head else 1  # a table that is also the head is multiplied with
    assert weights_in_products(m) == sum(products.values()) - tables * m.vocab_size * m.dim


def test_a_token_is_multiplied_with_the_experts_it_goes_to():
    dense = ModelConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=96)
    more = weights_in_products(replace(dense, experts=ExpertsConfig(count=8, per_token=2))) - weights_in_products(dense)
    assert more == 2 * (3 * 64 * 96 + 64 * 8)


@pytest.mark.parametrize("window", [None, 1, 5, 12, 99])
def test_what_a_token_sees_is_counted(window):
    m = ModelConfig(sliding_window=window)
    want = np.mean([min(i + 1, window or 12) for i in range(12)])
    assert seen(m, 12) == pytest.approx(want)
    assert flops_per_token(m, 12) == pytest.approx(6 * weights_in_products(m) + 12 * m.n_layers * m.dim * want)
    assert flops_per_token(m, 12) - flops_per_token(m, 12, frozen=True) == pytest.approx(2 * weights_in_products(m))


# -- guard -------------------------------------------------------------------------------------------------------------
def trainer(**guard):
    cfg = load([*TINY, "--train.steps", "20"], 1)[0]
    cfg = replace(cfg, guard=replace(cfg.guard, **guard))
    made = Trainer(cfg, load_text(cfg.data, cfg.model.vocab_size, cfg.train.seq), None)
    return made, lambda: [p.asnumpy().copy() for p in made.params]


def broken(one, monkeypatch, steps):
    """The gradients of these steps are no numbers."""
    calls, right = iter(range(100)), one.gradients

    def gradients(ids, labels):
        loss, grads = right(ids, labels)
        return (loss, (grads[0] * math.nan, *grads[1:])) if next(calls) in steps else (loss, grads)
    monkeypatch.setattr(one, "gradients", gradients)


def test_a_step_of_no_numbers_is_left_out(cpu, monkeypatch):
    one, weights = trainer(nan="skip", patience=2)
    broken(one, monkeypatch, {1, 3, 4})
    one.step(0)
    before = weights()
    result = one.step(1)
    assert result.verdict.action == "skip" and result.lr == 0 and math.isnan(result.grad_norm) and math.isfinite(result.loss)
    assert all(np.array_equal(a, b) for a, b in zip(before, weights(), strict=True))
    assert one.step(2).verdict.action == "go" and not np.array_equal(before[0], weights()[0])
    one.step(3)
    with pytest.raises(Diverged, match="2 steps in a row"):
        one.step(4)
    assert all(np.isfinite(w).all() for w in weights())


def test_a_run_of_no_numbers_ends(cpu, monkeypatch):
    one, _ = trainer()
    broken(one, monkeypatch, {0})
    with pytest.raises(Diverged, match="gradient norm nan at step 1"):
        one.step(0)


def test_what_the_guard_says_is_recorded(tmp_path, cpu, monkeypatch, capsys):
    class Strict(module.Guard):
        def _judge(self, step, loss, norm):
            return module.Verdict("warn", "a spike") if step == 1 else module.Verdict("go")
    monkeypatch.setattr(module, "Guard", Strict)
    rows = train(tmp_path, "--train.steps", "2")
    assert {"step": 2, "guard": "warn", "reason": "a spike"} in rows and "guard: a spike\n" in capsys.readouterr().out


# -- configuration -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("words", "said"), [
    (["--metrics.trackers", "mlflow"], "one of 'tensorboard', 'wandb', 'swanlab'"),
    (["--metrics.trackers", "{a: 1}"], "a list, each"),
    (["--metrics.trackers", "[wandb, 3]"], "metrics.trackers[1] cannot be 3"), (["--guard.nan", "warn"], "'stop', 'skip'"),
    (["--guard.window", "2"], "out of range"), (["--metrics.tracker", "wandb"], "'metrics.trackers' is the closest match")])
def test_a_wrong_section_is_explained(words, said):
    with pytest.raises(ConfigError) as refused:
        load(words, 1)
    assert said in str(refused.value)


def test_one_tracker_is_a_list_of_one():
    assert load(["--metrics.trackers", "wandb"], 1)[0].metrics.trackers == ("wandb",)
    assert load(["--metrics.trackers", "[wandb, tensorboard]"], 1)[0].metrics.trackers == ("wandb", "tensorboard")


def test_a_profile_beyond_the_last_step_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="profile.first is beyond the run"):
        prepare([*TINY, "--train.steps", "3", "--profile.first", "4", "--train.log_dir", str(tmp_path)], 1)


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        prepare([*TINY, "--train.log_dir", str(tmp_path / "file/run")], 1)
    with pytest.raises(ConfigError, match="'tensorboard' is not installed|cannot be written"):
        prepare([*TINY, "--metrics.trackers", "tensorboard", "--train.log_dir", str(tmp_path / "file/run")], 1)


class Buffered:
    """A tracker that keeps numbers, as TensorBoard's file does, and a disk that has become full."""

    def __init__(self, folder, *rest):
        self.file, self.rows = open("/dev/full", "wb"), rest  # noqa: SIM115  until `close`

    def log(self, step, values):
        self.file.write(b"x" * 3000)

    def close(self):
        self.file.close()


@pytest.mark.parametrize("steps", [1, 9])
def test_a_tracker_whose_disk_is_full_is_one_message_when_it_writes(tmp_path, monkeypatch, steps):
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", Buffered)
    monkeypatch.setattr(trackers, "check", lambda names: None)
    cfg = load([*TINY, "--train.log_dir", str(tmp_path)], 1)[0]
    report = Reporter(replace(cfg, metrics=replace(cfg.metrics, trackers=("tensorboard",))), 1, True, None, "cpu")
    report.begin(0, "")
    with pytest.raises(ConfigError, match="(?s)log_dir.*cannot be written.*No space left on device.*df -h"):
        try:
            for step in range(steps):
                report.held_out(step, 1.5)
            assert steps == 1
        finally:
            report.close()
    assert 1 <= len(metrics(tmp_path)) <= min(steps, 5)  # the disk of these has room


def test_a_line_that_no_log_has_room_for_is_one_message(tmp_path, monkeypatch):
    report = Reporter(load([*TINY, "--train.log_dir", str(tmp_path)], 1)[0], 1, True, None, "cpu")
    full = open("/dev/full", "w")  # noqa: SIM115  its end fails, too
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="(?s)cannot be written.*No space left.*df -h"):
        patch.setattr("sys.stdout", full)
        report.say("a line")
    with contextlib.suppress(OSError):
        full.close()


# -- the page ----------------------------------------------------------------------------------------------------------
def test_the_page_runs(tmp_path, cpu, monkeypatch, capsys):
    """docs/recipes_training.md: its configurations fit the worlds they name, its commands and its block do what it says."""
    text = (ROOT / "docs/recipes_training.md").read_text("utf-8")
    commands = "".join(re.findall(r"```bash\n(.*?)```", text, re.S))
    for line in re.findall(r"^((?:\w+=\S+ )*)scripts/run_llama.sh (\d+) (\w+)(.*)$", commands, re.M):
        env, nproc, name, words = line
        nodes = int(dict(word.split("=") for word in env.split()).get("NNODES", "1"))
        load(["--config", str(ROOT / f"model_zoo/llama/configs/{name}.yaml"), *words.split()], nodes * int(nproc))
    for line in re.findall(r"^python model_zoo/llama/train.py ((?:.*\\\n)*.*)$", commands, re.M):
        load(line.replace("\\\n", " ").replace("model_zoo/", f"{ROOT}/model_zoo/").split(), 1)
    monkeypatch.chdir(tmp_path)
    train(Path("runs/tiny"), "--train.steps", "2")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
    exec(compile(block, "recipes_training.md", "exec"), {})
    assert re.search(r"tiny: loss 5\.\d\d at step 1, 5\.\d\d at step 2", capsys.readouterr().out)
    assert cli.main(["doctor"]) == 0 and "ready to train" in capsys.readouterr().out
    if importlib.util.find_spec("matplotlib"):
        assert cli.main(["plot", "runs/tiny"]) == 0 and Path("runs/tiny/plots/loss.png").exists()
