# SPDX-License-Identifier: Apache-2.0
"""One rank's file: its parts of tensors as a safetensors file, hashed as they are written.

The file is an ordinary one: any program that reads safetensors reads it, parts by their names. Not here: which parts, and
where the folder is.
"""
from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import CheckpointError
from .pieces import piece_hash, pieces, view
from .plan import Part, part_name, within
from .safetensors_file import write_safetensors
from .shard import sealed, texts

if TYPE_CHECKING:
    from .state import Leaf  # which needs MindSpore


def array_of(part: Part, leaves: Mapping[str, Leaf]) -> np.ndarray:
    """The values of a part that is here; a view where that can be."""
    leaf = leaves[part.key]
    return view(leaf.array(), within(part.box, leaf.pieces))


def write(path: Path, parts: Sequence[Part], leaves: Mapping[str, Leaf], values: Callable[[Part], np.ndarray], save_id: str
          ) -> None:
    """Writes a rank's file and has it on the disk.

    Args:
        path: the file.
        parts: what goes into it.
        leaves: their tensors by key, with dtype and shape.
        values: gives a part's array, when its turn has come.
        save_id: goes into the file's header.
    """
    hashes: list[list[Future | int]] = [[] for _ in parts]
    names = [part_name(part.key, leaves[part.key].shape, part.box) for part in parts]
    twice = [n for n, count in Counter(names).items() if count > 1]
    if twice:
        raise CheckpointError(f"For 'save', two things would be called '{twice[0]}' in a file.", "",
                              "A part's name is its tensor's, with the box where it is not all of it.", "rename one of them")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    with ThreadPoolExecutor(1) as thread:
        def note(noted: list, piece: memoryview) -> None:  # hashed while it is written, where there is a core for that
            noted.append(thread.submit(piece_hash, piece) if cores > 1 and len(piece) > 1 << 16 else piece_hash(piece))

        def stream(part: Part, noted: list) -> Iterator[memoryview]:
            yield from pieces(values(part), partial(note, noted))

        entries = {name: (leaves[part.key].dtype, tuple(hi - lo for lo, hi in part.box), stream(part, noted))
                   for name, part, noted in zip(names, parts, hashes)}
        sizes = [(shape, leaves[part.key].itemsize) for part, (_, shape, _) in zip(parts, entries.values())]
        write_safetensors(path, entries, texts(save_id, path.name, sizes), seal=lambda head: sealed(
            head, {name: [h if isinstance(h, int) else h.result() for h in noted] for name, noted in zip(names, hashes)}))
