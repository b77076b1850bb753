# SPDX-License-Identifier: Apache-2.0
"""A unit of data parallelism: parameters that come and go together, and whose gradients are reduced together.

`fully_shard` and `replicate` make a unit of a cell. Its parameters are *cut* over the data axes (each rank has a shard, and
the whole only while it is needed) or *kept* whole by every rank; of `replicate` all are kept. What happens to cut ones are
the events of this file, by their usual names: `prefetch`, `unshard`, `reshard`. When they happen is said by `call.py`, what
becomes of gradients by `reduce.py`. Invariant: whether an event communicates follows from the program, never from values
or from what Python has forgotten, so it is the same on every rank.
"""
from __future__ import annotations

import copy
import functools
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mindspore import Tensor, nn

from ... import comm
from ...comm.packing import write
from ...comm.pretended import executing
from ...core.layout import Layout
from ...core.mesh import DeviceMesh
from ...core.placements import REPLICATE, Placement
from ...dispatch.operands import dtype_name, local_alias
from ...errors import ConfigError, LayoutError
from ...internals.names import no_grad
from ...internals.target import is_meta, on_cpu
from ...tensor.dtensor import DTensor
from .block import Block
from .local import summed_axes
from .reduce import Reduction
from .rooms import Room

if TYPE_CHECKING:
    from .call import Call

_log = logging.getLogger("ms_dtensor")
_alike: Counter = Counter()  # units of one description on the ranks that hold them, so far: what tells twins apart


class State(Enum):
    """Of the cut parameters of a unit."""

    SHARDED = "each rank has its shards, and no more"
    GATHERING = "a collective is under way that nobody has waited for"
    WHOLE = "the memory holds the whole parameters"


class DataAxes(NamedTuple):
    """The axes over which a unit's ranks bring different data, none of them flattened."""

    mesh: DeviceMesh
    given: DeviceMesh  # as the user said it, where axes may be flattened
    cut: int  # how many of them, the last ones, cut parameters; of `replicate` none
    neighbours: int  # among how many ranks the backward gathers again; 0: parameters stay whole till then

    @property
    def cutting(self) -> tuple[str, ...]:
        """Names of those that cut."""
        return self.mesh.mesh_dim_names[self.mesh.ndim - self.cut:]

    @property
    def copying(self) -> tuple[str, ...]:
        """Names of those over which parameters are copied."""
        return self.mesh.mesh_dim_names[:self.mesh.ndim - self.cut]

    def near(self):
        """The group of this rank and its neighbours; None: there are none, or all are."""
        if not self.neighbours or self.neighbours == self.mesh[self.cutting].size():
            return None
        ranks = self.mesh.mesh.reshape(*self.mesh.shape[:self.mesh.ndim - self.cut], -1, self.neighbours)
        return DeviceMesh(self.mesh.device_type, ranks, mesh_dim_names=(*self.copying, "far", "near")).get_group("near")


class Unit:
    """What one `fully_shard` or `replicate` was applied to.

    Args:
        who: what the user called, for messages: "fully_shard", "replicate" or "replicate(zero1=True)".
        cells: the cells; one, but for a list of cells that are one unit.
        slots: (cell, key, parameter) of every place that holds one of its parameters.
        tied: of places in its cells that hold parameters of other units.
        axes: `DataAxes`.
        local: its cells compute on local tensors.
        policy: `MixedPrecisionPolicy`.
        bucket_mb: of gradients of kept parameters that are reduced together.
    """

    def __init__(self, who: str, cells: list[nn.Cell], slots: list, tied: list, axes: DataAxes, local: bool, policy,
                 bucket_mb: float):
        self.who, self.cells, self.slots, self.tied, self.axes, self.mesh = who, cells, slots, tied, axes, axes.mesh
        self.local, self.policy, self.bucket_mb = local, policy, bucket_mb
        self.params = {id(p): p for _, _, p in slots}
        self.name = " and ".join(type(c).__name__ for c in cells)
        self.label = self._described()
        self.state, self.reshards, self.kept_by_user = State.SHARDED, axes.neighbours > 0, False
        self.next: Unit | None = None  # whose cell ran after this one's, the last time
        self.forward_prefetch: list[Unit] | None = None  # as the user says; None: the next one
        self.backward_prefetch: list[Unit] | None = None
        self.entered: dict[Call, None] = {}  # calls that the backward is in, oldest first
        self.runs = 0  # how many of its cells run now, or run again, and read what stands in the place of parameters
        self.differentiated = False  # a backward that read the parameters is differentiated; till then they stay whole
        self.blocks = self._made()
        self.place = {id(p): (block, i) for block in self.blocks for i, p in enumerate(block.params)}  # of cut ones
        # where others stand meanwhile
        self.standing = [s for s in (*slots, *tied) if id(s[2]) in self.place or self.local or policy.changes(s[2])]
        self.partial_on = {key: self._summed_on(p) for key, p in self.params.items()}
        self.reduction = Reduction(self)

    def _described(self) -> str:
        names = list(dict.fromkeys(p.name for p in self.params.values()))
        text = f"{self.who}({self.name}: {names[0] + (', ...' if names[1:] else '') if names else 'no parameters'})"
        # Sums over tensor-parallel axes have the label, too: whoever holds the parameters counts alike.
        meshes = self.mesh, *(p.device_mesh for p in self.params.values())
        holders = tuple(sorted({rank for mesh in meshes for rank in mesh.rank_list}))
        _alike[holders, text] += 1
        return text if _alike[holders, text] == 1 else f"{text} no. {_alike[holders, text]}"

    def on(self, p) -> tuple[int, ...]:
        """The data axes by their numbers on a parameter's mesh."""
        return tuple(p.device_mesh.axis_index(a) for a in self.mesh.mesh_dim_names)

    def _summed_on(self, p) -> tuple[int, ...]:
        """The axes over which ranks have summands of a parameter's gradient, by their numbers on its mesh."""
        data = self.on(p)
        return data if not self.local else tuple(sorted({*data, *summed_axes(p.layout)}))

    def _made(self) -> list[Block]:
        """Blocks by dtype."""
        by_dtype: dict[str, list] = {}
        for p in self.params.values():
            if not p.placements[self.on(p)[-1]].is_replicate():
                by_dtype.setdefault(dtype_name(self.policy.compute_dtype(p)), []).append(p)
        blocks, near = list[Block](), self.axes.near() if by_dtype else None
        for b, (kind, members) in enumerate(by_dtype.items()):
            whole = [_gathered(p.layout, self.on(p), kind) for p in members]
            dtype, sums = self.policy.compute_dtype(members[0]), self.policy.reduce_dtype
            blocks.append(Block(f"{self.label}, {kind}" if b else self.label, members, whole, dtype,
                                self.mesh.get_group(self.axes.cutting), self.on(members[0])[-self.axes.cut:],
                                None if sums == dtype else sums, near, self._leaves))
        return blocks

    def __deepcopy__(self, memo) -> Unit:
        cells, slots, tied = copy.deepcopy((self.cells, self.slots, self.tied), memo)
        out = Unit(self.who, cells, slots, tied, self.axes, self.local, self.policy, self.bucket_mb)
        out.reshards, out.reduction.sync, out.reduction.sync_copies, out.reduction.scale = \
            self.reshards, self.reduction.sync, self.reduction.sync_copies, self.reduction.scale
        return out

    @functools.cached_property
    def inside(self) -> weakref.WeakSet[nn.Cell]:
        """Its cells, and those in them."""
        return weakref.WeakSet(cells_in(*self.cells))

    @property
    def whole(self) -> bool:
        """Whether the memory holds the whole parameters."""
        return self.state is State.WHOLE

    def end_gradient(self) -> None:
        """The gradient has been taken, derivatives of gradients among it."""
        for block in self.blocks:
            block.forget()  # what no backward has asked for, as of what was detached
        if self.differentiated:
            self.differentiated = False
            self.reshard()

    def abandon(self) -> None:
        """The gradient that was under way has raised: nothing is left of it."""
        self.entered.clear()
        self.differentiated = False
        self.reshard()
        self.reduction.abandon()

    def give_up(self) -> None:
        """Ranks have left a step: what is under way will not come."""
        for block in self.blocks:
            block.give_up()
        self.abandon()

    def move_to(self, whole: DeviceMesh) -> None:
        """The unit's parameters lie on a mesh of more axes from here on, alike along the new ones: as on coordinate 0."""
        for p in self.params.values():
            new = [a for a in whole.mesh_dim_names if a not in p.device_mesh.mesh_dim_names]
            if new and set(p.device_mesh.mesh_dim_names) < set(whole.mesh_dim_names):
                group = whole.get_group(new)
                if group.size > 1 and not is_meta(p):
                    write(local_alias(p), group.broadcast(local_alias(p), group.ranks[0]))
                p._layout = lift(p, whole)
                self.partial_on[id(p)] = self._summed_on(p)
        for block in self.blocks:
            block.whole = [_gathered(p.layout, self.on(p), dtype_name(block.dtype)) for p in block.params]
        self.reduction.regroup()

    # -- events ------------------------------------------------------------------------------------------------------

    def prefetch(self, phase: str, when: str = "") -> None:
        """Begins to gather, if that has not begun; `when`: at which point of the program, which ranks compare."""
        if self.state is State.SHARDED and self.blocks:
            self.log("prefetch", phase)
            self._start(phase, f"ahead {when}".rstrip(), ahead=True)

    def unshard(self, phase: str, when: str = "", rooms: Sequence[Room] = (), keep_row: bool = False) -> None:
        """The memory holds the whole parameters, of the values that the shards have now; on a device in these rooms.
        `keep_row`: what this rank gives to the gathering stays, for the backward's."""
        if self.state is not State.SHARDED and any(block.rewritten() for block in self.blocks):  # after it was read
            self.reshard(forced=True)
        if not self.blocks:
            return
        pairs = zip(self.blocks, rooms or itertools.repeat(None))
        if self.state is State.WHOLE:
            for block, room in pairs:
                block.memory.bring(room)
            return
        self.log("unshard", phase)
        with no_grad():
            if self.state is State.SHARDED:
                self._start(phase, when, ahead=False)
            for block, room in pairs:
                block.finish(room, keep_row)
        self.state = State.WHOLE

    def rooms(self) -> tuple[Room, ...]:
        """On a device, where the blocks are, which are whole: tensors that are made of them now lie there."""
        return () if on_cpu() else tuple(block.memory.room() for block in self.blocks)

    def has(self, rooms: Sequence[Room]) -> bool:
        """Whether it is whole, and has these rooms."""
        return self.whole and all(room.holder is block.memory for block, room in zip(self.blocks, rooms))

    def _leaves(self) -> None:
        """Another unit is about to take a room of this one, which comes back when it is asked for, or when that one leaves.

        Raises:
            LayoutError: its backward is under way, and not all that reads the room there asks for it.
        """
        if self.differentiated or any(call.unseen for call in self.entered):
            raise LayoutError(f"For '{self.who}', two backwards at once need the memory in which {self.name} is whole.",
                              self.label, "Local tensors of its parameters, or a derivative of a gradient, read them in the "
                              "backward, and nobody sees when.",
                              ("take one gradient after the other", "reshard_after_forward=False for this cell"))

    def _start(self, phase: str, when: str, ahead: bool) -> None:
        with no_grad():
            for block in self.blocks:
                block.start(phase, ahead, when)
        self.state = State.GATHERING

    def reshard(self, keep_part: bool = False, forced: bool = False) -> None:
        """Gives the memory back, unless the user keeps it, or somebody reads on: a gradient inside of a forward may end
        before that, and before a derivative of it. `keep_part`: but for what the backward gathers again."""
        keep_part = keep_part and self.whole
        if not keep_part:
            for block in self.blocks:
                block.forget()
        if self.state is State.SHARDED or (self.kept_by_user or self.differentiated or self.runs) and not forced:
            return
        self.log("reshard", "")
        for block in self.blocks:
            block.release(keep_part, pages=self.reshards)
        self.state = State.SHARDED

    def begin(self) -> None:
        """A forward of the outermost cell begins: whatever has written the shards meanwhile, they are gathered anew."""
        self.reshard()
        self.reduction.begin()
        if self.kept_by_user and self._changed():
            self.reshard(forced=True)

    def _changed(self) -> bool:
        """Whether shards are no longer what the user had gathered; of what is on its way, as far as the program tells."""
        if not self.whole:
            return any(block.stale() for block in self.blocks)
        mine = any([block.changed() for block in self.blocks])
        with comm.annotate(phase="forward", src="fully_shard", dst="were kept parameters changed", of=self.label):
            changed = self.mesh.get_group().all_reduce(Tensor(np.array([mine], np.float32)), "max")
        return mine if executing() is not None else bool(changed.asnumpy()[0])

    def end_backward(self) -> None:
        """A backward has ended, which some calls may have left by no door of ours."""
        if self.entered or self.state is State.GATHERING:
            self.entered.clear()
            self.reshard()

    def log(self, event: str, phase: str) -> None:
        """One line an event, for who reads the log at DEBUG."""
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s: %s %s, %d bytes", self.label, event, phase, sum(block.bytes for block in self.blocks))

    # -- checks ------------------------------------------------------------------------------------------------------

    def check(self, slots: list) -> None:
        """The parameters in these slots are those that the unit was given.

        Raises:
            ConfigError: before anything is gathered.
        """
        gone = {key: getattr(x, "inited_param", None) is p for cell, key, p in slots
                if (x := cell._params.get(key)) is not p}
        if gone and all(gone.values()):
            raise ConfigError(f"For '{self.who}', {self.name} was run again before it returned.", ", ".join(sorted(gone)),
                              "The gathered parameters stand in their places for one run at a time.",
                              f"register a forward hook that runs it on {self.name} itself, not on a cell inside")
        if gone:
            raise ConfigError(f"For '{self.who}', parameters of {self.name} were replaced or taken out since.",
                              ", ".join(sorted(gone)), "A unit gathers the parameters that it was given.",
                              ("parameter.set_data(value) keeps its place", f"replace parameters before {self.who}"))
        empty = [p.name for p in self.params.values() if is_meta(p)]
        if empty:
            raise ConfigError(f"For '{self.who}', parameters of {self.name} have no values.", ", ".join(empty[:5]),
                              'They were made inside of DeviceCtx("meta").', "model.to_empty(), and fill them: p.normal_()")
        other = [p.name for block in self.blocks for p in block.params if dtype_name(p.dtype) != p.layout.dtype]
        if other:
            raise ConfigError(f"For '{self.who}', parameters of {self.name} have got another dtype since.",
                              ", ".join(other), "A unit gathers in the dtypes that it was given.",
                              (f"set_dtype before {self.who}", "MixedPrecisionPolicy(param_dtype=...)"))


def cells_in(*cells: nn.Cell) -> Iterator[nn.Cell]:
    """Cells and those inside, each once, in the order of `cells_and_names`, which makes names and takes several times as
    long."""
    seen, left = set[int](), list(reversed(cells))
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [inside for inside in reversed(one._cells.values()) if inside is not None]


def _gathered(layout: Layout, axes: tuple[int, ...], dtype: str) -> Layout:
    """A cut parameter's layout while it is whole on the data axes."""
    placed = [REPLICATE if a in axes else p for a, p in enumerate(layout.placements)]
    return Layout(layout.mesh, placed, layout.shape, dtype, layout.order)


def lift(x: Tensor, whole: DeviceMesh, new: Mapping[str, Placement] | None = None) -> Layout:
    """The layout of a tensor on a mesh that has its axes and more; on those as `new` says, else replicated."""
    if not isinstance(x, DTensor):
        return Layout(whole, new or {}, tuple(x.shape), dtype_name(x.dtype))
    layout, names = x.layout, x.device_mesh.mesh_dim_names
    placed = {**dict(zip(names, layout.placements)), **(new or {})}
    return Layout(whole, placed, layout.shape, layout.dtype, [names[a] for a in layout.order])
