# SPDX-License-Identifier: Apache-2.0
"""One rank's file: its parts of tensors as a safetensors file, hashed as they are written.

The file is an ordinary one: any program that reads safetensors reads it, parts by their names. Not here: which parts, and
where the folder is.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .index import ID, Chunk, FileInfo, TensorInfo
from .pieces import crc, piece_hash, piece_size, pieces, view
from .plan import Part, part_name, within
from .safetensors_file import write_safetensors
from .state import Leaf

Written = dict[str, Any]  # what a rank tells of its file; can be sent


def file_name(rank: int, size: int) -> str:
    """The name of a rank's file."""
    return f"shard-{rank:05d}-of-{size:05d}.safetensors"


def array_of(part: Part, leaves: Mapping[str, Leaf]) -> np.ndarray:
    """The values of a part that is here; a view where that can be."""
    leaf = leaves[part.key]
    return view(leaf.array(), within(part.box, leaf.pieces))


def write(path: Path, parts: Sequence[Part], leaves: Mapping[str, Leaf], values: Callable[[Part], np.ndarray], save_id: str
          ) -> Written:
    """Writes a rank's file and has it on the disk.

    Args:
        path: the file.
        parts: what goes into it.
        leaves: their tensors by key.
        values: gives a part's array, when its turn has come.
        save_id: goes into the file's header.

    Returns:
        What the index needs to know of it.
    """
    hashes: list[list[Future | int]] = [[] for _ in parts]
    names = [part_name(part.key, leaves[part.key].shape, part.box) for part in parts]
    twice = sorted(n for n in names if names.count(n) > 1) if len(set(names)) < len(names) else ()
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
        done = write_safetensors(path, entries, {ID: save_id})
    return {"file": path.name, "size": done.size, "data": len(done.head), "header": crc(done.head),
            "begin": [done.tensors[name].begin for name in names],
            "hashes": [[h if isinstance(h, int) else h.result() for h in noted] for noted in hashes]}


def merged(plan: Mapping[int, Sequence[Part]], written: Sequence[Written | None], leaves: Mapping[str, Leaf]
           ) -> tuple[dict[str, FileInfo], dict[str, TensorInfo]]:
    """Files and tensors of the index, from what all ranks told."""
    files: dict[str, FileInfo] = {}
    chunks: dict[str, list[Chunk]] = {key: [] for key in leaves}
    for rank, told in enumerate(written):
        if told is None:
            continue
        files[told["file"]] = FileInfo(told["size"], told["data"], told["header"])
        for part, begin, hashes in zip(plan[rank], told["begin"], told["hashes"], strict=True):
            leaf = leaves[part.key]
            size = piece_size([hi - lo for lo, hi in part.box], leaf.itemsize)
            chunks[part.key].append(Chunk(part.box, told["file"], begin, size, tuple(hashes)))
    return files, {key: TensorInfo(leaf.dtype, leaf.shape, tuple(sorted(chunks[key], key=lambda c: c.box)))
                   for key, leaf in leaves.items()}
