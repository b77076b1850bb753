# SPDX-License-Identifier: Apache-2.0
"""Ascend: MindSpore's `mint.distributed` over HCCL.

Written against the documented API of MindSpore 2.10 and tested call by call with a double; it has not run on a device.
Half-precision sums are the device's own: HCCL reduces float16 and bfloat16 as they are.
The invariant is `DeviceBackend`'s.
"""
from __future__ import annotations

from mindspore import Tensor

from .device import DeviceBackend, Flat

_NUMBERS = ("Float32", "Float16", "BFloat16", "Int8", "Int32")


class HcclBackend(DeviceBackend):
    """Collectives of `mint.distributed`."""

    name = "hccl"
    # int64 and uint8 are moved, not reduced, by older firmware, so they stay local
    reducible = frozenset({f"{op} {t}" for op in ("sum", "max", "min", "prod") for t in _NUMBERS}
                          | {f"avg {t}" for t in _NUMBERS[:3]})

    @classmethod
    def start(cls, rank: int, size: int, blocking: bool) -> HcclBackend:
        """Initialises MindSpore's process group from msrun's environment."""
        from mindspore import communication
        from mindspore.communication import GlobalComm
        from mindspore.mint import distributed as dist
        if not dist.is_initialized():
            dist.init_process_group(backend="hccl")
        return cls(dist.get_rank(), dist.get_world_size(), GlobalComm.WORLD_COMM_GROUP, communication.create_group,
                   dist)

    def _all_reduce_flat(self, flat: Tensor, op: str, comm: str, size: int, async_op: bool) -> Flat:
        out = self.ops.copy(flat)  # in place, and `flat` may be the caller's memory
        return out, self._api.all_reduce(out, op=op, group=comm, async_op=async_op)

    def _all_gather_flat(self, flat: Tensor, comm: str, size: int, async_op: bool) -> Flat:
        out = self.ops.empty(flat.shape[0] * size, flat.dtype)
        return out, self._api.all_gather_into_tensor(out, flat, group=comm, async_op=async_op)

    def _reduce_scatter_flat(self, flat: Tensor, op: str, comm: str, size: int, position: int, async_op: bool) -> Flat:
        out = self.ops.empty(flat.shape[0] // size, flat.dtype)
        return out, self._api.reduce_scatter_tensor(out, flat, op=op, group=comm, async_op=async_op)

    def _all_to_all_flat(self, flat: Tensor, block: int, comm: str, size: int, position: int, async_op: bool) -> Flat:
        out = self.ops.empty(flat.shape[0], flat.dtype)
        return out, self._api.all_to_all_single(out, flat, group=comm, async_op=async_op)

    def _broadcast_flat(self, flat: Tensor, src: int, comm: str, async_op: bool) -> Flat:
        return flat, self._api.broadcast(flat, src, group=comm, async_op=async_op)

    def _exchange_flat(self, sends: list[tuple[int, Tensor]], recvs: list[tuple[int, Tensor]]) -> None:
        d = self._api
        work = [d.P2POp("isend", x, dst) for dst, x in sends] + [d.P2POp("irecv", x, src) for src, x in recvs]
        for handle in d.batch_isend_irecv(work):
            handle.wait()
