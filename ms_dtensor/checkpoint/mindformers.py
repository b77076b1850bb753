# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of MindFormers 2.1: each rank's tensors in safetensors files, and `metadata.json`, which says what is where.

As its wheel writes them: `iteration_00000010/metadata.json` has of each tensor its whole shape, into how many parts each dim
is cut, and its pieces, by number and shape: what it calls `global_offset` is one number, row by row over these parts. Of
each piece it has the files. Like every list from elsewhere it is believed as far as it fits:
names of files are names in that folder, pieces make up their tensor, files hold what they are said to.
A folder without `metadata.json`, of one device, is ordinary safetensors files. Not here: `common.json`, what the run was at.
"""
from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ..errors import CheckpointError
from .safetensors_file import CODES, DTYPES, SafetensorsFile
from .strict_json import short, strict_json

METADATA, TRACKER = "metadata.json", "latest_checkpointed_iteration.txt"
_MAX = 1 << 30  # bytes of it
_MAX_DIM = 1 << 48

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape


def folder_of(path: Path) -> Path | None:
    """The folder with `metadata.json`: this one, or the latest iteration's in it; None: it is none of MindFormers."""
    if (path / METADATA).is_file():
        return path
    try:
        latest = (path / TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    inside = path / f"iteration_{int(latest):08d}" if latest.isascii() and latest.isdigit() and len(latest) < 12 else path
    return inside if (inside / METADATA).is_file() else None


class MindFormersFolder:
    """Tensors by name; only headers have been read.

    Args:
        path: a folder with `metadata.json`.

    Attributes:
        tensors: of each its dtype, its shape, and how to read it.

    Raises:
        CheckpointError: the list is damaged, or does not fit the files.
    """

    def __init__(self, path: Path):
        self.path = path
        self._files: dict[str, SafetensorsFile] = {}
        list_of = path / METADATA
        if list_of.stat().st_size > _MAX:
            self._refuse(f"it is larger than {_MAX} bytes.")
        told = strict_json(list_of.read_bytes(), self._refuse, fractions=True)
        described, stored = told.get("state_dict_metadata"), told.get("storage_data")
        if not isinstance(described, dict) or not isinstance(stored, dict):
            self._refuse("it has no 'state_dict_metadata' and 'storage_data'.")
        self.tensors: dict[str, tuple[str, tuple[int, ...], Callable[[], np.ndarray]]] = {}
        for name, entry in described.items():
            shape, boxes = self._boxes(name, entry)
            parts = [(box, self._file_of(name, number, box[1], stored)) for number, box in boxes]
            kinds = {file.tensors[name].dtype for _, file in parts}
            if len(kinds) > 1:
                self._refuse(f"pieces of {short(name)} are of dtypes {', '.join(sorted(kinds))}.")
            kind = kinds.pop()
            self.tensors[name] = kind, shape, functools.partial(_whole, name, kind, shape, parts)

    def _refuse(self, why: str) -> NoReturn:
        raise CheckpointError(f"For '{self.path / METADATA}', this is no list of a MindFormers checkpoint: {why}", "", "",
                              "save it again, or convert the files of one rank by themselves")

    def _boxes(self, name: str, entry: Any) -> tuple[tuple[int, ...], list[tuple[int, Box]]]:
        """Shape of a tensor, and the pieces that make it up, by their numbers."""
        shape, cuts = (self._numbers(name, entry.get(key) if isinstance(entry, dict) else None)
                       for key in ("global_shape", "axis_fragmentations"))
        chunks = entry.get("chunk")
        if not isinstance(chunks, list) or not chunks or not all(isinstance(c, dict) for c in chunks):
            self._refuse(f"{short(name)} has no pieces.")
        boxes: list[tuple[int, Box]] = []
        for chunk in chunks:
            number, size = (self._numbers(name, chunk.get(key)) for key in ("global_offset", "local_shape"))
            if len(number) != 1 or len(size) != len(shape) or len(cuts) != len(shape) or number[0] >= math.prod(cuts):
                self._refuse(f"{short(name)}, cut into {list(cuts)}, has a piece {list(number)} of shape {list(size)}.")
            at, rest = [], number[0]
            for n, length in zip(reversed(cuts), reversed(size)):
                rest, place = divmod(rest, n)
                at.append(place * length)
            boxes.append((number[0], (tuple(reversed(at)), size)))
        if any(a + n > whole for _, (at, size) in boxes for a, n, whole in zip(at, size, shape)):
            self._refuse(f"a piece of {short(name)} is outside of its shape {list(shape)}.")
        if not _tile(shape, [box for _, box in boxes]):
            self._refuse(f"the pieces of {short(name)} overlap, or leave something out, of its shape {list(shape)}.")
        return shape, boxes

    def _numbers(self, name: str, given: Any) -> tuple[int, ...]:
        if not isinstance(given, list) or not all(type(n) is int and 0 <= n < _MAX_DIM for n in given) or len(given) > 32:
            self._refuse(f"{short(name)} has the shape or offset {short(given)}.")
        return tuple(given)

    def _file_of(self, name: str, number: int, size: tuple[int, ...], stored: dict) -> SafetensorsFile:
        """A file that has the piece."""
        places = stored.get(str((name, (number,))))
        if not isinstance(places, list) or not places:
            self._refuse(f"no file is said to have piece {number} of {short(name)}.")
        for place in places:
            file = place.get("file_name") if isinstance(place, dict) else None
            if not isinstance(file, str) or file != os.path.basename(file) or not file:
                self._refuse(f"it names {short(file)}, which is no name of a file in this folder.")
            file = file if file.endswith(".safetensors") else f"{file}.safetensors"
            if file not in self._files and (self.path / file).is_file():
                self._files[file] = SafetensorsFile(self.path / file)
            held = self._files[file].tensors.get(name) if file in self._files else None
            if held is not None and held.shape == size:
                return self._files[file]
        self._refuse(f"none of the files that it names has piece {number} of {short(name)}, of shape {list(size)}.")


def _tile(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether boxes cover a shape, each element once; boxes without elements count for nothing."""
    boxes = [(at, size) for at, size in boxes if math.prod(size)]
    if sum(math.prod(size) for _, size in boxes) != math.prod(shape):
        return False
    ends = [[(at[d], at[d] + size[d]) for at, size in boxes] for d in range(len(shape))]
    cuts = [sorted({0, n, *(end for pair in pairs for end in pair)}) for n, pairs in zip(shape, ends)]
    cell = [{cut: i for i, cut in enumerate(c)} for c in cuts]
    if math.prod(len(c) for c in cuts) > 1 << 24:
        return False  # no mesh cuts like this
    seen = np.zeros([len(c) - 1 for c in cuts], bool)
    for at, size in boxes:
        index: Any = (..., *(slice(cell[d][a], cell[d][a + n]) for d, (a, n) in enumerate(zip(at, size))))
        part = seen[index]
        if part.any():
            return False
        part[...] = True
    return True


def _whole(name: str, dtype: str, shape: tuple[int, ...], parts: list[tuple[Box, SafetensorsFile]]) -> np.ndarray:
    out = np.empty(shape, DTYPES[CODES[dtype]])
    for (at, size), file in parts:
        if math.prod(size):
            out[tuple(slice(a, a + n) for a, n in zip(at, size))] = file.read(name)
    return out
