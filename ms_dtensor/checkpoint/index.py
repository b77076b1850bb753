# SPDX-License-Identifier: Apache-2.0
"""The index of a checkpoint, `index.json`: what tensors there are, and by which formula their parts lie in files. Pure.

It grows with the number of tensors and of meshes, not of ranks: where a part is follows from the mesh and from how dims are
cut (`spread.py`); hashes are in the shards' headers (`shard.py`). The file is JSON; its first line holds the digest of what
follows. Invariant: the parts that follow from an `Index` cover each tensor once. Not here: reading one (`parsing.py`).
"""
from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..redistribute.boxes import Box
from .pieces import piece_size
from .plan import common, part_name
from .safetensors_file import CODES, DTYPES
from .spread import Cut, Mesh, Ranks, Spread

NAME = "index.json"
FORMAT, VERSION = "ms_dtensor.checkpoint", 2
MAX_INDEX = 1 << 30  # bytes
_FILE = re.compile(r"shard-([0-9]{5,7})-of-[0-9]{5,7}\.safetensors")


def file_name(rank: int, ranks: int) -> str:
    """The name of a rank's file."""
    return f"shard-{rank:05d}-of-{ranks:05d}.safetensors"


class Chunk(NamedTuple):
    """A part of a tensor in a file, of which each so many bytes have a hash of their own."""

    name: str
    box: Box
    file: str
    piece: int


class Place(NamedTuple):
    """Where a part is in its file, as the file's header tells (in the first format: as the index tells)."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    hashes: Sequence[int]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint; `dtype` is its name in a `Layout`."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    spread: Spread
    ranks: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[CODES[self.dtype]].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.itemsize

    def chunks(self, wanted: Box | None = None) -> Iterator[Chunk]:
        """The parts that have something of a box, or all."""
        return (self._chunk(box, rank) for box, rank in self.spread.boxes(self.shape, wanted))

    def in_file(self, name: str, rank: int) -> Sequence[Chunk]:
        """The parts in a file, which a rank wrote."""
        return [self._chunk(box, rank) for box in self.spread.written_by(rank, self.shape)]

    def count(self) -> int:
        """How many parts there are."""
        return self.spread.count(self.shape)

    def _chunk(self, box: Box, rank: int) -> Chunk:
        size = piece_size([hi - lo for lo, hi in box], self.itemsize)
        return Chunk(part_name(self.key, self.shape, box), box, file_name(rank, self.ranks), size)


@dataclass(frozen=True)
class ListedTensor(TensorInfo):
    """One of the first format, whose parts are a list; its spread tells nothing."""

    listed: tuple[Chunk, ...] = ()

    def chunks(self, wanted: Box | None = None) -> Iterator[Chunk]:
        return (c for c in self.listed if wanted is None or common(c.box, wanted) is not None)

    def in_file(self, name: str, rank: int) -> Sequence[Chunk]:
        return [c for c in self.listed if c.file == name]

    def count(self) -> int:
        return len(self.listed)


class ListedFile(NamedTuple):
    """A file of the first format: its size, where its data begin, the CRC-32 of what stands before, and what it holds."""

    size: int
    data: int
    header: int
    places: dict[str, Place]


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds.

    Attributes:
        id: of this save; every file's header has it.
        step: the step it was saved at, or None.
        library: version of this library.
        ranks: how many the job had.
        files: those that wrote a file.
        tensors: by key.
        values: numbers, texts, booleans and None, by key.
        tied: keys that are the same tensor as another: key -> that one's key.
        saved: when, in nanoseconds; see `folder.saved_at`.
        listed: files by base name, in the first format; else None.
    """

    id: str
    step: int | None
    library: str
    ranks: int
    files: Ranks
    tensors: dict[str, TensorInfo]
    values: dict[str, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    saved: int = 0
    listed: dict[str, ListedFile] | None = None

    def tensor(self, key: str) -> TensorInfo | None:
        """A tensor by its key or one that is tied to it."""
        return self.tensors.get(self.tied.get(key, key))

    def file_names(self) -> Iterator[str]:
        """The files."""
        return (file_name(rank, self.ranks) for rank in self.files) if self.listed is None else iter(self.listed)

    def file_count(self) -> int:
        """How many there are."""
        return len(self.files) if self.listed is None else len(self.listed)

    def rank_of(self, name: str) -> int | None:
        """Which rank wrote a file, None if none did."""
        found = _FILE.fullmatch(name)
        rank = -1 if found is None else int(found[1])
        known = self.files.find(rank) is not None and name == file_name(rank, self.ranks) if self.listed is None else \
            name in self.listed
        return rank if known else None

    def in_file(self, name: str) -> Iterator[tuple[TensorInfo, Chunk]]:
        """What is in a file."""
        rank = self.rank_of(name)
        return ((t, c) for t in self.tensors.values() for c in (() if rank is None else t.in_file(name, rank)))


def dump(index: Index) -> bytes:
    """An index as the file's bytes, one tensor a line."""
    meshes: dict[Mesh, int] = {}
    cuts: dict[Cut, int] = {}
    tensors = {key: {"dtype": CODES[t.dtype], "shape": t.shape, "mesh": meshes.setdefault(t.spread.mesh, len(meshes)),
                     "cuts": [cuts.setdefault(cut, len(cuts)) for cut in t.spread.cuts],
                     "copy": [t.spread.first, t.spread.parts]} for key, t in index.tensors.items()}
    body = {"format": FORMAT, "version": VERSION, "library": index.library, "id": index.id, "step": index.step,
            "saved": index.saved, "ranks": index.ranks, "files": index.files.runs,
            "meshes": [{"shape": mesh.shape, "ranks": mesh.ranks.runs} for mesh in meshes],
            "cuts": [{"axes": cut.axes} | ({} if cut.runs is None else {"runs": cut.runs}) for cut in cuts],
            "tensors": tensors, "values": {key: _written(value) for key, value in index.values.items()}, "tied": index.tied}
    lines = ",\n".join(f"{json.dumps(name)}: {_lines(part)}" for name, part in body.items())
    data = sealed(f"{{{lines}}}".encode())
    if len(data) > MAX_INDEX:
        raise CheckpointError(f"For 'save', the index would have {len(data)} bytes.", "", f"One has at most {MAX_INDEX}.",
                              "texts that are long: save them as arrays of bytes")
    return data


def _lines(part: Any) -> str:
    if isinstance(part, dict) and part:
        return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in part.items()) + "}"
    return json.dumps(part)


def sealed(body: bytes) -> bytes:
    """A file of this body and its digest."""
    return b'{"digest": "%s",\n"index": %s}\n' % (digest(body).encode(), body)


def digest(body: bytes) -> str:
    """What tells that bytes have changed."""
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _written(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def natural(value: Any) -> bool:
    """Whether something is a whole number that an offset could be."""
    return type(value) is int and 0 <= value < 1 << 62  # a bool is an int, but no number
