# SPDX-License-Identifier: Apache-2.0
"""Links and files that another user planted in a folder which several may write: nothing beyond them is touched."""
import errno
import os
from pathlib import Path

import pytest

from ms_dtensor.core.files import beside, make_folder, new_folder, own_file, replacing

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user, which only root can")


@pytest.fixture
def victim(tmp_path) -> Path:
    file = tmp_path / "victim"
    file.write_bytes(b"precious")
    yield file
    assert file.read_bytes() == b"precious"


@pytest.mark.parametrize("mode", ["wb", "ab+", "r+b", "rb"])
def test_a_link_is_not_followed(tmp_path, victim, mode):
    (tmp_path / "a").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link") as caught:
        open(tmp_path / "a", mode, opener=own_file)
    assert caught.value.errno == errno.ELOOP and caught.value.filename == str(tmp_path / "a")


def test_a_link_to_nothing_makes_nothing(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match="symbolic link"):
        open(tmp_path / "a", "w", opener=own_file)
    with replacing(tmp_path / "a") as file:
        file.write(b"x")
    assert not (tmp_path / "made").exists() and not (tmp_path / "a").is_symlink()


def test_another_name_of_a_file_is_not_written(tmp_path, victim):
    os.link(victim, tmp_path / "a")
    for mode in ("wb", "ab", "r+b"):
        with pytest.raises(PermissionError, match="another name"):
            open(tmp_path / "a", mode, opener=own_file)
    with open(tmp_path / "a", "rb", opener=own_file) as file:  # as a backup by links has it
        assert file.read() == b"precious"


def test_a_pipe_keeps_nobody_waiting(tmp_path):
    os.mkfifo(tmp_path / "a")
    for mode in ("rb", "wb"):
        with pytest.raises(OSError):
            open(tmp_path / "a", mode, opener=own_file)


@AS_ROOT
def test_a_file_of_another_user_is_not_written(tmp_path, victim):
    os.chown(victim, 65534, 65534)
    for mode in ("wb", "ab", "r+b"):
        with pytest.raises(PermissionError, match="file of user 65534"):
            open(victim, mode, opener=own_file)


@AS_ROOT
def test_root_may_write_where_its_files_are_given_away(tmp_path):
    """As on a network disk, whose folder has the same owner then."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/a").write_bytes(b"old")
    for path in (tmp_path / "disk", tmp_path / "disk/a"):
        os.chown(path, 65534, 65534)
    with open(tmp_path / "disk/a", "wb", opener=own_file) as file:
        file.write(b"new")
    assert (tmp_path / "disk/a").read_bytes() == b"new"


def test_errors_say_the_name_that_was_given(tmp_path):
    (tmp_path / "folder").mkdir()
    for name, kind in (("none/a", FileNotFoundError), ("folder", IsADirectoryError)):
        with pytest.raises(kind) as refused, replacing(tmp_path / name):
            pass
        assert refused.value.filename == str(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_is_replaced_is_there_whole_or_as_it_was(tmp_path, victim):
    (tmp_path / "a").symlink_to(victim)
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "a") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert (tmp_path / "a").is_symlink() and {p.name for p in tmp_path.iterdir()} == {"a", "victim"}
    with replacing(tmp_path / "a") as file:
        file.write(b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert beside(tmp_path / "a") != beside(tmp_path / "a")


def test_a_new_folder_is_one_that_was_not_there(tmp_path, victim):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/now").symlink_to(tmp_path)  # of a name that can be foretold
    assert new_folder(tmp_path / "logs/now") == tmp_path / "logs/now-2"
    assert new_folder(tmp_path / "logs/now") == tmp_path / "logs/now-3"


@AS_ROOT
def test_a_link_of_another_user_is_no_folder(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "home")
    make_folder(tmp_path / "run")  # our own
    os.chown(tmp_path / "run", 65534, 65534, follow_symlinks=False)
    with pytest.raises(PermissionError, match="a link that user 65534 made"):
        make_folder(tmp_path / "run")
