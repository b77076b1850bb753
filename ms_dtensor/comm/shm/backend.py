# SPDX-License-Identifier: Apache-2.0
"""The shared-memory engine as a `Backend`: tensors in, tensors out. The default on CPU.

On CPU `asnumpy` of a contiguous tensor is a view and `Tensor.from_numpy` shares memory, so this layer copies nothing.
The invariant is the engine's: a result never aliases an input or a segment.
"""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from ...errors import CommError
from ...internals.host import host_array, numpy_dtype
from ..cores import end_spinning, keep_to_share
from ..parts import Parts
from ..protocol import Backend, Ranks, Result, Work, communicator_name
from ..record import note, user_site
from . import given_up
from .future import Future
from .reduce import BFLOAT16, is_bfloat16
from .rendezvous import job_name, stated_timeout
from .rows import RowsEngine


def _carrier(dtype: np.dtype) -> np.dtype:
    """The dtype in which the engine sees a dtype."""
    return BFLOAT16 if is_bfloat16(dtype) else dtype


def _carried(x: np.ndarray) -> np.ndarray:
    return x.view(BFLOAT16) if is_bfloat16(x.dtype) else x


def _tensor(x: np.ndarray) -> Tensor:
    return Tensor.from_numpy(x.view(numpy_dtype(mstype.bfloat16)) if is_bfloat16(x.dtype) else x)


def _give(result: np.ndarray | Future) -> Result:
    if isinstance(result, Future):
        tensor = _tensor(result.out)  # the same memory, filled when the wait is over
        return Work(tensor, lambda: (result.wait(), tensor)[1])
    return _tensor(result)


class ShmBackend(Backend):
    """Shared memory between the processes of this host.

    Args:
        rank: this rank.
        size: number of ranks.
        port: msrun's port, which names the job.
        timeout: seconds after which a wait for other ranks, at the start too, gives up (`MS_DTENSOR_TIMEOUT`, default 300).
        blocking: MindSpore's ops have run when they return.
    """

    name = "shm"
    on_host = True

    def __init__(self, rank: int, size: int, port: str, timeout: float | None = None, blocking: bool = False):
        timeout = stated_timeout() if timeout is None else timeout
        self.rank, self.size, self._blocking = rank, size, blocking
        self._engine = RowsEngine(rank, size, job_name(port), timeout=timeout, start_timeout=timeout, site=user_site,
                                    of=lambda: note().of)

    @classmethod
    def start(cls, rank: int, size: int, blocking: bool) -> ShmBackend:
        """Meets the other processes of this host, each on its share of the cores."""
        keep_to_share(rank, size)
        end_spinning()
        return cls(rank, size, os.environ.get("MS_SCHED_PORT", "8118"), blocking=blocking)

    def _array(self, x: Tensor, kept: bool = False) -> np.ndarray:
        return _carried(host_array(x) if self._blocking and not kept else x.asnumpy())

    def all_reduce(self, x: Tensor, op: str, group: Ranks, async_op: bool = False) -> Result:
        return _give(self._engine.all_reduce(self._array(x, async_op), op, group, async_op=async_op))

    def all_reduce_(self, x: Tensor, op: str, group: Ranks) -> Work[Tensor]:
        self._engine.all_reduce(self._array(x), op, group, inplace=True)
        return Work(x)

    def buffer(self, count: int, dtype: np.dtype) -> np.ndarray:
        return self._engine.buffer(count, _carrier(dtype)).view(dtype)

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int], group: Ranks, async_op: bool = False) -> Result:
        return _give(self._engine.all_gather(self._array(x, async_op), dim, sizes, group, async_op=async_op))

    def reduce_scatter(self, x: Tensor, op: str, dim: int, sizes: Sequence[int], group: Ranks,
                       async_op: bool = False) -> Result:
        return _give(self._engine.reduce_scatter(self._array(x, async_op), op, dim, sizes, group, async_op=async_op))

    def window(self, nbytes: int) -> Any:
        return self._engine.window(nbytes)

    def all_gather_into(self, pieces: Sequence[Tensor], window: Any, parts: Parts, dtype: np.dtype, group: Ranks,
                        async_op: bool = False) -> Work:
        done = self._engine.all_gather_into([x.asnumpy() for x in pieces], window, parts, dtype, group, async_op)
        return Work(finish=lambda: (done.wait(), None)[1]) if async_op else Work()

    def reduce_scatter_from(self, wholes: dict[int, Tensor], parts: Parts, op: str, group: Ranks) -> Tensor:
        arrays = {i: _carried(x.asnumpy()) for i, x in wholes.items()}
        return _tensor(self._engine.reduce_scatter_from(arrays, parts, op, group))

    def all_to_all(self, x: Tensor, split_dim: int, split_sizes: Sequence[int], concat_dim: int, concat_sizes: Sequence[int],
                   group: Ranks, async_op: bool = False) -> Result:
        result = self._engine.all_to_all(self._array(x, async_op), split_dim, split_sizes, concat_dim, concat_sizes, group,
                                         async_op=async_op)
        return _give(result)

    def all_to_all_rows(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], group: Ranks,
                        async_op: bool = False) -> Result:
        return _give(self._engine.all_to_all_rows(self._array(x, async_op), send_sizes, recv_sizes, group, async_op))

    def exchange(self, sends: Sequence[tuple[int, Tensor]],
                 recvs: Sequence[tuple[int, Sequence[int], Any]]) -> list[Tensor]:
        got = self._engine.exchange([(dst, self._array(x)) for dst, x in sends],
                                    [(src, tuple(shape), _carrier(numpy_dtype(dtype))) for src, shape, dtype in recvs])
        return [_tensor(a) for a in got]

    def broadcast(self, x: Tensor, src: int, group: Ranks, async_op: bool = False) -> Result:
        return _give(self._engine.broadcast(self._array(x, async_op), src, group, async_op=async_op))

    def scatter(self, x: Tensor | None, dim: int, sizes: Sequence[int], src: int, group: Ranks, *, shape: Sequence[int],
                dtype: Any, async_op: bool = False) -> Result:
        array = self._array(x, async_op) if self.rank == src else None
        result = self._engine.scatter(array, dim, sizes, src, group, shape=tuple(shape),
                                      dtype=_carrier(numpy_dtype(dtype)), async_op=async_op)
        return _give(result)

    def barrier(self, group: Ranks) -> None:
        self._engine.barrier(group)

    def agree(self, what: str, group: Ranks) -> None:
        self._engine.agree(what, group)

    def all_gather_object(self, obj: Any, group: Ranks) -> list[Any]:
        return self._engine.all_gather_object(obj, group)

    def broadcast_object(self, obj: Any, src: int, group: Ranks) -> Any:
        return self._engine.broadcast_object(obj, src, group)

    def give_up(self, error: CommError, group: Ranks) -> None:
        given_up.tell(self._engine, error, group)

    def resume(self, group: Ranks) -> None:
        given_up.resume(self._engine, group)

    def communicator(self, group: Ranks) -> str:
        return communicator_name(group)

    def close(self, reason: str = "") -> None:
        self._engine.close(reason)
