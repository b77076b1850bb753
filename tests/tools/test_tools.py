# SPDX-License-Identifier: Apache-2.0
"""The command line and what surrounds a run: trackers, guard, peaks, plots, doctor. No ranks; MindSpore only where said."""
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from ms_dtensor.errors import ConfigError
from ms_dtensor.tools import calibrate, cli, doctor, peaks, plot, predict, runs, trackers
from ms_dtensor.tools.guard import Guard
from tests.msrun import python


# -- the command line --------------------------------------------------------------------------------------------------
def test_help_names_every_command_and_imports_nothing_heavy(capsys):
    assert cli.main([]) == 0 and cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    commands = "doctor [CONFIG]", "plot RUN_DIR...", "pipeline", "ckpt ls PATH", "ckpt convert A B"
    assert all(f"\n  {command} " in out for command in commands)
    code = ("import sys; sys.modules['mindspore'] = None; from ms_dtensor.tools.cli import main; "
            "sys.exit(main(['plot', 'x']))")
    done = python("-c", code)
    assert done.returncode == 2 and "'x' is no run" in done.stderr + done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["--out", "none/costs.json"], ["--hardware", "none/mine.yaml"], ["--out", "list.json"],
                                   ["--out", "half.json"]], ids=" ".join)
def test_files_of_calibrate_are_refused_before_anything_is_measured(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrate, "measure", None)
    for name, text in (("list.json", "[1]"), ("half.json", "{")):
        Path(name).write_text(text)
    assert cli.main(["calibrate", *words]) == 2
    said = capsys.readouterr().err
    assert words[1] in said and all(part in said for part in ("on:", "rule:", "fix:")), said
    assert sorted(os.listdir()) == ["half.json", "list.json"], "nothing is left"


@pytest.mark.parametrize("beta", [0.0, 1e-10])
def test_costs_of_several_ranks_are_written_also_where_bytes_cost_nothing(beta, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    figures = {"alpha": 1e-5, "beta": beta, "gamma": 0.0}
    monkeypatch.setattr(calibrate, "measure", lambda device, machine: (figures, {}))
    assert cli.main(["calibrate"]) == 0
    assert json.loads(Path("costs.json").read_text()) == {"cpu": figures}
    assert json.loads(capsys.readouterr().out) == {"file": "costs.json", "cpu": figures}


@pytest.mark.parametrize("argv", [["plt"], ["plot"], ["ckpt"], ["doctor", "x", "y"]])
def test_a_wrong_command_is_refused(argv, capsys):
    with pytest.raises(SystemExit) as refused:
        cli.main(argv)
    assert refused.value.code == 2 and "error:" in capsys.readouterr().err


# -- the doctor --------------------------------------------------------------------------------------------------------
def test_what_is_missing_is_said_with_what_mends_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "CHECKS", (doctor._protobuf, doctor._numpy, doctor._msrun, doctor._ports, doctor._cuda,
                                           doctor._shared_memory, doctor._files, doctor._disk, doctor._cores, doctor._extras,
                                           lambda: 1 / 0))
    monkeypatch.setenv("PATH", str(tmp_path))
    versions = {"protobuf": "6.33.6", "numpy": "2.1.0", "mindspore": "2.10.0"}
    monkeypatch.setattr(doctor, "_text", lambda name: versions.get(name, "not installed"))
    assert doctor.main(["--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    found = {one["name"]: one for one in told["checks"]}
    assert not told["ready"] and "protobuf>=7.34.1" in found["protobuf"]["fix"] and "numpy>=1.26,<2" in found["NumPy"]["fix"]
    assert found["msrun"]["status"] == "warn" and "export PATH=" in found["msrun"]["fix"]
    assert found["ports"]["status"] == "ok" and "could not be looked at" in found["<lambda>"]["found"]
    assert all(one["fix"] for one in told["checks"] if one["status"] in ("warn", "fail"))


def test_a_recipe_that_does_not_fit_is_a_finding_with_the_plan_that_does(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "CHECKS", ())
    monkeypatch.setattr(doctor.Path, "exists", lambda self: self.name == "davinci_manager")
    recipe = tmp_path / "eight.yaml"
    model = "model: {dim: 4096, n_layers: 32, n_heads: 32, n_kv_heads: 8, ffn_dim: 14336, vocab_size: 128256}\n"
    recipe.write_text(model + "parallel: {dp: 8}\ntrain: {batch: 8, seq: 4096, dtype: bfloat16}\n")
    assert cli.main(["doctor", str(recipe), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["checks"]
    assert "needs 129.5 GiB" in found["found"] and found["fix"] == "8 ranks: --parallel.dp 8 --parallel.zero1 true"
    recipe.write_text(model + "parallel: {dp: 8, fsdp: true}\ntrain: {batch: 8, seq: 4096, dtype: bfloat16}\n")
    assert cli.main(["doctor", str(recipe)]) == 0 and "a 64 GB card: 58.0" in capsys.readouterr().out
    monkeypatch.setattr(doctor.Path, "exists", lambda self: False)
    monkeypatch.setattr(doctor.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": 2**23}[name])
    assert cli.main(["doctor", str(recipe)]) == 1 and "this machine's memory over 8 ranks: 4.0" in capsys.readouterr().out
    recipe.write_text(model)
    assert cli.main(["doctor", str(recipe)]) == 2 and "no run is described" in capsys.readouterr().err


def test_a_mindspore_that_cannot_be_imported_is_a_finding(monkeypatch, tmp_path, capsys):
    (tmp_path / "mindspore").mkdir()
    (tmp_path / "mindspore/__init__.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor._mindspore()
    assert found.status == "fail" and "libascendcl.so" in found.found and "set_env.sh" in found.fix


def test_a_mindspore_that_does_not_end_says_what_was_tried_and_how_long(monkeypatch, tmp_path):
    (tmp_path / "mindspore").mkdir()
    (tmp_path / "mindspore/__init__.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_PATIENCE", 0.5)
    found = doctor._mindspore()
    assert found.status == "fail" and "did not end in 0.5 seconds" in found.found and sys.executable in found.found
    assert "import mindspore" in found.fix and "npu-smi" not in found.fix, "there is no device here"
    monkeypatch.setattr(doctor.Path, "exists", lambda self: self.name == "davinci_manager")
    assert "npu-smi" in doctor._mindspore().fix


def test_variables_that_ranks_would_refuse_are_a_finding(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MS_DTENSOR_")]:  # of who runs the tests
        monkeypatch.delenv(name)
    for name, value in (("TIMEOUT", "-1"), ("CPU_BACKEND", "foo"), ("CHECK_EVERY", "x")):
        assert doctor._settings().status == "ok"
        monkeypatch.setenv(f"MS_DTENSOR_{name}", value)
        found = doctor._settings()
        assert found.status == "fail" and f"MS_DTENSOR_{name}={value!r}: " in found.found and name in found.fix
        monkeypatch.delenv(f"MS_DTENSOR_{name}")
    monkeypatch.setenv("MS_DTENSOR_TIMEOUT", "60")
    assert doctor._settings() == ("settings", "ok", "MS_DTENSOR_TIMEOUT=60", "") and doctor._settings in doctor.CHECKS


# -- plans before the machine ------------------------------------------------------------------------------------------
LLAMA_8B = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 14336, "vocab_size": 128256}


def test_plans_are_suggested_for_a_configuration_file(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    run = ["--batch", "8", "--seq", "8192"]
    for given, said in (([], "give --batch and --seq"), (run[:2], "does not say train.seq: give --seq")):
        with pytest.raises(SystemExit):
            cli.main(["suggest", str(tmp_path), "--world", "8", *given])
        assert said in capsys.readouterr().err
    assert cli.main(["suggest", str(tmp_path), "--world", "8", "--json", *run]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert plans[0]["gib"] < 58 and plans[0]["seconds"] <= plans[1]["seconds"]
    assert cli.main(["suggest", "model_zoo/llama/configs/llama3_8b.yaml", "--world", "8", *run]) == 0
    assert plans[0]["options"] in capsys.readouterr().out, "the recipe's file has the same sizes"
    mixtral = ["suggest", "model_zoo/llama/configs/mixtral_8x7b.yaml", "--world", "16", "--batch", "16", "--seq", "4096"]
    assert cli.main(mixtral) == 0 and "--parallel.ep" in capsys.readouterr().out


def test_a_plan_that_does_not_fit_is_told_with_one_that_does(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    run = ["memory", str(tmp_path), "--batch", "8", "--seq", "8192", "--dp", "8"]
    assert cli.main(run) == 1
    said = capsys.readouterr().out
    assert said.startswith("a rank of 8, batch 8, seq 8192: --parallel.dp 8\n"), "the plan comes first"
    assert "GiB of 58.0 GiB: does not fit" in said and "not measured" in said
    assert "the quickest plan of 8 ranks that fits" in said
    assert cli.main([*run, "--sharded", "fsdp", "--recompute", "full", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] and told["instead"] is None and sum(told["memory_gib"].values()) == pytest.approx(told["gib"])


@pytest.mark.parametrize(("argv", "said"), [
    (["memory", "nowhere.json", "--batch", "8", "--seq", "8"], "no configuration can be read"),
    (["memory", "/dev/zero", "--batch", "8", "--seq", "8"], "no regular file"),
    (["memory", "model_zoo/llama/configs/tiny.yaml", "--hardware", "/dev/zero"], "regular file"),
    (["memory", "setup.py", "--batch", "8", "--seq", "8"], "can be read|no mapping"),
    (["memory", "model_zoo/llama/configs/llama3_8b.yaml", "--dp", "3", "--batch", "8", "--seq", "8"], "--batch 12"),
    (["memory", "model_zoo/llama/configs/llama3_8b.yaml", "--tp", "12", "--batch", "8", "--seq", "8"], "--tp 8"),
    (["suggest", "model_zoo/llama/configs/llama3_8b.yaml", "--world", "8", "--hardware", "x", "--batch", "8", "--seq", "8"],
     "no machine 'x'")])
def test_a_plan_that_cannot_be_told_is_refused(argv, said, capsys):
    import re
    assert cli.main(argv) == 2
    assert re.search(said, capsys.readouterr().err)


SMALL = "dim: 64, n_layers: 2, n_heads: 16, n_kv_heads: 8, ffn_dim: 168, vocab_size: 259"
MODEL, RUN = f"model: {{{SMALL}}}", "train: {batch: 4, seq: 32}"


@pytest.mark.parametrize(("text", "said"), [
    *((f"{MODEL}\n{RUN}\n{section}", said) for section, said in (
        ("parallel: {dp: 0}", "dp = 0"), ("parallel: {tp: null}", "tp cannot be None"),
        ("parallel: {tp: 1.5}", "tp cannot be 1.5"), ("parallel: {dp: '2'}", "dp cannot be '2'"),
        ("parallel: {fsdp: 'no'}", "parallel.fsdp = 'no'"), ("parallel: []", "parallel = []"),
        ("x: " + "[" * 3000, "no configuration can be read"),
        ("paralel: {tp: 2}", "sections that no recipe has"), ("parallel: {'no': 1}", "'parallel.no' is not a key"),
        ("lora: {rank: x}", "lora.rank cannot be 'x'"), ("optim: {betas: [1]}", "optim.betas cannot be"),
        (RUN, "'train' is given twice"))),
    *((f"{MODEL}\ntrain: {{batch: 4, seq: 32, {key}}}", said) for key, said in (
        ("dtype: float8", "train.dtype = 'float8'"), ("qkv_concat: 7", "train.qkv_concat cannot be 7"),
        ("recompute: maybe", "train.recompute cannot be 'maybe'"),
        ("recompute_gib: -4", "recompute_gib = -4.0 is out of range"), ("seq: 64", "'seq' is given twice"))),
    *((f"model: {{{SMALL}, experts: {experts}}}\n{RUN}", said) for experts, said in (
        ("3", "model.experts cannot be 3"), ("{count: 4, top_k: 2}", "'model.experts.top_k' is not"))),
    *((f"{MODEL}\ntrain: {sizes}", said) for sizes, said in (
        ("{batch: 010, seq: 32}", "'010'"), ("{batch: 4, seq: 1:30}", "'1:30'"), ("&a {batch: 4, seq: 32}", "an anchor"))),
    ("model: null\ntrain: {batch: -4, seq: 32}", "model = None")])
def test_a_recipe_that_cannot_be_is_refused_as_the_recipe_refuses_it(text, said, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{text}\n")
    for command in (["memory", str(recipe)], ["doctor", str(recipe)],
                    *([] if "parallel: " in text else [["suggest", str(recipe), "--world", "2"]])):
        assert cli.main(command) == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(("options", "said"), [
    (["--cp", "3"], "--seq 4098"), (["--pp", "35"], "--pp 34 or less"),
    (["--dp", "4", "--hsdp", "3", "--sharded", "fsdp"], "--hsdp 1"),
    (["--dp", "4", "--hsdp", "2"], "goes with fsdp"), (["--dp", "4", "--ep", "2"], "no experts, ep = 2"),
    (["--tp", str(10**18)], "--tp 8\n")])
def test_a_plan_that_no_run_can_have_is_refused(options, said, capsys):
    run = ["memory", "model_zoo/llama/configs/llama3_8b.yaml", "--micro_batches", "1", "--batch", "8"]
    assert cli.main([*run, *options]) == 2 and said in capsys.readouterr().err


def test_experts_that_a_recipe_does_not_number_are_as_many_as_it_has_unsaid(tmp_path, capsys):
    from model_zoo.llama.config import ExpertsConfig
    assert (ExpertsConfig().count, ExpertsConfig().per_token) == (8, 2)
    said = []
    for experts in ("{}", "{count: 8, per_token: 2}"):
        (tmp_path / "recipe.yaml").write_text(f"model: {{{SMALL}, experts: {experts}}}\n{RUN}\n")
        assert cli.main(["memory", str(tmp_path / "recipe.yaml")]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_what_a_recipe_leaves_unsaid_is_as_the_recipe_has_it(tmp_path, capsys):
    recipe, said = tmp_path / "recipe.yaml", []
    run = "train: {batch: 4, seq: 1}\noptim: {lr: 1e-3}\n"
    whole = "dim: 64, n_layers: 4, n_heads: 16, n_kv_heads: 8, ffn_dim: 704, vocab_size: 256"
    for model in (whole, "dim: 64, n_heads: 16"):  # Hugging Face would have 16 heads of keys
        recipe.write_text(f"model: {{{model}}}\n{run}")
        assert cli.main(["memory", str(recipe), "--json"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    recipe.write_text(run)
    assert cli.main(["memory", str(recipe), "--dp", "2"]) == 0
    said = capsys.readouterr().out
    assert cli.main(["memory", str(recipe), "--dp", "2", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["memory_gib"]
    assert min(size for size in parts.values() if size) < 0.05 and "iB of 58.0 GiB" in said
    for part, size in parts.items():  # small parts beside large buffers, each in its own unit
        number, unit = next(line for line in said.splitlines() if line.startswith(part)).split()[-2:]
        want = size * {"GiB": 1, "MiB": 2**10, "KiB": 2**20, "B": 2**30}[unit]
        assert float(number) == pytest.approx(want, abs=0.051, rel=0.03), part
        assert (float(number) > 0) == (size > 0), part
    recipe.write_text("train: {batch: 4, seq: 32, init_hf: /no/such}\n")
    assert cli.main(["memory", str(recipe)]) == 2 and "/no/such/config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B, indent="\t"))  # no YAML
    assert cli.main(["memory", str(tmp_path), "--batch", "1", "--seq", "1"]) == 1


def test_the_sections_of_a_recipe_are_all_known():
    from dataclasses import fields

    from model_zoo.llama.config import Config
    assert predict.SECTIONS == tuple(f.name for f in fields(Config))


# -- guard, peaks ------------------------------------------------------------------------------------------------------
def test_skipped_steps_are_not_remembered_and_too_many_end_the_run():
    guard = Guard(nan="skip", spike=5.0, on_spike="skip", patience=3)
    assert guard.skips and not Guard(spike=5.0).skips and not Guard().skips
    for step in range(20):
        assert guard.judge(step, 3.0 + 0.01 * (step % 3), 1.0).action == "go"
    assert [guard.judge(20 + i, x, 1.0).action for i, x in enumerate((9.0, math.nan, 3.0, 9.0, math.inf))] == [
        "skip", "skip", "go", "skip", "skip"]
    last = guard.judge(25, 3.0, math.nan)
    assert last.action == "stop" and "3 steps in a row" in last.reason


def test_a_spike_is_not_remembered_either():
    guard = Guard(spike=5.0)
    assert [guard.judge(step, 3.0 + 0.01 * (step % 3), 1.0).action for step in range(20)] == ["go"] * 20
    assert [guard.judge(20 + i, 9.0, 1.0).action for i in range(4)] == ["warn"] * 4


def test_no_early_step_and_no_flat_curve_has_a_spike():
    guard = Guard(spike=3.0)
    assert [guard.judge(i, x, 1.0).action for i, x in enumerate([5.0, 9.0, *[2.0] * 20, 2.001])] == ["go"] * 23


@pytest.mark.parametrize(("name", "tflops"), [
    ("Ascend910B2", 376), ("Ascend910B3", 313), ("Ascend910B2C", None), ("Ascend910B1", None),
    ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("CPU", None), ("", None)])
def test_a_peak_is_of_that_very_device(name, tflops):
    found = peaks.peak(name)
    assert (found and found.tflops) == tflops and (found is None or found.source)


# -- trackers ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def packages(monkeypatch):
    """Stands for wandb and swanlab: what they were told."""
    said: list = []
    run = types.SimpleNamespace(log=lambda values, step: said.append(("wandb", step, values)),
                                finish=lambda: said.append(("wandb", "end")))
    wandb = types.SimpleNamespace(init=lambda **options: said.append(("wandb", options)) or run)
    swanlab = types.SimpleNamespace(init=lambda **options: said.append(("swanlab", options)),
                                    log=lambda values, step: said.append(("swanlab", step, values)),
                                    finish=lambda: said.append(("swanlab", "end")))
    for name, module in (("wandb", wandb), ("swanlab", swanlab)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: name in ("wandb", "swanlab") or None)
    return said


def test_trackers_get_the_numbers(packages, tmp_path):
    started = trackers.start(["wandb", "swanlab"], tmp_path, "project", "run", {"train": {"steps": 3}})
    for one in started:
        one.log(2, {"loss": 1.5})
        one.close()
    assert ("wandb", 2, {"loss": 1.5}) in packages and ("swanlab", 2, {"loss": 1.5}) in packages
    assert packages[0][1]["name"] == "run" and packages[0][1]["config"] == {"train": {"steps": 3}}
    assert packages[-1] == ("swanlab", "end")


def test_a_tracker_that_is_missing_or_fails_is_one_message(packages, tmp_path):
    with pytest.raises(ConfigError, match="'tensorboard' is not installed") as refused:
        trackers.check(["wandb", "tensorboard"])
    assert "pip install tensorboard" in str(refused.value)
    sys.modules["wandb"].init = lambda **options: 1 / 0
    with pytest.raises(ConfigError, match="did not start.*\n.*ZeroDivisionError"):
        trackers.start(["wandb"], tmp_path, "p", "r", {})


def test_tensorboard_writes_what_it_reads_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    (one,) = trackers.start(["tensorboard"], tmp_path, "p", "r", {})
    one.log(7, {"loss": 2.5})
    one.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    values = [(event.step, v.tag, v.tensor.float_val[0]) for event in EventFileLoader(str(file)).Load()
              for v in event.summary.value]
    assert values == [(7, "loss", 2.5)]


# -- runs and plots ----------------------------------------------------------------------------------------------------
def recorded(folder: Path, seed: int, steps: int = 30) -> Path:
    """A run as train.py records it."""
    folder.mkdir(parents=True)
    noise = np.random.default_rng(seed).normal(size=steps)
    rows = [{"step": 0, "held_out_loss": 5.5}]
    rows += [{"step": i + 1, "loss": 2 + 3 / (1 + 0.2 * i) + 0.02 * x, "grad_norm": 1 + 0.1 * x, "lr": 1e-3,
              "ms": 100 + 3 * x, "tokens_per_s": 1e4 + 100 * x, "tokens_per_s_per_device": 5e3,
              "tflops_per_device": 0.1, "mfu": None,
              "memory_gib": 0.5, "comm_share": 0.2,
              "comm": {"all_reduce tp": [4, 4096, 6.0], "all_gather dp": [2, 2048 * (1 + seed), 2.0], "wait": [1, 0, 0.5]}}
             for i, x in enumerate(noise)]
    rows[5]["loss"] = None  # a NaN
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 31, "lo'
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_a_run_is_read_back(tmp_path):
    one, two = runs.read([recorded(tmp_path / "a/run", 0), recorded(tmp_path / "b/run", 1)])
    assert (one.name, two.name) == ("a/run", "b/run") and len(one.series("loss")[0]) == 29
    assert one.series("held_out_loss") == ([0], [5.5]) and one.series("mfu") == ([], [])
    assert list(one.communication()) == ["all_reduce tp", "all_gather dp", "wait"]
    assert two.communication()["all_gather dp"] == pytest.approx((2.0, 4096.0, 2.0))


@pytest.mark.parametrize(("content", "said"), [(None, "is no run"), ("\udcff\udcfe\0", "is no text"),
                                               ("{}\n7\n{}\n", "line 2 of"), ("{}\nx\n{}\n", "line 2 of"),
                                               ('{"step": 0}\n', "no step yet")])
def test_what_is_no_run_is_refused(tmp_path, content, said, capsys):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content, "utf-8", "surrogateescape")
    assert cli.main(["plot", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("line", "said"), [
    ('{"step": "1", "loss": 3.0}', "its step is '1'"), ('{"step": 0.5, "loss": 3.0}', "its step is 0.5"),
    ('{"loss": 3.0}', "its step is None"), ('{"step": NaN, "loss": 3.0}', "its step is nan"),
    ('{"step": true, "loss": 3.0}', "its step is True"), ('{"step": 1, "loss": "abc"}', "its loss is 'abc'"),
    ('{"step": 1, "loss": true}', "its loss is True"), ('{"step": 1, "loss": 1, "memory_gib": []}', "its memory_gib is []"),
    ('{"step": 1, "loss": 1%s}' % ("0" * 400), "its loss is 1000"),
    *((f'{{"step": 1, "loss": 3.0, "comm": {comm}}}', "its comm is") for comm in
      ('[1]', '{"x": "y"}', '{"x": [1, 2]}', '{"x": [1, 2, null]}', '3'))])
def test_a_line_of_another_form_is_named(tmp_path, line, said, capsys):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0, "loss": null, "comm": null}}\n{line}\n')
    assert cli.main(["plot", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert f"line 2 of '{tmp_path}/metrics.jsonl' is of no run: {said}" in err and "Traceback" not in err


def test_runs_of_nothing_but_a_loss_are_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2}\n')
    for folders, count in (([tmp_path / "bare"], 2), ([tmp_path / "bare", recorded(tmp_path / "full", 0)], 8)):
        assert cli.main(["plot", "--json", *map(str, folders), "--out", str(tmp_path / "out")]) == 0
        assert len(json.loads(capsys.readouterr().out)["files"]) == count


def test_a_run_is_shown_as_text(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["plot", "--text", str(recorded(tmp_path / "a", 1)), str(recorded(tmp_path / "b", 0))]) == 0
    first, second = capsys.readouterr().out.split("\n\nb: ")
    lines = first.splitlines()
    top = next(i for i, line in enumerate(lines) if "│" in line)
    picture = [line.partition("│")[2] for line in lines[top:] if "│" in line]
    assert lines[top].split()[0] == "5.50" and picture[0].startswith("o"), "the held-out loss before the first step"
    columns = {x: y for y, line in enumerate(picture) for x, mark in enumerate(line) if mark == "·"}
    assert len(columns) >= 29 and columns[max(columns)] == len(picture) - 1, "the last step has the least loss"
    table = {tuple(line.split()[:2]): line.split()[2:] for line in lines if line.startswith(("all-", "waiting"))}
    assert table["all-reduce", "tp"] == ["4", "4", "6.0"] and table["all-gather", "dp"] == ["2", "4", "2.0"]
    assert lines[-1].split() == ["all", "7", "8", "8.5"] and "all-gather" in second


def test_a_reader_that_leaves_early_is_no_fault():
    made = subprocess.Popen([sys.executable, "-m", "ms_dtensor", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    made.stdout.close()
    assert made.stderr.read() == b"" and made.wait() == 1
    made.stderr.close()


def test_a_path_that_the_system_refuses_and_an_interruption_are_no_tracebacks(monkeypatch, capsys):
    for words in (["ckpt", "ls"], ["suggest", "--world", "8", "--json"]):
        assert cli.piped([*words, "x" * 5000]) == 2
        told = "".join(capsys.readouterr())
        assert "File name too long" in told and "rule: " in told and "fix: " in told and len(told) < 500

    def interrupted(words):  # as Ctrl-C does; where MindSpore's dataset has run, a signal would end this process
        raise KeyboardInterrupt
    monkeypatch.setattr(predict, "needed", interrupted)
    assert cli.piped(["memory", "x"]) == 130 and capsys.readouterr().err == "interrupted\n"


def test_pictures_are_drawn_and_hide_nothing(tmp_path, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    names = ("one", "two", "a_run_with_a_rather_long_name_of_its_own")
    folders = [recorded(tmp_path / name, i) for i, name in enumerate(names)]
    assert cli.main(["plot", "--json", *map(str, folders), "--out", str(tmp_path / "out")]) == 0
    files = [Path(name) for name in json.loads(capsys.readouterr().out)["files"]]
    assert {f.name for f in files} == {f"{p}.{k}" for p in plot.PICTURES for k in ("png", "svg")}
    assert all(2_000 < f.stat().st_size < 200_000 for f in files)
    for some in (folders[:1], folders):
        with pyplot.rc_context(plot.STYLE):
            for picture in plot.PICTURES.values():
                figure = picture(pyplot, runs.read(some))
                figure.canvas.draw()
                inside = figure.bbox
                for text in [t for axes in figure.axes for t in (axes.title, axes.xaxis.label, axes.yaxis.label,
                                                                 *axes.texts, axes._left_title)]:
                    box = text.get_window_extent()
                    assert not text.get_text() or (inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0
                                                   and box.y1 <= inside.y1), (picture.__name__, text.get_text())
                pyplot.close(figure)


def test_without_matplotlib_plot_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["plot", str(recorded(tmp_path / "a", 0))]) == 2
    said = capsys.readouterr().err
    assert "pip install matplotlib" in said and "import of matplotlib halted" in said, "why it is not there, too"


# -- what is counted, and the trace ------------------------------------------------------------------------------------
def test_a_tally_adds_up_what_the_recorder_lists(cpu):
    import mindspore as ms

    import ms_dtensor as md
    from ms_dtensor.comm import tally as tallies
    with md.comm.fake_world(4), md.comm.record() as events, tallies.Tally() as tally:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = md.DTensor.from_local(ms.ops.arange(16.0).reshape(2, 8), mesh, [md.Shard(0), md.Partial()])
        for _ in range(3):
            x.redistribute(placements=[md.Replicate(), md.Replicate()])
        mesh.get_group("tp").all_gather(ms.ops.ones((2, 3)), 0, [2, 2], async_op=True).wait()
    want: dict = {}
    for e in events:
        calls, nbytes = want.get((e.op, e.axes), (0, 0))
        want[e.op, e.axes] = calls + 1, nbytes + e.bytes
    got = tally.take()
    assert {key: line[:2] for key, line in got.items() if key != ("wait", ())} == want and len(want) >= 2
    assert all(line.seconds > 0 for line in got.values()) and tallies.running is None and not tally.take()


def test_waiting_for_a_collective_is_counted():
    from ms_dtensor.comm import Work
    from ms_dtensor.comm.tally import Tally
    with Tally() as tally:
        assert Work(finish=lambda: 3).wait() == 3 and Work(4).wait() == 4
    assert [(key, line.calls) for key, line in tally.take().items()] == [(("wait", ()), 1)]
