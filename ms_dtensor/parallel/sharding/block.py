# SPDX-License-Identifier: Apache-2.0
"""Parameters of one dtype that one collective gathers and one reduces, and the memory in which they are whole.

When that happens is the unit's to say (`unit.py`). On a host the group writes into the memory of large blocks, and reads
gradients where they lie. Else pieces are packed: each rank's are a row, in which every rank has a parameter's at the same
place, so that one strided copy takes a parameter out of the gathered rows, however many ranks there are (one copy more of a
parameter that they do not divide). One that is cut by parts (`FusedShard`) is several tensors here, one behind another, each
cut by itself. Tensors whose pieces are equally large lie side by side, of whichever parameters, and are taken out together.
A row that was cast for the forward's gathering is kept for the backward's, unless a shard is written between.

Where the memory is and how it comes and goes say `memory.py`, of hosts, and `rooms.py`, of devices.
"""
from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor

from ... import comm
from ...comm.packing import ArrayOps, TensorOps, blocks, numpy_dtype, same_bits, write
from ...comm.parts import Parts, in_chains
from ...comm.pretended import executing
from ...comm.protocol import Work
from ...core.layout import Layout
from ...dispatch.memo import times_written
from ...dispatch.operands import local_alias
from ...internals.names import NoFallbackGuard
from ...internals.target import on_cpu
from ...redistribute.boxes import tensors_along
from .memory import AbstractMemory, HostMemory, Memory
from .rooms import Room, RoomMemory
from .sums import blank

_LARGE = 8  # more than one in so many of a row's elements: a large column
_Column = tuple[int, list[tuple[int, Any]]]  # how wide; pieces to be put there, whose first dim are ranks from a number on


class Block:
    """Parameters of one dtype of a unit.

    Args:
        of: whose they are, as messages and the comparison of calls between ranks say it.
        params: cut DTensor Parameters; the block's are in an order of its own.
        whole: their layouts while gathered.
        dtype: MindSpore's dtype in which they are gathered and computed with.
        group: the ranks that a parameter is cut over.
        axes: these axes of the parameters' mesh.
        reduce_dtype: in which gradients are summed, where that is another; None: as they come.
        near: of `group`, the neighbours among whom the backward gathers; None: all.
        leaves: on a device, is called before another block takes the room in which this one is whole; it may refuse.
    """

    def __init__(self, of: str, params: list, whole: list[Layout], dtype, group, axes: tuple[int, ...], reduce_dtype, near,
                 leaves: Callable[[], None]):
        self.of, self.dtype, self._leaves = of, dtype, leaves
        self.group, self.reduce_dtype, self.near = group, reduce_dtype, near
        here = params[0].device_mesh.get_coordinate()
        tensors = [tensors_along(layout, p.layout, axes, here) for p, layout in zip(params, whole)]
        found, numbers = Parts(*zip(*itertools.chain(*tensors))), itertools.count()
        order = in_chains([[found.kind(next(numbers)) for _ in some] for some in tensors])
        self.params, self.whole = [params[i] for i in order], [whole[i] for i in order]
        self.shapes = [layout.local_shape() for layout in self.whole]
        self.parts = Parts(*zip(*itertools.chain(*(tensors[i] for i in order))))
        ends = itertools.accumulate((len(tensors[i]) for i in order), initial=0)
        self._numbers = [range(*pair) for pair in itertools.pairwise(ends)]  # in `parts`, of each parameter's tensors
        self.widths = [sum(self.parts.widths[j] for j in some) for some in self._numbers]  # of each one's place in a row
        self.bytes = self.parts.starts[-1] * numpy_dtype(dtype).itemsize
        self._left: tuple[Any, Tensor] | None = None  # for the backward: whom it gathers among, and what of this rank
        self._gathered: list[tuple[int, int, int]] = []  # `_writes` when it was gathered
        self._work: Work | None = None
        self._places = weakref.WeakKeyDictionary[Any, list]()  # of `_places_in_memory`, by where the memory is
        self._ops: type[TensorOps] = ArrayOps if on_cpu() else TensorOps
        # To pack again takes a cast beside a join: two kernels are worth a row's memory, one is not.
        self._keeps_row = not on_cpu() and near is None and any(p.dtype != dtype for p in params)

    def note(self, phase: str, dst: str, when: str = "") -> comm.annotate:
        """What the record and the comparison between ranks know of a collective."""
        return comm.annotate(phase=phase, src="fully_shard", dst=dst, of=f"{self.of} {when}" if when else self.of)

    def straight(self) -> bool:
        """Whether nothing is packed: the group writes into the memory, and reads where gradients lie."""
        return on_cpu() and self.group.size > 1 and self.memory.window is not None

    # -- rows, of what `_ops` work on --------------------------------------------------------------------------------

    def row(self, shards: dict[int, Tensor], dtype) -> Tensor:
        """This rank's pieces of parameters, given by their numbers; the places are as long as the longest pieces."""
        dry = executing()
        if dry is not None:
            return dry.ledger.new((sum(self.widths[i] for i in shards),), dtype, "buffers")
        return self._packed([(self.widths[i], [(0, self._ops.shaped(self._ops.of(x), (1, *x.shape)))] if x.size else [])
                             for i, x in shards.items()], 1, dtype)

    def _rows(self, wholes: dict[int, Any], first: int, stop: int, dtype) -> Tensor:
        """The rows of ranks [first, stop) of whole parameters, given by their numbers.

        On a device those of one dtype are joined in that, and cast all at once: CANN casts into memory of its own what it
        then writes into a row, so a column by itself takes two kernels, and as much memory for that moment.
        """
        dry, total = executing(), sum(self.widths[i] for i in wholes)
        given = list(dict.fromkeys(x.dtype for x in wholes.values()))
        kind = given[0] if self._ops is TensorOps and len(given) == 1 else dtype
        if dry is not None:
            joined = dry.ledger.new(((stop - first) * total,), kind, "buffers")
            return joined if kind == dtype else dry.ledger.new(((stop - first) * total,), dtype, "buffers")
        columns, rows = list[_Column](), [shape[0] for shape in self.parts.shapes]
        for i, whole in wholes.items():
            alike = [list(some) for _, some in itertools.groupby(self._numbers[i], self.parts.kind)]
            for some, x in zip(alike, self._split(whole, [sum(rows[j] for j in some) for some in alike])):
                columns += self._columns(some, x, first, stop, total, kind)
        return self._ops.tensor(self._ops.cast(self._ops.of(self._packed(columns, stop - first, kind)), dtype))

    def _columns(self, some: list[int], x: Any, first: int, stop: int, total: int, dtype) -> list[_Column]:
        """Of tensors that lie alike and one behind another, as one view; as one column, if that is to be written alone."""
        ops, k, n, width = self._ops, len(some), self.parts.members, self.parts.widths[some[0]]
        if k > 1 and (not ops.lies_as_it_is(x) or self._alone(x, stop - first, k * width, total, dtype)):
            x = ops.take(ops.shaped(x, (k, n, x.shape[0] // (k * n), *x.shape[1:])), 1, first, stop)
            return [(k * width, [(0, ops.permute(x, (1, 0, *range(2, len(x.shape)))))])]
        return [(width, [(r - first, piece) for r, piece in self._pieces(j, one, first, stop)])
                for j, one in zip(some, self._split(x, [x.shape[0] // k] * k))]

    def _alone(self, x: Any, count: int, width: int, total: int, dtype) -> bool:
        """Whether so many rows of a column are cast on their way to where they go, and not joined with others first."""
        kind = numpy_dtype(dtype) if self._ops is ArrayOps else dtype
        return count > 1 and x.dtype != kind and width * _LARGE > total

    def _split(self, x: Any, rows: Sequence[int]) -> Sequence[Any]:
        """Views of so many rows each; itself, where it is one."""
        return self._ops.split(x, rows, 0) if len(rows) > 1 else [x]

    def _pieces(self, j: int, whole: Any, first: int, stop: int) -> list[tuple[int, Any]]:
        """Views of a tensor whose first dim are ranks, those side by side with equal pieces; and the first of them."""
        d = self.parts.dims[j]
        return [(r, blocks(self._ops.take(whole, d, at, at + count * size), d, count, self._ops))
                for r, count, at, size in self.parts.runs(j, first, stop)]

    def _packed(self, columns: list[_Column], count: int, dtype) -> Tensor:
        """So many rows, flat, in memory of their own, of columns side by side.

        Columns that lie in order are joined, which is one kernel, and cast together, which is another. Of several rows large
        ones are written where they go by themselves: to join them first would move most of the bytes once more.
        """
        ops, kind = self._ops, numpy_dtype(dtype) if self._ops is ArrayOps else dtype
        total, at = sum(width for width, _ in columns), 0
        runs: list[tuple[int, list, list]] = []  # where each begins; columns to be joined, or else pieces to be written
        for width, found in columns:
            column = None
            if len(found) == 1 and math.prod(found[0][1].shape) == count * width and ops.lies_as_it_is(found[0][1]):
                column = ops.shaped(found[0][1], (count, width))
            if column is None or self._alone(column, count, width, total, dtype):
                runs.append((at, [], found))
            elif runs and runs[-1][1] and runs[-1][1][0].dtype == column.dtype:
                runs[-1][1].append(column)
            else:
                runs.append((at, [column], []))
            at += width
        if len(runs) == 1 and runs[0][1]:
            joined = runs[0][1]
            out = ops.join(joined, 1) if joined[1:] or joined[0].dtype != kind else ops.copy(joined[0])
            return ops.tensor(ops.shaped(ops.cast(out, dtype), (-1,)))
        out = ops.empty((count, total), dtype)
        for (at, joined, found), stop in zip(runs, [*(run[0] for run in runs[1:]), total]):
            place = ops.take(out, 1, at, stop)
            if joined:
                ops.write(place, ops.join(joined, 1))
            for r, x in found:
                ops.write(self._place(place, r, x.shape), x)
        return ops.tensor(ops.shaped(out, (-1,)))

    def _place(self, rows: Any, first: int, shape: Sequence[int]) -> Any:
        """The places of pieces of this shape, whose first dim are ranks from `first` on, in rows; a view."""
        if math.prod(shape) != math.prod(rows.shape):
            rows = self._ops.take(self._ops.take(rows, 0, first, first + shape[0]), 1, 0, math.prod(shape[1:]))
        return rows if tuple(rows.shape) == tuple(shape) else self._ops.shaped(rows, shape)

    # -- collectives -------------------------------------------------------------------------------------------------

    def reduce(self, grads: dict[int, Tensor], when: str) -> tuple[Work, dict[int, int]]:
        """Begins to add up all ranks' gradients, given by number of the parameter.

        Returns:
            The work, which has this rank's pieces, flat; and by number how many elements of that are a piece's place.
        """
        with NoFallbackGuard(), self.note("backward", "sharded gradients", when):
            grads = dict(sorted(grads.items()))  # as they lie in a row: those that are joined are side by side
            kind, size = self.reduce_dtype or next(iter(grads.values())).dtype, self.group.size
            if self.straight() and all(g.dtype == kind for g in grads.values()):
                tensors = {j: x for i, g in grads.items() for j, x in self._each(i, g, self.parts.shapes)}
                places = {i: math.prod(self.params[i].local_shape) for i in grads}
                return Work(self.group.reduce_scatter_from(tensors, self.parts)), places
            places = {i: self.widths[i] for i in grads}
            given = grads if executing() is not None else {i: self._ops.of(g) for i, g in grads.items()}
            rows = self._rows(given, 0, size, kind)
            return self.group.reduce_scatter(rows, "sum", 0, [sum(places.values())] * size, async_op=True), places

    def shards(self, places: dict[int, int], flat: Tensor) -> dict[int, Tensor]:
        """This rank's pieces, by number of the parameter, from flat memory in which these are their places."""
        ops, out, at, dry = self._ops, {}, 0, executing()
        if dry is not None:
            return {i: dry.on_storage_of(flat, self.params[i].local_shape) for i in places}
        with NoFallbackGuard():
            row = ops.of(flat)
            for i, elements in places.items():
                shape = self.params[i].local_shape
                out[i] = ops.tensor(ops.shaped(ops.take(row, 0, at, at + math.prod(shape)), shape))
                at += elements
        return out

    def _each(self, i: int, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, Tensor]]:
        """What parameter `i`, or a shard of it, has of each of its tensors, by their numbers, on the same memory."""
        some, ops, dry = self._numbers[i], self._ops, executing()
        if len(some) == 1:
            return [(some[0], x)]
        if dry is not None:
            return [(j, dry.on_storage_of(x, shapes[j])) for j in some]
        return [(j, ops.tensor(one)) for j, one in zip(some, self._split(ops.of(x), [shapes[j][0] for j in some]))]

    def start(self, phase: str, ahead: bool, when: str) -> None:
        """Begins to gather. `ahead`: it is not waited for at once."""
        later = ahead or not on_cpu()  # on host a thread would have to be woken for it
        own = list(map(local_alias, self.params))
        left, self._left = self._left, None
        if left is not None and (self.rewritten() if left[0] is self.near else phase != "backward" or self.stale()):
            left = None  # it is of what the shards were
        self._gathered = self._writes()
        with NoFallbackGuard(), self.note(phase, "gathered parameters", when):
            if left is None and self.straight():
                shapes = [self.parts.shape(j, self.group.rank_index) for j in range(len(self.parts.shapes))]
                own = [piece for i, x in enumerate(own) for _, piece in self._each(i, x, shapes)]
                self._work = self.group.all_gather_into(own, self.memory.window, self.parts, self.dtype, async_op=later)
                return
            group, row = left or (self.group, self.row(dict(enumerate(own)), self.dtype))
            if phase == "forward" and self._keeps_row:
                self._left = group, row
            given = group.all_gather(row, 0, [row.size] * group.size, async_op=later)
            self._work = given if later else Work(given)

    def _writes(self) -> list[tuple[int, int, int]]:
        """How often each shard was written: as a DTensor, by an optimizer, as a local tensor."""
        return [(0, 0, p._version) if (memo := p._memo) is None else (memo.written, memo.stepped, p._version)
                for p in self.params]

    def stale(self) -> bool:
        """Whether a shard was written since it was gathered."""
        return self._gathered != self._writes()

    def rewritten(self) -> bool:
        """Whether a shard was written since it was gathered, other than by an optimizer or as a local tensor."""
        return any(times_written(p) != then[0] for p, then in zip(self.params, self._gathered))

    def forget(self) -> None:
        """The backward gathers all anew."""
        self._left = None

    def finish(self, room: Room | None = None, keep_row: bool = False) -> None:
        """The memory holds the whole parameters; on a device in this room, or in any.

        `keep_row`: for a backward to come, which gathers it again.
        """
        work: Any = self._work
        gathered, self._work = work.wait(), None
        if not keep_row:
            self.forget()
        if gathered is None:  # it has been written there
            return
        with NoFallbackGuard():
            self.memory.claim(room)
            dry, here = executing(), self.memory.room()
            if dry is not None:
                dry.ledger.written(self.memory.tensor(0), dry.ledger.maker(gathered))
                dry.ledger.is_now(gathered, "buffers")
                return
            if here not in self._places:  # kept, as the host's calls for these views are what a device waits for
                self._places[here] = self._places_in_memory()
            rows = self._ops.shaped(self._ops.of(gathered), (self.group.size, -1))
            for at, width, order, place in self._places[here]:
                self._ops.write(place, order(self._ops.take(rows, 1, at, at + width)))

    def _places_in_memory(self) -> list[tuple[int, int, Callable[[Any], Any], Any]]:
        """Which columns of gathered rows go where: the first, how many, what makes a view of them, and the place."""
        at, n, ops, memory, starts = 0, self.group.size, self._ops, self.memory, self.parts.starts
        out: list[tuple[int, int, Callable[[Any], Any], Any]] = []
        for some in self.parts.alike():
            width, stretches = len(some) * self.parts.widths[some[0]], self.parts.stretches(some[0])
            if stretches is not None:
                lies = len(some), stretches, n, self.parts.widths[some[0]] // stretches
                out.append((at, width, functools.partial(self._by_tensor, lies),
                            ops.shaped(memory.joined(starts[some[0]], starts[some[-1] + 1]), lies)))
            else:
                whole = ops.shaped(memory.joined(starts[some[0]], starts[some[0] + 1]), self.parts.shapes[some[0]])
                for r, x in self._pieces(some[0], whole, 0, n):
                    out.append((at, width, functools.partial(self._place, first=r, shape=x.shape), x))
            at += width
        return out

    def _by_tensor(self, lies: tuple[int, int, int, int], rows: Any) -> Any:
        """Rows of tensors that lie alike: tensor, stretch, rank, elements."""
        tensors, stretches, n, elements = lies
        return self._ops.permute(self._ops.shaped(rows, (n, tensors, stretches, elements)), (1, 2, 0, 3))

    # -- memory ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def memory(self) -> Memory:
        """Where the parameters are whole while it is full."""
        if not on_cpu():
            return RoomMemory(self.shapes, self.dtype, self._leaves)
        kind = HostMemory if executing() is None else AbstractMemory
        return kind(self.shapes, self.dtype, self.group.backend)

    @functools.cached_property
    def blanks(self) -> list[Tensor]:
        """What autograd is given as the shards' gradients while sums are under way."""
        return [blank(p.local_shape, p.dtype) for p in self.params]

    def release(self, keep_part: bool, pages: bool) -> None:
        """The memory goes, but for what this rank keeps for its neighbours; without `pages`, windows stay as they are."""
        if self._work is not None:  # a gathering that nobody waited for
            self._work.wait()
            self._work = None
        elif keep_part and self.near is not None:
            each = self.group.size // self.near.size
            first = self.near.rank_index * each
            with NoFallbackGuard():
                wholes = {i: self.memory.array(i) for i in range(len(self.params))}
                self._left = self.near, self._rows(wholes, first, first + each, self.dtype)
        if pages or not self.straight():
            self.memory.release()

    def give_up(self) -> None:
        """A gathering that is under way will not end."""
        self._work = None

    def changed(self) -> bool:
        """Whether this rank's shards are no longer what lies in the memory."""
        if executing() is not None:
            return self.stale()
        ops = self._ops
        with NoFallbackGuard():
            return any(not same_bits(ops.tensor(ops.cast(ops.of(local_alias(p)), self.dtype)), mine)
                       for i, p in enumerate(self.params) for mine in self._mine(i))

    def write_own(self, i: int) -> None:
        """This rank's shard of parameter `i` becomes what lies in the memory."""
        self.forget()
        with NoFallbackGuard():
            for mine in self._mine(i):
                write(local_alias(self.params[i]), mine)

    def _mine(self, i: int) -> list[Tensor]:
        """This rank's piece of parameter `i` in the memory, if it has one."""
        me, ops, some = self.group.rank_index, self._ops, self._numbers[i]
        wholes = self._split(self.memory.array(i), [self.parts.shapes[j][0] for j in some])
        pieces = [ops.shaped(x, self.parts.shape(j, me)) for j, whole in zip(some, wholes)
                  for _, x in self._pieces(j, whole, me, me + 1)]
        return [ops.tensor(ops.join(pieces, 0))] if pieces else []
