# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at any moment of a save; two exports into one folder; a reader while steps are removed."""
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from mindspore import nn

from ms_dtensor import checkpoint
from ms_dtensor.checkpoint import converting, folder, hf, load, loading, save, verify
from ms_dtensor.checkpoint.safetensors_file import SafetensorsFile
from ms_dtensor.errors import CheckpointError
from tests.checkpoint.test_disk import CALLS, Refusing, saved, sound

ROOT = Path(__file__).resolve().parents[2]


class Interrupting(Refusing):
    """Ctrl-C at a call to the system."""

    def error(self, about) -> BaseException:
        return KeyboardInterrupt()


def test_after_ctrl_c_at_any_moment_the_next_save_works_and_nothing_is_left(tmp_path, monkeypatch):
    assert CALLS
    with monkeypatch.context() as patch:
        saved(tmp_path / "run", 1)
        watched = Interrupting(patch, tmp_path / "run")
        saved(tmp_path / "run", 2)
    assert len(watched.calls) > 12
    for number, call in enumerate(watched.calls):
        root = tmp_path / f"run{number}"
        saved(root, 1)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            Interrupting(patch, root, number)
            saved(root, 2)
        assert sound(root) in (1, 2), call
        left = root / ".step-00000002.saving"
        assert not left.exists() or call[0] == "open" and not os.listdir(left), call  # just made
        saved(root, 2)
        assert sound(root) == 2 and sorted(os.listdir(root)) == ["latest", "step-00000002"], call


def net(seed: int) -> nn.Cell:
    made = nn.Dense(64, 64)
    for i, p in enumerate(made.get_parameters()):
        p.set_data(type(p)(np.random.default_rng(seed + i).normal(size=p.shape).astype(np.float32), name=p.name))
    return made


def at_once(monkeypatch, home, name: str, works) -> list[str]:
    """Runs two works, the second from within the first's writing; what each raised."""
    real, errors, inside = getattr(home, name), [], []

    def run(work) -> None:
        try:
            work()
            errors.append("")
        except CheckpointError as e:
            errors.append(str(e))

    def watched(*args, **kwargs):
        if not inside:
            inside.append(True)
            run(works[1])
        return real(*args, **kwargs)
    monkeypatch.setattr(home, name, watched)
    run(works[0])
    return errors


def test_of_two_exports_into_one_folder_the_second_is_refused(tmp_path, monkeypatch):
    one, two = net(1), net(2)
    second, first = at_once(monkeypatch, hf, "write_safetensors", [lambda: checkpoint.save_hf(one, tmp_path / "out"),
                                                                   lambda: checkpoint.save_hf(two, tmp_path / "out")])
    assert first == "" and "another save is writing" in second and "out" in second
    held = SafetensorsFile(tmp_path / "out" / "model.safetensors")
    assert np.array_equal(held.read("weight"), one.weight.asnumpy()) and sorted(os.listdir(tmp_path / "out")) == [
        "model.safetensors"]
    with pytest.raises(CheckpointError, match="has weights already"):
        checkpoint.save_hf(two, tmp_path / "out")


def test_of_two_conversions_into_one_file_the_second_is_refused(tmp_path, monkeypatch):
    for i in (1, 2):
        save({"w": np.full(5000, i)}, tmp_path / str(i))
    target = tmp_path / "w.safetensors"
    (tmp_path / ".w.safetensors.saving").write_text("of a killed one, as earlier versions left it")
    second, first = at_once(monkeypatch, converting, "write_safetensors", [
        lambda: checkpoint.convert(tmp_path / "1", target), lambda: checkpoint.convert(tmp_path / "2", target)])
    assert first == "" and "For 'convert', another save is writing" in second
    assert (SafetensorsFile(target).read("w") == 1).all() and sorted(os.listdir(tmp_path)) == ["1", "2", "w.safetensors"]


def test_an_export_that_was_killed_or_interrupted_is_taken_over(tmp_path, monkeypatch):
    code = ("import os, sys; from ms_dtensor.checkpoint import hf; from mindspore import nn;"
            "hf.write_safetensors = lambda *a, **k: os._exit(9); hf.save_hf(nn.Dense(2, 1), sys.argv[1])")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], cwd=ROOT, capture_output=True)
    assert done.returncode == 9 and os.listdir(tmp_path / "out") == [".partial"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hf, "write_safetensors", interrupted)
        checkpoint.save_hf(net(1), tmp_path / "out")
    checkpoint.save_hf(net(1), tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


def interrupted(*args, **kwargs):
    raise KeyboardInterrupt


def test_a_reader_of_a_run_that_keeps_one_step_gets_the_latest(tmp_path, monkeypatch):
    """Between finding `latest` and reading, the run saves the next step and removes this one."""
    saved(tmp_path, 1)
    real, ahead = loading._read, iter((2, 3))

    def read(*args):
        step = next(ahead, None)
        if step is not None:
            saved(tmp_path, step)
        return real(*args)
    monkeypatch.setattr(loading, "_read", read)
    into = {"w": np.zeros((40, 1000), np.float32), "small": np.zeros(3, int), "step": 0}
    assert load(into, tmp_path).step == 3 and into["step"] == 3 and (into["w"] == 3).all()
    monkeypatch.setattr(loading, "_read", lambda *args: (_ for _ in ()).throw(CheckpointError("For 'x', damaged.")))
    with pytest.raises(CheckpointError, match="damaged"):  # and not for ever
        load(into, tmp_path)


def test_a_folder_that_is_removed_before_it_is_listed_is_looked_up_again(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    real, ahead = os.listdir, iter((2, 3))

    def listdir(path):
        if str(path).endswith(("step-00000001", "step-00000002")) and (step := next(ahead, None)) is not None:
            saved(tmp_path, step)
        return real(path)
    monkeypatch.setattr(os, "listdir", listdir)
    assert verify(tmp_path) == [] and next(ahead, None) is None
    assert folder.steps(tmp_path) == [3]


def test_readers_while_a_run_saves_without_pause(tmp_path):
    saved(tmp_path, 1)
    stop, wrong = threading.Event(), []

    def run():
        step = 1
        while not stop.is_set():
            step += 1
            saved(tmp_path, step)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(60):
            wrong += verify(tmp_path)
    finally:
        stop.set()
        thread.join()
    assert not wrong, wrong
    assert folder.steps(tmp_path)
