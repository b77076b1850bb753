# SPDX-License-Identifier: Apache-2.0
"""`verify`: everything that can be wrong with a checkpoint's files, all of it named; reads every byte. No MindSpore."""
from __future__ import annotations

import os
from collections.abc import Callable

from ..errors import CheckpointError
from .folder import find
from .index import NAME
from .plan import volume
from .reader import Reader


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
    try:
        reader = Reader(find(path))
    except CheckpointError as e:
        return [e.attempt]
    with reader:
        index, found = reader.index, []
        for name in sorted(set(os.listdir(reader.folder)) - {NAME, *index.files}):
            found.append(f"'{reader.folder / name}' is no file of this checkpoint.")
        bad = set()
        for name in index.files:
            try:
                reader.check_file(name)
            except CheckpointError as e:
                bad.add(name)
                found.append(e.attempt)
        for key, tensor in index.tensors.items():
            for chunk in tensor.chunks:
                if chunk.file not in bad:
                    try:
                        reader.check(key, tensor, chunk)
                    except CheckpointError as e:
                        found.append(e.attempt)
                if progress is not None:
                    progress(volume(chunk.box) * tensor.itemsize)
    return found
