# SPDX-License-Identifier: Apache-2.0
"""GPU: MindSpore's communication primitives over NCCL.

On GPU MindSpore has kernels for the classic primitives (`ops.AllReduce` ...), not for `mint.distributed`. A primitive
is bound to a communicator when it is made, so they are made once and kept. Written against MindSpore 2.10's API and
rehearsed against an emulator; it has not run on a device. The invariant is `DeviceBackend`'s.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from mindspore import Tensor
from mindspore import dtype as mstype

from .device import DeviceBackend, Flat

_NUMBERS = ("Float32", "Float16", "Int32", "Int8")


class NcclBackend(DeviceBackend):
    """Collectives of `mindspore.ops`."""

    name = "nccl"
    # MindSpore's own check lets none of these through on GPU but bool, which NCCL has not
    carriers: ClassVar[dict[Any, Any]] = {mstype.bfloat16: mstype.float32, **dict.fromkeys(
        (mstype.bool_, mstype.uint8, mstype.int16, mstype.uint16), mstype.int32)}
    # `prod` is not documented for GPU and goes through gather
    reducible = frozenset(f"{op} {t}" for op in ("sum", "max", "min") for t in _NUMBERS)

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._made: dict[tuple[Any, ...], Any] = {}

    @classmethod
    def start(cls, rank: int, size: int, blocking: bool) -> NcclBackend:
        """Initialises MindSpore's communication from msrun's environment."""
        from mindspore import communication, ops
        from mindspore.communication import GlobalComm
        if not GlobalComm.INITED:
            communication.init("nccl")
        return cls(communication.get_rank(), communication.get_group_size(), GlobalComm.WORLD_COMM_GROUP,
                   communication.create_group, ops)

    def _primitive(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        key = (kind, args, tuple(sorted((k, str(v)) for k, v in kwargs.items())))
        if key not in self._made:
            self._made[key] = getattr(self._api, kind)(*args, **kwargs)
        return self._made[key]

    def _all_reduce_flat(self, x: Tensor, op: str, comm: str, async_op: bool) -> Flat:
        return self._primitive("AllReduce", op, comm)(x), None

    def _all_gather_flat(self, x: Tensor, shape: Sequence[int], comm: str, async_op: bool) -> Flat:
        return self._primitive("AllGather", comm)(x), None

    def _reduce_scatter_flat(self, x: Tensor, shape: Sequence[int], op: str, comm: str, position: int,
                             async_op: bool) -> Flat:
        return self._primitive("ReduceScatter", op, comm)(x), None

    def _all_to_all_flat(self, x: Tensor, shape: Sequence[int], sends: Sequence[int], recvs: Sequence[int], comm: str,
                         position: int, async_op: bool) -> Flat:
        out = self._primitive("AlltoAll", split_count=len(sends), split_dim=0, concat_dim=0, group=comm)(x)
        return self.ops.shaped(out, shape), None

    def _broadcast_flat(self, x: Tensor, src: int, comm: str, async_op: bool) -> Flat:
        ranks = next(r for r, name in self._names.items() if name == comm)
        return self._primitive("Broadcast", ranks.index(src), comm)((x,))[0], None

    def _exchange_flat(self, sends: list[tuple[int, Tensor]], recvs: list[tuple[int, Tensor]]) -> None:
        world = self._names[tuple(range(self.size))]
        for what, peer, tag, x in self._in_order(sends, recvs):  # NCCL's send waits for its receive
            if what == "send":
                self._primitive("Send", sr_tag=tag, dest_rank=peer, group=world)(x)
            else:
                x.copy_(self._primitive("Receive", sr_tag=tag, src_rank=peer, shape=list(x.shape), dtype=x.dtype,
                                        group=world)())
