# SPDX-License-Identifier: Apache-2.0
"""Pure: an index comes back as it was; whatever else is in the file is refused by name."""
from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from ms_dtensor.checkpoint.index import Index, TensorInfo, dump, sealed
from ms_dtensor.checkpoint.parsing import parse
from ms_dtensor.checkpoint.spread import Cut, Mesh, Ranks, Spread
from ms_dtensor.errors import CheckpointError

ID = "0123456789abcdef" * 2
MESH = Mesh((2, 2), Ranks.of([3, 1, 0, 2]))
TOLD = Cut((0,), (((0, 1), (4, 6)), ((1, 4),)))
INDEX = Index(ID, 7, "0.1.0", 4, Ranks.of([0, 1, 2, 3]), {
    "w": TensorInfo("w", "float32", (6, 3), Spread(MESH, (TOLD, Cut()), 1, 2), 4),
    "s": TensorInfo("s", "float32", (), Spread(MESH, (), 3), 4),
    "both": TensorInfo("both", "int8", (5, 9), Spread(MESH, (Cut(), Cut((1, 0)))), 4),
    "none": TensorInfo("none", "bfloat16", (0, 3), Spread(MESH, (Cut((1,)), Cut())), 4)},
    {"a": 1, "b": None, "c": 0.1, "d": "ü", "e": True, "f": math.inf, "g": 10 ** 300}, {"v": "w"}, 12345)


def test_an_index_comes_back():
    assert parse(dump(INDEX), "x") == INDEX
    again = parse(dump(replace(INDEX, step=None, values={"n": math.nan})), "x")
    assert again.step is None and math.isnan(again.values["n"])
    assert json.loads(dump(INDEX))["index"]["tensors"]["w"] == {
        "dtype": "F32", "shape": [6, 3], "mesh": 0, "cuts": [0, 1], "copy": [1, 2]}


def _changed(change):
    body = json.loads(dump(INDEX))["index"]
    change(body)
    return sealed(json.dumps(body).encode())


def _set(*path):
    *path, last, value = path

    def change(body):
        for name in path:
            body = body[name]
        if value is ...:
            del body[last]
        else:
            body[last] = value
    return change


W, RUNS = ("tensors", "w"), ("cuts", 0, "runs")
WRONG = {
    "its format is": _set("format", "pt"), "format version 3": _set("version", 3), "its id is": _set("id", "../" + ID),
    "its step is": _set("step", -1), "does not have just format": _set("more", 1), "its 'library'": _set("library", None),
    "its time is": _set("saved", 1.5), "it is of 0 ranks": _set("ranks", 0),
    "it is of 1048577 ranks": _set("ranks", 2 ** 20 + 1),
    r"its files are the ranks \[0, 5, 1\], of 4": _set("files", [[0, 5, 1]]), "its files name a rank twice": _set(
        "files", [[0, 4, 1], [2, 1, 1]]), "its files are 5, no list": _set("files", 5),
    "its files are the ranks .*, of 4": _set("files", [[0, 2 ** 61, 1]]),
    "the ranks \\[0, 2, 0\\]": _set("meshes", 0, "ranks", [[0, 2, 0]]),
    "a mesh of 4 ranks has the shape": _set("meshes", 0, "shape", [2, 3]),
    "a mesh does not have just": _set("meshes", 0, {}),
    "its meshes are": _set("meshes", None), "a cut does not have just axes": _set("cuts", 0, {"axes": [], "x": 1}),
    "the axes of a cut are": _set("cuts", 0, "axes", [0, 0]), "a run of a cut is": _set(*RUNS, [[[0, 0]], [[0, 6]]]),
    "the runs of 'w' do not cover it once": _set(*RUNS, [[[0, 1]], [[2, 6]]]),
    "runs of 'w' do not cover it": _set(*RUNS, [[[0, 6]], [[2, 3]]]), "the runs of 'w' do": _set(*RUNS, [[[0, 6]]]),
    "the runs of a rank are": _set(*RUNS, [5]), "of 'w' do not cover it once": _set(*W, "shape", [7, 3]),
    "the dtype of 'w'": _set(*W, "dtype", "F99"), "the shape of 'w'": _set(*W, "shape", [2, -3]),
    "the mesh of 'w' is 1 of 1": _set(*W, "mesh", 1), "the cuts of 'w' are": _set(*W, "cuts", [0]),
    "the cuts of 'w' are \\[0, 9\\]": _set(*W, "cuts", [0, 9]), "the axes that cut 'w' are": _set(*W, "cuts", [0, 0]),
    "the axes that cut 'w' are .*, of a mesh of 2": _set("cuts", 1, "axes", [2]),
    "the copy of 'w' is": _set(*W, "copy", [2, 1]), "the copy of 'w' is \\[0, 3\\] of 2": _set(*W, "copy", [0, 3]),
    "tensor 'w' does not have just": _set(*W, "mesh", ...), "its 'values' is no map": _set("values", []),
    "is tied to": _set("tied", "v", "x"), "is two things": _set("values", "w", 1), "the value of": _set("values", "a", [1]),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_index_is_refused_by_name(text):
    with pytest.raises(CheckpointError, match=text):
        parse(_changed(WRONG[text]), "x")


def test_bytes_that_are_no_index_are_refused():
    good = dump(INDEX)
    nested = sealed(b"[" * 100_000 + b"]" * 100_000)
    twice = sealed(b'{"a": 1, "a": 2}')
    long = sealed(b'{"a": ' + b"9" * 5000 + b"}")
    for data in (b"", good[:-1], good[1:], good + b" ", good.replace(b'"w"', b'"x"', 1), nested, twice, long,
                 sealed(b"\xff"), sealed(b"{"), sealed(b'{"a": NaN}'), sealed(b"[]")):
        with pytest.raises(CheckpointError, match="no sound index"):
            parse(data, "x")
