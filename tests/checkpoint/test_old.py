# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the first format load as they did: `old/v1`, made by the library of then (`old/make_v1.py`)."""
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
from ms_dtensor.errors import CheckpointError
from tests.checkpoint.old.make_v1 import VALUES, arrays
from tests.checkpoint.test_plan import _set

V1 = Path(__file__).parent / "old" / "v1"
pytestmark = pytest.mark.usefixtures("cpu")


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
