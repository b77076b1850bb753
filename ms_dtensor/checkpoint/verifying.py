# SPDX-License-Identifier: Apache-2.0
"""`verify`: everything that can be wrong with a checkpoint's files, all of it named; reads every byte. No MindSpore."""
from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError
from .folder import find
from .index import NAME, Chunk, TensorInfo
from .plan import volume
from .reader import Reader

MOST = 1000  # lines


def verify(path: str | os.PathLike, progress: Callable[[int], None] | None = None) -> list[str]:
    """What is wrong with a checkpoint's files; an empty list if nothing is. Communicates nothing; one process calls it.

    Args:
        path: the checkpoint's folder; or one with `latest` in it.
        progress: is told the number of bytes of each part that was read.

    Example:
        >>> import tempfile, numpy as np, ms_dtensor as md
        >>> folder = tempfile.mkdtemp() + "/one"
        >>> md.checkpoint.save({"w": np.ones(3)}, folder)
        >>> md.checkpoint.verify(folder)
        []
        >>> with open(folder + "/shard-00000-of-00001.safetensors", "r+b") as file:
        ...     _ = file.seek(-1, 2), file.write(b"x")
        >>> len(md.checkpoint.verify(folder))
        1
    """
    found: list[str] = []
    before = None
    while True:
        try:
            place = find(path)
        except CheckpointError as e:
            return [e.attempt]
        if before is not None and (not found or place == before):
            return found  # else a run that keeps few checkpoints has removed it while it was read
        found, before = _faults(place, progress), place


def _faults(folder: Path, progress: Callable[[int], None] | None) -> list[str]:
    try:
        reader = Reader(folder)
    except CheckpointError as e:
        return [e.attempt]
    with reader:
        index, found = reader.index, []
        try:
            names = sorted(set(os.listdir(reader.folder)) - {NAME})
        except OSError as e:  # removed since its index was read
            return [f"'{reader.folder}' cannot be listed: {e.strerror}."]
        for name in names:
            if index.rank_of(name) is None:
                found.append(f"'{reader.folder / name}' is no file of this checkpoint.")
        left = sum(tensor.nbytes for tensor in index.tensors.values())
        for name in index.file_names():
            held = list(index.in_file(name))
            left -= sum(volume(chunk.box) * tensor.itemsize for tensor, chunk in held)
            found += _in_file(reader, name, held, progress)
            if len(found) >= MOST:
                return [*found[:MOST], f"'{reader.folder}' has more faults; these are the first {MOST}."]
        if left:
            found.append(f"'{reader.folder / NAME}' does not name the files of {left} bytes of its tensors.")
    return found


def _in_file(reader: Reader, name: str, held: list[tuple[TensorInfo, Chunk]], progress: Callable[[int], None] | None
             ) -> list[str]:
    found = []
    try:
        with reader.file(name) as shard:
            if shard.places.keys() != {chunk.name for _, chunk in held}:
                raise shard.damaged("its header does not tell what the index tells.")
            for tensor, chunk in held:
                try:
                    reader.check(shard, tensor, chunk)
                except CheckpointError as e:
                    found.append(e.attempt)
                if progress is not None:
                    progress(volume(chunk.box) * tensor.itemsize)
    except CheckpointError as e:
        found.append(e.attempt)
    return found
