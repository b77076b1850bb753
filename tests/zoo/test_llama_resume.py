# SPDX-License-Identifier: Apache-2.0
"""Whole jobs that are killed or asked to end: launch.py names the rank, starts again, and the run is the one it would be."""
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from model_zoo.llama.restore import restore
from model_zoo.llama.train import run
from model_zoo.llama.trainer import Trainer
from ms_dtensor.checkpoint import latest
from ms_dtensor.checkpoint.reader import Reader
from ms_dtensor.errors import CheckpointError, ConfigError
from tests.jobs import Job, losses, metrics
from tests.msrun import PATIENCE

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]
LLAMA = Path(__file__).resolve().parents[2] / "model_zoo/llama"
OPTIONS = ["--config", str(LLAMA / "configs/tiny.yaml"), "--data.max_bytes", "200000", "--train.steps", "20"]


class Run(Job):
    """launch.py at work."""

    def __init__(self, folder: Path, workers: int, *options: str):
        self.folder = folder
        folder.mkdir()
        super().__init__(folder / "out.txt", sys.executable, LLAMA / "launch.py", "--workers", workers, "--log-dir",
                         folder / "logs", *OPTIONS, "--train.log_dir", folder / "run", *options)

    def steps(self) -> dict[int, float]:
        return losses(self.folder / "run")


@pytest.fixture
def job(tmp_path):
    """Starts jobs; those that a failed test leaves are ended."""
    started = []

    def start(name: str, workers: int, *options: str) -> Run:
        started.append(Run(tmp_path / name, workers, *options))
        return started[-1]
    yield start
    for one in started:
        for _ in range(2):  # the second time launch.py ends all of its run
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGTERM)
                time.sleep(1)
        one.process.wait(PATIENCE)


def train(folder: Path, *options: str) -> None:
    """train.py in this process."""
    run([*OPTIONS, "--train.log_dir", str(folder), "--checkpoint.interval", "1000", *options])


def tensors(root: Path) -> dict[str, np.ndarray]:
    with Reader(latest(root)) as reader:
        return {key: reader.array(key) for key in reader.index.tensors}


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_ends_as_if_nothing_had_been(tmp_path, job):
    """dp=2 x tp=2: twenty steps straight, and with a rank killed after the tenth was saved: bit for bit the same state."""
    mesh = ["--parallel.dp", "2", "--parallel.tp", "2", "--checkpoint.interval", "10"]
    straight = job("straight", 4, *mesh)
    straight.ended()
    cut = job("cut", 4, *mesh, "--max_restarts", "1")
    cut.until(lambda: 13 <= max(cut.steps(), default=0) and (tmp_path / "cut/run/checkpoints/latest").exists())
    cut.ranks()["3"].kill()
    assert cut.until(lambda: "rank 3 was ended by SIGKILL" in cut.said()) < 10
    assert "going on after step 10" in cut.ended() and cut.said().count("starting 4 ranks") == 2
    assert len(cut.steps()) == 20 and cut.steps() == straight.steps()
    one, other = (tensors(tmp_path / name / "run/checkpoints") for name in ("straight", "cut"))
    assert set(one) == set(other) and all(one[k].tobytes() == other[k].tobytes() for k in one)


def test_sigterm_ends_a_job_cleanly_and_another_goes_on(tmp_path, job, cpu, capsys):
    one = job("job", 2, "--parallel.tp", "2", "--checkpoint.interval", "1000", "--checkpoint.on_sigterm", "true",
              "--max_restarts", "3")
    one.until(lambda: len(one.steps()) >= 3)
    with pytest.raises(ConfigError, match="another run is at work"):
        train(tmp_path / "job/run", "--checkpoint.resume", "latest")
    one.process.send_signal(signal.SIGTERM)
    text = one.ended()
    step = len(one.steps())
    assert f"ended by SIGTERM after step {step}, which is saved" in text and text.count("starting 2 ranks") == 1
    assert latest(tmp_path / "job/run/checkpoints").name == f"step-{step:08}" and step < 20
    train(tmp_path / "job/run", "--checkpoint.resume", "latest")
    assert f"going on after step {step}" in capsys.readouterr().out and sorted(one.steps()) == list(range(1, 21))
    train(tmp_path / "straight")
    want = losses(tmp_path / "straight")
    assert all(abs(one.steps()[i] / want[i] - 1) < 1e-5 for i in want), "two ranks, then one: as one"


def test_what_keeps_a_run_from_going_on_is_named(tmp_path, cpu):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"For 'save', '{tmp_path}/file/checkpoints"):
        train(tmp_path / "run", "--train.steps", "1", "--checkpoint.dir", str(tmp_path / "file/checkpoints"))
    train(tmp_path / "run", "--train.steps", "1")
    with pytest.raises(ConfigError, match="not those of the checkpoint: seed"):
        train(tmp_path / "run", "--checkpoint.resume", "latest", "--train.seed", "5")
    with pytest.raises(ConfigError, match="has checkpoints of a run(.|\n)*--checkpoint.resume latest"):
        train(tmp_path / "run")
    with pytest.raises(ConfigError, match="has checkpoints of a run(.|\n)*its config.yaml and metrics"):
        train(tmp_path / "run", "--checkpoint.interval", "0")
    with pytest.raises(ConfigError, match="nothing to go on from in 'nosuch'(.|\n)*--checkpoint.resume latest"):
        train(tmp_path / "run", "--checkpoint.resume", "nosuch")
    with pytest.raises(ConfigError, match="checkpoint.interval is 0"):
        train(tmp_path / "other", "--checkpoint.interval", "0", "--checkpoint.on_sigterm", "true")


def test_a_run_goes_on_with_its_own_model_only(tmp_path, cpu, capsys, monkeypatch):
    """Of equal shapes is not the same; config.yaml stays what it was. A checkpoint of before it was kept still loads."""
    small = ["--model.n_layers", "1", "--train.steps", "1", "--train.eval_batches", "1"]
    for name, options, other, keys in (
            ("full", [], ["--model.n_heads", "8", "--model.n_kv_heads", "4", "--model.rope_theta", "1e4",
                          "--model.sliding_window", "9"],
             "model.n_heads, model.n_kv_heads, model.rope_theta, model.sliding_window."),
            ("lora", ["--lora.rank", "2"], ["--lora.alpha", "64"], "lora.alpha.")):
        folder = tmp_path / name
        train(folder, *small, *options)
        before = (folder / "config.yaml").read_bytes()
        with pytest.raises(ConfigError, match=f"the model is not that of the checkpoint: {keys}") as error:
            train(folder, *small, *options, *other, "--checkpoint.resume", "latest")
        assert "in the checkpoint," in str(error.value) and (folder / "config.yaml").read_bytes() == before
        assert restore(folder, "cpu", 1).source.endswith("step-00000001")
        train(folder, *small, *options, "--train.steps", "2", "--checkpoint.resume", "latest")
        assert "not compared" not in capsys.readouterr().out
    state = Trainer.state
    monkeypatch.setattr(Trainer, "state", lambda self: {**state(self), "config": {}})
    train(tmp_path / "old", *small)
    monkeypatch.undo()
    train(tmp_path / "old", *small, "--train.steps", "2", "--checkpoint.resume", "latest")
    assert "does not say its model's configuration" in capsys.readouterr().out
    with Reader(latest(tmp_path / "old/checkpoints")) as reader:
        assert reader.index.step == 2 and reader.index.values["config.model.n_heads"] > 0, "from now on it says"


def test_a_run_that_has_its_steps_says_so(tmp_path, cpu, capsys):
    small = ["--model.n_layers", "1", "--train.steps", "2"]
    train(tmp_path, *small)
    capsys.readouterr()
    for steps in ("1", "2"):
        train(tmp_path, *small, "--train.steps", steps, "--checkpoint.resume", "latest")
        said = capsys.readouterr().out
        assert f"nothing to do: 2 steps are done, and train.steps = {steps}" in said and said.count("held-out") == 1
    lines = metrics(tmp_path)
    told = [line["held_out_loss"] for line in lines if line["step"] == 2 and "held_out_loss" in line]
    assert len(told) == 3 and len(set(told)) == 1 and not any("held_out_loss" in r for r in lines if r["step"] == 1)


def test_a_run_in_stages_says_its_bubble_and_goes_on_without_them(tmp_path, job):
    """All ranks know the loss of the last stage, and rank 0, which has the first one, says it."""
    stages = job("stages", 2, "--parallel.pp", "2", "--train.micro_batches", "4", "--train.steps", "4",
                 "--checkpoint.interval", "2", "--metrics.communication", "true")
    out = stages.ended()
    assert "2 ranks: pp=2 dp=1 tp=1" in out and "held-out loss at step 4" in out
    assert "bubble: 20% of a step simulated" in out and "% measured" in out  # (p - 1) / (m + p - 1)
    steps = [row for row in metrics(tmp_path / "stages/run") if "loss" in row]
    assert all(0 < row["bubble"] <= row["comm_share"] < 1 and "exchange pp" in row["comm"] for row in steps)
    alone = job("alone", 1, "--train.steps", "4")
    assert "bubble" not in alone.ended()
    assert np.allclose([*stages.steps().values()], [*alone.steps().values()], rtol=1e-5)
    on = job("on", 1, "--train.steps", "4", "--checkpoint.resume",
             str(tmp_path / "stages/run/checkpoints/step-00000002"))
    on.ended()
    assert [*on.steps()] == [3, 4] and np.allclose([*on.steps().values()], [*alone.steps().values()][2:], rtol=1e-5)
