# SPDX-License-Identifier: Apache-2.0
"""Which dtypes the device libraries move and reduce, and how long they take, as their documents say.

HCCL: the pages of HcclAllReduce, HcclReduceScatter, HcclAllGather and HcclBatchSendRecv of CANN 8.0 to 9.0, for Atlas A2
and A3. NCCL: what `mindspore.ops` lets through on GPU (MindSpore 2.10, comm_ops.py) and NCCL knows.
"""
from dataclasses import dataclass

REDUCTIONS = ("sum", "prod", "max", "min")


@dataclass(frozen=True)
class Table:
    """What a library does.

    Attributes:
        moved: dtypes it moves.
        reduced: dtypes it reduces.
        refused: pairs (reduction, dtype) that it does not all the same.
        buffer: MiB of each of a communicator's two buffers, where nothing is said.
        buffers: bytes that all of a program's buffers may take: a fifth of a card's 58 GiB. Our choice, not a document's.
    """

    moved: frozenset[str]
    reduced: frozenset[str]
    refused: frozenset[tuple[str, str]] = frozenset()
    buffer: int = 0
    buffers: int = 58 * 2**30 // 5

    def reduces(self, op: str, dtype: str) -> bool:
        return op in REDUCTIONS and dtype in self.reduced and (op, dtype) not in self.refused


HCCL = Table(
    frozenset(("Int8", "UInt8", "Int16", "UInt16", "Int32", "UInt32", "Int64", "UInt64", "Float16", "Float32", "Float64",
               "BFloat16")),
    frozenset(("Int8", "Int16", "Int32", "Int64", "Float16", "Float32", "BFloat16")),
    frozenset((("prod", "Int16"), ("prod", "BFloat16"))), buffer=200)
_NCCL = frozenset(("Int8", "Int32", "UInt32", "Int64", "UInt64", "Float16", "Float32", "Float64"))
NCCL = Table(_NCCL, _NCCL)


@dataclass(frozen=True)
class Rates:
    """Speeds of the two logical clocks, in bytes a second; they order events, they predict nothing.

    Attributes:
        wire: of what leaves a rank.
        saved: of tensors saved for the backward, as they are saved and as they are read: the measure of computation.
        flops: operations a second of products that Python calls by `mint.matmul`, beside that.
        latency: seconds of a collective, however small.
    """

    wire: float = 50e9
    saved: float = 100e9
    flops: float = float("inf")
    latency: float = 20e-6


def wire_share(name: str, n: int) -> float:
    """Which part of the larger of input and output leaves a rank, by the usual ring."""
    return (2 if name == "all_reduce" else 1) * (n - 1) / n
