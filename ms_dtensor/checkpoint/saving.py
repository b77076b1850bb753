# SPDX-License-Identifier: Apache-2.0
"""`save`: every rank writes its share into a hidden folder, then rank 0 writes the index and renames the folder.

Steps, each of which fails on all ranks or on none: the state is described and compared; rank 0 makes the folder; all write;
rank 0 completes it. With `async_save` the last two run in a thread, from a copy; ranks then tell each other through files
in that folder, since communication belongs to the main thread. Read next: `plan.py`, `folder.py`.
"""
from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ..comm.group import Group
from ..core.layout import Layout
from ..core.version import __version__
from ..errors import CheckpointError
from . import background
from .folder import Folder, point_latest, retire, step_name, write_synced
from .index import NAME, Index, dump
from .pieces import as_bytes, crc
from .plan import Request, assign, held_boxes, volume, whole_box
from .random_state import DIFFER, RandomState
from .ranks import alike, all_ranks, attempted, folder_of, gathered, raise_for_all, rank_of, together, told, unlike
from .refusals import refusals
from .staging import Snapshot
from .state import State
from .writer import Written, array_of, file_name, merged, write


def save(state: Any, path: str | os.PathLike, *, step: int | None = None, async_save: bool = False,
         keep_last: int | None = None, keep_every: int | None = None) -> background.AsyncSave | None:
    """Saves a program's state, from any mesh for any mesh; every rank of the job calls it.

    Args:
        state: nested dicts and lists of DTensors, parameters, tensors, arrays, numbers, texts, booleans and None; Cells,
            optimizers, and objects with `state_dict()` and `load_state_dict()`. Or one of the latter alone.
        path: the checkpoint's folder. What it holds of an earlier save stays until this one is complete.
        step: the checkpoint is the folder `step-00000010` in `path`, to which the file `latest` then points.
        async_save: return as soon as this rank's share is copied, and write it in a thread. An error of the writing is
            raised by `wait()` of what is returned, or by the next save.
        keep_last: keep so many of the latest steps, and remove the others.
        keep_every: keep also the steps that are a multiple of it.

    Returns:
        None; with `async_save` an object with `wait()`, which all ranks call, and `done`.

    Raises:
        CheckpointError: on all ranks the same: a state that differs between ranks or that has no place in a checkpoint (a
            Partial DTensor), another save at work in the folder, or what the system refuses; names the ranks.

    A tensor that several ranks hold, or that has several names, is written once; ranks write about as many bytes each.
    Plain tensors and values are the same on every rank, which is checked.

    Example:
        >>> import tempfile, mindspore as ms, ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> w = md.distribute_tensor(ms.ops.ones((4, 2)), mesh, [md.Shard(0)])
        >>> root = tempfile.mkdtemp()
        >>> md.checkpoint.save({"model": {"w": w}, "epoch": 3}, root, step=100, keep_last=2)
        >>> state = {"model": {"w": md.zeros(4, 2, device_mesh=mesh)}, "epoch": 0}
        >>> md.checkpoint.load(state, root).step, state["epoch"], float(state["model"]["w"].sum())
        (100, 3, 8.0)
    """
    background.wait()
    group = all_ranks()
    step, keep_last, keep_every = (int(n) if isinstance(n, np.integer) else n for n in (step, keep_last, keep_every))
    held, given = together(group, "save", partial(_described, state, path, step, keep_last, keep_every))
    _agree(group, held, {"path": str(given), "step": repr(step), "async_save": repr(bool(async_save)),
                         "keep_last": repr(keep_last), "keep_every": repr(keep_every)})
    root = Path(os.path.abspath(given))
    target = root if step is None else root / step_name(step)
    folder, save_id, hidden = _begun(group, target)
    held_by = {key: whole_box(leaf.shape, range(group.size if group else 1)) if leaf.layout is None else
               held_boxes(leaf.layout) for key, leaf in held.tensors.items()}
    plan = assign([Request(key, leaf.itemsize, held_by[key]) for key, leaf in held.tensors.items()])
    rank = rank_of(group)
    mine = plan.get(rank, [])
    file = hidden / file_name(rank, group.size if group else 1)

    def write_mine(values) -> Written | None:
        return write(file, mine, held.tensors, values, save_id) if mine else None

    def complete(written: Sequence[Written | None]) -> None:
        """On rank 0: everything is on the disk but the index."""
        assert folder is not None
        files, tensors = merged(plan, written, held.tensors)
        index = Index(save_id, step, __version__, files, tensors, held.values, held.tied)
        with refusals(f"For 'save', '{folder.path / NAME}' cannot be written"):
            write_synced(folder.path / NAME, dump(index))
        folder.commit()
        if step is not None:
            point_latest(root, target.name)
            if keep_last is not None:
                retire(root, keep_last, keep_every)

    if async_save:
        sizes = [(part, volume(part.box) * held.tensors[part.key].itemsize) for part in mine]
        copies, error = attempted(lambda: Snapshot(sizes, partial(array_of, leaves=held.tensors)))
        return background.start(group, hidden, folder, partial(_from_copies, write_mine, copies, error), complete)
    written, error = attempted(lambda: write_mine(partial(array_of, leaves=held.tensors)))
    everyone = gathered(group, [None if error is None else told(error), written])
    _finish(group, folder, error, everyone, complete)
    return None


def _from_copies(write_mine, copies: Snapshot | None, error: Exception | None) -> Written | None:
    if error is not None or copies is None:
        raise error or AssertionError
    try:
        return write_mine(copies.__getitem__)
    finally:
        copies.release()


def _finish(group: Group | None, folder: Folder | None, error: Exception | None, everyone: list, complete) -> None:
    """Rank 0 completes the checkpoint if all have written; all raise if anything went wrong."""
    bad = any(e is not None for e, _ in everyone)
    if folder is not None:
        if not bad:
            _, error = attempted(lambda: complete([written for _, written in everyone]))
        if error is not None or bad:
            folder.abandon()
    if group is None:
        if error is not None:
            raise error
        return
    raise_for_all("save", [e for e, _ in everyone])
    raise_for_all("save", group.all_gather_object(None if error is None else told(error)))


def _described(state: Any, path: Any, step: int | None, keep_last: int | None, keep_every: int | None
               ) -> tuple[State, Path]:
    given = folder_of(path, "save")
    for name, value, least in (("step", step, 0), ("keep_last", keep_last, 1), ("keep_every", keep_every, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 62):
            raise CheckpointError(f"For 'save', '{name}' is {value!r}.", "", f"It is a whole number, at least {least}, "
                                  "and less than 2**62.")
    if keep_last is not None and step is None or keep_every is not None and keep_last is None:
        raise CheckpointError("For 'save', there is nothing that could be kept.", f"{step=}, {keep_last=}, {keep_every=}",
                              "'keep_last' is of steps; 'keep_every' adds to what 'keep_last' keeps.",
                              "save(state, path, step=N, keep_last=3, keep_every=1000)")
    return State(state, "save"), given


def _begun(group: Group | None, target: Path) -> tuple[Folder | None, str, Path]:
    """On rank 0 the folder in the making; the id of this save, and where ranks write (they may run in other folders)."""
    folder, error = attempted(lambda: Folder(target)) if rank_of(group) == 0 else (None, None)
    everyone = gathered(group, [None if error is None else told(error), uuid.uuid4().hex, str(folder and folder.path)])
    if error is not None and group is None:
        raise error
    raise_for_all("save", [everyone[0][0]] * len(everyone))  # the others have done nothing that could fail
    return folder, everyone[0][1], Path(everyone[0][2])


def _agree(group: Group | None, state: State, arguments: dict[str, str]) -> None:
    """All ranks save the same names, layouts and plain values, in the same way."""
    if group is None:
        return
    table = {key: _identity(leaf) for key, leaf in state.tensors.items()}
    table |= {key: repr(value) for key, value in state.values.items()}
    table |= {key: f"the same as '{first}'" for key, first in state.tied.items()}
    if alike(group, [arguments, table]):
        return
    bad = unlike(group, arguments)
    if bad:
        raise CheckpointError(f"For 'save', the ranks' arguments differ: {', '.join(bad)}.", "\n".join(bad.values()),
                              "All ranks save one checkpoint together.", "give each rank the same arguments")
    bad = unlike(group, table)
    random = tuple(f"{key}." if key else "" for key, node in state.objects.items() if isinstance(node, RandomState))
    raise CheckpointError(f"For 'save', the ranks' states differ in {len(bad)} keys.", "\n".join([*bad.values()][:4]),
                          "A checkpoint is one state; what is not laid out over the ranks is the same on all of them.",
                          (*((DIFFER,) if any(key.startswith(random) for key in bad) else ()),
                           "DTensor.from_local(x, mesh, [Shard(0)]) for what each rank has of its own",
                           "save what rank 0 has: broadcast it first"))


def _identity(leaf) -> str:
    if leaf.layout is not None:
        return _place(leaf.layout)
    return f"{leaf.describe()} crc32 {crc(as_bytes(np.ascontiguousarray(leaf.array()))):08x}"


@lru_cache(maxsize=4096)
def _place(layout: Layout) -> str:
    return f"{layout.describe()} {layout.placements} ranks {layout.mesh.rank_list}"
