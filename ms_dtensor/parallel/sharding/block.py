# SPDX-License-Identifier: Apache-2.0
"""Parameters of one dtype that one collective gathers and one reduces, and the memory in which they are whole.

When that happens is the unit's to say (`unit.py`).
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ... import comm
from ...comm.packing import numpy_dtype, write
from ...comm.parts import Parts
from ...comm.pretended import executing
from ...comm.protocol import Work
from ...core.layout import Layout
from ...dispatch.operands import local_alias
from ...internals.names import NoFallbackGuard
from ...internals.target import on_cpu
from ...redistribute.boxes import sizes_along
from .memory import AbstractMemory, DeviceMemory, HostMemory


class Block:
    """Parameters of one dtype of a unit.

    Args:
        of: whose they are, as messages and the comparison of calls between ranks say it.
        params: cut DTensor Parameters.
        whole: their layouts while gathered.
        dtype: MindSpore's dtype in which they are gathered and computed with.
        group: the ranks that a parameter is cut over.
        axes: these axes of the parameters' mesh.
        reduce_dtype: in which gradients are summed; None: as they come.
        near: of `group`, the neighbours among whom the backward gathers; None: all.
    """

    def __init__(self, of: str, params: list, whole: list[Layout], dtype, group, axes: tuple[int, ...], reduce_dtype, near):
        self.of, self.params, self.whole, self.dtype = of, params, whole, dtype
        self.group, self.reduce_dtype, self.near = group, reduce_dtype, near
        self.shapes, dims = [layout.local_shape() for layout in whole], [p.placements[axes[0]].dim for p in params]
        here = params[0].device_mesh.get_coordinate()
        self.parts = Parts(self.shapes, dims, [sizes_along(p.layout, axes, d, here) for p, d in zip(params, dims)])
        self.kind: Any = AbstractMemory if executing() is not None else HostMemory if on_cpu() else DeviceMemory
        self.bytes = self.parts.starts[-1] * numpy_dtype(dtype).itemsize
        self.memory: Any = None
        self.part: Any = None  # this rank's part of what the neighbours have together
        self._work: Work | None = None

    def note(self, phase: str, dst: str, when: str = "") -> comm.annotate:
        """What the record and the comparison between ranks know of a collective."""
        return comm.annotate(phase=phase, src="fully_shard", dst=dst, of=f"{self.of} {when}" if when else self.of)

    def reduce(self, grads: dict[int, Tensor], when: str) -> Work:
        """Begins to add up all ranks' gradients, given by number of the parameter; the work has this rank's part, flat."""
        with NoFallbackGuard(), self.note("backward", "sharded gradients", when):
            kind = self.reduce_dtype or next(iter(grads.values())).dtype
            if self.straight() and all(g.dtype == kind for g in grads.values()):
                return Work(self.group.reduce_scatter_from(grads, self.parts))
            pieces = [(grads[i], self.parts.index(i, r)) for r in range(self.group.size) for i in grads]
            totals = [self.parts.total(tuple(grads), r) for r in range(self.group.size)]
            return self.group.reduce_scatter(self.kind.pack(pieces, kind), "sum", 0, totals, async_op=True)

    def shards(self, numbers: Iterable[int], flat: Tensor) -> dict[int, Tensor]:
        """This rank's part of what `reduce` added up, by number of the parameter."""
        out, at = {}, 0
        with NoFallbackGuard():
            for i in numbers:
                count = self.parts.count(i, self.group.rank_index)
                out[i] = ms.mint.reshape(self.kind.part(flat, at, count), self.parts.shape(i, self.group.rank_index))
                at += count
        return out

    def handed_out(self, i: int, whole: bool) -> Tensor:
        """What the node gives: the whole parameter; or, as MindSpore casts a gradient to its tensor's dtype, a stand-in.

        A stand-in has the dtype in which gradients are reduced, and the memory of one number.
        """
        if whole and self.reduce_dtype in (None, self.dtype):
            return self.tensor(i)
        shape = self.shapes[i]
        return ms.ops.zeros((1,) * len(shape), self.reduce_dtype or self.dtype).expand(shape)

    def straight(self) -> bool:
        """Whether nothing is packed: the group writes into the memory, and reads where gradients lie."""
        return on_cpu() and self.group.size > 1 and self._memory().window is not None

    def _memory(self) -> DeviceMemory:
        if self.memory is None:
            self.memory = self.kind(self.shapes, self.dtype, self.group.backend)
        return self.memory

    def start(self, phase: str, ahead: bool, when: str) -> None:
        """Begins to gather. `ahead`: it is not waited for at once."""
        later = ahead or not on_cpu()  # on host a thread would have to be woken for it
        with NoFallbackGuard(), self.note(phase, "gathered parameters", when):
            if self.part is None and self.straight():
                own = [local_alias(p) for p in self.params]
                self._work = self.group.all_gather_into(own, self._memory().window, self.parts, self.dtype, async_op=later)
                return
            group, totals, given = self.group, self.parts.totals, self._packed() if self.part is None else self.part
            if self.part is not None:
                group, each = self.near, self.group.size // self.near.size
                totals = [sum(totals[r:r + each]) for r in range(0, len(totals), each)]
            given = group.all_gather(given, 0, totals, async_op=later)
            self._work = given if later else Work(given)

    def finish(self) -> None:
        """The memory holds the whole parameters."""
        work: Any = self._work
        gathered, self._work, self.part = work.wait(), None, None
        if gathered is None:  # it has been written there
            return
        with NoFallbackGuard():
            memory, at = self._memory(), 0
            memory.claim()
            if self.kind is AbstractMemory:
                executing().ledger.is_now(gathered, "buffers")
                return
            for r in range(self.group.size):
                for i in range(len(self.params)):
                    count = self.parts.count(i, r)
                    if count:
                        memory.write(i, self.parts.index(i, r), self.kind.part(gathered, at, count))
                    at += count

    def tensor(self, i: int) -> Tensor:
        """A new tensor on the memory, which is full."""
        return self._memory().tensor(i)

    def overwrite(self, i: int, value: Tensor) -> None:
        """Parameter `i` gets other values in the memory."""
        self._memory().write(i, (slice(None),) * len(self.shapes[i]), value)

    def release(self, keep_part: bool = False, pages: bool = True) -> None:
        """The memory goes, but for what this rank keeps for its neighbours; without `pages`, windows stay as they are."""
        self.part = None
        if self._work is not None:  # a gathering that nobody waited for
            self._work.wait()
            self._work = None
        elif keep_part and self.near is not None:
            near, whole = self.near, [self.tensor(i) for i in range(len(self.params))]
            each = self.group.size // near.size
            first = near.rank_index * each
            with NoFallbackGuard():
                self.part = self.kind.pack([(whole[i], self.parts.index(i, r)) for r in range(first, first + each)
                                             for i in range(len(self.params))], self.dtype)
        if self.memory is not None and (pages or not self.straight()):
            self.memory.release()

    def give_up(self) -> None:
        """A gathering that is under way will not end."""
        self._work = None

    def changed(self) -> bool:
        """Whether this rank's shards are no longer what lies in the memory."""
        if self.kind is AbstractMemory:
            return False
        with NoFallbackGuard():
            a, b = (x.asnumpy().view(np.uint8) for x in (self._packed(), self._mine(range(len(self.params)))))
        return not np.array_equal(a, b)

    def write_own(self, i: int) -> None:
        """This rank's shard of parameter `i` becomes what lies in the memory."""
        with NoFallbackGuard():
            own, piece = local_alias(self.params[i]), self._mine([i])
            if piece.size:
                write(own, ms.mint.reshape(piece, own.shape))

    def _mine(self, numbers: Iterable[int]) -> Tensor:
        parts, me = self.parts, self.group.rank_index
        return self.kind.pack([(self.tensor(i), parts.index(i, me)) for i in numbers], self.dtype)

    def _packed(self) -> Tensor:
        return self.kind.pack([(x, ()) for x in map(local_alias, self.params)], self.dtype)
