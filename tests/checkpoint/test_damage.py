# SPDX-License-Identifier: Apache-2.0
"""Whatever is damaged is named by `verify` and refused by `load`; the command line says the same."""
import json
import os
from pathlib import Path

import numpy as np
import pytest

from ms_dtensor import checkpoint
from ms_dtensor.checkpoint.cli import main
from ms_dtensor.checkpoint.safetensors_file import SafetensorsFile, write_safetensors
from ms_dtensor.errors import CheckpointError
from tests.checkpoint.damage import KINDS, arrays, make
from tests.msrun import python


def zeros():
    return {**{key: np.zeros_like(a) for key, a in arrays().items()}, "step": 0}


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_named_and_refused(tmp_path, kind):
    make(tmp_path / "a")
    KINDS[kind](tmp_path / "a")
    found = checkpoint.verify(tmp_path / "a")
    assert found and all(str(tmp_path / "a") in line for line in found), found
    with pytest.raises(CheckpointError):
        checkpoint.load(zeros(), tmp_path / "a")


def test_the_page_counts_them():
    assert f"{len(KINDS)} kinds, all named" in (Path(__file__).parents[2] / "docs/checkpoints.md").read_text("utf-8")


def test_a_sound_one_is_sound_and_what_else_is_in_the_folder_is_named(tmp_path):
    make(tmp_path / "a")
    assert checkpoint.verify(tmp_path / "a") == []
    checkpoint.load(target := zeros(), tmp_path / "a")
    assert all(np.array_equal(target[key], a) for key, a in arrays().items())
    (tmp_path / "a" / "more").write_text("x")
    assert "is no file of this checkpoint" in checkpoint.verify(tmp_path / "a")[0]


def run(capsys, *arguments):
    code = main(["ckpt", *map(str, arguments)])
    return code, capsys.readouterr().out


def told(capsys, *arguments):
    code, out = run(capsys, *arguments, "--json")
    return code, json.loads(out)


def test_ls(tmp_path, capsys):
    make(tmp_path / "a")
    code, out = run(capsys, "ls", tmp_path / "a")
    assert code == 0 and "f32[900, 1200]" in out and "4.1 MiB" in out and "in 2 files, step 1" in out, out
    code, got = told(capsys, "ls", tmp_path / "a")
    assert code == 0 and got["tensors"]["small"] == {"dtype": "float32", "shape": [3, 50], "bytes": 600, "parts": 1}
    for step in (5, 10):
        os.makedirs(tmp_path / "run", exist_ok=True)
        make(tmp_path / "run" / f"step-{step:08d}")
    (tmp_path / "run" / "latest").write_text("step-00000005\n")
    code, got = told(capsys, "ls", tmp_path / "run")
    assert code == 0 and [(row["step"], row["latest"]) for row in got] == [(5, True), (10, False)]
    assert main(["ckpt", "ls", str(tmp_path / "none")]) == 2 and "there is no checkpoint" in capsys.readouterr().err


def test_verify(tmp_path, capsys):
    make(tmp_path / "a")
    assert run(capsys, "verify", tmp_path / "a") == (0, f"{tmp_path / 'a'}: sound\n")
    KINDS["a shard removed"](tmp_path / "a")
    code, got = told(capsys, "verify", tmp_path / "a")
    assert code == 1 and not got["sound"] and "cannot be opened" in got["checkpoints"][str(tmp_path / "a")][0]


def test_where_nothing_of_a_checkpoint_is_there_is_nothing_to_verify(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "none", tmp_path / "file"):
        code, got = told(capsys, "verify", path)
        assert code == 2 and "there is no checkpoint" in got["error"]


def test_names_from_files_do_nothing_to_a_terminal(tmp_path, capsys):
    odd = "w\x1b[31m\n\u202eü"
    for step in (1, 2):
        checkpoint.save({odd: np.full(2, step), "v" + odd: step}, tmp_path / "run", step=step)
    paths = [tmp_path / "run" / f"step-0000000{step}" for step in (1, 2)]
    (paths[0] / f"{odd}.txt").write_text("")
    (paths[1] / "shard-00000-of-00001.safetensors").unlink()
    printed = [run(capsys, "ls", paths[0]), run(capsys, "verify", tmp_path / "run")]
    main(["ckpt", "diff", *map(str, paths)])
    printed.append((1, capsys.readouterr().err))
    main(["ckpt", "convert", str(paths[0]), str(tmp_path / "x"), "--strip", "z"])
    printed.append((1, capsys.readouterr().err))
    for _, text in printed:
        assert not set(text) & {"\x1b", "\u202e"}, ascii(text)
    for _, text in printed[:2] + printed[3:]:
        assert r"w\x1b[31m\n\u202eü" in text or r"w\x1b[31m" in text, ascii(text)
    assert run(capsys, "diff", paths[0], paths[0]) == (0, "1 tensors in both, 0 differences\n")


def test_a_file_is_converted_whole_or_not_at_all(tmp_path):
    target = tmp_path / "w.safetensors"
    checkpoint.save({"a": np.float32([1e-3, 2]), "b": np.float32([1e10])}, tmp_path / "one")
    checkpoint.convert(tmp_path / "one", target)
    before = target.read_bytes()
    with pytest.raises(CheckpointError, match="out of the range of float16"):
        checkpoint.convert(tmp_path / "one", target, dtype="float16")
    assert target.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["one", "w.safetensors"]
    checkpoint.convert(target, target, dtype="bfloat16")  # in place
    assert SafetensorsFile(target).tensors["b"].dtype == "bfloat16"
    with pytest.raises(CheckpointError, match="cannot be written: No such file"):
        checkpoint.convert(tmp_path / "one", tmp_path / "none" / "x.safetensors")


def test_diff(tmp_path, capsys):
    make(tmp_path / "a")
    make(tmp_path / "b")
    assert told(capsys, "diff", tmp_path / "a", tmp_path / "b") == (0, {"equal": True, "compared": 4, "different": {}})
    values = arrays()
    values["large"][5, 7] += 2
    values["new"] = values.pop("small")
    checkpoint.save({**values, "step": 2}, tmp_path / "c")
    code, got = told(capsys, "diff", tmp_path / "a", tmp_path / "c")
    assert code == 1 and got["different"] == {
        "small": "only in the first", "new": "only in the second", "step": "1, in the second 2",
        "large": "1 of 1080000 elements, the largest difference is 2"}


def test_convert(tmp_path, capsys):
    checkpoint.save({"model": {"w": arrays()["large"], "n": np.arange(3)}, "other": np.ones(2)}, tmp_path / "a")
    options = "--dtype", "float16", "--strip", "model."
    code, got = told(capsys, "convert", tmp_path / "a", tmp_path / "w.safetensors", *options)
    file = SafetensorsFile(tmp_path / "w.safetensors")
    assert code == 0 and got == {"tensors": 2, "bytes": 2 * 1080000 + 24} and file.tensors["n"].dtype == "int64"
    assert np.array_equal(file.read("w"), arrays()["large"].astype(np.float16))
    write_safetensors(tmp_path / "more.safetensors", {"m": ("float32", (2,), [np.ones(2, np.float32)])})
    os.makedirs(tmp_path / "hf")
    for name in ("w", "more"):
        os.rename(tmp_path / f"{name}.safetensors", tmp_path / "hf" / f"{name}.safetensors")
    code, got = told(capsys, "convert", tmp_path / "hf", tmp_path / "b")
    assert code == 0 and checkpoint.verify(tmp_path / "b") == []
    checkpoint.load(target := {"w": np.zeros((900, 1200), np.float16), "n": np.zeros(3, int), "m": np.zeros(2, np.float32)},
                    tmp_path / "b")
    assert np.array_equal(target["w"], file.read("w")) and target["m"].tolist() == [1, 1]
    assert told(capsys, "convert", tmp_path / "hf", tmp_path / "c", "--strip", "x.")[0] == 2
    assert told(capsys, "convert", tmp_path / "hf", tmp_path / "c", "--dtype", "int8")[0] == 2
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for other in (tmp_path / "b", tmp_path / "hf/w.safetensors"):  # a checkpoint, a file: nothing is replaced unasked
        code, got = told(capsys, "convert", tmp_path / "a", other)
        assert code == 2 and f"'{other}' is there already" in got["error"]
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_tensors_without_elements_are_converted_both_ways(tmp_path):
    none = {"none": np.zeros((0, 3), np.float32), "flat": np.zeros(0, np.int8)}
    for name, state in (("some", {**none, "w": np.arange(3.0)}), ("only", none)):
        checkpoint.save(state, tmp_path / name)
        for source, target in ((name, f"{name}.safetensors"), (f"{name}.safetensors", f"{name}2"), (name, f"{name}3")):
            assert checkpoint.convert(tmp_path / source, tmp_path / target)["tensors"] == len(state)
            if "." not in target:
                assert checkpoint.verify(tmp_path / target) == []
                checkpoint.load(held := {key: a + 1 for key, a in state.items()}, tmp_path / target)
                assert all(held[key].tobytes() == a.tobytes() and held[key].shape == a.shape for key, a in state.items())
        assert {k: e.shape for k, e in SafetensorsFile(tmp_path / f"{name}.safetensors").tensors.items()} == {
            key: a.shape for key, a in state.items()}


def test_each_byte_is_watched_over(tmp_path):
    """Of the index, of headers with their hashes, and of data."""
    make(tmp_path / "a", scale=30)
    count = 0
    for path in sorted((tmp_path / "a").iterdir()):
        good = path.read_bytes()
        edge = len(good) if path.name == "index.json" else 8 + int.from_bytes(good[:8], "little")
        for at in (*range(edge), *range(edge, len(good), 997)):
            bad = bytearray(good)
            bad[at] ^= 1 << at % 8
            path.write_bytes(bad)
            found = checkpoint.verify(tmp_path / "a")
            assert found and all(str(tmp_path / "a") in line for line in found), (path.name, at)
            count += 1
        path.write_bytes(good)
    assert count > 1300 and checkpoint.verify(tmp_path / "a") == []


def test_the_command_needs_no_mindspore(tmp_path):
    make(tmp_path / "a")
    code = ("import sys, runpy; sys.modules['mindspore'] = None; sys.argv = ['x', 'ckpt', 'verify', sys.argv[1], '--json'];"
            "runpy.run_module('ms_dtensor', run_name='__main__')")
    done = python("-c", code, str(tmp_path / "a"))
    assert done.returncode == 0 and json.loads(done.stdout)["sound"], done.stderr
