# SPDX-License-Identifier: Apache-2.0
"""Several users in a folder that all may write, one of whom plants names: each keeps what it saved, none waits."""
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mindspore import nn

from ms_dtensor import checkpoint
from ms_dtensor.checkpoint import latest, load, save
from ms_dtensor.checkpoint.background import wait
from ms_dtensor.checkpoint.folder import Folder, steps
from ms_dtensor.checkpoint.safetensors_file import write_safetensors
from ms_dtensor.errors import CheckpointError

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users, which only root can")
ONE, TWO = 65533, 65534


def as_user(uid: int, work: Callable[[], object]) -> str:
    """Does something as another user, in a process of its own; what it raised."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = ""
        try:
            os.umask(0o022)
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            work()
        except CheckpointError as e:
            said = str(e)
        except BaseException:
            said = traceback.format_exc()
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as file:
        return file.read()


@pytest.fixture
def shared():
    """A folder in which all may make names, below folders that all may pass.

    Not in ``tmp_path``: each pytest that starts on the machine closes the folder above it to other users again.
    """
    with tempfile.TemporaryDirectory() as above:
        root = Path(above, "shared")
        root.mkdir()
        root.chmod(0o777)
        Path(above).chmod(0o711)
        yield root


def step(root: Path, number: int, **options) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"w": np.full(5, number)}, root, step=number, **options)
        wait()


@AS_ROOT
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_each_user_removes_its_own_steps_and_counts_them_alone(shared, asynchronous):
    options = {"keep_last": 1, "async_save": asynchronous}
    assert as_user(ONE, lambda: step(shared, 1)) == "" and as_user(ONE, lambda: step(shared, 2)) == ""
    for number in (3, 4):
        assert as_user(TWO, lambda n=number: step(shared, n, **options)) == ""
    assert steps(shared) == [1, 2, 4] and latest(shared).name == "step-00000004"
    assert as_user(ONE, lambda: step(shared, 5, **options)) == ""
    assert steps(shared) == [4, 5] and sorted(os.listdir(shared)) == ["latest", "step-00000004", "step-00000005"]
    into = {"w": np.zeros(5, int)}
    assert load(into, shared / "step-00000004").step == 4 and (into["w"] == 4).all()


@AS_ROOT
def test_steps_of_others_that_stay_are_told(shared):
    assert as_user(ONE, lambda: step(shared, 1)) == ""
    with pytest.warns(UserWarning, match=f"other users saved .user {ONE}.*this user only") as told:
        save({"w": 1}, shared, step=2, keep_last=1)
    assert len(told) == 1 and steps(shared) == [1, 2]


@AS_ROOT
def test_a_checkpoint_of_another_user_is_not_replaced(shared):
    assert as_user(ONE, lambda: step(shared, 1)) == ""
    text = as_user(TWO, lambda: step(shared, 1))
    assert "that another user saved" in text and f"of user {ONE}; this is user {TWO}" in text
    assert (load(into := {"w": np.zeros(5, int)}, shared), into["w"][0])[1] == 1
    assert sorted(os.listdir(shared)) == ["latest", "step-00000001"]


@AS_ROOT
@pytest.mark.parametrize("what", ["save", "convert", "save_hf"])
def test_a_killed_save_of_another_user_is_in_nobodys_way(shared, what):
    left = {"save": ".step-00000001.saving", "convert": ".w.safetensors.saving", "save_hf": "hf/.partial"}[what]

    def kill():
        (shared / left).mkdir()
        (shared / left / "part").write_text("x")
    step(shared / "source", 7)
    (shared / left).parent.mkdir(exist_ok=True)
    (shared / left).parent.chmod(0o777)
    assert as_user(ONE, kill) == ""
    work = {"save": lambda: step(shared, 1), "save_hf": lambda: checkpoint.save_hf(nn.Dense(2, 1), shared / "hf"),
            "convert": lambda: checkpoint.convert(shared / "source", shared / "w.safetensors")}[what]
    assert as_user(TWO, work) == ""
    made = {"save": "step-00000001/index.json", "convert": "w.safetensors", "save_hf": "hf/model.safetensors"}[what]
    assert (shared / made).stat().st_uid == TWO and not (shared / left).exists()
    assert as_user(ONE, lambda: step(shared, 2)) == ""  # which removes what is its own
    assert what == "save_hf" or not [name for name in os.listdir(shared) if name.startswith(".")]


@AS_ROOT
def test_a_save_of_another_user_at_work_is_waited_for(shared):
    def at_work():
        held = Folder(shared / "a")
        os.write(ready, b".")
        os.read(over, 1)
        held.abandon()
    (is_ready, ready), (over, is_over) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        as_user(ONE, at_work)
        os._exit(0)
    os.read(is_ready, 1)
    try:
        assert "another save is writing" in as_user(TWO, lambda: save({"w": 1}, shared / "a"))
    finally:
        os.write(is_over, b".")
        os.waitpid(pid, 0)
    assert as_user(TWO, lambda: save({"w": 1}, shared / "a")) == ""


@AS_ROOT
def test_a_folder_of_another_user_that_cannot_be_asked_is_named(shared):
    def closed():
        (shared / ".a.saving").mkdir(mode=0o700)
        (shared / ".b.saving").mkdir(mode=0o700)
    assert as_user(ONE, closed) == ""
    text = as_user(TWO, lambda: save({"w": 1}, shared / "a"))
    assert f"'{shared}/.a.saving' is in the way: Permission denied" in text and f"of user {ONE}" in text and "rm -r" in text
    assert as_user(TWO, lambda: save({"w": 1}, shared / "c")) == ""  # not in the way of what has another name


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "file"])
@pytest.mark.parametrize("what", ["save", "convert", "save_hf"])
def test_what_is_planted_under_a_hidden_name_is_named_and_not_touched(tmp_path, kind, what):
    victim, where = tmp_path / "victim", tmp_path / "w.safetensors" if what == "convert" else tmp_path / "a"
    for folder in (victim, tmp_path / "a"):
        folder.mkdir()
    (victim / "precious").write_text("x")
    planted = tmp_path / "a/.partial" if what == "save_hf" else where.with_name(f".{where.name}.saving")
    plant(planted, kind, victim)
    save({"w": np.ones(2)}, tmp_path / "here/source")
    work = {"save": lambda: save({"w": 1}, where), "save_hf": lambda: checkpoint.save_hf(nn.Dense(2, 1), where),
            "convert": lambda: checkpoint.convert(tmp_path / "here/source", where)}[what]
    if (what, kind) == ("convert", "file"):  # as earlier versions left it
        work()
    else:
        with pytest.raises(CheckpointError, match=f"{planted}' is in the way: Not a directory") as e:
            work()
        assert "not opened, followed or removed" in str(e.value) and os.path.lexists(planted)
    assert os.listdir(victim) == ["precious"]


def plant(path: Path, kind: str, victim: Path) -> None:
    {"link": lambda: path.symlink_to(victim), "link to nothing": lambda: path.symlink_to(victim / "made"),
     "pipe": lambda: os.mkfifo(path), "file": lambda: path.write_text("x")}[kind]()


@pytest.mark.timeout(60)
def test_links_and_pipes_among_leftovers_keep_no_save_off(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/precious").write_text("x")
    for kind in ("link", "link to nothing", "pipe", "file"):
        for end in (".saving", ".retired", ".replaced"):
            plant(tmp_path / f".{kind}{end}", kind, tmp_path / "victim")
    step(tmp_path, 1)
    assert os.listdir(tmp_path / "victim") == ["precious"]
    assert not [name for name in os.listdir(tmp_path) if name.endswith((".saving", ".retired"))]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "file", "folder"])
def test_latest_may_be_anything(tmp_path, kind):
    step(tmp_path, 3)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir() if kind == "folder" else plant(tmp_path / "latest", kind, tmp_path / "step-00000003")
    assert latest(tmp_path).name == "step-00000003"
    os.rename(tmp_path / "step-00000003/index.json", tmp_path / "index")
    os.mkfifo(tmp_path / "step-00000003/index.json")
    assert latest(tmp_path) is None


def test_files_are_not_written_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "a.safetensors").symlink_to(victim)
    with pytest.raises(CheckpointError, match="symbolic link"):
        write_safetensors(tmp_path / "a.safetensors", {"w": ("float32", (1,), [np.ones(1, np.float32)])})
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").symlink_to(victim)
    checkpoint.save_hf(nn.Dense(2, 1), tmp_path / "hf", config={"model_type": "mine"})
    assert victim.read_text() == "precious" and not (tmp_path / "hf/config.json").is_symlink()


def test_a_run_may_be_reached_by_a_link_of_ones_own(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    step(tmp_path / "run", 1)
    held = Folder(tmp_path / "disk/step-00000002")
    with pytest.raises(CheckpointError, match="another save is writing"):  # by whatever name
        step(tmp_path / "run", 2)
    held.abandon()
    assert latest(tmp_path / "run") == tmp_path / "run/step-00000001" and os.listdir(tmp_path / "disk")
