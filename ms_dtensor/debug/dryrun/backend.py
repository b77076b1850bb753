# SPDX-License-Identifier: Apache-2.0
"""A world of ranks without data: collectives give tensors of the right shape and dtype, at no cost.

As `comm/fake.py`, whose shapes these are, and which repeats and cuts the data of this rank; here there are none.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor

from ...comm.fake import FakeBackend
from ...comm.parts import Parts
from ...comm.protocol import Ranks, Result, Work, with_dim


class AbstractWindow:
    """Memory of so many bytes that comes and goes; what is gathered is written straight into it."""

    def __init__(self, executor: Any, nbytes: int):
        self.executor, self.nbytes, self.taken = executor, nbytes, False
        self.flat: Tensor | None = None  # what lies in it

    def claim(self) -> None:
        """The memory comes; nothing if it is there."""
        self._take(True)

    def release(self) -> None:
        """It goes; nothing if there is none."""
        self._take(False)

    def _take(self, taken: bool) -> None:
        if taken != self.taken:
            self.taken = taken
            self.executor.mapped += self.nbytes if taken else 0
            self.executor.ledger.change("gathered", self.nbytes if taken else -self.nbytes, "windows")


class AbstractBackend(FakeBackend):
    """A world of `size` ranks without data, of which only `rank` exists.

    Args:
        size: number of ranks.
        rank: the one to be.
        executor: makes the results.
        on_host: as of the backend whose place this takes.
    """

    def __init__(self, size: int, rank: int, executor: Any, on_host: bool):
        super().__init__(size, rank)
        self.executor, self.on_host = executor, on_host

    def _made(self, shape: Sequence[int], x: Tensor, async_op: bool, of: tuple = ()) -> Result:
        out = self.executor.arrive(shape, x.dtype, x)
        return Work(out) if async_op else out

    def all_reduce_(self, x: Tensor, op: str, group: Ranks) -> Work[Tensor]:
        self.executor.give(x)
        return Work(x)

    def buffer(self, count: int, dtype: np.dtype) -> np.ndarray:
        return self.executor.buffer(count, dtype)

    def window(self, nbytes: int) -> AbstractWindow | None:
        """As the backend of a host has it, see `comm/shm/window.py`; a device packs."""
        return AbstractWindow(self.executor, nbytes) if self.on_host else None

    def all_gather_into(self, pieces: Sequence[Tensor], window: AbstractWindow, parts: Parts, dtype: np.dtype, group: Ranks,
                        async_op: bool = False) -> Work:
        window.claim()
        self.executor.give(*pieces)
        self.executor.ledger.written(window.flat, len(self.executor.events))
        return Work()

    def reduce_scatter_from(self, wholes: dict[int, Tensor], parts: Parts, op: str, group: Ranks) -> Tensor:
        count = parts.total(tuple(wholes), group.index(self.rank))
        return self.executor.arrive((count,), next(iter(wholes.values())).dtype, *wholes.values())

    def exchange(self, sends: Sequence[tuple[int, Tensor]],
                 recvs: Sequence[tuple[int, Sequence[int], Any]]) -> list[Tensor]:
        out = [self.executor.arrive(tuple(shape), dtype) for _, shape, dtype in recvs]
        self.executor.give(*(x for _, x in sends))
        self.executor.peers = tuple(to for to, _ in sends), tuple(of for of, _, _ in recvs)
        return out

    def scatter(self, x: Tensor | None, dim: int, sizes: Sequence[int], src: int, group: Ranks, *, shape: Sequence[int],
                dtype: Any, async_op: bool = False) -> Result:
        out = self.executor.arrive(with_dim(shape, dim, sizes[group.index(self.rank)]), dtype)
        return Work(out) if async_op else out
