# SPDX-License-Identifier: Apache-2.0
"""`load`: from any checkpoint into any program, in place; each rank reads what its shards need and no more.

Everything is compared before anything is written: names, shapes, dtypes. Ranks communicate to agree that all may go on, and
again when all are done; no data travel.
"""
from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..comm.group import Group
from ..comm.pretended import needs_data
from ..core.mesh import DeviceMesh
from ..errors import CheckpointError
from .background import wait
from .folder import find
from .index import Index, TensorInfo
from .pieces import view
from .plan import within
from .ranks import all_ranks, folder_of, gathered, rank_of, together, unlike
from .reader import Reader
from .safetensors_file import CODES, DTYPES
from .state import Leaf, State, key_order
from .strict_json import short
from .whole import pipeline_axis

KeyMap = Mapping[str, str] | Callable[[str], str]


class Loaded(NamedTuple):
    """What a load did.

    Attributes:
        path: the checkpoint.
        step: its step, or None.
        missing: keys of the state that the checkpoint lacks; they are as they were.
        unused: keys of the checkpoint that the state lacks.

    Example:
        >>> import tempfile, ms_dtensor as md
        >>> root = tempfile.mkdtemp()
        >>> md.checkpoint.save({"a": 1, "b": 2}, root, step=5)
        >>> done = md.checkpoint.load({"a": 0, "c": 0}, root, strict=False)
        >>> done.step, done.missing, done.unused
        (5, ('c',), ('b',))
    """

    path: Path
    step: int | None
    missing: tuple[str, ...]
    unused: tuple[str, ...]


def load(state: Any, path: str | os.PathLike, *, strict: bool = True, key_map: KeyMap | None = None,
         cast: bool = False, over: DeviceMesh | None = None) -> Loaded:
    """Loads a checkpoint into a program's state, in place; every rank of the job calls it.

    Args:
        state: as for `save`, with tensors of the wanted layouts, on any mesh or none: their values are overwritten, they
            stay the same objects. Numbers and texts in dicts and lists are replaced.
        path: the checkpoint's folder; or one with `latest` in it.
        strict: False: keys that only the state, or only the checkpoint, has are passed over, and returned.
        key_map: from keys of the state to keys of the checkpoint, a dict or a function; keys not in the dict are the same.
        cast: convert dtypes where they differ, among floating and among whole numbers.
        over: as for `save`: each rank's state has the keys of its stages, and all stages' together are compared.

    Returns:
        The checkpoint's step, and the keys that were passed over.

    Raises:
        CheckpointError: on all ranks the same: no or a damaged checkpoint, keys, shapes or dtypes that do not fit. If a
            hash is wrong, or `cast` meets a value that the other dtype has none for (300 as int8, 1e10 as float16),
            tensors may have been written already.

    Example:
        >>> import tempfile, numpy as np, ms_dtensor as md
        >>> folder = tempfile.mkdtemp() + "/one"
        >>> md.checkpoint.save({"w": np.ones(2, np.float32), "b": np.zeros(2), "step": 7}, folder)
        >>> state = {"weight": np.zeros(2, np.float64), "step": 0}
        >>> done = md.checkpoint.load(state, folder, strict=False, key_map={"weight": "w"}, cast=True)
        >>> state["weight"].tolist(), state["step"], done.unused
        ([1.0, 1.0], 7, ('b',))
    """
    needs_data("load")
    wait()
    group = all_ranks()
    folder, name = _place(group, path, over)
    while True:
        try:
            return _loaded(group, state, folder / name, strict, key_map, cast, over)
        except CheckpointError:  # the same on all ranks
            before, (_, name) = name, _place(group, path, over)
            if name == before:
                raise  # else a run that keeps few checkpoints has removed it while it was read


def _place(group: Group | None, path: Any, over: DeviceMesh | None) -> tuple[Path, str]:
    """The folder that the user named, and which checkpoint in it: of `latest` the first rank decides for all."""
    def here() -> tuple[Path, str]:
        folder = folder_of(path, "load")
        pipeline_axis(over, "load")
        return folder, os.path.relpath(find(folder), folder) if rank_of(group) == 0 else ""
    folder, name = together(group, "load", here)
    told_of = gathered(group, [name, over.describe() if over else "None"])
    if len({axis for _, axis in told_of}) > 1:
        raise CheckpointError("For 'load', the ranks' arguments differ: over.", "; ".join(
            f"rank {rank} {axis}" for rank, (_, axis) in enumerate(told_of[:4])),
            "All ranks load one checkpoint together.", "give each rank the same arguments")
    return folder, told_of[0][0]


def _loaded(group: Group | None, state: Any, folder: Path, strict: bool, key_map: KeyMap | None, cast: bool,
            over: DeviceMesh | None) -> Loaded:
    held, reader, found = together(group, "load", partial(_compared, state, folder, strict, key_map, cast, over is not None))
    with reader:
        if group is not None and over is not None:
            found = _of_all_stages(over.get_group(), found)
            together(group, "load", partial(_complete, found, str(reader.folder), strict))
        _agree(group, reader, found, bool(cast))
        together(group, "load", partial(_read, held, reader, found.tensors))
        together(group, "load", partial(held.restore, found.values))
    return Loaded(reader.folder, reader.index.step, found.missing, found.unused)


class _Found(NamedTuple):
    tensors: dict[str, TensorInfo]  # by key of the state
    values: dict[str, Any]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


def _of_all_stages(over: Group, found: _Found) -> _Found:
    """What any stage misses, and what none asks for."""
    told_of = over.all_gather_object((list(found.missing), list(found.unused)))
    missing = set().union(*(stage for stage, _ in told_of))
    unused = set(found.unused).intersection(*(stage for _, stage in told_of))
    return found._replace(missing=tuple(sorted(missing, key=key_order)),
                          unused=tuple(key for key in found.unused if key in unused))


def _agree(group: Group | None, reader: Reader, found: _Found, cast: bool) -> None:
    """All ranks load the same of one checkpoint; it may be a copy on each node's own disk."""
    bad = unlike(group, {"checkpoint": f"{reader.index.id}, step {reader.index.step}", "cast": str(cast),
                         "missing": ", ".join(found.missing), "unused": ", ".join(found.unused)})
    if bad:
        raise CheckpointError(f"For 'load', the ranks do not load the same: {', '.join(bad)}.", "\n".join(bad.values()),
                              "All ranks load one checkpoint together.", "give each rank the same state and arguments")


def _compared(state: Any, folder: Path, strict: bool, key_map: KeyMap | None, cast: bool, a_stage: bool = False
              ) -> tuple[State, Reader, _Found]:
    if key_map is not None and not isinstance(key_map, Mapping) and not callable(key_map):
        raise CheckpointError(f"For 'load', 'key_map' is {key_map!r}.", "", "It is a dict, or a function, from keys of the "
                              "state to keys of the checkpoint.", "load(..., key_map={here: there})")
    held = State(state, "load")
    reader = Reader(Path(os.path.normpath(folder)))
    try:
        found = _match(held, reader.index, str(reader.folder), strict, key_map, cast)
        if not (a_stage and all_ranks()):  # else what all stages have counts
            _complete(found, str(reader.folder), strict)
        return held, reader, found
    except BaseException:
        reader.close()
        raise


def _match(held: State, index: Index, where: str, strict: bool, key_map: KeyMap | None, cast: bool) -> _Found:
    name: Callable[[str], str] = (lambda key: key) if key_map is None else \
        key_map if callable(key_map) else lambda key: key_map.get(key, key)
    names = {key: name(key) for key in (*held.tensors, *held.values, *held.tied)}
    odd = [f"'{key}' -> {there!r}" for key, there in names.items() if not isinstance(there, str)]
    if odd:
        raise CheckpointError("For 'load', 'key_map' gives names that are no texts.", _some(odd))
    tensors: dict[str, TensorInfo] = {}
    values, missing, wrong = {}, [], []
    for key, leaf in held.tensors.items():
        every = [key, *(alias for alias, first in held.tied.items() if first == key)]
        theirs = {index.tied.get(names[k], names[k]): names[k] for k in every if index.tensor(names[k]) is not None}
        if len(theirs) > 1 and strict:
            there = " and ".join(map(repr, theirs.values()))
            wrong.append(f"'{key}' is one tensor here, in the checkpoint there are {there}")
        elif theirs:
            tensors[key] = index.tensors[next(iter(theirs))]
            wrong += _unlike(key, leaf, tensors[key], cast)
        elif names[key] in index.values:
            wrong.append(f"'{key}' is a tensor here, in the checkpoint {index.values[names[key]]!r}")
        else:
            missing.append(key)
    for key in held.values:
        if names[key] in index.values:
            values[key] = index.values[names[key]]
            wrong += _unlike_value(key, held.values[key], values[key], key in held.whole)
        elif index.tensor(names[key]) is not None:
            wrong.append(f"'{key}' is {held.values[key]!r} here, in the checkpoint a tensor")
        else:
            missing.append(key)
    if wrong:
        dtypes = not cast and any(held.tensors[key].dtype != info.dtype for key, info in tensors.items())
        raise CheckpointError(f"For 'load', {len(wrong)} entries of '{where}' do not fit.", _some(wrong),
                              "A load changes layouts, and no shapes or types of values; dtypes if asked to.",
                              (*(("load(..., cast=True) converts dtypes",) if dtypes else ()),
                               "load(..., key_map={here: there})"))
    asked = {index.tied.get(n, n) for n in names.values()}
    unused = [key for key in (*index.tensors, *index.values) if key not in asked]
    return _Found(tensors, values, tuple(missing), tuple(unused))


def _complete(found: _Found, where: str, strict: bool) -> None:
    """Refuses keys that are on one side only."""
    missing, unused = found.missing, found.unused
    if strict and (missing or unused):
        lines = [f"only the program has '{key}'" for key in missing[:5]]
        lines += [f"only the checkpoint has '{key}'" for key in unused[:5]]
        raise CheckpointError(f"For 'load', the program has {len(missing)} keys that '{where}' lacks, and lacks "
                              f"{len(unused)} of its keys.", "\n".join(lines), "Every key is on both sides, unless told "
                              "otherwise.",
                              ("load(..., strict=False) loads what both have", "load(..., key_map={here: there}) renames",
                               'load(..., over=mesh["pp"]) into the stages of a pipeline',
                               f"python -m ms_dtensor ckpt ls {where}"))


def _unlike(key: str, leaf: Leaf, info: TensorInfo, cast: bool) -> list[str]:
    if leaf.shape != info.shape:
        return [f"'{key}' is {leaf.describe()} here, {info.dtype}{list(info.shape)} in the checkpoint"]
    if leaf.dtype == info.dtype:
        return []
    ours, theirs = (_kind(name) for name in (leaf.dtype, info.dtype))
    return [] if cast and ours == theirs else [f"'{key}' is {leaf.dtype} here, {info.dtype} in the checkpoint" + (
        ", which are no kinds of numbers that convert" if cast else "")]


def _unlike_value(key: str, here: Any, there: Any, whole: bool) -> list[str]:
    """None goes with all: it stands for what is not known yet. Whole numbers go with others unless they are NumPy's."""
    mine, theirs = (bool if isinstance(v, bool) else float if isinstance(v, int) else type(v) for v in (here, there))
    if here is None or there is None or mine is theirs and not (whole and isinstance(there, float)):
        return []
    return [f"'{key}' is {short(here)} here, in the checkpoint {short(there)}"]


def _kind(dtype: str) -> str:
    kind = DTYPES[CODES[dtype]].kind
    return "float" if kind in "fV" else "integer" if kind in "iu" else kind


def _some(lines: list[str]) -> str:
    return "\n".join(lines[:5]) + (f"\nand {len(lines) - 5} more" if len(lines) > 5 else "")


def _read(held: State, reader: Reader, tensors: Mapping[str, TensorInfo]) -> None:
    wanted = []
    for key, info in tensors.items():
        leaf = held.tensors[key]
        if not leaf.here():
            continue
        array, direct = leaf.target()
        boxes = [box for box in itertools.product(*leaf.pieces) if all(lo < hi for lo, hi in box)]
        jobs = [(info, key, box, view(array, within(box, leaf.pieces))) for box in boxes]
        if direct:
            wanted += jobs
        else:  # one at a time, so that only one tensor is in memory twice
            reader.read(jobs)
            leaf.store(array)
    reader.read(wanted)
    for key in tensors:
        held.tensors[key].loaded()
