# SPDX-License-Identifier: Apache-2.0
"""Any world in one process: collectives that send nothing and return tensors of the right shape and dtype.

For dry runs: which communication would a program make, and with what shapes. Values are this rank's own data, cut,
repeated or padded to fit; do not read them. The invariant: shape and dtype of every result are those of a real run.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor

from ..errors import CommError
from .packing import copy, numpy_dtype
from .protocol import Backend, Ranks, Result, Work, communicator_name, cut, offsets, with_dim


def _fit(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """`x` repeated and cut to `shape`; zeros where there is nothing to repeat."""
    shape = tuple(shape)
    if x.shape == shape:
        return x
    if 0 in x.shape:
        return np.zeros(shape, x.dtype)
    for dim, (have, want) in enumerate(zip(x.shape, shape)):
        if want > have:
            x = np.concatenate([x] * -(-want // have), dim)
        x = x[cut(dim, 0, want)]
    return x


class FakeBackend(Backend):
    """A world of `size` ranks of which only `rank` exists."""

    name = "fake"
    on_host = True

    def __init__(self, size: int, rank: int = 0, name: str = "fake"):
        self.size, self.rank, self.name = size, rank, name

    @classmethod
    def start(cls, rank: int, size: int, blocking: bool) -> FakeBackend:
        """A process that is alone."""
        return cls(size, rank, "local")

    def give_up(self, error: CommError, group: Ranks) -> None:
        """Nothing is in flight."""

    def communicator(self, group: Ranks) -> str | None:
        return communicator_name(group) if self.name == "local" else None

    def _made(self, shape: Sequence[int], x: Tensor, async_op: bool, of: tuple = (...,)) -> Result:
        """A result of this shape, of `x`, or of these elements of it."""
        tensor = Tensor.from_numpy(np.array(_fit(x.asnumpy()[of], shape), order="C", copy=True))
        return Work(tensor) if async_op else tensor

    def _own(self, dim: int, sizes: Sequence[int], group: Ranks) -> tuple[int, tuple]:
        """How many rows of a dim are this rank's, and which."""
        at, me = offsets(sizes), group.index(self.rank)
        return sizes[me], cut(dim, at[me], at[me + 1])

    def all_reduce(self, x: Tensor, op: str, group: Ranks, async_op: bool = False) -> Result:
        return self._made(x._shape, x, async_op)

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int], group: Ranks, async_op: bool = False) -> Result:
        return self._made(with_dim(x._shape, dim, sum(sizes)), x, async_op)

    def reduce_scatter(self, x: Tensor, op: str, dim: int, sizes: Sequence[int], group: Ranks,
                       async_op: bool = False) -> Result:
        count, mine = self._own(dim, sizes, group)
        return self._made(with_dim(x._shape, dim, count), x, async_op, mine)

    def all_to_all(self, x: Tensor, split_dim: int, split_sizes: Sequence[int], concat_dim: int, concat_sizes: Sequence[int],
                   group: Ranks, async_op: bool = False) -> Result:
        count, mine = self._own(split_dim, split_sizes, group)
        return self._made(with_dim(with_dim(x._shape, split_dim, count), concat_dim, sum(concat_sizes)), x, async_op, mine)

    def all_to_all_rows(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], group: Ranks,
                        async_op: bool = False) -> Result:
        return self._made(with_dim(x._shape, 0, sum(recv_sizes)), x, async_op)

    def exchange(self, sends: Sequence[tuple[int, Tensor]],
                 recvs: Sequence[tuple[int, Sequence[int], Any]]) -> list[Tensor]:
        mine = [copy(x) for dst, x in sends if dst == self.rank]
        return [mine.pop(0) if src == self.rank and mine else
                Tensor.from_numpy(np.zeros(tuple(shape), numpy_dtype(dtype))) for src, shape, dtype in recvs]

    def broadcast(self, x: Tensor, src: int, group: Ranks, async_op: bool = False) -> Result:
        return self._made(x._shape, x, async_op)

    def scatter(self, x: Tensor | None, dim: int, sizes: Sequence[int], src: int, group: Ranks, *, shape: Sequence[int],
                dtype: Any, async_op: bool = False) -> Result:
        count, mine = self._own(dim, sizes, group)
        if x is None:
            x, mine = Tensor.from_numpy(np.zeros(0, numpy_dtype(dtype))), (...,)
        return self._made(with_dim(shape, dim, count), x, async_op, mine)

    def barrier(self, group: Ranks) -> None:
        pass

    def all_gather_object(self, obj: Any, group: Ranks) -> list[Any]:
        return [obj] * len(group)

    def broadcast_object(self, obj: Any, src: int, group: Ranks) -> Any:
        return obj
