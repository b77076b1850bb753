# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as MindFormers 2.1 writes them, into ours and back; those of the first format load as they did.

These are `old/v1`, made by the library of then (`old/make_v1.py`).
"""
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import ms_dtensor as md
from ms_dtensor import checkpoint
from ms_dtensor.checkpoint.cli import main
from ms_dtensor.checkpoint.index import NAME, sealed
from ms_dtensor.checkpoint.parsing import parse
from ms_dtensor.checkpoint.reader import Reader, read_index
from ms_dtensor.checkpoint.safetensors_file import SafetensorsFile, write_safetensors
from ms_dtensor.errors import CheckpointError
from tests.checkpoint.old.make_v1 import VALUES, arrays
from tests.checkpoint.test_plan import _set

RNG = np.random.default_rng(3)
WHOLE = {"decoder.qkv.weight": RNG.normal(size=(8, 6)).astype(np.float32), "decoder.norm.weight":
         RNG.normal(size=6).astype(np.float32), "adam_m.decoder.qkv.weight": RNG.normal(size=(8, 6)).astype(np.float32),
         "half": RNG.normal(size=(5, 2)).astype(np.float16), "global_step": np.array(7, np.int64)}
CUTS = {"decoder.qkv.weight": (2, 2), "adam_m.decoder.qkv.weight": (4, 1), "half": (1, 2)}  # parts of each dim


def written(root: Path, ranks: int = 4) -> Path:
    """A run's folder with one iteration, of four ranks: norms are on all of them, the rest is cut."""
    folder = root / "iteration_00000010"
    folder.mkdir(parents=True)
    described: dict = {}
    stored: dict = {}
    for rank in range(ranks):
        for kind in ("model", "opt"):
            file, held = f"{kind}-{rank:07d}-{ranks:07d}", {}
            for name, whole in WHOLE.items():
                if (kind == "opt") != (name.startswith("adam") or name == "global_step"):
                    continue
                cuts = CUTS.get(name, (1,) * whole.ndim)
                number = rank % int(np.prod(cuts))  # row by row; ranks beyond have copies
                piece = whole
                for dim, at in enumerate(np.unravel_index(number, cuts) if cuts else ()):
                    piece = np.split(piece, cuts[dim], dim)[at]
                piece = np.ascontiguousarray(piece).reshape(piece.shape)
                held[name] = whole.dtype.name, piece.shape, [piece]
                chunk = {"global_offset": [number], "local_shape": list(piece.shape)}
                entry = described.setdefault(name, {"properties": {"dtype": "Float32", "replica_id": 0},
                                                    "global_shape": list(whole.shape), "axis_fragmentations": list(cuts),
                                                    "layout": None, "chunk": []})
                if chunk not in entry["chunk"]:
                    entry["chunk"].append(chunk)
                stored.setdefault(str((name, (number,))), []).append(
                    {"file_name": f"{file}.safetensors", "storage_rank": rank, "rank_group": [rank]})
            write_safetensors(folder / f"{file}.safetensors", held)
    (folder / "metadata.json").write_text(json.dumps({"state_dict_metadata": described, "storage_data": stored}))
    (folder / "common.json").write_text("{}")
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return folder


def read(path: Path) -> dict[str, np.ndarray]:
    file = SafetensorsFile(path)
    return {name: file.read(name) for name in file.tensors}


@pytest.mark.parametrize("of", ["run", "iteration"])
def test_ranks_pieces_are_put_together(tmp_path, of):
    folder = written(tmp_path / "theirs")
    done = md.checkpoint.convert(folder if of == "iteration" else folder.parent, tmp_path / "whole.safetensors")
    assert done == {"tensors": len(WHOLE), "bytes": sum(a.nbytes for a in WHOLE.values())}
    for name, array in read(tmp_path / "whole.safetensors").items():
        assert array.dtype == WHOLE[name].dtype and array.tobytes() == WHOLE[name].tobytes(), name
    md.checkpoint.convert(folder, tmp_path / "ours", strip="decoder.")
    state = {key.removeprefix("decoder."): np.zeros_like(a) for key, a in WHOLE.items() if key.startswith("decoder.")}
    md.checkpoint.load(state, tmp_path / "ours")
    assert {f"decoder.{key}": a.tobytes() for key, a in state.items()} == {
        key: a.tobytes() for key, a in WHOLE.items() if key.startswith("decoder.")}


def test_what_is_written_for_them_is_read_back(tmp_path):
    """A folder of one file without a list, as of one device: MindFormers takes it on any mesh."""
    md.checkpoint.save({"model": dict(WHOLE)}, tmp_path / "ours")
    target = tmp_path / "iteration_00000001" / "model-0000000-0000001.safetensors"
    target.parent.mkdir()
    md.checkpoint.convert(tmp_path / "ours", target, strip="model.")
    assert {k: a.tobytes() for k, a in read(target).items()} == {k: a.tobytes() for k, a in WHOLE.items()}
    assert md.checkpoint.convert(target.parent, tmp_path / "again.safetensors")["tensors"] == len(WHOLE)


FIRST = str(("decoder.qkv.weight", (0,)))
CHANGES = {  # of a weight, of what is stored, and of the whole list
    "a piece less": lambda weight, stored, told: weight["chunk"].pop(),
    "a piece twice": lambda weight, stored, told: weight["chunk"].append(dict(weight["chunk"][0])),
    "a piece outside": lambda weight, stored, told: weight["chunk"][3].update(global_offset=[4]),
    "another shape": lambda weight, stored, told: weight.update(global_shape=[8, 7]),
    "a negative shape": lambda weight, stored, told: weight.update(global_shape=[-8, 6]),
    "pieces that overlap": lambda weight, stored, told: weight["chunk"][3].update(global_offset=[0]),
    "an offset": lambda weight, stored, told: weight["chunk"][3].update(global_offset=[4, 3]),
    "other parts": lambda weight, stored, told: weight.update(axis_fragmentations=[4, 1]),
    "parts of no dim": lambda weight, stored, told: weight.update(axis_fragmentations=[4]),
    "no parts": lambda weight, stored, told: weight.pop("axis_fragmentations"),
    "no pieces": lambda weight, stored, told: weight.update(chunk=[]),
    "no place": lambda weight, stored, told: stored.pop(FIRST),
    "a path": lambda weight, stored, told: stored[FIRST][0].update(file_name="../model-0000000-0000004.safetensors"),
    "no such file": lambda weight, stored, told: stored[FIRST][0].update(file_name="model-9.safetensors"),
    "another's file": lambda weight, stored, told: stored[FIRST][0].update(file_name="opt-0000000-0000004.safetensors"),
    "no list": lambda weight, stored, told: told.pop("storage_data"),
    "text": lambda weight, stored, told: weight.update(global_shape="8")}


@pytest.mark.parametrize("what", CHANGES)
def test_a_list_that_does_not_fit_is_refused(tmp_path, what):
    folder = written(tmp_path / "theirs")
    told = json.loads((folder / "metadata.json").read_text())
    CHANGES[what](told["state_dict_metadata"]["decoder.qkv.weight"], told["storage_data"], told)
    (folder / "metadata.json").write_text(json.dumps(told))
    for target in (tmp_path / "ours", tmp_path / "w.safetensors"):
        with pytest.raises(CheckpointError, match="no list of a MindFormers checkpoint|outside|overlap|piece"):
            md.checkpoint.convert(folder, target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["theirs"]


V1 = Path(__file__).parent / "old" / "v1"


def test_it_loads_verifies_and_is_saved_again_in_the_format_of_today(tmp_path, capsys):
    assert b'"version": 1,' in (V1 / NAME).read_bytes() and checkpoint.verify(V1) == []
    state = {key: np.zeros_like(a) for key, a in arrays().items()} | {key: None for key in VALUES}
    state["tied"] = state["rows"]
    assert checkpoint.load(state, V1).step == 7
    assert all(np.array_equal(state[key], a) for key, a in arrays().items()) and {k: state[k] for k in VALUES} == VALUES
    with Reader(V1) as reader:
        assert reader.array("columns", ((1, 3), (1, 4))).tolist() == arrays()["columns"][1:, 1:].tolist()
        assert reader.bytes_read < 100
        assert sum(c.piece for c in reader.index.tensors["large"].chunks(((400, 401), (0, 100)))) and reader.files_opened
    mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    laid = {"large": md.zeros(700, 100, device_mesh=mesh, placements=[md.Shard(1)])}
    checkpoint.load(laid, V1, strict=False)
    assert np.array_equal(laid["large"].full_tensor().asnumpy(), arrays()["large"])
    assert main(["ckpt", "ls", str(V1)]) == 0 and "f32[700, 100]" in (out := capsys.readouterr().out) and "2 files" in out
    checkpoint.convert(V1, tmp_path / "now")
    assert main(["ckpt", "diff", str(V1), str(tmp_path / "now")]) == 0 and checkpoint.verify(tmp_path / "now") == []
    assert read_index(tmp_path / "now").tied == {"tied": "rows"}


def test_each_of_its_bytes_is_still_watched_over(tmp_path):
    shutil.copytree(V1, tmp_path / "a")
    rng = np.random.default_rng(0)
    for path in sorted((tmp_path / "a").iterdir()):
        good = path.read_bytes()
        for at in (*range(0, 600, 7), *rng.integers(0, len(good), 40).tolist(), len(good) - 1):
            bad = bytearray(good)
            bad[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(bad)
            assert checkpoint.verify(tmp_path / "a"), (path.name, at)
        path.write_bytes(good[:-1])
        assert checkpoint.verify(tmp_path / "a")
        path.write_bytes(good)
    assert checkpoint.verify(tmp_path / "a") == []


A = "shard-00000-of-00002.safetensors"
CHUNK = ("tensors", "large", "chunks", 0)
WRONG = {
    "is no name of a file": _set("files", "../" + A, {"size": 8, "data": 8, "header": 0}),
    "the sizes of file": _set("files", A, "size", True), "bytes that are of no chunk": _set("files", A, "size", 141_000),
    "do not cover it once": _set("tensors", "large", "shape", [701, 100]),
    "the box": _set(*CHUNK, "box", [[0, 1], [0, 400]]),
    "is no file of the index": _set(*CHUNK, "file", "/etc/passwd"), "is at byte 0": _set(*CHUNK, "begin", 0),
    "is at byte 1000000": _set(*CHUNK, "begin", 10 ** 6), "one begins at": _set(*CHUNK, "begin", 441),
    "not one for each piece": _set(*CHUNK, "hashes", "0"), "hashes of a chunk": _set(*CHUNK, "piece", 0),
    "a chunk of 'large' does not have": _set(*CHUNK, {}), "no list": _set("tensors", "large", "chunks", None),
    "a file in this folder": _set("files", "a\u0000.safetensors", {}), "does not have just format": _set("ranks", 4),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_index_of_the_first_format_is_refused_by_name(text):
    body = json.loads((V1 / NAME).read_bytes())["index"]
    WRONG[text](body)
    with pytest.raises(CheckpointError, match=text):
        parse(sealed(json.dumps(body).encode()), "x")
