# SPDX-License-Identifier: Apache-2.0
"""A disk that is full, read-only, or loses files, at every step of a save: named, and the previous checkpoint stays.

Ctrl-C at any moment of a save; two exports into one folder; a reader while steps are removed.
"""
import builtins
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from mindspore import nn

from ms_dtensor import checkpoint
from ms_dtensor.checkpoint import converting, folder, hf, latest, load, loading, save, verify
from ms_dtensor.checkpoint.folder import by_age, steps
from ms_dtensor.checkpoint.safetensors_file import SafetensorsFile
from ms_dtensor.errors import CheckpointError

FIXES = (errno.ENOSPC, "free space"), (errno.EROFS, "a folder that this user may write")
CALLS = ((os, "mkdir"), (os, "open"), (os, "fsync"), (os, "rename"), (os, "replace"), (builtins, "open"))


class Refusing:
    """The system's calls on paths below a folder, of which the one with a number is refused."""

    def __init__(self, monkeypatch, root, number: int = -1, code: int = errno.ENOSPC):
        self.root, self.number, self.code, self.calls = str(root), number, code, []
        for home, name in CALLS:
            monkeypatch.setattr(home, name, self._watched(name, getattr(home, name)))

    def _watched(self, name, call):
        def watched(path, *args, **kwargs):
            about = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
            if str(about).startswith(self.root):
                self.calls.append((name, about))
                if len(self.calls) - 1 == self.number:
                    raise self.error(about)
            return call(path, *args, **kwargs)
        return watched

    def error(self, about) -> BaseException:
        return OSError(self.code, os.strerror(self.code), about)


def state(step: int) -> dict:
    return {"w": np.full((40, 1000), step, np.float32), "small": np.arange(3) + step, "step": step}


def saved(root, step: int, asynchronous: bool = False) -> None:
    save(state(step), root, step=step, keep_last=1, async_save=asynchronous)
    checkpoint.wait()


def sound(root) -> int:
    """The step that `latest` loads."""
    for step in steps(root):
        assert verify(root / f"step-{step:08d}") == []
    into = state(0)
    load(into, root)
    assert np.array_equal(into["w"], state(into["step"])["w"]) and latest(root).name == f"step-{into['step']:08d}"
    return into["step"]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_each_refusal_of_the_system_is_named_and_leaves_a_checkpoint(tmp_path, monkeypatch, asynchronous):
    with monkeypatch.context() as patch:
        saved(tmp_path / "run", 1)
        watched = Refusing(patch, tmp_path / "run")
        saved(tmp_path / "run", 2, asynchronous)
    moved = max(i for i, (name, _) in enumerate(watched.calls) if name == "replace")  # of `latest`
    assert len(watched.calls) > 12 and moved > 9, watched.calls
    for number, call in enumerate(watched.calls):
        code, fix = FIXES[number % 2]
        root = tmp_path / f"run_{number}_{code}"
        saved(root, 1)
        text = None
        with monkeypatch.context() as patch:
            Refusing(patch, root, number, code)
            try:
                saved(root, 2, asynchronous)
            except CheckpointError as e:
                text = str(e)
        if text is None:
            unread = call[0] == "open" and call[1].endswith(("/index.json", "/latest")) and ".saving" not in call[1]
            assert (unread or call == ("mkdir", str(tmp_path / "run"))) and sound(root) == 2, call  # it is there already
        else:
            assert os.strerror(code) in text and fix in text and str(root) in text, (call, text)
            assert sound(root) == (1 if number <= moved else 2), call
        saved(root, 3)
        assert sound(root) == 3 and sorted(os.listdir(root)) == ["latest", "step-00000003"], call


def test_a_folder_that_vanishes_while_it_is_written_is_named(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    real = os.fsync

    def fsync(fd):
        real(fd)
        shutil.rmtree(tmp_path / ".step-00000002.saving", ignore_errors=True)
    monkeypatch.setattr(os, "fsync", fsync)
    for asynchronous in (False, True):
        with pytest.raises(CheckpointError, match="step-00000002.*No such file"):
            saved(tmp_path, 2, asynchronous)
    monkeypatch.undo()
    assert sound(tmp_path) == 1
    saved(tmp_path, 2)
    assert sound(tmp_path) == 2


def test_a_file_that_vanished_is_named_and_the_step_before_loads(tmp_path):
    save(state(1), tmp_path, step=1)
    save(state(2), tmp_path, step=2)
    shard = next((tmp_path / "step-00000002").glob("*.safetensors"))
    shard.unlink()
    assert [shard.name in line and "No such file" in line for line in verify(tmp_path)] == [True]
    into = state(0)
    with pytest.raises(CheckpointError, match=f"{shard.name}', the file cannot be opened: No such file"):
        load(into, tmp_path)
    assert load(into, tmp_path / "step-00000001").step == 1 and into["step"] == 1
    (tmp_path / "step-00000002" / "index.json").unlink()
    assert load(into, tmp_path).step == 1  # what has no index is no checkpoint


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_clock_that_goes_back_changes_nothing(tmp_path, monkeypatch, asynchronous):
    hours = iter(range(10 ** 6, 0, -1))
    for name, unit in (("time_ns", 3600 * 10 ** 9), ("time", 3600.0)):
        monkeypatch.setattr(time, name, lambda unit=unit: next(hours) * unit)
    for step in (1, 2, 3, 4):
        save(state(step), tmp_path, step=step, keep_last=2, async_save=asynchronous)
        checkpoint.wait()
        assert sound(tmp_path) == step and steps(tmp_path) == [1, 2, 3, 4][max(0, step - 2):step]
    save(state(2), tmp_path, step=2, keep_last=2)  # and a run that went back, in one whose clock did
    (tmp_path / "latest").unlink()
    assert by_age(tmp_path) == [4, 2] and sound(tmp_path) == 2


def test_a_full_disk_under_a_copy_has_its_own_advice(tmp_path, monkeypatch):
    saved(tmp_path / "run", 1)
    for name, make in (("w.safetensors", checkpoint.convert), ("other", checkpoint.convert),
                       ("hf", lambda source, target: checkpoint.save_hf(nn.Dense(2, 1), target))):
        with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="free space") as error:
            patch.setattr(os, "fsync", lambda fd: refuse())
            make(tmp_path / "run", tmp_path / name)
        assert "keep_last" not in str(error.value) and "previous checkpoint" not in str(error.value)


def refuse():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
