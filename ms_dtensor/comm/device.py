# SPDX-License-Identifier: Apache-2.0
"""What HCCL, NCCL and MCCL backends share: packing around a few flat primitives, and lazily made communicators.

A subclass supplies collectives on equal, non-empty, 1-d blocks (the methods named `_*_flat`); everything uneven, on
other dims, empty or of an unsupported dtype is handled here. The invariant: whether a call communicates is decided
from what all members know (shapes, sizes, dtype), never from local data.
"""
from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from ..errors import CommError
from .agree import Agreement, check_every
from .objects import decode, encode
from .owner import Owner
from .packing import TensorOps, pack, unpack
from .protocol import Backend, Ranks, Result, Work, offsets, with_dim
from .protocol import kind as _kind

Handle = Any  # MindSpore's CommHandle, or None when the call was synchronous
Flat = tuple[Tensor, Handle]


def communicator_name(ranks: Ranks) -> str:
    """A name for a set of ranks, equal on all of them, short however many they are (HCCL allows 128 characters)."""
    return f"msdt_{len(ranks)}_{hashlib.sha1(repr(ranks).encode()).hexdigest()[:24]}"


class DeviceBackend(Backend):
    """Backend over MindSpore's own communication.

    Args:
        rank: this rank.
        size: number of ranks.
        world: name of MindSpore's world communicator.
        create_group: MindSpore's `create_group(name, rank_ids)`; called by members only, once per set of ranks.
        api: the module of MindSpore's that has the collectives.
    """

    needs_scheduler = True
    ops: type[TensorOps] = TensorOps
    #: dtypes the device reduces by itself, by reduction; others are gathered and reduced locally
    reducible: frozenset[str] = frozenset()
    #: after how many collectives of a group its members compare what they called, see `agree`
    check_every: int = 64

    def __init__(self, rank: int, size: int, world: str, create_group: Callable[[str, list[int]], Any], api: Any):
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
        got, handle = self._all_gather_flat(halves, self._comm(group)[0], len(group), False)
        if handle is not None:
            handle.wait()
        return list(map(tuple, got.asnumpy().reshape(-1, 2).tolist()))

    # -- primitives of the subclass: flat, equal, not empty; give (result, handle or None) ---------------------------

    @abstractmethod
    def _all_reduce_flat(self, flat: Tensor, op: str, comm: str, size: int, async_op: bool) -> Flat:
        """All-reduce; must not change `flat`."""

    @abstractmethod
    def _all_gather_flat(self, flat: Tensor, comm: str, size: int, async_op: bool) -> Flat:
        """All blocks, in communicator order."""

    @abstractmethod
    def _reduce_scatter_flat(self, flat: Tensor, op: str, comm: str, size: int, position: int, async_op: bool) -> Flat:
        """Reduce-scatter of `size` equal blocks; this rank's is at `position`."""

    @abstractmethod
    def _all_to_all_flat(self, flat: Tensor, block: int, comm: str, size: int, position: int, async_op: bool) -> Flat:
        """All-to-all of `size` blocks of `block` elements."""

    @abstractmethod
    def _broadcast_flat(self, flat: Tensor, src: int, comm: str, async_op: bool) -> Flat:
        """Global rank `src`'s block; may overwrite `flat`."""

    @abstractmethod
    def _exchange_flat(self, sends: list[tuple[int, Tensor]], recvs: list[tuple[int, Tensor]]) -> None:
        """Point-to-point of not empty flat tensors, `recvs` written in place."""

    # -- dtypes ----------------------------------------------------------------------------------------------------

    def _wire(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The tensor in a dtype that can be moved, and the way back."""
        if x.dtype == mstype.bool_:
            return self.ops.cast(x, mstype.uint8), lambda y: self.ops.cast(y, mstype.bool_)
        if x.dtype in (mstype.complex64, mstype.complex128):
            raise CommError(f"For communication, dtype {x.dtype} is not supported by '{self.name}'.", str(x.shape),
                            "The device library moves no complex numbers.", "move real and imaginary part apart")
        return x, lambda y: y

    @staticmethod
    def _finish(result: Tensor, handle: Handle, step: Callable[[Tensor], Tensor], async_op: bool) -> Result:
        if not async_op:
            return step(result)

        def finish() -> Tensor:
            if handle is not None:
                handle.wait()
            return step(result)
        return Work(finish=finish)

    @staticmethod
    def _give(result: Tensor, async_op: bool) -> Result:
        return Work(result) if async_op else result

    def _reduced(self, y: Tensor, block: int, order: list[int], op: str, shape: Sequence[int]) -> Tensor:
        """What a device does not reduce by itself: the members' blocks, in the order of the group."""
        blocks = [unpack(y, block, order.index(i), (math.prod(shape),), self.ops) for i in range(len(order))]
        return self.ops.shaped(self.ops.reduce(blocks, op), shape)

    # -- collectives -----------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: str, group: Ranks, async_op: bool = False) -> Result:
        self._agree("all_reduce", f"{op} {_kind(x)}", group)
        if not math.prod(x.shape):
            return self._give(self.ops.copy(x), async_op)
        shape, (wire, back) = tuple(x.shape), self._wire(x)
        comm, order = self._comm(group)
        flat = self.ops.flat(wire)
        if f"{op} {wire.dtype}" in self.reducible:
            out, handle = self._all_reduce_flat(flat, op, comm, len(group), async_op)
            return self._finish(out, handle, lambda y: back(self.ops.shaped(y, shape)), async_op)
        out, handle = self._all_gather_flat(flat, comm, len(group), async_op)
        return self._finish(out, handle, lambda y: back(self._reduced(y, math.prod(shape), order, op, shape)), async_op)

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int], group: Ranks, async_op: bool = False) -> Result:
        self._agree("all_gather", f"{_kind(x, dim)} dim={dim} sizes={tuple(sizes)}", group)
        shape, (wire, back) = tuple(x.shape), self._wire(x)
        block = math.prod(with_dim(shape, dim, max(sizes)))
        if not block:
            return self._give(self._nothing(with_dim(shape, dim, sum(sizes)), x.dtype), async_op)
        comm, order = self._comm(group)
        out, handle = self._all_gather_flat(pack([wire], block, self.ops), comm, len(group), async_op)

        def step(y: Tensor) -> Tensor:
            pieces = [unpack(y, block, order.index(i), with_dim(shape, dim, s), self.ops)
                      for i, s in enumerate(sizes) if s]
            return back(self.ops.join(pieces, dim))
        return self._finish(out, handle, step, async_op)

    def reduce_scatter(self, x: Tensor, op: str, dim: int, sizes: Sequence[int], group: Ranks,
                       async_op: bool = False) -> Result:
        self._agree("reduce_scatter", f"{op} {_kind(x)} dim={dim} sizes={tuple(sizes)}", group)
        me = group.index(self.rank)
        shape = with_dim(tuple(x.shape), dim, sizes[me])
        block = math.prod(with_dim(tuple(x.shape), dim, max(sizes)))
        if not block:
            return self._give(self._nothing(shape, x.dtype), async_op)
        wire, back = self._wire(x)
        comm, order = self._comm(group)
        at = offsets(sizes)
        flat = pack([self.ops.take(wire, dim, at[i], at[i + 1]) for i in order], block, self.ops)
        if f"{op} {wire.dtype}" in self.reducible:
            out, handle = self._reduce_scatter_flat(flat, op, comm, len(group), order.index(me), async_op)
            return self._finish(out, handle, lambda y: back(unpack(y, block, 0, shape, self.ops)), async_op)
        out, handle = self._all_to_all_flat(flat, block, comm, len(group), order.index(me), async_op)
        return self._finish(out, handle, lambda y: back(self._reduced(y, block, order, op, shape)), async_op)

    def all_to_all(self, x: Tensor, split_dim: int, split_sizes: Sequence[int], concat_dim: int, concat_sizes: Sequence[int],
                   group: Ranks, async_op: bool = False) -> Result:
        self._agree("all_to_all", f"{_kind(x, concat_dim)} split {split_dim}:{tuple(split_sizes)} concat "
                    f"{concat_dim}:{tuple(concat_sizes)}", group)
        me = group.index(self.rank)

        def piece(i: int, j: int) -> tuple[int, ...]:
            """Shape of what member i gives to member j."""
            return with_dim(with_dim(tuple(x.shape), split_dim, split_sizes[j]), concat_dim, concat_sizes[i])
        largest = with_dim(with_dim(tuple(x.shape), split_dim, max(split_sizes)), concat_dim, max(concat_sizes))
        block = math.prod(largest)
        if not block:
            return self._give(self._nothing(with_dim(piece(me, me), concat_dim, sum(concat_sizes)), x.dtype), async_op)
        wire, back = self._wire(x)
        comm, order = self._comm(group)
        at = offsets(split_sizes)
        flat = pack([self.ops.take(wire, split_dim, at[i], at[i + 1]) for i in order], block, self.ops)
        out, handle = self._all_to_all_flat(flat, block, comm, len(group), order.index(me), async_op)

        def step(y: Tensor) -> Tensor:
            pieces = [unpack(y, block, order.index(i), piece(i, me), self.ops) for i, s in enumerate(concat_sizes) if s]
            return back(self.ops.join(pieces, concat_dim))
        return self._finish(out, handle, step, async_op)

    def broadcast(self, x: Tensor, src: int, group: Ranks, async_op: bool = False) -> Result:
        self._agree("broadcast", f"{_kind(x)} from {src}", group)
        if not math.prod(x.shape):
            return self._give(self.ops.copy(x), async_op)
        shape, (wire, back) = tuple(x.shape), self._wire(x)
        flat = self.ops.copy(self.ops.flat(wire))  # broadcast in place, and the input stays untouched
        out, handle = self._broadcast_flat(flat, src, self._comm(group)[0], async_op)
        return self._finish(out, handle, lambda y: back(self.ops.shaped(y, shape)), async_op)

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
            return self.ops.empty(math.prod(shape), mstype.uint8 if dtype == mstype.bool_ else dtype)
        got = [mine.pop(0) if src == self.rank else buffer(shape, dtype) for src, shape, dtype in recvs]
        # both ends know what is empty
        leaving = [(dst, self.ops.flat(self._wire(x)[0])) for dst, x in sends if dst != self.rank and math.prod(x.shape)]
        arriving = [(src, y) for (src, shape, _), y in zip(recvs, got) if src != self.rank and 0 not in shape]
        if leaving or arriving:
            self._exchange_flat(leaving, arriving)
        return [self.ops.shaped(self.ops.cast(y, dtype) if dtype == mstype.bool_ else y, shape)
                for y, (_, shape, dtype) in zip(got, recvs)]

    def _in_order(self, sends: list[tuple[int, Tensor]],
                  recvs: list[tuple[int, Tensor]]) -> Iterator[tuple[str, int, int, Tensor]]:
        """Messages in one order of all pairs of ranks, as ("send" or "recv", peer, number within the pair, tensor).

        The lower rank sends first: where a send waits for its receive, the smallest unfinished pair can always proceed.
        """
        for peer in sorted({p for p, _ in (*sends, *recvs)}, key=lambda p: (min(p, self.rank), max(p, self.rank))):
            for what in ("send", "recv") if self.rank < peer else ("recv", "send"):
                messages = [x for p, x in (sends if what == "send" else recvs) if p == peer]
                yield from ((what, peer, number, x) for number, x in enumerate(messages))

    def _nothing(self, shape: Sequence[int], dtype: Any) -> Tensor:
        return self.ops.shaped(self.ops.empty(0, dtype), shape)

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
