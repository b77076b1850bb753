# SPDX-License-Identifier: Apache-2.0
"""Ascend: MindSpore's `mint.distributed` over HCCL.

Written against the documented API of MindSpore 2.10 and tested call by call with a double; it has not run on a device.
Half-precision sums are the device's own: HCCL reduces float16 and bfloat16 as they are.
The invariant is `DeviceBackend`'s.
"""
from __future__ import annotations

from typing import Any

from mindspore import Tensor

from .device import DeviceBackend, Handle

_NUMBERS = ("Float32", "Float16", "BFloat16", "Int8", "Int32")


def _reducible() -> frozenset[str]:
    """HCCL's reductions by dtype; int64 and uint8 are moved, not reduced, by older firmware, so they stay local."""
    pairs = {f"{op} {t}" for op in ("sum", "max", "min", "prod") for t in _NUMBERS}
    return frozenset(pairs | {f"avg {t}" for t in _NUMBERS[:3]})


class HcclBackend(DeviceBackend):
    """Collectives of `mint.distributed`.

    Args:
        rank: this rank.
        size: number of ranks.
        world: name of the world communicator.
        create_group: `mindspore.communication.create_group`.
        dist: the module `mindspore.mint.distributed`.
    """

    name = "hccl"
    reducible = _reducible()

    def __init__(self, rank: int, size: int, world: str, create_group: Any, dist: Any):
        super().__init__(rank, size, world, create_group)
        self._dist = dist

    @classmethod
    def start(cls) -> HcclBackend:
        """Initialises MindSpore's process group from msrun's environment."""
        from mindspore import communication
        from mindspore.communication import GlobalComm
        from mindspore.mint import distributed as dist
        if not dist.is_initialized():
            dist.init_process_group(backend="hccl")
        return cls(dist.get_rank(), dist.get_world_size(), GlobalComm.WORLD_COMM_GROUP, communication.create_group,
                   dist)

    def _all_reduce_flat(self, flat: Tensor, op: str, comm: str, size: int, async_op: bool) -> tuple[Tensor, Handle]:
        out = self.ops.copy(flat)  # in place, and `flat` may be the caller's memory
        return out, self._dist.all_reduce(out, op=op, group=comm, async_op=async_op)

    def _all_gather_flat(self, flat: Tensor, comm: str, size: int, async_op: bool) -> tuple[Tensor, Handle]:
        out = self.ops.empty(flat.shape[0] * size, flat.dtype)
        return out, self._dist.all_gather_into_tensor(out, flat, group=comm, async_op=async_op)

    def _reduce_scatter_flat(self, flat: Tensor, op: str, comm: str, size: int, position: int,
                      async_op: bool) -> tuple[Tensor, Handle]:
        out = self.ops.empty(flat.shape[0] // size, flat.dtype)
        return out, self._dist.reduce_scatter_tensor(out, flat, op=op, group=comm, async_op=async_op)

    def _all_to_all_flat(self, flat: Tensor, block: int, comm: str, size: int, position: int,
                   async_op: bool) -> tuple[Tensor, Handle]:
        out = self.ops.empty(flat.shape[0], flat.dtype)
        return out, self._dist.all_to_all_single(out, flat, group=comm, async_op=async_op)

    def _flat_broadcast(self, flat: Tensor, src: int, comm: str, async_op: bool) -> tuple[Tensor, Handle]:
        return flat, self._dist.broadcast(flat, src, group=comm, async_op=async_op)

    def _flat_exchange(self, sends: list[tuple[int, Tensor]], recvs: list[tuple[int, Tensor]]) -> None:
        d = self._dist
        work = [d.P2POp("isend", x, dst) for dst, x in sends] + [d.P2POp("irecv", x, src) for src, x in recvs]
        for handle in d.batch_isend_irecv(work):
            handle.wait()
