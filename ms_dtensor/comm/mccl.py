# SPDX-License-Identifier: Apache-2.0
"""CPU over several hosts: MindSpore's own CPU backend, with what it lacks emulated.

MCCL has in-place all-reduce, list all-gather, broadcast and send/receive; it has no reduce-scatter and no all-to-all,
and it cannot reduce several dtypes. After one failed collective its stream returns stale bytes, so any error here ends
communication for good. The invariant: only calls known to work on every group size and dtype are made.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor
from mindspore import dtype as mstype

from ..errors import CommError
from .device import DeviceBackend, Flat
from .packing import HostOps
from .protocol import Ranks

_NUMBERS = ("Float32", "Int8", "Int32", "Int64")
_HALF = ("Float16", "BFloat16")


class McclBackend(DeviceBackend):
    """Collectives of `mint.distributed` that run on CPU."""

    name = "mccl"
    on_host = True
    ops = HostOps
    check_every = 1
    _broken: Exception | None = None
    # half-precision sums run in float32, see `_all_reduce_flat`
    reducible = frozenset(f"{op} {t}" for op in ("sum", "max", "min", "prod") for t in (*_NUMBERS, *_HALF))

    @classmethod
    def start(cls, rank: int, size: int, blocking: bool) -> McclBackend:
        """Initialises MindSpore's communication from msrun's environment."""
        import mindspore.mint.distributed.distributed as module
        from mindspore import communication
        from mindspore.communication import GlobalComm
        if not GlobalComm.INITED:
            communication.init("mccl")
        world = GlobalComm.WORLD_COMM_GROUP
        # These defaults are frozen at import to Ascend's world group, which send, recv and broadcast then ask for.
        # Remove when a MindSpore release reads the default at the call.
        module.get_cache_group_rank.__defaults__ = (world,)
        module.get_cache_group_size.__defaults__ = (world,)
        return cls(communication.get_rank(), communication.get_group_size(), world, communication.create_group, module)

    def _call(self, what: str, *args: Any, **kwargs: Any) -> Any:
        if self._broken is not None:
            raise CommError(f"For '{what}', the communication of this process has ended.", f"after: {self._broken}",
                            "After a failed collective MCCL returns stale data.", "end the process")
        try:
            return getattr(self._api, what)(*args, **kwargs)
        except Exception as e:
            self._broken = e
            raise CommError(f"For '{what}', MindSpore's CPU backend failed.", str(e).strip().split("\n")[0],
                            "A peer died, or the ranks called different collectives.",
                            ("look at the other ranks' logs",
                             'on one host, set_cpu_backend("shm") says which rank')) from e

    def _wire(self, x: Tensor) -> tuple[Tensor, Any]:
        if x.dtype in (mstype.complex64, mstype.complex128, mstype.uint16, mstype.uint32, mstype.uint64, mstype.int16):
            # Redistribute as bytes: MCCL has no kernel for them. Reductions gather, and reduce locally on the way back.
            return x, None
        return super()._wire(x)

    def _all_reduce_flat(self, flat: Tensor, op: str, comm: str, async_op: bool) -> Flat:
        dtype, half = flat.dtype, str(flat.dtype) in _HALF
        out = self.ops.cast(flat, mstype.float32) if half else flat
        self._call("all_reduce", out, op=op, group=comm)
        return self.ops.cast(out, dtype) if half else out, None

    def _all_gather_flat(self, flat: Tensor, comm: str, size: int, async_op: bool) -> Flat:
        data = flat.asnumpy().view("uint8")  # bytes: one kernel for every dtype
        parts = [Tensor.from_numpy(data * 0) for _ in range(size)]
        self._call("all_gather", parts, Tensor.from_numpy(data), group=comm)
        joined = self.ops.join(parts, 0).asnumpy()
        return Tensor.from_numpy(joined.view(flat.asnumpy().dtype)), None

    def _reduce_scatter_flat(self, flat: Tensor, op: str, comm: str, size: int, position: int, async_op: bool) -> Flat:
        out, _ = self._all_reduce_flat(flat, op, comm, False)
        block = flat.shape[0] // size
        return self.ops.take(out, 0, position * block, (position + 1) * block), None

    def _all_to_all_flat(self, flat: Tensor, sends: Sequence[int], recvs: Sequence[int], comm: str, position: int,
                         async_op: bool) -> Flat:
        size = len(sends)
        everything = self._all_gather_flat(flat, comm, size, False)[0].asnumpy().reshape(size, size, -1)
        return Tensor.from_numpy(everything[:, position].reshape(-1).copy()), None

    def _broadcast_flat(self, flat: Tensor, src: int, comm: str, async_op: bool) -> Flat:
        self._call("broadcast", Tensor.from_numpy(flat.asnumpy().view("uint8")), src, group=comm)
        return flat, None

    def _exchange_flat(self, sends: list[tuple[int, Tensor]], recvs: list[tuple[int, Tensor]]) -> None:
        world = self._names[tuple(range(self.size))]
        for what, peer, _, x in self._in_order(sends, recvs):  # not to lean on MCCL's buffering
            self._call(what, Tensor.from_numpy(x.asnumpy().view("uint8")), peer, group=world)

    def barrier(self, group: Ranks) -> None:
        self._agree("barrier", "", group)
        self._call("barrier", group=self._comm(group)[0])

    def close(self, reason: str = "") -> None:
        if not reason and self._broken is None and not self._owner.forked:
            # A rank that exits while a peer still sends makes the peer fail.
            self.barrier(tuple(range(self.size)))
