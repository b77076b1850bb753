# SPDX-License-Identifier: Apache-2.0
"""Ascend: MindSpore's `mint.distributed` over HCCL.

Written against the documented API of MindSpore 2.10 and rehearsed against a strict emulator of it; it has not run on a
device. Half-precision sums are the device's own: HCCL reduces float16 and bfloat16 as they are. Each communicator takes
twice the buffer of device memory that is stated here: HCCL_BUFFSIZE, or HCCL's own default. The invariant is
`DeviceBackend`'s.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from mindspore import Tensor

from ..internals.names import GroupOptions
from ..internals.target import card_memory
from .buffers import buffer_megabytes, check_communicators
from .device import DeviceBackend, Flat

# HcclAllReduce of CANN 8.0 to 9.0, Atlas A2 and A3: these dtypes; no product of int16 and bfloat16.
_NUMBERS = ("Float32", "Float16", "BFloat16", "Int8", "Int16", "Int32", "Int64")
_NO_PRODUCT = ("BFloat16", "Int16")


class HcclBackend(DeviceBackend):
    """Collectives of `mint.distributed`."""

    name = "hccl"
    uneven_pieces = True
    reducible = frozenset({f"{op} {t}" for op in ("sum", "max", "min") for t in _NUMBERS}
                          | {f"prod {t}" for t in _NUMBERS if t not in _NO_PRODUCT})

    @classmethod
    def start(cls, rank: int, size: int, blocking: bool) -> HcclBackend:
        """Initialises MindSpore's process group from msrun's environment."""
        from mindspore import communication
        from mindspore.communication import GlobalComm
        from mindspore.mint import distributed as dist
        if not dist.is_initialized():
            dist.init_process_group(backend="hccl")
        made = [GlobalComm.WORLD_COMM_GROUP]

        def create_group(name: str, ranks: list[int]) -> Any:
            made.append(name)
            check_communicators(len(made), card_memory())  # before its members meet for it
            options = GroupOptions()
            options.hccl_config = {"hccl_buffer_size": buffer_megabytes()}
            return communication.create_group(name, ranks, options)
        return cls(dist.get_rank(), dist.get_world_size(), GlobalComm.WORLD_COMM_GROUP, create_group, dist)

    def _all_reduce_flat(self, x: Tensor, op: str, comm: str, async_op: bool) -> Flat:
        return x, self._api.all_reduce(x, op=op, group=comm, async_op=async_op)

    def _all_gather_flat(self, x: Tensor, shape: Sequence[int], comm: str, async_op: bool) -> Flat:
        out = self.ops.empty(shape, x.dtype)
        return out, self._api.all_gather_into_tensor(out, x, group=comm, async_op=async_op)

    def _reduce_scatter_flat(self, x: Tensor, shape: Sequence[int], op: str, comm: str, position: int,
                             async_op: bool) -> Flat:
        out = self.ops.empty(shape, x.dtype)
        return out, self._api.reduce_scatter_tensor(out, x, op=op, group=comm, async_op=async_op)

    def _all_to_all_flat(self, x: Tensor, shape: Sequence[int], sends: Sequence[int], recvs: Sequence[int], comm: str,
                         position: int, async_op: bool) -> Flat:
        out = self.ops.empty(shape, x.dtype)
        even = len({*sends, *recvs}) == 1
        sizes = {} if even else {"output_split_sizes": list(recvs), "input_split_sizes": list(sends)}
        return out, self._api.all_to_all_single(out, x, **sizes, group=comm, async_op=async_op)

    def _rows_flat(self, x: Tensor, shape: Sequence[int], sends: Sequence[int], recvs: Sequence[int], comm: str,
                   async_op: bool) -> Flat:
        out = self.ops.empty(shape, x.dtype)  # sizes always: what is even for one rank is not for another
        return out, self._api.all_to_all_single(out, x, output_split_sizes=list(recvs), input_split_sizes=list(sends),
                                                group=comm, async_op=async_op)

    def _broadcast_flat(self, x: Tensor, src: int, comm: str, async_op: bool) -> Flat:
        return x, self._api.broadcast(x, src, group=comm, async_op=async_op)

    def _exchange_flat(self, sends: list[tuple[int, Tensor]], recvs: list[tuple[int, Tensor]]) -> None:
        d = self._api
        # HCCL refuses two tasks of one kind for one peer in a batch: the k-th message of each pair goes in the k-th batch
        for leaving, arriving in zip_longest(_batches(sends), _batches(recvs), fillvalue=()):
            work = [*(d.P2POp("isend", x, dst) for dst, x in leaving), *(d.P2POp("irecv", x, src) for src, x in arriving)]
            for handle in d.batch_isend_irecv(work):
                handle.wait()


def _batches(messages: list[tuple[int, Tensor]]) -> list[list[tuple[int, Tensor]]]:
    """Messages with each peer at most once in a batch, in order."""
    out: list[list[tuple[int, Tensor]]] = []
    number: dict[int, int] = {}
    for peer, x in messages:
        k = number[peer] = number.get(peer, -1) + 1
        if k == len(out):
            out.append([])
        out[k].append((peer, x))
    return out
