# SPDX-License-Identifier: Apache-2.0
"""Pure: an index comes back as it was; whatever else is in the file is refused by name."""
from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from ms_dtensor.checkpoint.index import Chunk, FileInfo, Index, TensorInfo, dump, parse, sealed
from ms_dtensor.errors import CheckpointError

ID = "0123456789abcdef" * 2
NAME = "shard-00000-of-00001.safetensors"
INDEX = Index(ID, 7, "0.1.0", {NAME: FileInfo(64 + 24 + 4, 64, 5)}, {
    "w": TensorInfo("float32", (2, 3), (Chunk(((0, 1), (0, 3)), NAME, 64, 4, (1, 2, 3)),
                                        Chunk(((1, 2), (0, 3)), NAME, 76, 1 << 20, (4294967295,)))),
    "s": TensorInfo("float32", (), (Chunk((), NAME, 88, 4, (0,)),)), "none": TensorInfo("bfloat16", (0, 3), ())},
    {"a": 1, "b": None, "c": 0.1, "d": "ü", "e": True, "f": math.inf, "g": 10 ** 300}, {"v": "w"})


def test_an_index_comes_back():
    assert parse(dump(INDEX), "x") == INDEX
    again = parse(dump(replace(INDEX, step=None, values={"n": math.nan})), "x")
    assert again.step is None and math.isnan(again.values["n"])
    assert json.loads(dump(INDEX))["index"]["tensors"]["w"]["chunks"][1]["hashes"] == "00000000ffffffff"


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


CHUNK = ("tensors", "w", "chunks", 0)
WRONG = {
    "its format is": _set("format", "pt"), "format version 2": _set("version", 2), "its id is": _set("id", "../" + ID),
    "its step is": _set("step", -1), "does not have just format": _set("more", 1), "its 'library'": _set("library", None),
    "is no name of a file": _set("files", "../" + NAME, {"size": 8, "data": 8, "header": 0}),
    "the sizes of file": _set("files", NAME, "size", True), "bytes that are of no chunk": _set("files", NAME, "size", 93),
    "the dtype of 'w'": _set("tensors", "w", "dtype", "F99"), "the shape of 'w'": _set("tensors", "w", "shape", [2, -3]),
    "do not cover it once": _set("tensors", "w", "shape", [2, 4]), "is no map": _set("values", []),
    "the box": _set(*CHUNK, "box", [[0, 1], [0, 4]]), "is no file of the index": _set(*CHUNK, "file", "/etc/passwd"),
    "is at byte": _set(*CHUNK, "begin", 0), "is at byte 1000000": _set(*CHUNK, "begin", 10 ** 6),
    "one begins at 68": _set(*CHUNK, "begin", 68), "not one for each piece": _set(*CHUNK, "hashes", "0"),
    "hashes of a chunk": _set(*CHUNK, "piece", 0), "a chunk of 'w' does not have": _set(*CHUNK, "box", ...),
    "is tied to": _set("tied", "v", "x"), "is two things": _set("values", "w", 1), "the value of": _set("values", "a", [1]),
    "no list": _set("tensors", "w", "chunks", None), "a file in this folder": _set("files", "a\u0000.safetensors", {}),
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
