# SPDX-License-Identifier: Apache-2.0
"""CPU over several hosts: MindSpore's own CPU backend, with what it lacks emulated.

MCCL has in-place all-reduce, list all-gather, broadcast and send/receive; it has no reduce-scatter and no all-to-all,
and it cannot reduce several dtypes. After one failed collective its stream returns stale bytes, so any error here ends
communication for good. The invariant: only calls known to work on every group size and dtype are made.
"""
from __future__ import annotations

import math
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

    def _all_reduce_flat(self, x: Tensor, op: str, comm: str, async_op: bool) -> Flat:
        dtype, half = x.dtype, str(x.dtype) in _HALF
        out = self.ops.cast(x, mstype.float32) if half else x
        self._call("all_reduce", out, op=op, group=comm)
        return self.ops.cast(out, dtype) if half else out, None

    def _all_gather_flat(self, x: Tensor, shape: Sequence[int], comm: str, async_op: bool) -> Flat:
        array = x.asnumpy()
        data = array.reshape(-1).view("uint8")  # bytes: one kernel for every dtype
        parts = [Tensor.from_numpy(data * 0) for _ in range(math.prod(shape) // array.size)]
        self._call("all_gather", parts, Tensor.from_numpy(data), group=comm)
        return Tensor.from_numpy(self.ops.join(parts, 0).asnumpy().view(array.dtype).reshape(shape)), None

    def _reduce_scatter_flat(self, x: Tensor, shape: Sequence[int], op: str, comm: str, position: int,
                             async_op: bool) -> Flat:
        out, _ = self._all_reduce_flat(x, op, comm, False)
        n = math.prod(shape)
        return Tensor.from_numpy(out.asnumpy().reshape(-1)[position * n:(position + 1) * n].reshape(shape).copy()), None

    def _all_to_all_flat(self, x: Tensor, shape: Sequence[int], sends: Sequence[int], recvs: Sequence[int], comm: str,
                         position: int, async_op: bool) -> Flat:
        n = len(sends)
        everything = self._all_gather_flat(x, (n * sum(sends),), comm, False)[0].asnumpy().reshape(n, n, -1)
        return Tensor.from_numpy(everything[:, position].reshape(shape).copy()), None

    def _broadcast_flat(self, x: Tensor, src: int, comm: str, async_op: bool) -> Flat:
        self._call("broadcast", Tensor.from_numpy(x.asnumpy().reshape(-1).view("uint8")), src, group=comm)
        return x, None

    def _exchange_flat(self, sends: list[tuple[int, Tensor]], recvs: list[tuple[int, Tensor]]) -> None:
        world = self._names[tuple(range(self.size))]
        for what, peer, _, x in self._in_order(sends, recvs):  # not to lean on MCCL's buffering
            self._call(what, Tensor.from_numpy(x.asnumpy().reshape(-1).view("uint8")), peer, group=world)

    def barrier(self, group: Ranks) -> None:
        self._agree("barrier", "", group)
        self._call("barrier", group=self._comm(group)[0])

    def close(self, reason: str = "") -> None:
        if not reason and self._broken is None and not self._owner.forked:
            # A rank that exits while a peer still sends makes the peer fail.
            self.barrier(tuple(range(self.size)))
