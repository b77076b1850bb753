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

    @staticmethod
    def _give(result: np.ndarray, async_op: bool) -> Result:
        tensor = Tensor.from_numpy(np.array(result, order="C", copy=True))
        return Work(tensor) if async_op else tensor

    def all_reduce(self, x: Tensor, op: str, group: Ranks, async_op: bool = False) -> Result:
        return self._give(x.asnumpy(), async_op)

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int], group: Ranks, async_op: bool = False) -> Result:
        return self._give(_fit(x.asnumpy(), with_dim(x.shape, dim, sum(sizes))), async_op)

    def reduce_scatter(self, x: Tensor, op: str, dim: int, sizes: Sequence[int], group: Ranks,
                       async_op: bool = False) -> Result:
        at, me = offsets(sizes), group.index(self.rank)
        return self._give(x.asnumpy()[cut(dim, at[me], at[me + 1])], async_op)

    def all_to_all(self, x: Tensor, split_dim: int, split_sizes: Sequence[int], concat_dim: int, concat_sizes: Sequence[int],
                   group: Ranks, async_op: bool = False) -> Result:
        at, me = offsets(split_sizes), group.index(self.rank)
        mine = x.asnumpy()[cut(split_dim, at[me], at[me + 1])]
        return self._give(_fit(mine, with_dim(mine.shape, concat_dim, sum(concat_sizes))), async_op)

    def all_to_all_rows(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], group: Ranks,
                        async_op: bool = False) -> Result:
        return self._give(_fit(x.asnumpy(), with_dim(x.shape, 0, sum(recv_sizes))), async_op)

    def exchange(self, sends: Sequence[tuple[int, Tensor]],
                 recvs: Sequence[tuple[int, Sequence[int], Any]]) -> list[Tensor]:
        mine = [copy(x) for dst, x in sends if dst == self.rank]
        return [mine.pop(0) if src == self.rank and mine else
                self._give(np.zeros(tuple(shape), numpy_dtype(dtype)), False) for src, shape, dtype in recvs]

    def broadcast(self, x: Tensor, src: int, group: Ranks, async_op: bool = False) -> Result:
        return self._give(x.asnumpy(), async_op)

    def scatter(self, x: Tensor | None, dim: int, sizes: Sequence[int], src: int, group: Ranks, *, shape: Sequence[int],
                dtype: Any, async_op: bool = False) -> Result:
        at, me = offsets(sizes), group.index(self.rank)
        if x is None:
            return self._give(np.zeros(with_dim(shape, dim, sizes[me]), numpy_dtype(dtype)), async_op)
        return self._give(x.asnumpy()[cut(dim, at[me], at[me + 1])], async_op)

    def barrier(self, group: Ranks) -> None:
        pass

    def all_gather_object(self, obj: Any, group: Ranks) -> list[Any]:
        return [obj] * len(group)

    def broadcast_object(self, obj: Any, src: int, group: Ranks) -> Any:
        return obj
