# SPDX-License-Identifier: Apache-2.0
"""An index of the first format, which lists every part with its place and its hashes. Pure.

Nothing writes it any more. Invariant, beside that of `checks.py`: the parts listed cover each tensor once, and each file.
"""
from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..redistribute.boxes import Box
from .checks import Checks
from .index import Chunk, Index, ListedFile, ListedTensor, Place, natural
from .plan import part_name, volume, whole_on
from .safetensors_file import CODES, DTYPES
from .spread import Ranks
from .strict_json import short

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors")


class ParserV1(Checks):
    """Checks of one file of the first format."""

    def index(self, body: dict[str, Any]) -> Index:
        """The index of a tree of version 1."""
        self.fields(body, "it", "format", "version", "library", "id", "step", "files", "tensors", "values", "tied")
        self.beginning(body)
        files = {name: self._file(name, f) for name, f in self.map(body["files"], "files").items()}
        tensors = {key: self._listed(key, t, files) for key, t in self.map(body["tensors"], "tensors").items()}
        self._check_files(files)
        return Index(body["id"], body["step"], body["library"], len(files), Ranks(()), dict(tensors),
                     *self.plain(body, tensors), 0, files)

    def _file(self, name: str, f: Any) -> ListedFile:
        if not _FILE.fullmatch(name):
            self.refuse(f"{short(name)} is no name of a file in this folder.")
        self.fields(f, f"file {name}", "size", "data", "header")
        if not all(map(natural, f.values())) or not 8 <= f["data"] <= f["size"] or f["header"] >> 32:
            self.refuse(f"the sizes of file {name} are {short(list(f.values()))}.")
        return ListedFile(f["size"], f["data"], f["header"], {})

    def _listed(self, key: str, t: Any, files: Mapping[str, ListedFile]) -> ListedTensor:
        self.fields(t, f"tensor {short(key)}", "dtype", "shape", "chunks")
        dtype, shape = self.kind(key, t)
        chunks, item = self.list(t["chunks"], f"the chunks of {short(key)}"), DTYPES[CODES[dtype]].itemsize
        found = tuple(self._chunk(key, c, dtype, shape, item, files) for c in chunks)
        if sum(volume(c.box) for c in found) != math.prod(shape) or _overlap([c.box for c in found]):
            self.refuse(f"the chunks of {short(key)} do not cover it once.")
        return ListedTensor(key, dtype, shape, whole_on(1, shape), 1, found)

    def _chunk(self, key: str, c: Any, dtype: str, shape: tuple[int, ...], itemsize: int, files: Mapping[str, ListedFile]
               ) -> Chunk:
        self.fields(c, f"a chunk of {short(key)}", "box", "file", "begin", "piece", "hashes")
        given, name, begin, piece, text = c["box"], c["file"], c["begin"], c["piece"], c["hashes"]
        if not isinstance(given, list) or len(given) != len(shape) or not all(
                isinstance(e, list) and len(e) == 2 and all(map(natural, e)) and e[0] < e[1] <= n
                for e, n in zip(given, shape)):
            self.refuse(f"a chunk of {short(key)} is the box {short(given)} of {short(list(shape))}.")
        if not isinstance(name, str) or name not in files:
            self.refuse(f"a chunk of {short(key)} is in {short(name)}, which is no file of the index.")
        box: Box = tuple((lo, hi) for lo, hi in given)
        size = itemsize * volume(box)
        if not natural(begin) or not files[name].data <= begin <= files[name].size - size:
            self.refuse(f"a chunk of {short(key)} is at byte {short(begin)} of {name}, which has {files[name].size}.")
        if not natural(piece) or piece < itemsize or piece % itemsize or not isinstance(text, str) or \
                len(text) != 16 * -(-size // piece) or not re.fullmatch("[0-9a-f]*", text):
            self.refuse(f"the hashes of a chunk of {short(key)} are not one for each piece.")
        part = part_name(key, shape, box)
        if part in files[name].places:
            self.refuse(f"a chunk of {short(key)} is in {name} twice.")
        files[name].places[part] = Place(dtype, tuple(hi - lo for lo, hi in box), begin,
                                         [int(text[i:i + 16], 16) for i in range(0, len(text), 16)])
        return Chunk(part, box, name, piece)

    def _check_files(self, files: Mapping[str, ListedFile]) -> None:
        for name, file in files.items():
            at = file.data
            for begin, end in sorted((p.begin, p.begin + math.prod(p.shape) * DTYPES[CODES[p.dtype]].itemsize)
                                     for p in file.places.values()):
                if begin != at:
                    self.refuse(f"the chunks in {name} do not cover it once: one begins at {begin}, next is {at}.")
                at = end
            if at != file.size:
                self.refuse(f"{name} has {file.size - at} bytes that are of no chunk.")


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
