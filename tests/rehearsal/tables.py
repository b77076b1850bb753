# SPDX-License-Identifier: Apache-2.0
"""Which dtypes the device libraries move and reduce, how long they take, and which kernels CANN launches for a copy, on
Atlas A2 and A3, as their documents and public sources say.

`Tensor.copy_` is one call of `aclnnInplaceCopy`, and that is up to four kernels: what puts a strided source in order, a
cast, and what writes into a strided target. The last of the first two writes where the copy goes, if that is in order. Of
`aclnn_copy.cpp`, `aclnn_cat.cpp` and `contiguous.cpp` of CANN's `ops-math`, as published in 2025: read, not run. Invariant:
of shapes and strides alone; values are never asked for.
"""
import itertools
import math
from collections.abc import Sequence
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


_WHOLE = 64  # elements of a last dim, of which multiples are moved by `AsStrided` at once
_JOINED = 32  # as many tensors joins one `ConcatD`

Pairs = list[tuple[int, int]]


def in_order(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements lie in row-major order."""
    return _dense([(step, n) for step, n in zip(strides, shape) if n != 1])


def _dense(pairs: Pairs) -> bool:
    return all(step == math.prod(n for _, n in pairs[i + 1:]) for i, (step, _) in enumerate(pairs))


def ordered(shape: Sequence[int], strides: Sequence[int], offset: int, elements: int) -> list[str]:
    """What puts a view in order; `offset`: where it begins in its storage, which has so many `elements`."""
    if in_order(shape, strides):
        return []
    spread = ["BroadcastTo"] if 0 in strides else []
    pairs = [(step, n) for step, n in zip(strides, shape) if n != 1 and step]
    if _dense(pairs):
        return spread
    turned = any(a < b for (a, _), (b, _) in itertools.pairwise(pairs))
    pairs = sorted(pairs, reverse=True)
    if turned and _dense(pairs):
        return ["Transpose", *spread]
    pairs += [(1, 1)] if len(pairs) == 1 else []
    if any(a < step * (n - 1) for (a, _), (step, n) in itertools.pairwise(pairs)):
        return ["AsStrided"]
    if pairs[-1][0] == 1 and not any(a % b for (a, _), (b, _) in itertools.pairwise(pairs)):
        if not _a_slice(pairs, offset, elements) or turned and strides[-1] == 1 and not shape[-1] % _WHOLE:
            return ["AsStrided"]
        return ["Slice", *["Transpose"] * turned, *spread]
    inner = math.gcd(*(step for step, _ in pairs[:-1]))
    if inner > 1 and inner >= math.prod(pairs[-1]):
        return ["StridedSlice", *["Transpose"] * turned, *spread]
    return ["AsStrided"]


def _a_slice(pairs: Pairs, offset: int, elements: int) -> bool:
    """Whether it is a box of a tensor on all of the storage."""
    extents = [a // b for (a, _), (b, _) in itertools.pairwise(pairs)]
    for extent, (step, n) in zip([elements // math.prod(extents), *extents], pairs):
        if offset // step + n > extent:
            return False
        offset %= step
    return True


def copied(shape: Sequence[int], strides: Sequence[int], source: tuple[Sequence[int], Sequence[int], int, int],
           casts: bool) -> list[str]:
    """What `copy_` launches into a target of this shape; `source`: its shape, strides, offset and storage's elements."""
    made = ordered(*source) + ["Cast"] * casts + ["BroadcastTo"] * (tuple(source[0]) != tuple(shape))
    if in_order(shape, strides):
        return made or ["TensorMove"]
    pairs = [(step, n) for step, n in zip(strides, shape) if n != 1]
    return [*made, "Transpose" if _dense(sorted(pairs, reverse=True)) else "ViewCopy"]


def before_joining(views: Sequence[tuple[Sequence[int], Sequence[int], int, int]]) -> list[str]:
    """What `cat` launches before its last `ConcatD`: strided tensors are put in order, and of many some are joined first."""
    left, more = len(views), 0
    while left > _JOINED:
        more += left // _JOINED + (left % _JOINED > 1)
        left = -(-left // _JOINED)
    return [name for view in views for name in ordered(*view)] + ["ConcatD"] * more
