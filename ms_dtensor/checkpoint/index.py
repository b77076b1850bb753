# SPDX-License-Identifier: Apache-2.0
"""The index of a checkpoint, `index.json`: where every part of every tensor is, and the hash of every piece of it. Pure.

The file is JSON; its first line holds the digest of what follows. Whoever reads it believes nothing: types, names, boxes,
offsets and sizes are checked before any is used, and a file is named by its base name only, so that no index leads out of
its folder. Invariant: the parts in an `Index` cover each tensor once, and each file's data once.
"""
from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from ..errors import CheckpointError
from ..redistribute.boxes import Box
from .plan import volume
from .safetensors_file import CODES, DTYPES

NAME = "index.json"
FORMAT, VERSION = "ms_dtensor.checkpoint", 1
ID = "ms_dtensor.id"  # where a shard's header carries the id of its save
_OPENING = re.compile(rb'\A\{"digest": "([0-9a-f]{32})",\n"index": ')
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors")
_ID = re.compile(r"[0-9a-f]{32}")
MAX_INDEX = 1 << 30  # bytes
_DIGITS = 1000  # of the longest whole number


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor in a file: bytes from `begin` on, in pieces of `piece` bytes with a hash each (`pieces.py`)."""

    box: Box
    file: str
    begin: int
    piece: int
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a checkpoint; `dtype` is its name in a `Layout`."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[CODES[self.dtype]].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file: its size, where its data begin, and the CRC-32 of what stands before them."""

    size: int
    data: int
    header: int


@dataclass(frozen=True, slots=True)
class Index:
    """What a checkpoint holds.

    Attributes:
        id: of this save; every file's header has it.
        step: the step it was saved at, or None.
        library: version of this library.
        files: by base name.
        tensors: by key.
        values: numbers, texts, booleans and None, by key.
        tied: keys that are the same tensor as another: key -> that one's key.
    """

    id: str
    step: int | None
    library: str
    files: dict[str, FileInfo]
    tensors: dict[str, TensorInfo]
    values: dict[str, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)

    def tensor(self, key: str) -> TensorInfo | None:
        """A tensor by its key or one that is tied to it."""
        return self.tensors.get(self.tied.get(key, key))


def dump(index: Index) -> bytes:
    """An index as the file's bytes."""
    body = {
        "format": FORMAT, "version": VERSION, "library": index.library, "id": index.id, "step": index.step,
        "files": {name: {"size": f.size, "data": f.data, "header": f.header} for name, f in index.files.items()},
        "tensors": {key: {"dtype": CODES[t.dtype], "shape": list(t.shape), "chunks": [
            {"box": [list(extent) for extent in c.box], "file": c.file, "begin": c.begin, "piece": c.piece,
             "hashes": "".join(f"{h:016x}" for h in c.hashes)} for c in t.chunks]} for key, t in index.tensors.items()},
        "values": {key: _written(value) for key, value in index.values.items()}, "tied": index.tied}
    data = sealed(json.dumps(body, indent=1).encode())
    if len(data) > MAX_INDEX:
        raise CheckpointError(f"For 'save', the index would have {len(data)} bytes.", "", f"One has at most {MAX_INDEX}.",
                              "texts that are long: save them as arrays of bytes")
    return data


def sealed(body: bytes) -> bytes:
    """A file of this body and its digest."""
    return b'{"digest": "%s",\n"index": %s}\n' % (_digest(body).encode(), body)


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _written(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def parse(data: bytes, where: str) -> Index:
    """The index in these bytes.

    Args:
        data: of the file.
        where: its name in messages.

    Raises:
        CheckpointError: they are none, or do not fit together; names what is wrong.
    """
    return _Parser(where).index(data)


class _Parser:
    """Checks of one file."""

    def __init__(self, where: str):
        self.where = where

    def refuse(self, why: str) -> NoReturn:
        raise CheckpointError(f"For '{self.where}', this is no sound index: {why}", "",
                              "Nothing of a checkpoint is read before its index is right.",
                              ("load another checkpoint of the run", "python -m ms_dtensor ckpt verify FOLDER tells more"))

    def index(self, data: bytes) -> Index:
        opening = _OPENING.match(data)
        if opening is None or not data.endswith(b"}\n"):
            self.refuse("it does not begin and end as one; it may be cut off.")
        text = data[opening.end():-2]
        if _digest(text) != opening[1].decode():
            self.refuse("its digest is not that of its text: bytes of it have changed.")
        try:
            body = json.loads(text.decode("utf-8"), object_pairs_hook=self._once, parse_int=self._integer,
                              parse_constant=lambda word: self.refuse(f"it has the number {word}."))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
            self.refuse(f"it is no JSON: {type(e).__name__} {str(e)[:80]}.")
        self.fields(body, "it", "format", "version", "library", "id", "step", "files", "tensors", "values", "tied")
        if body["format"] != FORMAT or type(body["version"]) is not int:
            self.refuse(f"its format is {_short(body['format'])}, not '{FORMAT}'.")
        if body["version"] != VERSION:
            raise CheckpointError(f"For '{self.where}', the checkpoint has format version {body['version']}.",
                                  f"written by ms_dtensor {_short(body['library'])}",
                                  f"This library reads version {VERSION}.", "install a later ms_dtensor")
        if not isinstance(body["id"], str) or not _ID.fullmatch(body["id"]):
            self.refuse(f"its id is {_short(body['id'])}.")
        if not isinstance(body["library"], str):
            self.refuse("its 'library' is no text.")
        if body["step"] is not None and not _natural(body["step"]):
            self.refuse(f"its step is {_short(body['step'])}.")
        files = {name: self._file(name, f) for name, f in self.map(body["files"], "files").items()}
        tensors = {key: self._tensor(key, t, files) for key, t in self.map(body["tensors"], "tensors").items()}
        self._check_files(files, tensors)
        values = {key: self._value(key, v) for key, v in self.map(body["values"], "values").items()}
        tied = self.map(body["tied"], "tied")
        for key, target in tied.items():
            if not isinstance(target, str) or target not in tensors:
                self.refuse(f"{_short(key)} is tied to {_short(target)}, which is no tensor.")
        twice = (tensors.keys() & values.keys()) | (tensors.keys() & tied.keys()) | (values.keys() & tied.keys())
        if twice:
            self.refuse(f"{_short(min(twice))} is two things.")
        return Index(body["id"], body["step"], body["library"], files, tensors, values, tied)

    def _once(self, pairs):
        found = dict(pairs)
        if len(found) < len(pairs):
            self.refuse("a name of it is there twice.")
        return found

    def _integer(self, text: str) -> int:
        return int(text) if len(text) <= _DIGITS else self.refuse(f"it has a number of {len(text)} digits.")

    def fields(self, value: Any, what: str, *names: str) -> None:
        if not isinstance(value, dict) or set(value) != set(names):
            self.refuse(f"{what} does not have just {', '.join(names)}.")

    def map(self, value: Any, what: str) -> dict[str, Any]:
        return value if isinstance(value, dict) else self.refuse(f"its '{what}' is no map.")

    def _file(self, name: str, f: Any) -> FileInfo:
        if not _FILE.fullmatch(name):
            self.refuse(f"{_short(name)} is no name of a file in this folder.")
        self.fields(f, f"file {name}", "size", "data", "header")
        if not all(map(_natural, f.values())) or not 8 <= f["data"] <= f["size"] or f["header"] >> 32:
            self.refuse(f"the sizes of file {name} are {_short(list(f.values()))}.")
        return FileInfo(f["size"], f["data"], f["header"])

    def _tensor(self, key: str, t: Any, files: Mapping[str, FileInfo]) -> TensorInfo:
        self.fields(t, f"tensor {_short(key)}", "dtype", "shape", "chunks")
        dtype = DTYPES.get(t["dtype"]) if isinstance(t["dtype"], str) else None
        shape, chunks = t["shape"], t["chunks"]
        if dtype is None:
            self.refuse(f"the dtype of {_short(key)} is {_short(t['dtype'])}.")
        if not isinstance(shape, list) or not all(map(_natural, shape)) or len(shape) > 32 or \
                math.prod(max(n, 1) for n in shape) >= 1 << 58:
            self.refuse(f"the shape of {_short(key)} is {_short(shape)}.")
        if not isinstance(chunks, list):
            self.refuse(f"the chunks of {_short(key)} are no list.")
        found = tuple(self._chunk(key, c, shape, dtype.itemsize, files) for c in chunks)
        if sum(volume(c.box) for c in found) != math.prod(shape) or _overlap([c.box for c in found]):
            self.refuse(f"the chunks of {_short(key)} do not cover it once.")
        return TensorInfo(dtype.name, tuple(shape), found)

    def _chunk(self, key: str, c: Any, shape: list[int], itemsize: int, files: Mapping[str, FileInfo]) -> Chunk:
        self.fields(c, f"a chunk of {_short(key)}", "box", "file", "begin", "piece", "hashes")
        box, name, begin, piece, text = c["box"], c["file"], c["begin"], c["piece"], c["hashes"]
        if not isinstance(box, list) or len(box) != len(shape) or not all(
                isinstance(e, list) and len(e) == 2 and all(map(_natural, e)) and e[0] < e[1] <= n
                for e, n in zip(box, shape)):
            self.refuse(f"a chunk of {_short(key)} is the box {_short(box)} of {_short(shape)}.")
        if not isinstance(name, str) or name not in files:
            self.refuse(f"a chunk of {_short(key)} is in {_short(name)}, which is no file of the index.")
        size = itemsize * math.prod(hi - lo for lo, hi in box)
        if not _natural(begin) or not files[name].data <= begin <= files[name].size - size:
            self.refuse(f"a chunk of {_short(key)} is at byte {_short(begin)} of {name}, which has {files[name].size}.")
        if not _natural(piece) or piece < itemsize or piece % itemsize or not isinstance(text, str) or \
                len(text) != 16 * -(-size // piece) or not re.fullmatch("[0-9a-f]*", text):
            self.refuse(f"the hashes of a chunk of {_short(key)} are not one for each piece.")
        hashes = tuple(int(text[i:i + 16], 16) for i in range(0, len(text), 16))
        return Chunk(tuple((lo, hi) for lo, hi in box), name, begin, piece, hashes)

    def _check_files(self, files: Mapping[str, FileInfo], tensors: Mapping[str, TensorInfo]) -> None:
        spans: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
        for t in tensors.values():
            for c in t.chunks:
                spans[c.file].append((c.begin, c.begin + volume(c.box) * t.itemsize))
        for name, found in spans.items():
            at = files[name].data
            for begin, end in sorted(found):
                if begin != at:
                    self.refuse(f"the chunks in {name} do not cover it once: one begins at {begin}, next is {at}.")
                at = end
            if at != files[name].size:
                self.refuse(f"{name} has {files[name].size - at} bytes that are of no chunk.")

    def _value(self, key: str, value: Any) -> Any:
        if isinstance(value, dict) and set(value) == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        if isinstance(value, dict | list):
            self.refuse(f"the value of {_short(key)} is {_short(value)}.")
        return value


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62  # a bool is an int, but no number


def _overlap(boxes: list[Box]) -> bool:
    """Whether two boxes have something in common; all are within one shape and not empty."""
    if len(boxes) < 2 or not boxes[0]:
        return len(boxes) > 1
    bounds = np.array(boxes)  # [boxes, dims, 2]
    for i in range(len(boxes) - 1):
        rest = bounds[i + 1:]
        if np.all((rest[:, :, 0] < bounds[i, :, 1]) & (bounds[i, :, 0] < rest[:, :, 1]), axis=1).any():
            return True
    return False


def _short(value: Any) -> str:
    text = ascii(value[:20] if isinstance(value, list | str) else value)
    return text if len(text) <= 100 else text[:97] + "..."
