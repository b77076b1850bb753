# SPDX-License-Identifier: Apache-2.0
"""A run in a folder where somebody has planted links under the names that it writes: what they point to stays as it was."""
import os
import time

import pytest

from model_zoo.llama.configio import load
from model_zoo.llama.hold import hold
from model_zoo.llama.report import Reporter, check_folder, put_aside
from ms_dtensor.checkpoint.folder import clean, latest, point_latest
from ms_dtensor.errors import ConfigError
from tests.zoo.test_llama_launch import ROOT


@pytest.fixture
def planted(tmp_path):
    """A run's folder, and a function that puts a link in it; what the links point to is compared at the end."""
    victims = tmp_path / "home"
    victims.mkdir()
    (tmp_path / "run").mkdir()
    made = {}

    def plant(name: str, there: bool = True) -> None:
        victim = made[name] = victims / name.lstrip(".")
        if there:
            victim.write_text(f"precious {name}")
        (tmp_path / "run" / name).symlink_to(victim)
        made[name] = there
    yield tmp_path / "run", plant
    assert {p.name: p.read_text() for p in victims.iterdir()} == {
        name.lstrip("."): f"precious {name}" for name, there in made.items() if there}


def config(folder, *words: str):
    return load(["--config", str(ROOT / "model_zoo/llama/configs/tiny.yaml"), "--train.log_dir", str(folder), *words], 1)[0]


def test_the_lock(planted):
    folder, plant = planted
    plant(".lock")
    with pytest.raises(ConfigError, match="It is a symbolic link"), hold(config(folder)):
        pass


def test_the_probe(planted):
    folder, plant = planted
    plant(f".probe-{os.getpid()}")
    check_folder(folder)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("done", [0, 1])
def test_metrics_and_configuration(planted, there, done):
    folder, plant = planted
    plant("config.yaml", there)
    if not done:
        plant("metrics.jsonl", there)
    else:
        (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    report = Reporter(config(folder), 1, True, None, "cpu")
    report.begin(done, "text: resolved\n")
    report.record(step=3)
    report.close()
    assert (folder / "config.yaml").read_text() == "text: resolved\n"
    assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n' * done + '{"step": 3}\n'


def test_metrics_that_a_run_goes_on_with(planted):
    folder, plant = planted
    plant("metrics.jsonl")
    with pytest.raises(ConfigError, match="It is a symbolic link"):
        Reporter(config(folder), 1, True, None, "cpu").begin(1, "text: resolved\n")


def test_latest(planted):
    folder, plant = planted
    for name in (".latest.saving", "latest"):
        plant(name)
    (folder / "step-00000010").mkdir()
    (folder / "step-00000010/index.json").write_text("{}")
    point_latest(folder, "step-00000010")
    assert latest(folder).name == "step-00000010" and not (folder / "latest").is_symlink()
    clean(folder)


def test_runs_of_one_second_do_not_replace_each_other(tmp_path):
    """As two short ones, or a clock that was put back."""
    for text in ("first", "second", "third"):
        for name in ("metrics.jsonl", "config.yaml"):
            (tmp_path / name).write_text(text)
            os.utime(tmp_path / name, (1e9, 1e9))
        put_aside(tmp_path / "metrics.jsonl", tmp_path / "config.yaml")
    when = time.strftime("%Y%m%d-%H%M%S", time.localtime(1e9))
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        f"{stem}-{when}{number}{end}": text for stem, end in (("metrics", ".jsonl"), ("config", ".yaml"))
        for number, text in (("", "first"), ("-2", "second"), ("-3", "third"))}
