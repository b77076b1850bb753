# SPDX-License-Identifier: Apache-2.0
"""`save`: every rank writes its share into a hidden folder, then rank 0 writes the index and renames the folder.

Steps, each of which fails on all ranks or on none: the state is described and compared; rank 0 makes the folder; all write;
rank 0 completes it. With `async_save` the last two run in a thread, from a copy; ranks then tell each other through files
in that folder, since communication belongs to the main thread. Read next: `plan.py`, `folder.py`.
"""
from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..comm.group import Group
from ..comm.pretended import needs_data
from ..core.mesh import DeviceMesh
from ..core.version import __version__
from ..errors import CheckpointError
from . import background
from .folder import Folder, now, point_latest, retire, step_name, write_synced
from .index import NAME, Index, dump, file_name
from .plan import Request, assign, parts_of, volume
from .ranks import all_ranks, attempted, folder_of, gathered, raise_for_all, raise_together, rank_of, together, told
from .refusals import refusals
from .spread import Ranks
from .staging import Snapshot
from .state import State
from .whole import Whole, agreed, pipeline_axis
from .writer import array_of, write


def save(state: Any, path: str | os.PathLike, *, step: int | None = None, async_save: bool = False,
         keep_last: int | None = None, keep_every: int | None = None, over: DeviceMesh | None = None
         ) -> background.AsyncSave | None:
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
        over: the axis over which the stages of a pipeline are dealt, `mesh["pp"]`: each has other names, and the checkpoint
            has all, as of one device. What several stages have is equal on them, and is saved once. Give the schedule as
            the model: `{"model": schedule, "optimizer": optimizer}`.

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
    needs_data("save")
    background.wait()
    group = all_ranks()
    step, keep_last, keep_every = (int(n) if isinstance(n, np.integer) else n for n in (step, keep_last, keep_every))
    held, given = together(group, "save", partial(_described, state, path, step, keep_last, keep_every, over))
    whole = agreed(group, held, {"path": str(given), "step": repr(step), "async_save": repr(bool(async_save)),
                                  "keep_last": repr(keep_last), "keep_every": repr(keep_every),
                                 "over": over.describe() if over else "None"}, over)
    root = Path(os.path.abspath(given))
    target = root if step is None else root / step_name(step)
    plan = assign([Request(key, t.itemsize, t.shape, t.spread) for key, t in whole.tensors.items()],
                  group.size if group else 1)
    whole = whole._replace(tensors={key: replace(t, spread=plan[key]) for key, t in whole.tensors.items()})
    with _Begun(group, target) as begun:
        saving = _saved(group, held, whole, begun, _Where(root, step, keep_last, keep_every), async_save)
        begun.handed_on = saving is not None
    return saving


class _Where(NamedTuple):
    """Which checkpoint a save makes, and which it removes."""

    root: Path
    step: int | None
    keep_last: int | None
    keep_every: int | None

    def pointed(self) -> None:
        """What is done once it is complete."""
        if self.step is not None:
            point_latest(self.root, step_name(self.step))
            if self.keep_last is not None:
                retire(self.root, self.keep_last, self.keep_every)


class _Begun:
    """The folder in the making (on rank 0), where ranks write into it, the id of this save; gone if the block is left by
    anything but its end, Ctrl-C say.

    Raises:
        CheckpointError: on all ranks the same.
    """

    def __init__(self, group: Group | None, target: Path):
        self.group, self.target, self.handed_on = group, target, False
        self.folder: Folder | None = None

    def __enter__(self) -> _Begun:
        try:
            self.folder, error = attempted(lambda: Folder(self.target)) if rank_of(self.group) == 0 else (None, None)
            everyone = gathered(self.group, [None if error is None else told(error), uuid.uuid4().hex,
                                             str(self.folder and self.folder.path)])
            if error is not None and self.group is None:
                raise error
            raise_for_all("save", [everyone[0][0]] * len(everyone))  # the others have done nothing that could fail
            self.save_id, self.hidden = everyone[0][1], Path(everyone[0][2])  # ranks may run in other folders
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc) -> None:
        if self.folder is not None and not self.handed_on:
            self.folder.abandon()  # does nothing to a complete one


def _saved(group: Group | None, held: State, whole: Whole, begun: _Begun, where: _Where, async_save: bool
           ) -> background.AsyncSave | None:
    ranks, rank, folder = group.size if group else 1, rank_of(group), begun.folder
    mine = parts_of(rank, {key: t.spread for key, t in whole.tensors.items()},
                    {key: t.shape for key, t in whole.tensors.items()})
    file = begun.hidden / file_name(rank, ranks)

    def write_mine(values) -> bool:
        if mine:
            write(file, mine, held.tensors, values, begun.save_id)
        return bool(mine)

    def complete(written: Sequence[bool]) -> None:
        """On rank 0: everything is on the disk but the index."""
        assert folder is not None
        files = Ranks.of([i for i, wrote in enumerate(written) if wrote])
        index = Index(begun.save_id, where.step, __version__, ranks, files, *whole,
                      now(where.root) if where.step is not None else time.time_ns())
        with refusals(f"For 'save', '{folder.path / NAME}' cannot be written"):
            write_synced(folder.path / NAME, dump(index))
        folder.commit(where.pointed)

    if async_save:
        sizes = [(part, volume(part.box) * held.tensors[part.key].itemsize) for part in mine]
        copies, error = attempted(lambda: Snapshot(sizes, partial(array_of, leaves=held.tensors)))
        return background.start(group, begun.hidden, folder, partial(_from_copies, write_mine, copies, error), complete)
    written, error = attempted(lambda: write_mine(partial(array_of, leaves=held.tensors)))
    everyone = gathered(group, [None if error is None else told(error), written])
    _finish(group, folder, error, everyone, complete)
    return None


def _from_copies(write_mine, copies: Snapshot | None, error: Exception | None) -> bool:
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
    if group is not None:
        raise_for_all("save", [e for e, _ in everyone])
    raise_together(group, "save", error)


def _described(state: Any, path: Any, step: int | None, keep_last: int | None, keep_every: int | None,
               over: DeviceMesh | None) -> tuple[State, Path]:
    given = folder_of(path, "save")
    pipeline_axis(over, "save")
    for name, value, least in (("step", step, 0), ("keep_last", keep_last, 1), ("keep_every", keep_every, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 62):
            raise CheckpointError(f"For 'save', '{name}' is {value!r}.", "", f"It is a whole number, at least {least}, "
                                  "and less than 2**62.")
    if keep_last is not None and step is None or keep_every is not None and keep_last is None:
        raise CheckpointError("For 'save', there is nothing that could be kept.", f"{step=}, {keep_last=}, {keep_every=}",
                              "'keep_last' is of steps; 'keep_every' adds to what 'keep_last' keeps.",
                              "save(state, path, step=N, keep_last=3, keep_every=1000)")
    return State(state, "save"), given
