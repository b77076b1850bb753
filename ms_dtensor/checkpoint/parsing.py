# SPDX-License-Identifier: Apache-2.0
"""An index that is read: of today's format here, of the first in `parsing_v1.py`. Pure.

Invariant: what leaves here fits together; see `checks.py`.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .checks import Checks
from .index import VERSION, Index, TensorInfo, natural
from .parsing_v1 import ParserV1
from .spread import Cut, Mesh, Ranks, Spread
from .strict_json import short

MAX_RANKS = 1 << 20


def parse(data: bytes, where: str) -> Index:
    """The index in these bytes.

    Args:
        data: of the file.
        where: its name in messages.

    Raises:
        CheckpointError: they are none, or do not fit together; names what is wrong.
    """
    body = Checks(where).opened(data)
    if body["version"] == 1:
        return ParserV1(where).index(body)
    if body["version"] != VERSION:
        raise CheckpointError(f"For '{where}', the checkpoint has format version {body['version']}.",
                              f"written by ms_dtensor {short(body.get('library'))}",
                              f"This library reads versions 1 and {VERSION}.", "install a later ms_dtensor")
    return Parser(where).index(body)


class Parser(Checks):
    """Checks of one file of today's format."""

    def __init__(self, where: str):
        super().__init__(where)
        self._covered: set[tuple[int, int, int]] = set()

    def index(self, body: dict[str, Any]) -> Index:
        """The index of a tree of version 2."""
        self.fields(body, "it", "format", "version", "library", "id", "step", "saved", "ranks", "files", "meshes", "cuts",
                    "tensors", "values", "tied")
        self.beginning(body)
        if not natural(body["saved"]):
            self.refuse(f"its time is {short(body['saved'])}.")
        ranks = body["ranks"]
        if not natural(ranks) or not 1 <= ranks <= MAX_RANKS:
            self.refuse(f"it is of {short(ranks)} ranks; of 1 to {MAX_RANKS} can be read.")
        files = self._ranks(body["files"], "its files", ranks)
        meshes = [self._mesh(mesh, ranks) for mesh in self.list(body["meshes"], "its meshes")]
        cuts = [self._cut(cut) for cut in self.list(body["cuts"], "its cuts")]
        tensors = {key: self._tensor(key, t, meshes, cuts, ranks) for key, t in self.map(body["tensors"], "tensors").items()}
        return Index(body["id"], body["step"], body["library"], ranks, files, tensors, *self.plain(body, tensors),
                     body["saved"])

    def _ranks(self, value: Any, what: str, ranks: int) -> Ranks:
        """Ranks of the job, each once; as runs, so that no more is allocated than is there."""
        runs, seen = [], np.zeros(ranks, np.bool_)
        for run in self.list(value, what):
            if not isinstance(run, list) or len(run) != 3 or not all(map(natural, run)) or not run[1] or not run[2] or \
                    run[0] + (run[1] - 1) * run[2] >= ranks:
                self.refuse(f"{what} are the ranks {short(run)}, of {ranks}.")
            runs.append(tuple(run))
            held = seen[run[0]:run[0] + run[1] * run[2]:run[2]]
            if held.any():
                self.refuse(f"{what} name a rank twice.")
            held[:] = True
        return Ranks(tuple(runs))

    def _mesh(self, mesh: Any, ranks: int) -> Mesh:
        self.fields(mesh, "a mesh", "shape", "ranks")
        shape, found = mesh["shape"], self._ranks(mesh["ranks"], "a mesh's ranks", ranks)
        if not isinstance(shape, list) or not all(map(natural, shape)) or len(shape) > 32 or math.prod(shape) != len(found):
            self.refuse(f"a mesh of {len(found)} ranks has the shape {short(shape)}.")
        return Mesh(tuple(shape), found)

    def _cut(self, cut: Any) -> Cut:
        self.fields(cut, "a cut", "axes", *(("runs",) if isinstance(cut, dict) and "runs" in cut else ()))
        axes = cut["axes"]
        if not isinstance(axes, list) or not all(map(natural, axes)) or len(set(axes)) < len(axes):
            self.refuse(f"the axes of a cut are {short(axes)}.")
        if "runs" not in cut:
            return Cut(tuple(axes))
        for runs in self.list(cut["runs"], "the runs of a cut"):
            for run in self.list(runs, "the runs of a rank"):
                if not isinstance(run, list) or len(run) != 2 or not all(map(natural, run)) or run[0] >= run[1]:
                    self.refuse(f"a run of a cut is {short(run)}.")
        return Cut(tuple(axes), tuple(tuple((lo, hi) for lo, hi in runs) for runs in cut["runs"]))

    def _tensor(self, key: str, t: Any, meshes: Sequence[Mesh], cuts: Sequence[Cut], ranks: int) -> TensorInfo:
        self.fields(t, f"tensor {short(key)}", "dtype", "shape", "mesh", "cuts", "copy")
        dtype, shape = self.kind(key, t)
        mesh, given, copy = t["mesh"], t["cuts"], t["copy"]
        if not natural(mesh) or mesh >= len(meshes):
            self.refuse(f"the mesh of {short(key)} is {short(mesh)} of {len(meshes)}.")
        if not isinstance(given, list) or len(given) != len(shape) or not all(natural(c) and c < len(cuts) for c in given):
            self.refuse(f"the cuts of {short(key)} are {short(given)}, not one of {len(cuts)} for each dim.")
        spread = Spread(meshes[mesh], tuple(cuts[c] for c in given))
        axes = [a for cut in spread.cuts for a in cut.axes]
        if len(set(axes)) < len(axes) or any(a >= len(spread.mesh.shape) for a in axes):
            self.refuse(f"the axes that cut {short(key)} are {short(axes)}, of a mesh of {len(spread.mesh.shape)}.")
        for cut, size in zip(spread.cuts, shape):
            if cut.runs is not None and (id(cut), size, mesh) not in self._covered:  # long, and many tensors have them
                if not _cover(cut, size, spread.mesh.shape):
                    self.refuse(f"the runs of {short(key)} do not cover it once.")
                self._covered.add((id(cut), size, mesh))
        if not isinstance(copy, list) or len(copy) != 2 or not all(map(natural, copy)) or \
                not copy[0] < spread.copies or not 1 <= copy[1] <= spread.copies:
            self.refuse(f"the copy of {short(key)} is {short(copy)} of {spread.copies}.")
        return TensorInfo(key, dtype, shape, Spread(spread.mesh, spread.cuts, *copy), ranks)


def _cover(cut: Cut, size: int, shape: Sequence[int]) -> bool:
    """Whether the runs of a cut are one for each place, and cover a dim of this size once."""
    assert cut.runs is not None
    at = 0
    for lo, hi in sorted(run for runs in cut.runs for run in runs):
        if lo != at:
            return False
        at = hi
    return at == size and len(cut.runs) == math.prod(shape[a] for a in cut.axes)
