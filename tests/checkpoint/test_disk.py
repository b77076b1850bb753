# SPDX-License-Identifier: Apache-2.0
"""A disk that is full, read-only, or loses files, at every step of a save: named, and the previous checkpoint stays."""
import builtins
import errno
import os
import shutil
import time

import numpy as np
import pytest
from mindspore import nn

from ms_dtensor import checkpoint
from ms_dtensor.checkpoint import latest, load, save, verify
from ms_dtensor.checkpoint.folder import by_age, steps
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
