# SPDX-License-Identifier: Apache-2.0
"""Pure: folders that appear whole or not at all, whatever a killed save has left."""
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ms_dtensor.checkpoint import folder as module
from ms_dtensor.checkpoint.folder import Folder, by_age, clean, find, latest, now, point_latest, retire, step_name, steps
from ms_dtensor.errors import CheckpointError


def made(target: Path, text: str = "x") -> None:
    folder = Folder(target)
    (folder.path / "index.json").write_text(text)
    folder.commit()


def test_a_checkpoint_is_there_after_commit_only_and_replaced_at_once(tmp_path):
    target = tmp_path / "a"
    folder = Folder(target)
    (folder.path / "index.json").write_text("1")
    assert not target.exists()
    folder.commit()
    assert (target / "index.json").read_text() == "1" and os.listdir(tmp_path) == ["a"]
    made(target, "2")
    assert (target / "index.json").read_text() == "2" and os.listdir(tmp_path) == ["a"]


@contextlib.contextmanager
def killed_at_rename(monkeypatch, number: int):
    """Where two names cannot be exchanged in one call, an end at the rename with this number."""
    real, calls = os.rename, []

    def rename(a, b):
        calls.append(b)
        if len(calls) == number:
            raise KeyboardInterrupt
        real(a, b)
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        yield
    monkeypatch.undo()


@pytest.mark.parametrize("point", [1, 2], ids=["before", "between"])
def test_where_names_cannot_be_exchanged_an_interruption_is_finished(tmp_path, monkeypatch, point):
    monkeypatch.setattr(module, "_exchange", lambda a, b: False)
    target = tmp_path / "a"
    made(target, "1")
    folder = Folder(target)
    (folder.path / "index.json").write_text("2")
    with killed_at_rename(monkeypatch, point):
        folder.commit()
    folder.close()
    assert (find(target) / "index.json").read_text() == "1"
    clean(tmp_path)
    assert os.listdir(tmp_path) == ["a"] and (target / "index.json").read_text() == "1"


def test_leftovers_of_killed_saves_are_removed_and_saves_at_work_are_not(tmp_path):
    code = ("import sys, os; from pathlib import Path; from ms_dtensor.checkpoint.folder import Folder;"
            "f = Folder(Path(sys.argv[1])); (f.path / 'part').write_text('x'); print('ready', flush=True); sys.stdin.read()")
    runs = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / name)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, cwd=module.__file__.split("/ms_dtensor/")[0]) for name in "ab"]
    try:
        for run in runs:
            assert run.stdout.readline() == b"ready\n"
        with pytest.raises(CheckpointError, match="another save is writing"):
            Folder(tmp_path / "a")
        runs[0].kill()
        runs[0].wait()
        made(tmp_path / "c")
        assert sorted(os.listdir(tmp_path)) == [".b.saving", "c"]
        made(tmp_path / "a")
    finally:
        for run in runs:
            run.kill()
            run.communicate()


def test_other_things_are_not_replaced(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    for name in ("file", "full", "link"):
        with pytest.raises(CheckpointError, match="is there and is no checkpoint"):
            Folder(tmp_path / name)
    (tmp_path / "empty").mkdir()
    made(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="cannot be made"):
        Folder(tmp_path / "file" / "below")


def test_a_folder_with_anything_but_one_checkpoint_is_not_replaced(tmp_path):
    target = tmp_path / "run"
    made(target, "1")
    with pytest.raises(CheckpointError, match="'.*run' is itself a checkpoint"):
        Folder(target / step_name(1))
    assert os.listdir(target) == ["index.json"]
    for name in ("notes.txt", "latest", "step-00000001", "shard-00000-of-00001.safetensors"):
        (target / name).mkdir() if name[:2] in ("st", "sh") else (target / name).write_text("mine")
        with pytest.raises(CheckpointError, match=f"has other things in it than a checkpoint.*\n.*{name}"):
            Folder(target)
        (target / name).rmdir() if name[:2] in ("st", "sh") else (target / name).unlink()
    (target / "shard-00000-of-00001.safetensors").write_text("x")
    folder = Folder(target)
    (folder.path / "index.json").write_text("2")
    (target / "late.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="late.txt"):
        folder.commit()
    folder.abandon()
    assert (target / "late.txt").read_text() == "mine" and (target / "index.json").read_text() == "1"


def test_a_path_that_means_two_checkpoints_is_refused(tmp_path):
    made(tmp_path / step_name(7))
    (tmp_path / "index.json").write_text("x")
    with pytest.raises(CheckpointError, match="there are two checkpoints: .*'step-00000007' is in it"):
        find(tmp_path)
    assert find(tmp_path / step_name(7)) == tmp_path / step_name(7)


def saved(root: Path, step: int, at: int) -> None:
    """A step that tells when it was saved."""
    folder = Folder(root / step_name(step))
    (folder.path / "index.json").write_text(f'{{"digest": "0",\n"index": {{"saved": {at}, "x": 1}}}}')
    folder.commit(lambda: point_latest(root, step_name(step)))


def test_what_was_saved_last_stays_whatever_its_number(tmp_path):
    for at, step in enumerate((10, 30, 40, 44, 50, 31, 32)):  # from 50 back to 30
        saved(tmp_path, step, 100 + at)
    assert steps(tmp_path) == [10, 30, 31, 32, 40, 44, 50] and by_age(tmp_path)[-3:] == [50, 31, 32]
    (tmp_path / "latest").unlink()
    assert latest(tmp_path) == tmp_path / step_name(32), "not the highest number, which was abandoned"
    assert retire(tmp_path, 2, 20) == [10, 30, 44, 50] and steps(tmp_path) == [31, 32, 40]
    assert now(tmp_path) > 106 and now(tmp_path) > time.time_ns() - 10 ** 9
    saved(tmp_path, 33, 2 ** 61)  # by a clock that was wrong
    assert now(tmp_path) == 2 ** 61 + 1


def test_a_step_that_was_killed_between_two_renames_is_still_the_latest(tmp_path, monkeypatch):
    """Where two names cannot be exchanged in one call; `load(root)` must not give the step before."""
    monkeypatch.setattr(module, "_exchange", lambda a, b: False)
    for at, step in enumerate((1, 2)):
        saved(tmp_path, step, at + 1)
    with killed_at_rename(monkeypatch, 2):
        saved(tmp_path, 2, 3)
    for _ in range(2):
        assert (find(tmp_path) / "index.json").read_text().count('"saved": 2,') == 1 and steps(tmp_path) == [1, 2]
        (tmp_path / "latest").unlink(missing_ok=True)
    clean(tmp_path)
    assert find(tmp_path) == tmp_path / step_name(2)


def test_two_jobs_that_save_steps_into_one_folder_are_refused(tmp_path):
    first = Folder(tmp_path / step_name(1))
    with pytest.raises(CheckpointError, match=f"another save is writing '{tmp_path}' at this moment"):
        Folder(tmp_path / step_name(2))
    (tmp_path / ".latest.saving").write_text("of the first")
    made(tmp_path / "export")  # of no step
    assert (tmp_path / ".latest.saving").read_text() == "of the first", "another save leaves it alone"
    first.abandon()
    made(tmp_path / step_name(2))


def test_names_that_no_save_gives_are_no_steps(tmp_path):
    for name in ("step-000000010", "step-0000001", "step-\u0661\u0662\u0663\u0664\u0665\u0666\u0667\u0668"):
        made(tmp_path / name)
    assert steps(tmp_path) == [] and latest(tmp_path) is None
    made(tmp_path / step_name(123456789))
    assert latest(tmp_path) == tmp_path / "step-123456789" and steps(tmp_path) == [123456789]


def test_an_abandoned_save_leaves_anothers_folder_alone(tmp_path):
    done = Folder(tmp_path / "a")
    (done.path / "index.json").write_text("1")
    done.commit()
    other = Folder(tmp_path / "a")
    done.abandon()
    assert other.path.is_dir()
    other.abandon()


def test_steps_latest_and_which_stay(tmp_path):
    assert latest(tmp_path) is None and latest(tmp_path / "none") is None and steps(tmp_path / "none") == []
    for step in range(10, 100, 10):
        made(tmp_path / step_name(step))
        point_latest(tmp_path, step_name(step))
        retire(tmp_path, 2, 40)
    assert steps(tmp_path) == [40, 80, 90] and latest(tmp_path) == tmp_path / step_name(90) == find(tmp_path)
    (tmp_path / "latest").write_text("step-00000040")
    made(tmp_path / step_name(100))
    assert latest(tmp_path) == tmp_path / step_name(40), "`latest` counts, not the number"
    assert retire(tmp_path, 1, None) == [80, 90] and steps(tmp_path) == [40, 100]
    for text in ("../step-00000040", "step-00000041", ""):
        (tmp_path / "latest").write_text(text)
        assert latest(tmp_path) == tmp_path / step_name(100)
