# SPDX-License-Identifier: Apache-2.0
"""Parameters that are gathered together: one flat collective before use, one after, and memory that comes and goes.

A unit is what `fully_shard` was applied to. Its parameters are DTensors cut over the data axis; while its cell runs, one
autograd node stands for all of them: forward it hands out whole tensors that lie in one piece of memory, backward it has
all their gradients at once and reduces them in one collective. Autograd says when that is. So a parameter that is used
elsewhere, past its unit, is an ordinary cut DTensor there, and right.

What autograd saved lies in memory that was given back after the forward (`fsdp_memory.py`); a node behind the cell's
outputs fills it again before their gradient goes in.
"""
from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from .. import comm
from ..comm.packing import write
from ..comm.parts import Parts
from ..comm.protocol import Work
from ..core.layout import Layout
from ..core.mesh import DeviceMesh
from ..core.placements import REPLICATE
from ..dispatch.cotangent import as_copy
from ..dispatch.memo import memo_of
from ..dispatch.operands import dtype_name, local_alias, wrap
from ..dispatch.patches.gradients import asked_for
from ..errors import ConfigError, LayoutError, OpRuleError
from ..internals.names import Function, NoFallbackGuard, no_grad, recording
from ..internals.target import on_cpu
from ..redistribute.boxes import sizes_along
from ..redistribute.execute import redistribute_local
from ..tensor.dtensor import DTensor
from .fsdp_late import LateGradients
from .fsdp_memory import DeviceMemory, HostMemory
from .fsdp_written import Written


class Block:
    """Parameters of one dtype of a unit: what one collective gathers, and one reduces.

    Args:
        params: cut DTensor Parameters.
        whole: their layouts while gathered.
        dtype: MindSpore's dtype in which they are gathered and computed with.
        group: the ranks that a parameter is cut over.
        axis: that axis of the parameters' mesh.
        reduce_dtype: in which gradients are summed; None: as they come.
        near: of `group`, the neighbours among whom the backward gathers; None: all.
    """

    def __init__(self, params: list, whole: list[Layout], dtype, group, axis: int, reduce_dtype, near):
        self.params, self.whole, self.dtype, self.group, self.reduce_dtype = params, whole, dtype, group, reduce_dtype
        self.near = near
        self._part: Any = None  # this rank's part of what the neighbours have together
        self.shapes, dims = [layout.local_shape() for layout in whole], [p.placements[axis].dim for p in params]
        here = params[0].device_mesh.get_coordinate()
        self.parts = Parts(self.shapes, dims, [sizes_along(p.layout, (axis,), d, here) for p, d in zip(params, dims)])
        self._kind = HostMemory if on_cpu() else DeviceMemory
        self.memory: HostMemory | DeviceMemory | None = None
        self._work: Work | None = None

    def start(self, phase: str, ahead: bool) -> None:
        """Begins to gather; does nothing if that has begun. `ahead`: it is not waited for at once."""
        if self._work is not None:
            return
        later = ahead or not on_cpu()  # on host a thread would have to be woken for it
        with NoFallbackGuard(), comm.annotate(phase=phase, src="fully_shard", dst="gathered parameters"):
            if self._part is None and self._straight():
                own = [local_alias(p) for p in self.params]
                self._work = self.group.all_gather_into(own, self._memory().window, self.parts, self.dtype, async_op=later)
                return
            group, own, totals = self.group, self._own() if self._part is None else self._part, self.parts.totals
            if self._part is not None:
                group, each = self.near, self.group.size // self.near.size
                totals = [sum(totals[r:r + each]) for r in range(0, len(totals), each)]
            given = group.all_gather(own, 0, totals, async_op=later)
            self._work = given if later else Work(given)

    def _memory(self) -> HostMemory | DeviceMemory:
        if self.memory is None:
            self.memory = self._kind(self.shapes, self.dtype, self.group.backend)
        return self.memory

    def _straight(self) -> bool:
        """Whether nothing is packed: the group writes into the memory, and reads where gradients lie."""
        return on_cpu() and self.group.size > 1 and self._memory().window is not None

    def finish(self, phase: str) -> None:
        """The memory holds the whole parameters."""
        self.start(phase, ahead=False)
        work: Any = self._work
        gathered, self._work, self._part = work.wait(), None, None
        if gathered is None:  # it has been written there
            return
        with NoFallbackGuard():
            memory, at = self._memory(), 0
            memory.claim()
            for r in range(self.group.size):
                for i in range(len(self.params)):
                    count = self.parts.count(i, r)
                    if count:
                        memory.write(i, self.parts.index(i, r), self._kind.part(gathered, at, count))
                    at += count

    def tensor(self, i: int) -> Tensor:
        """A new tensor on the memory, which is full."""
        memory: Any = self.memory
        return memory.tensor(i)

    def handed_out(self, i: int, full: bool) -> Tensor:
        """What the node gives: the whole parameter; or, as MindSpore casts a gradient to its tensor's dtype, a stand-in.

        A stand-in has the dtype in which gradients are reduced, and the memory of one number.
        """
        if full and self.reduce_dtype in (None, self.dtype):
            return self.tensor(i)
        shape = self.shapes[i]
        return ms.ops.zeros((1,) * len(shape), self.reduce_dtype or self.dtype).expand(shape)

    def release(self, keep_part: bool, pages: bool = True) -> None:
        """The memory goes, but for what this rank keeps for its neighbours; without `pages`, windows stay as they are."""
        if self.memory is None:
            return
        if keep_part and self.near is not None:
            each, whole = self.group.size // self.near.size, [self.tensor(i) for i in range(len(self.params))]
            first = self.near.rank_index * each
            with NoFallbackGuard():
                self._part = self._kind.pack([(whole[i], self.parts.index(i, r)) for r in range(first, first + each)
                                              for i in range(len(self.params))], self.dtype)
        if pages or not self._straight():
            self.memory.release()

    def drop(self) -> None:
        """Forgets a gathering that nobody waited for, and a part that nobody asked for."""
        self._part = None
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self.memory is not None:
                self.memory.release()

    def changed(self) -> bool:
        """Whether this rank's shards are no longer what lies in the memory."""
        with NoFallbackGuard():
            there = [(self.tensor(i), self.parts.index(i, self.group.rank_index)) for i in range(len(self.params))]
            pairs = self._own(), self._kind.pack(there, self.dtype)
            a, b = (x.asnumpy().view(np.uint8) for x in pairs)
        return not np.array_equal(a, b)

    def write_own(self, i: int) -> None:
        """This rank's shard of parameter `i` becomes what lies in the memory."""
        with NoFallbackGuard():
            own = local_alias(self.params[i])
            piece = self._kind.pack([(self.tensor(i), self.parts.index(i, self.group.rank_index))], self.dtype)
            if piece.size:
                write(own, ms.mint.reshape(piece, own.shape))

    def _own(self) -> Tensor:
        return self._kind.pack([(local_alias(p), ()) for p in self.params], self.dtype)

    def reduce(self, grads: dict[int, Tensor]) -> Work:
        """Begins to add up all ranks' gradients, given by number of the parameter; the work has this rank's part, flat."""
        with NoFallbackGuard(), comm.annotate(phase="backward", src="fully_shard", dst="sharded gradients"):
            kind = self.reduce_dtype or next(iter(grads.values())).dtype
            if self._straight() and all(g.dtype == kind for g in grads.values()):
                return Work(self.group.reduce_scatter_from(grads, self.parts))
            pieces = [(grads[i], self.parts.index(i, r)) for r in range(self.group.size) for i in grads]
            totals = [self.parts.total(tuple(grads), r) for r in range(self.group.size)]
            return self.group.reduce_scatter(self._kind.pack(pieces, kind), "sum", 0, totals, async_op=True)

    def shards(self, numbers: Iterable[int], work: Work, copies) -> dict[int, Tensor]:
        """What `reduce` adds up, by number of the parameter, and added up over the ranks that have copies."""
        with NoFallbackGuard(), comm.annotate(phase="backward", src="fully_shard", dst="sharded gradients"):
            flat = work.wait()
            if copies is not None:
                flat = copies.all_reduce(flat, "sum")
            out, at = {}, 0
            for i in numbers:
                count = self.parts.count(i, self.group.rank_index)
                out[i] = ms.mint.reshape(self._kind.part(flat, at, count), self.parts.shape(i, self.group.rank_index))
                if out[i].dtype != self.params[i].dtype:
                    out[i] = out[i].astype(self.params[i].dtype)
                at += count
            return out

    def named_shards(self, numbers: Iterable[int], work: Work, copies) -> dict[int, Tensor]:
        """The same by id of the parameter."""
        return {id(self.params[i]): g for i, g in self.shards(numbers, work, copies).items()}


class Call:
    """One recorded run of a unit's cell: between its outputs' gradient and its parameters' the memory is needed.

    Or, with `taken`, the second run of a cell in it, in the backward, which gathers the gradients up there.
    """

    def __init__(self, unit: Unit, taken: dict[int, Tensor] | None = None):
        self.unit, self.entered, self.taken = unit, False, taken
        self.nodes: dict[int, Tensor] = {}  # while the cell runs: what the node handed out, by id of the parameter

    @contextmanager
    def again(self, cell: nn.Cell) -> Iterator[Call]:
        """The whole tensors stand once more in the slots of a cell, which runs again."""
        cells = {id(c) for _, c in cell.cells_and_names()}
        slots = [slot for slot in self.unit.slots if id(slot[0]) in cells]
        call = Call(self.unit, {})
        with self.unit.in_place(call, slots):
            yield call

    def enter(self) -> None:
        """The backward is about to go into the cell."""
        if not self.entered:
            self.entered = True
            self.unit.running += 1
            self.unit.gather(backward=True)

    def leave(self) -> None:
        """All of the parameters' gradients are there."""
        if not self.entered and not self.unit.full:
            raise LayoutError(f"For 'fully_shard', the backward reached {self.unit.name} past the cell's outputs.",
                              f"{sum(len(b.params) for b in self.unit.blocks)} parameters, given back after the forward",
                              "They are gathered again when the gradient of what the cell returned arrives.",
                              ("reshard_after_forward=False for this cell",
                               "return all tensors that the loss depends on, in tuples, lists or dicts"))
        if self.entered:
            self.entered = False
            self.unit.running -= 1
        if self.unit.running == 0:
            self.unit.release()


class Whole(Function):
    """A unit's trainable parameters, gathered; the one node whose backward reduces all their gradients."""

    @staticmethod
    def forward(ctx, call: Call, numbers: tuple[tuple[int, int], ...], *params):
        ctx.call, ctx.numbers = call, numbers
        return tuple(call.unit.blocks[b].handed_out(i, call.unit.full) for b, i in numbers)

    @staticmethod
    def backward(ctx, *grads):
        call, unit = ctx.call, ctx.call.unit
        if recording():
            raise OpRuleError("For 'fully_shard', a derivative of a parameter's gradient was asked for.", unit.name,
                              "Gradients of sharded parameters are reduced outside autograd.",
                              ("distribute_module(cell, device_mesh) instead of fully_shard()",
                               "take the inner gradient with respect to the inputs"))
        if call.taken is not None:
            call.taken.update((id(unit.blocks[b].params[i]), g) for (b, i), g in zip(ctx.numbers, grads))
            return None, None, *map(unit.zeros, ctx.numbers)
        call.leave()
        return None, None, *unit.reduced(ctx.numbers, grads)


class Again(Function):
    """An output of a unit's cell; its gradient is the first to arrive in the backward.

    What it does not depend on may go in with it: the nodes of units that did not run and owe gradients of earlier steps.
    """

    @staticmethod
    def forward(ctx, x, call: Call, *unused):
        ctx.call, ctx.unused = call, [(node._shape, node.dtype) for node in unused]
        return x.view(x._shape)

    @staticmethod
    def backward(ctx, grad):
        ctx.call.enter()
        return grad, None, *(ms.ops.zeros(shape, dtype) for shape, dtype in ctx.unused)


class Unit:
    """What one `fully_shard` gathers and gives back together; its state, and its way through a step.

    Args:
        name: for messages.
        slots: (cell, key, parameter) of every place that holds one of its parameters.
        mesh: the data axes: the last one cuts, one before it copies.
        neighbours: among how many ranks of the last axis the backward gathers again; 0: the memory is kept till then.
        policy: `MixedPrecisionPolicy`.
    """

    def __init__(self, name: str, slots: list, mesh, neighbours: int, policy):
        self.name, self.slots, self.mesh, self.neighbours, self.policy = name, slots, mesh, neighbours, policy
        self.reshard = neighbours > 0
        self.sync, self.kept, self.full, self.running = True, False, False, 0
        self.before: Unit | None = None  # in the order of the last forward
        self.after: Unit | None = None
        axes = mesh.mesh_dim_names
        near = _near(mesh, neighbours) if 0 < neighbours < mesh.shape[-1] else None
        self.copies = mesh.get_group(axes[0]) if mesh.ndim == 2 and mesh.shape[0] > 1 else None
        by_dtype: dict[str, list] = {}
        last = {id(p): p.placements[p.device_mesh.axis_index(axes[-1])] for _, _, p in slots}
        # what is kept whole is here for its dtype only
        for p in {id(p): p for _, _, p in slots if not last[id(p)].is_replicate()}.values():
            by_dtype.setdefault(dtype_name(policy.compute_dtype(p)), []).append(p)
        self.blocks, self.place = [], {}
        for b, params in enumerate(by_dtype.values()):
            axis = params[0].device_mesh.axis_index(axes[-1])
            own = [params[0].device_mesh.axis_index(a) for a in axes]
            dtype = policy.compute_dtype(params[0])
            whole = [gathered(p.layout, own, dtype_name(dtype)) for p in params]
            self.blocks.append(Block(params, whole, dtype, mesh.get_group(axes[-1]), axis, policy.reduce_dtype, near))
            self.place.update({id(p): (b, i) for i, p in enumerate(params)})
        self.partial_on = {id(p): tuple(p.device_mesh.axis_index(a) for a in axes) for _, _, p in slots}
        self._unsent: dict[tuple[int, int], Tensor] = {}  # gradients of steps without communication
        self.late = None if on_cpu() else LateGradients(p for block in self.blocks for p in block.params)

    def __deepcopy__(self, memo) -> Unit:
        out = Unit(self.name, copy.deepcopy(self.slots, memo), self.mesh, self.neighbours, self.policy)
        out.sync, out.reshard = self.sync, self.reshard
        return out

    def check(self) -> None:
        """The cell's parameters are those that were cut.

        Raises:
            ConfigError: before anything is gathered.
        """
        gone = {key: getattr(x, "inited_param", None) is p for cell, key, p in self.slots
                if (x := cell._params.get(key)) is not p}
        if gone and all(gone.values()):
            raise ConfigError(f"For 'fully_shard', {self.name} was run again before it returned.", ", ".join(sorted(gone)),
                              "The gathered parameters stand in their places for one run at a time.",
                              f"register a forward hook that runs it on {self.name} itself, not on a cell inside")
        if gone:
            raise ConfigError(f"For 'fully_shard', parameters of {self.name} were replaced or taken out since.",
                              ", ".join(sorted(gone)), "A unit gathers the parameters that it was given.",
                              ("parameter.set_data(value) keeps its place", "replace parameters before fully_shard()"))
        other = [p.name for block in self.blocks for p in block.params if dtype_name(p.dtype) != p.layout.dtype]
        if other:
            raise ConfigError(f"For 'fully_shard', parameters of {self.name} have got another dtype since.",
                              ", ".join(other), "A unit gathers in the dtypes that it was given.",
                              ("set_dtype before fully_shard()", "MixedPrecisionPolicy(param_dtype=...)"))

    def abandon(self) -> None:
        """Forgets gradients of steps without communication: the one that was under way has raised, or the user says so."""
        self._unsent = {}

    def unsent_nodes(self) -> list[Tensor]:
        """Nodes for the gradients of earlier steps, where this step is to send them and does not run the cell."""
        params = {(b, i): self.blocks[b].params[i] for b, i in self._unsent}
        owed = {at: p for at, p in params.items() if self.sync and p.requires_grad}
        if not owed:
            return []
        call = Call(self)
        call.entered, self.running = True, self.running + 1
        with NoFallbackGuard():
            nodes = Whole.apply(call, tuple(owed), *owed.values())
        return list(nodes) if isinstance(nodes, tuple) else [nodes]

    def gather(self, backward: bool = False) -> None:
        """The memory holds the whole parameters; the next unit's are on their way."""
        phase = "backward" if backward else "forward"
        coming = self.before if backward else self.after
        with no_grad():
            if not self.full:
                for block in self.blocks:
                    block.start(phase, ahead=False)
                for block in self.blocks:
                    block.finish(phase)
                self.full = True
            if coming is not None and not coming.full:
                for block in coming.blocks:
                    block.start(phase, ahead=True)

    def release(self, keep_part: bool = False) -> None:
        """Gives the memory back, unless the user keeps it."""
        for block in self.blocks:
            block.drop()
            if self.full and not self.kept:
                block.release(keep_part, pages=self.reshard)
        self.full = self.full and self.kept

    def tensors(self, call: Call | None, slots: list) -> dict[int, Tensor]:
        """The whole parameters as DTensors, by id of the sharded ones; recorded where a gradient is asked for."""
        params = {id(p): p for _, _, p in slots}
        trained = {k: p for k, p in params.items() if call is not None and p.requires_grad and k in self.place}
        out: dict[int, Tensor] = {}
        with NoFallbackGuard():
            nodes = Whole.apply(call, tuple(self.place[k] for k in trained), *trained.values()) if trained else ()
            of = dict(zip(trained, nodes if isinstance(nodes, tuple) else (nodes,)))
        if call is not None:
            call.nodes = of
        for k, p in params.items():
            if k not in self.place:
                out[k] = self.policy.copy_of(p)
                out[k].inited_param = p
                continue
            b, i = self.place[k]
            layout, kind, held = self.blocks[b].whole[i], self.blocks[b].reduce_dtype, self.blocks[b].tensor(i)
            out[k] = wrap(held, layout) if k not in of else self._connected(
                of[k], held, layout, self.partial_on[k], None if kind == self.blocks[b].dtype else kind)
            out[k].inited_param = params[k]  # which cells then list in its place
        return out

    @contextmanager
    def in_place(self, call: Call | None, slots: list) -> Iterator[dict[int, Tensor]]:
        """The slots hold the whole parameters inside; what the cell writes into them reaches the shards."""
        whole = self.tensors(call, slots)
        written = Written(whole)

        def put(held: Callable) -> None:
            for cell, key, p in slots:
                cell._params[key] = held(p)
                if key in cell.__dict__:
                    cell.__dict__[key] = held(p)
        put(lambda p: whole[id(p)])
        try:
            yield whole
        finally:
            put(lambda p: p)
            if call is not None:
                call.nodes = {}  # they know the call, in memory that Python does not see
        written.keep(self.blocks, self.place)

    def lends(self, x: Tensor, whole: dict[int, Tensor]) -> bool:
        """Whether a tensor lies in the memory of the gathered parameters `whole`, which goes."""
        if on_cpu():
            return any(isinstance(block.memory, HostMemory) and block.memory.holds(x) for block in self.blocks)
        # its address would wait for the device
        while isinstance(x, DTensor) and x._memo is not None and x._memo.view_of is not None:
            x = x._memo.view_of[0]
        return any(x is w for w in whole.values())

    @staticmethod
    def _connected(node: Tensor, data: Tensor, layout: Layout, partial_on: tuple[int, ...], reduce_dtype):
        """What the node handed out as a DTensor: it expects summands of the cotangent, which is reduced on other axes."""
        if reduce_dtype is None:
            summand = layout.gradient(partial_on)
            out = wrap(redistribute_local(node, layout, layout, layout.gradient(), summand, data=node), layout)
            memo_of(out).source = node, layout, summand
            return out
        stand_in = wrap(node, layout)
        memo_of(stand_in).partial_grad_axes = partial_on
        out = wrap(as_copy(data, stand_in, reduce_dtype, layout.gradient()), layout)
        memo_of(out).copy_of = stand_in, reduce_dtype
        return out

    def reduced(self, numbers, grads) -> list[Tensor]:
        """The gradients of this backward as shards; zeros while they are only gathered up, and where nobody asks for one."""
        given = {(b, i): g for (b, i), g in zip(numbers, grads) if asked_for(self.blocks[b].params[i])}
        with NoFallbackGuard():
            for at in given.keys() & self._unsent.keys():
                given[at] = self._unsent[at] + given[at].astype(self._unsent[at].dtype)
        if not self.sync:
            for (b, i), g in given.items():
                kind = self.blocks[b].reduce_dtype
                self._unsent[b, i] = g * 1 if kind is None else g.astype(kind)
            return [*map(self.zeros, numbers)]
        self._unsent = {at: g for at, g in self._unsent.items() if at not in given}
        out: dict[tuple[int, int], Tensor] = {}
        for b, block in enumerate(self.blocks):
            mine = {i: g for (c, i), g in given.items() if c == b}
            if mine:
                work = block.reduce(mine)
                if self.late is None:
                    out.update({(b, i): g for i, g in block.shards(mine, work, self.copies).items()})
                else:
                    self.late.add(functools.partial(block.named_shards, tuple(mine), work, self.copies))
        return [out[at] if at in out else self.zeros(at) for at in numbers]

    def zeros(self, at: tuple[int, int]) -> Tensor:
        """The shard of no gradient."""
        p = self.blocks[at[0]].params[at[1]]
        return ms.ops.zeros(p.local_shape, p.dtype)


def _near(mesh, size: int):
    """The group of this rank and its neighbours on the last axis, so many together."""
    ranks = mesh.mesh.reshape(*mesh.shape[:-1], -1, size)
    names = (*mesh.mesh_dim_names[:-1], "far", "near")
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names).get_group("near")


def gather_changed(units: list[Unit]) -> None:
    """Of what users keep gathered, lets go what was changed on any rank."""
    for unit in units:
        if unit.kept and unit.full:
            changed = Tensor(np.array([any([block.changed() for block in unit.blocks])], np.float32))
            with comm.annotate(phase="forward", src="fully_shard", dst="were kept parameters changed"):
                changed = unit.mesh.get_group().all_reduce(changed, "max")
            if changed.asnumpy()[0]:
                for block in unit.blocks:
                    block.release(keep_part=False)
                unit.full = False


def gathered(layout: Layout, axes: list[int], dtype: str | None = None) -> Layout:
    """A cut parameter's layout while it is whole on the data axes."""
    placed = [REPLICATE if a in axes else p for a, p in enumerate(layout.placements)]
    return Layout(layout.mesh, placed, layout.shape, dtype or layout.dtype, layout.order)
