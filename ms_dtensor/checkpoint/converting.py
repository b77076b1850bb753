# SPDX-License-Identifier: Apache-2.0
"""Checkpoints into safetensors files and back, without MindSpore, one tensor in memory at a time."""
from __future__ import annotations

import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ..core.version import __version__
from ..errors import CheckpointError
from .folder import Folder, claimed, find, sync, write_synced
from .index import NAME, Index, TensorInfo, dump, file_name
from .mindformers import MindFormersFolder, folder_of
from .pieces import piece_hash, pieces
from .plan import whole_on
from .reader import Reader
from .refusals import COPYING, refusals
from .safetensors_file import CODES, DTYPES, SafetensorsFile, TensorEntry, put, write_safetensors
from .shard import sealed, texts
from .spread import Ranks

Source = Mapping[str, tuple[str, tuple[int, ...], Callable[[], np.ndarray]]]  # dtype, shape, and how to read it


def convert(source: str | os.PathLike, target: str | os.PathLike, *, dtype: str | None = None, strip: str = "",
            progress: Callable[[int], None] | None = None) -> dict[str, int]:
    """Copies a checkpoint into one safetensors file, or safetensors files into a checkpoint.

    Args:
        source: a checkpoint, a `.safetensors` file, a folder of such files, or a folder of a MindFormers 2.1 checkpoint
            (of one iteration, or the latest of a run), whose ranks' pieces are put together.
        target: a name that ends in `.safetensors`; or the folder of a checkpoint.
        dtype: what floating tensors become.
        strip: a beginning of keys, "model." say, that is left out; keys without it are not copied.
        progress: is told the number of bytes of each tensor that was written.

    Returns:
        How many tensors and bytes were written.

    Example:
        >>> import tempfile, numpy as np, ms_dtensor as md
        >>> folder = tempfile.mkdtemp()
        >>> md.checkpoint.save({"model": {"w": np.ones(3, np.float32)}, "step": 1}, folder + "/one")
        >>> md.checkpoint.convert(folder + "/one", folder + "/w.safetensors", dtype="bfloat16", strip="model.")
        {'tensors': 1, 'bytes': 6}
    """
    if dtype is not None and (not isinstance(dtype, str) or dtype not in CODES or not _floating(dtype)):
        raise CheckpointError(f"For 'convert', 'dtype' is {dtype!r}.", "", "It is the name of a floating dtype.",
                              "bfloat16, float16, float32, float64")
    with ExitStack() as stack:
        found, values, tied = _open(Path(source), stack)
        kept = {key.removeprefix(strip): entry for key, entry in found.items() if key.startswith(strip)}
        if not kept:
            raise CheckpointError(f"For 'convert', no tensor of '{source}' begins with {strip!r}.", ", ".join([*found][:5]))
        hashes: dict[str, list[int]] = {key: [] for key in kept}
        entries = {}
        for key, (name, shape, read) in kept.items():
            kind = dtype if dtype is not None and _floating(name) else name
            entries[key] = kind, shape, _stream(key, read, kind, hashes[key], progress)
        if Path(target).suffix == ".safetensors":
            placed = _write_file(Path(target), entries)
        else:
            placed = _write_checkpoint(Path(target), entries, hashes, {k.removeprefix(strip): v for k, v in values.items() if
                                                                       k.startswith(strip)}, tied, strip)
    return {"tensors": len(placed), "bytes": sum(e.end - e.begin for e in placed.values())}


def _floating(dtype: str) -> bool:
    return DTYPES[CODES[dtype]].kind in "fV"


def _stream(key: str, read: Callable[[], np.ndarray], dtype: str, hashes: list[int], progress) -> Iterator[memoryview]:
    array = read()
    if array.dtype.name != dtype:
        array = put(np.empty(array.shape, DTYPES[CODES[dtype]]), array, key)
    array = np.ascontiguousarray(array)
    yield from pieces(array, lambda piece: hashes.append(piece_hash(piece)))
    if progress is not None:
        progress(array.nbytes)


def _open(path: Path, stack: ExitStack) -> tuple[Source, dict[str, Any], dict[str, str]]:
    """Tensors, plain values and ties of a source."""
    theirs = folder_of(path) if path.is_dir() else None
    if theirs is not None:
        return MindFormersFolder(theirs).tensors, {}, {}
    if path.is_file() or path.is_dir() and not (find(path) / NAME).is_file():
        paths = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"For 'convert', '{path}' is no checkpoint and has no safetensors files.")
        found: dict[str, Any] = {}
        for file in map(SafetensorsFile, paths):
            for key, e in file.tensors.items():
                if key in found:
                    raise CheckpointError(f"For 'convert', '{key}' is in two files of '{path}'.")
                found[key] = e.dtype, e.shape, lambda file=file, key=key: file.read(key)
        return found, {}, {}
    reader = stack.enter_context(Reader(find(path)))
    index = reader.index
    return {key: (t.dtype, t.shape, lambda key=key: reader.array(key)) for key, t in index.tensors.items()}, \
        index.values, index.tied


def _write_file(target: Path, entries) -> dict[str, TensorEntry]:
    """One file, under its name when it is whole; it is made in a folder that no other export may write into."""
    aside = target.with_name(f".{target.name}.saving")
    with refusals(f"For 'convert', '{target}' cannot be written", COPYING):
        if aside.is_file():  # as an earlier version was killed
            aside.unlink()
        lock = claimed(aside, target, "convert")
        try:
            placed = write_safetensors(aside / target.name, entries, {"format": "pt"}, COPYING).tensors
            os.replace(aside / target.name, target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            os.close(lock)
        sync(target.parent)
    return placed


def _write_checkpoint(target: Path, entries, hashes, values: dict[str, Any], tied: dict[str, str], strip: str):
    folder = Folder(Path(os.path.abspath(target)))
    try:
        name, save_id = file_name(0, 1), uuid.uuid4().hex
        given = {key: entry for key, entry in entries.items() if math.prod(entry[1])}  # no file has parts without elements
        placed = {key: TensorEntry(dtype, shape, 0, 0) for key, (dtype, shape, _) in entries.items()}
        if given:
            sizes = [(shape, DTYPES[CODES[dtype]].itemsize) for dtype, shape, _ in given.values()]
            placed |= write_safetensors(folder.path / name, given, texts(save_id, name, sizes), COPYING, lambda head: sealed(
                head, {key: hashes[key] for key in given})).tensors
        tensors = {key: TensorInfo(key, e.dtype, e.shape, whole_on(1, e.shape), 1) for key, e in placed.items()}
        ties = {k.removeprefix(strip): v.removeprefix(strip) for k, v in tied.items() if v.removeprefix(strip) in tensors}
        index = Index(save_id, None, __version__, 1, Ranks.of([0] if given else []), tensors, values, ties, time.time_ns())
        with refusals(f"For 'convert', '{folder.path / NAME}' cannot be written", COPYING):
            write_synced(folder.path / NAME, dump(index))
        folder.commit()
        return placed
    except BaseException:
        folder.abandon()
        raise
