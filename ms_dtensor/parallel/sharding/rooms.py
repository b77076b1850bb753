# SPDX-License-Identifier: Apache-2.0
"""Where the whole parameters of units lie on a device: in rooms, flat pieces of memory that units fill in turn.

To take a tensor's storage away and bring it back, as on a host, would wait for the device. Here no storage changes: a block
takes a free room when it is gathered, and leaves it when its parameters are given back; so units that run one after another
share one. What autograd and own functions have saved of a forward are views of the room that the block had then. So the
backward must have the parameters in that room, and no other (`bring`): whoever has it meanwhile is set aside, in memory of
its own, until the room is free again. A room lives as long as a block is in it or a recorded forward can come back to it.
Invariant: none of this communicates, as which rooms there are also follows from what Python has forgotten.
"""
from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence

import mindspore as ms
from mindspore import Tensor

from ...comm.packing import copy, write
from ...comm.pretended import executing
from ...internals.names import NoFallbackGuard, no_grad
from .memory import Memory

_ROOMY = 2  # how many times what it needs a block takes at most, where there is nothing smaller
_numbers = itertools.count()
_alive: weakref.WeakValueDictionary[int, Room] = weakref.WeakValueDictionary()  # in the order in which they were made


class Room:
    """One of them.

    Attributes:
        flat: its memory.
        holder: whose parameters lie in it.
        aside: of who has had to leave it, copies of what lay there, the last one last; of a free one nobody has.
    """

    def __init__(self, count: int, dtype):
        self.dtype, self.count, self._dry = dtype, count, executing()
        self.flat: Tensor = ms.mint.empty((count,), dtype=dtype) if self._dry is None else \
            self._dry.ledger.new((count,), dtype, "gathered")
        self.holder: RoomMemory | None = None
        self.aside: dict[RoomMemory, Tensor] = {}
        _alive[next(_numbers)] = self

    @classmethod
    def free(cls, count: int, dtype) -> Room:
        """The smallest that is free and large enough, or a new one."""
        fit = [room for room in _alive.values() if room.holder is None and room.dtype == dtype
               and room._dry is executing() and count <= room.count <= _ROOMY * count]
        return min(fit, key=lambda room: room.count) if fit else cls(count, dtype)

    def enter(self, memory: RoomMemory) -> bool:
        """It is this block's; whether its parameters lie here already."""
        if self.holder is memory:
            return True
        mine = self.aside.pop(memory, None)
        if self.holder is not None:
            self.holder.leaves()
            with no_grad():
                self.aside[self.holder] = copy(self.part(self.holder.count))
        self.holder = memory
        if mine is not None:
            self.fill(mine)
        return mine is not None

    def leave(self, memory: RoomMemory) -> None:
        """It is no longer this block's; who was set aside for it has its place again."""
        self.aside.pop(memory, None)
        if self.holder is memory:
            self.holder = None
            if self.aside:
                self.holder, values = self.aside.popitem()
                self.fill(values)

    def fill(self, values: Tensor) -> None:
        """Its first elements are these."""
        with no_grad():
            write(self.part(math.prod(values.shape)), values)

    def part(self, count: int) -> Tensor:
        """Its first elements."""
        if count == self.count:
            return self.flat
        return ms.mint.narrow(self.flat, 0, 0, count) if self._dry is None else self._dry.on_storage_of(self.flat, (count,))


class RoomMemory(Memory):
    """A block's memory, while it has one: in a room, or in several at once, where forwards had different ones.

    Attributes:
        leaves: is called before another block takes the room; it may refuse.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype, leaves: Callable[[], None]):
        super().__init__(shapes, dtype)
        self.leaves = leaves
        self.rooms: list[Room] = []

    def room(self) -> Room:
        """Where it is now; brought back there, if it was set aside."""
        for room in self.rooms:
            if room.holder is self:
                return room
        self.rooms[0].enter(self)
        return self.rooms[0]

    def tensor(self, i: int) -> Tensor:
        # Of an alias: MindSpore counts its writes by itself, and would refuse what is saved once the room is filled again.
        room = self.room()
        return self._cut(room, room.flat if room._dry is not None else ms.ops.stop_gradient(room.flat), i)

    def array(self, i: int) -> Tensor:
        room = self.room()
        return self._cut(room, room.flat, i)

    def joined(self, start: int, stop: int) -> Tensor:
        return ms.mint.narrow(self.room().flat, 0, start, stop - start)

    def _cut(self, room: Room, flat: Tensor, i: int) -> Tensor:
        if room._dry is not None:
            return room._dry.on_storage_of(flat, self.shapes[i])
        return ms.mint.reshape(ms.mint.narrow(flat, 0, self.starts[i], self.counts[i]), self.shapes[i])

    def claim(self, room: Room | None = None) -> None:
        if room is None:
            room = Room.free(self.count, self.dtype)
        if room not in self.rooms:
            self.rooms.insert(0, room)
        room.enter(self)

    def bring(self, room: Room | None) -> None:
        here = self.room()
        if room is None or room is here:
            return
        values = here.part(self.count)
        if room in self.rooms:
            self.rooms.remove(room)
        self.rooms.insert(0, room)  # whence tensors are made
        with NoFallbackGuard():
            if not room.enter(self):
                room.fill(values)

    def release(self) -> None:
        rooms, self.rooms = self.rooms, []
        for room in rooms:
            room.leave(self)
