# SPDX-License-Identifier: Apache-2.0
"""What HCCL, NCCL and MCCL backends share: packing around a few primitives, and communicators.

A subclass supplies collectives on equal, non-empty blocks that lie one behind another (the methods named `_*_flat`);
everything uneven, on other dims, empty or of an unsupported dtype is handled here. Even pieces of dim 0 go as they lie,
in one kernel; others take a kernel before, a kernel after, or both. An average is the sum of values divided before, so
that it cannot overflow. The invariant: whether a call communicates is decided from what all members know (shapes, sizes,
dtype), never from local data.
"""
from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from ..errors import CommError
from .agree import Agreement, check_every
from .objects import decode, encode
from .owner import Owner
from .packing import TensorOps, blocks, first, last_back, padded, unpadded
from .protocol import Backend, Ranks, Result, Work, communicator_name, offsets, with_dim
from .protocol import kind as _kind

Handle = Any  # MindSpore's CommHandle, or None when the call was synchronous
Flat = tuple[Tensor, Handle]
_Cast = Callable[[Tensor], Tensor]


class DeviceBackend(Backend):
    """Backend over MindSpore's own communication.

    Args:
        rank: this rank.
        size: number of ranks.
        world: name of MindSpore's world communicator.
        create_group: makes a communicator, `create_group(name, rank_ids)`; called by members only, once per set of ranks.
        api: the module of MindSpore's that has the collectives.
    """

    needs_scheduler = True
    ops: type[TensorOps] = TensorOps
    #: dtypes the device reduces by itself, by reduction; others are gathered and reduced locally
    reducible: frozenset[str] = frozenset()
    #: dtypes that are moved as another
    carriers: ClassVar[dict[Any, Any]] = {mstype.bool_: mstype.uint8}
    #: after how many collectives of a group its members compare what they called, see `agree`
    check_every: int = 4096
    #: whether `_all_to_all_flat` takes pieces of different lengths
    uneven_pieces: bool = False

    def __init__(self, rank: int, size: int, world: str, create_group: Callable[[str, list[int]], Any],
                 api: Any):
        self.rank, self.size, self._api = rank, size, api
        self._create_group = create_group
        self._comms: dict[Ranks, tuple[str, list[int]]] = {tuple(range(size)): (world, list(range(size)))}
        self._names: dict[Ranks, str] = {tuple(range(size)): world}
        self._owner = Owner()
        self._agreement = Agreement(check_every(self.check_every), self._gather_number, self.all_gather_object)

    def _agree(self, what: str, about: str, group: Ranks) -> None:
        self._owner.check(what)
        self._agreement.call(what, about, group)

    def _comm(self, group: Ranks) -> tuple[str, list[int]]:
        """The communicator's name, and which group index sits at each of its positions.

        Communicators are made over sorted ranks: one serves every order of its members.
        """
        known = self._comms.get(group)
        if known is None:
            ranks = tuple(sorted(group))
            name = self._names.get(ranks)
            if name is None:
                name = self._names[ranks] = communicator_name(ranks)
                self._create_group(name, list(ranks))
            known = self._comms[group] = (name, [group.index(r) for r in ranks])
        return known

    def communicator(self, group: Ranks) -> str | None:
        return self._comm(group)[0]

    def _gather_number(self, number: int, group: Ranks) -> list[tuple[int, int]]:
        halves = Tensor(np.array([number >> 16, number & 0xFFFF], np.int32))
        got, handle = self._all_gather_flat(halves, (2 * len(group),), self._comm(group)[0], False)
        if handle is not None:
            handle.wait()
        return list(map(tuple, got.asnumpy().reshape(-1, 2).tolist()))

    # -- primitives of the subclass: contiguous, equal, not empty; give (result, handle or None) ----------------------

    @abstractmethod
    def _all_reduce_flat(self, x: Tensor, op: str, comm: str, async_op: bool) -> Flat:
        """All-reduce; may write into `x`, and then that is the result."""

    @abstractmethod
    def _all_gather_flat(self, x: Tensor, shape: Sequence[int], comm: str, async_op: bool) -> Flat:
        """All blocks, in communicator order, as a tensor of this shape."""

    @abstractmethod
    def _reduce_scatter_flat(self, x: Tensor, shape: Sequence[int], op: str, comm: str, position: int,
                             async_op: bool) -> Flat:
        """Reduce-scatter of equal blocks of this shape; this rank's is at `position`."""

    @abstractmethod
    def _all_to_all_flat(self, x: Tensor, shape: Sequence[int], sends: Sequence[int], recvs: Sequence[int], comm: str,
                         position: int, async_op: bool) -> Flat:
        """All-to-all of pieces of a flat tensor, in these lengths, which are all one unless `uneven_pieces`."""

    def _rows_flat(self, x: Tensor, shape: Sequence[int], sends: Sequence[int], recvs: Sequence[int], comm: str,
                   async_op: bool) -> Flat:
        """All-to-all of rows in any numbers, some of them zero; `x` and the result hold some. Asked if `uneven_pieces`."""
        raise NotImplementedError

    @abstractmethod
    def _broadcast_flat(self, x: Tensor, src: int, comm: str, async_op: bool) -> Flat:
        """Global rank `src`'s block; may overwrite `x`, and then that is the result."""

    @abstractmethod
    def _exchange_flat(self, sends: list[tuple[int, Tensor]], recvs: list[tuple[int, Tensor]]) -> None:
        """Point-to-point of not empty tensors, `recvs` written in place."""

    # -- dtypes ----------------------------------------------------------------------------------------------------

    def _wire(self, x: Tensor) -> tuple[Tensor, _Cast | None]:
        """The tensor in a dtype that can be moved, and the way back if that is another."""
        carrier = self.carriers.get(x.dtype)
        if carrier is not None:
            return self.ops.cast(x, carrier), lambda y: self.ops.cast(y, x.dtype)
        if x.dtype in (mstype.complex64, mstype.complex128):
            raise CommError(f"For communication, dtype {x.dtype} is not supported by '{self.name}'.", str(x.shape),
                            "The device library moves no complex numbers.", "move real and imaginary part apart")
        return x, None

    def _finish(self, out: Tensor, handle: Handle, shape: Sequence[int], async_op: bool, back: _Cast | None,
                view: Callable[[Tensor], Tensor] | None = None, made: Callable[[Tensor], Tensor] | None = None) -> Result:
        """What the caller gets of the device's `out`: at once, or with a `Work` that has it after its wait.

        It is no view: MindSpore's `assign` refuses to write into one, and a view of a padded block keeps all of it.

        Args:
            out: written by the collective that `handle` is of.
            handle: None if the stream has been made to wait already.
            shape: of the result, which is `out` as it is unless `view` or `made` says how to get it.
            async_op: a `Work` is wanted, if possible with the tensor that will hold the result.
            back: the way back from the dtype that was moved.
            view: of `out`, with the elements of the result in order; its dims may be apart.
            made: a new tensor from `out`.
        """
        def result(holds: Tensor | None = None) -> Tensor:
            if handle is not None:
                handle.wait()
            y = made(out) if made is not None else out if holds is out else self._put(holds, view(out))  # type: ignore[misc]
            return y if back is None else back(y)
        if made is not None:
            return Work(finish=result) if async_op else result()
        holds = out if view is None else self.ops.empty(shape, out.dtype)
        if not async_op:
            return result(holds)
        return Work(holds if back is None else None, lambda: result(holds))

    def _put(self, holds: Tensor, view: Tensor) -> Tensor:
        self.ops.write(self.ops.shaped(holds, view.shape), view)
        return holds

    def _not_0d(self, x: Tensor) -> Tensor:
        return x if x.shape else self.ops.shaped(x, (1,))

    @staticmethod
    def _give(result: Tensor, async_op: bool) -> Result:
        return Work(result) if async_op else result

    def _reduced(self, y: Tensor, block: Sequence[int], order: list[int], op: str) -> Tensor:
        """What a device does not reduce by itself: the members' blocks of this shape, in the order of the group."""
        n = math.prod(block)
        places = [order.index(i) * n for i in range(len(order))]
        return self.ops.reduce([self.ops.shaped(self.ops.take(y, 0, at, at + n), block) for at in places], op)

    def _native(self, op: str, x: Tensor) -> str | None:
        """The device's reduction for this one, or None: an average is a sum of parts."""
        op = "sum" if op == "avg" else op
        return op if f"{op} {x.dtype}" in self.reducible else None

    # -- collectives -----------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: str, group: Ranks, async_op: bool = False) -> Result:
        self._agree("all_reduce", f"{op} {_kind(x)}", group)
        if not math.prod(x.shape):
            return self._give(self.ops.copy(x), async_op)
        shape, (wire, back), n = tuple(x.shape), self._wire(x), len(group)
        comm, order = self._comm(group)
        native = self._native(op, wire)
        if native is None:
            out, handle = self._all_gather_flat(self.ops.flat(wire), (n * math.prod(shape),), comm, async_op)
            return self._finish(out, handle, shape, async_op, back, made=lambda y: self._reduced(y, shape, order, op))
        own = self.ops.scaled(wire, 1 / n) if op == "avg" else self.ops.copy(wire) if back is None else wire
        out, handle = self._all_reduce_flat(self._not_0d(self.ops.in_order(own)), native, comm, async_op)
        return self._finish(out, handle, shape, async_op, back, None if shape else lambda y: y)

    def all_reduce_(self, x: Tensor, op: str, group: Ranks) -> Work[Tensor]:
        native = self._native(op, x)
        if native is None or op == "avg" or not x.shape or not self.ops.lies_as_it_is(x):
            work = self.all_reduce(x, op, group, async_op=True)
            return Work(finish=lambda: self.ops.write(x, work.wait()))
        self._agree("all_reduce", f"{op} {_kind(x)}", group)
        out, handle = self._all_reduce_flat(x, native, self._comm(group)[0], True)

        def written() -> Tensor:
            if handle is not None:
                handle.wait()
            return x if out is x else self.ops.write(x, out)
        return Work(x, written)

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int], group: Ranks, async_op: bool = False) -> Result:
        self._agree("all_gather", f"{_kind(x, dim)} dim={dim} sizes={tuple(sizes)}", group)
        shape, (wire, back), n, rows = tuple(x.shape), self._wire(x), len(group), max(sizes)
        result = with_dim(shape, dim, sum(sizes))
        if not math.prod(with_dim(shape, dim, rows)):
            return self._give(self.ops.empty(result, x.dtype), async_op)
        comm, order = self._comm(group)
        if min(sizes) == rows and order == sorted(order):
            out, handle = self._all_gather_flat(self.ops.in_order(wire), with_dim(shape, 0, n * shape[0]), comm, async_op)
            return self._finish(out, handle, result, async_op, back, None if dim == 0 else
                                lambda y: last_back(self.ops.shaped(y, (n, *shape)), dim, self.ops))
        flat = padded([wire], dim, rows, self.ops)
        out, handle = self._all_gather_flat(flat, (n * flat.shape[0],), comm, async_op)

        def made(y: Tensor) -> Tensor:
            pieces = [unpadded(y, with_dim(shape, dim, s), dim, rows, order.index(i), self.ops)
                      for i, s in enumerate(sizes) if s]
            return self.ops.join(pieces, dim) if len(pieces) > 1 else self.ops.copy(pieces[0])
        return self._finish(out, handle, result, async_op, back, made=made)

    def reduce_scatter(self, x: Tensor, op: str, dim: int, sizes: Sequence[int], group: Ranks,
                       async_op: bool = False) -> Result:
        self._agree("reduce_scatter", f"{op} {_kind(x)} dim={dim} sizes={tuple(sizes)}", group)
        me, n, rows = group.index(self.rank), len(group), max(sizes)
        shape = with_dim(tuple(x.shape), dim, sizes[me])
        block = math.prod(with_dim(tuple(x.shape), dim, rows))
        if not block:
            return self._give(self.ops.empty(shape, x.dtype), async_op)
        wire, back = self._wire(x)
        comm, order = self._comm(group)
        native = self._native(op, wire)
        if native is not None and op == "avg":
            wire = self.ops.scaled(wire, 1 / n)
        position, even = order.index(me), min(sizes) == rows and order == sorted(order)
        flat = self._padded(wire, dim, sizes, order) if not even else self.ops.in_order(wire) if dim == 0 else \
            self.ops.shaped(self.ops.in_order(blocks(wire, dim, n, self.ops)), with_dim(shape, 0, n * shape[0]))
        lies = shape if even else (block,)

        def view(y: Tensor) -> Tensor:
            return y if even else unpadded(y, shape, dim, rows, 0, self.ops)
        if native is not None:
            out, handle = self._reduce_scatter_flat(flat, lies, native, comm, position, async_op)
            return self._finish(out, handle, shape, async_op, back, None if even else view)
        equal = [block] * n
        out, handle = self._all_to_all_flat(self.ops.flat(flat), (n * block,), equal, equal, comm, position, async_op)
        return self._finish(out, handle, shape, async_op, back, made=lambda y: self._put(
            self.ops.empty(shape, y.dtype), view(self._reduced(y, lies, order, op))))

    def _padded(self, x: Tensor, dim: int, sizes: Sequence[int], order: list[int]) -> Tensor:
        at = offsets(sizes)
        return padded([self.ops.take(x, dim, at[i], at[i + 1]) for i in order], dim, max(sizes), self.ops)

    def all_to_all(self, x: Tensor, split_dim: int, split_sizes: Sequence[int], concat_dim: int, concat_sizes: Sequence[int],
                   group: Ranks, async_op: bool = False) -> Result:
        self._agree("all_to_all", f"{_kind(x, concat_dim)} split {split_dim}:{tuple(split_sizes)} concat "
                    f"{concat_dim}:{tuple(concat_sizes)}", group)
        me, n, shape = group.index(self.rank), len(group), tuple(x.shape)

        def piece(i: int, j: int) -> tuple[int, ...]:
            """Shape of what member i gives to member j."""
            return with_dim(with_dim(shape, split_dim, split_sizes[j]), concat_dim, concat_sizes[i])
        result = with_dim(piece(me, me), concat_dim, sum(concat_sizes))
        block = math.prod(with_dim(with_dim(shape, split_dim, max(split_sizes)), concat_dim, max(concat_sizes)))
        if not block:
            return self._give(self.ops.empty(result, x.dtype), async_op)
        wire, back = self._wire(x)
        comm, order = self._comm(group)
        ordered = order == sorted(order)
        if ordered and min(split_sizes) == max(split_sizes) and min(concat_sizes) == max(concat_sizes):
            flat = self.ops.flat(blocks(wire, split_dim, n, self.ops))
            lies = result if concat_dim == 0 else (n * block,)
            out, handle = self._all_to_all_flat(flat, lies, [block] * n, [block] * n, comm, me, async_op)
            return self._finish(out, handle, result, async_op, back, None if concat_dim == 0 else
                                lambda y: last_back(self.ops.shaped(y, (n, *piece(me, me))), concat_dim, self.ops))
        # a piece lies with the split dim in front: so the pieces lie one behind another
        flat = self.ops.flat(first(wire, split_dim, self.ops))
        sends, recvs = ([math.prod(p) for p in pieces] for pieces in (
            [piece(me, j) for j in range(n)], [piece(i, me) for i in range(n)]))
        at = offsets(sends)
        if ordered and self.uneven_pieces and min(split_sizes) and min(concat_sizes):
            starts, lengths = offsets(recvs), (sends, recvs)
        else:
            parts = []
            for j in order:
                parts += [self.ops.take(flat, 0, at[j], at[j + 1])] if sends[j] else []
                parts += [self.ops.empty((block - sends[j],), flat.dtype)] if sends[j] < block else []
            flat, starts = self.ops.join(parts, 0), [order.index(i) * block for i in range(n)]
            lengths = [block] * n, [block] * n
        out, handle = self._all_to_all_flat(flat, (sum(lengths[1]),), *lengths, comm, order.index(me), async_op)

        def made(y: Tensor) -> Tensor:
            pieces = []
            for i in (i for i in range(n) if recvs[i]):
                dims = piece(i, me)
                lies = self.ops.shaped(self.ops.take(y, 0, starts[i], starts[i] + recvs[i]),
                                       (dims[split_dim], *dims[:split_dim], *dims[split_dim + 1:]))
                pieces.append(last_back(lies, split_dim, self.ops))
            if len(pieces) > 1:
                return self.ops.join(pieces, concat_dim)
            return self.ops.copy(pieces[0]) if pieces else self.ops.empty(result, y.dtype)
        return self._finish(out, handle, result, async_op, back, made=made)

    def all_to_all_rows(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], group: Ranks,
                        async_op: bool = False) -> Result:
        self._agree("all_to_all_rows", _kind(x, 0), group)
        me, rest = group.index(self.rank), tuple(x.shape[1:])
        shape = (sum(recv_sizes), *rest)
        if not math.prod(rest):
            return self._give(self.ops.empty(shape, x.dtype), async_op)
        if not self.uneven_pieces:
            return self._give(self._rows_as_messages(x, send_sizes, recv_sizes, group), async_op)
        (wire, back), (comm, order) = self._wire(x), self._comm(group)
        # whether tensors hold anything only this rank knows, so the call is made anyhow: with a row for itself
        spare = int(not sum(send_sizes) or not sum(recv_sizes))
        sends, recvs = ([*sizes[:me], sizes[me] + spare, *sizes[me + 1:]] for sizes in (send_sizes, recv_sizes))
        ordered = order == sorted(order)
        if spare or not ordered:
            at = offsets(send_sizes)
            pieces = [p for i in order for p in (
                *([self.ops.take(wire, 0, at[i], at[i + 1])] if send_sizes[i] else ()),
                *([self.ops.empty((1, *rest), wire.dtype)] if spare and i == me else ()))]
            wire = self.ops.join(pieces, 0)
        out, handle = self._rows_flat(self.ops.in_order(wire), (sum(recvs), *rest), [sends[i] for i in order],
                                      [recvs[i] for i in order], comm, async_op)
        if ordered and not spare:
            return self._finish(out, handle, shape, async_op, back)
        starts = dict(zip(order, offsets([recvs[i] for i in order])))

        def made(y: Tensor) -> Tensor:
            parts = [self.ops.take(y, 0, starts[i], starts[i] + n) for i, n in enumerate(recv_sizes) if n]
            if len(parts) > 1:
                return self.ops.join(parts, 0)
            return self.ops.copy(parts[0]) if parts else self.ops.empty(shape, y.dtype)
        return self._finish(out, handle, shape, async_op, back, made=made)

    def _rows_as_messages(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], group: Ranks) -> Tensor:
        """Where a device has no all-to-all of unlike pieces: both ends of a message know whether there is one."""
        at, rest = offsets(send_sizes), tuple(x.shape[1:])
        got = self.exchange([(r, self.ops.take(x, 0, at[i], at[i + 1])) for i, r in enumerate(group) if send_sizes[i]],
                            [(r, (n, *rest), x.dtype) for r, n in zip(group, recv_sizes) if n])
        return self.ops.join(got, 0) if got else self.ops.empty((0, *rest), x.dtype)

    def broadcast(self, x: Tensor, src: int, group: Ranks, async_op: bool = False) -> Result:
        self._agree("broadcast", f"{_kind(x)} from {src}", group)
        if not math.prod(x.shape):
            return self._give(self.ops.copy(x), async_op)
        shape, (wire, back) = tuple(x.shape), self._wire(x)
        # broadcast in place, and the input stays untouched
        own = self.ops.copy(wire) if self.rank == src else self.ops.empty(shape, wire.dtype)
        out, handle = self._broadcast_flat(self._not_0d(own), src, self._comm(group)[0], async_op)
        return self._finish(out, handle, shape, async_op, back, None if shape else lambda y: y)

    def scatter(self, x: Tensor | None, dim: int, sizes: Sequence[int], src: int, group: Ranks, *, shape: Sequence[int],
                dtype: Any, async_op: bool = False) -> Result:
        self._agree("scatter", f"{dtype}{list(shape)} dim={dim} sizes={tuple(sizes)} from {src}", group)
        me, shape = group.index(self.rank), tuple(shape)
        if self.rank == src:
            at = offsets(sizes)
            pieces = [self.ops.take(x, dim, at[i], at[i + 1]) for i in range(len(group))]
            self.exchange([(r, p) for r, p in zip(group, pieces) if r != src], [])
            return self._give(self.ops.copy(pieces[me]), async_op)
        return self._give(self.exchange([], [(src, with_dim(shape, dim, sizes[me]), dtype)])[0], async_op)

    def exchange(self, sends: Sequence[tuple[int, Tensor]],
                 recvs: Sequence[tuple[int, Sequence[int], Any]]) -> list[Tensor]:
        self._owner.check("exchange")
        mine = [self.ops.copy(x) for dst, x in sends if dst == self.rank]

        def buffer(shape: Sequence[int], dtype: Any) -> Tensor:
            return self.ops.empty(shape or (1,), self.carriers.get(dtype, dtype))
        got = [mine.pop(0) if src == self.rank else buffer(shape, dtype) for src, shape, dtype in recvs]
        # both ends know what is empty
        leaving = [(dst, self.ops.in_order(self._not_0d(self._wire(x)[0]))) for dst, x in sends
                   if dst != self.rank and math.prod(x.shape)]
        arriving = [(src, y) for (src, shape, _), y in zip(recvs, got) if src != self.rank and 0 not in shape]
        if leaving or arriving:
            self._exchange_flat(leaving, arriving)
        got = [self.ops.cast(y, dtype) if y.dtype != dtype else y for y, (_, _, dtype) in zip(got, recvs)]
        return [y if tuple(y.shape) == tuple(shape) else self.ops.shaped(y, shape) for y, (_, shape, _) in zip(got, recvs)]

    def _in_order(self, sends: list[tuple[int, Tensor]],
                  recvs: list[tuple[int, Tensor]]) -> Iterator[tuple[str, int, int, Tensor]]:
        """Messages in one order of all pairs of ranks, as ("send" or "recv", peer, number within the pair, tensor).

        The lower rank sends first: where a send waits for its receive, the smallest unfinished pair can always proceed.
        """
        for peer in sorted({p for p, _ in (*sends, *recvs)}, key=lambda p: (min(p, self.rank), max(p, self.rank))):
            for what in ("send", "recv") if self.rank < peer else ("recv", "send"):
                messages = [x for p, x in (sends if what == "send" else recvs) if p == peer]
                yield from ((what, peer, number, x) for number, x in enumerate(messages))

    # -- objects, and the barrier --------------------------------------------------------------------------------------

    def barrier(self, group: Ranks) -> None:
        self.all_gather(Tensor(np.zeros(1, np.int32)), 0, [1] * len(group), group).asnumpy()

    def all_gather_object(self, obj: Any, group: Ranks) -> list[Any]:
        data = np.frombuffer(encode(obj), np.uint8)
        ones = [1] * len(group)
        sizes = self.all_gather(Tensor(np.array([data.size], np.int32)), 0, ones, group).asnumpy().tolist()
        joined = self.all_gather(Tensor(data.copy()), 0, sizes, group).asnumpy().tobytes()
        at = offsets(sizes)
        return [decode(joined[at[i]:at[i + 1]]) for i in range(len(group))]

    def broadcast_object(self, obj: Any, src: int, group: Ranks) -> Any:
        data = np.frombuffer(encode(obj), np.uint8) if self.rank == src else np.zeros(0, np.uint8)
        count = int(self.broadcast(Tensor(np.array([data.size], np.int32)), src, group).asnumpy()[0])
        payload = data.copy() if self.rank == src else np.zeros(count, np.uint8)
        return decode(self.broadcast(Tensor(payload), src, group).asnumpy().tobytes())
