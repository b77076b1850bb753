# SPDX-License-Identifier: Apache-2.0
"""A product and the collective before or behind it as one kernel, which Ascend has.

On an Ascend these are `all_gather_matmul` and `matmul_reduce_scatter` of `mindspore.ops` (*not run on hardware*); elsewhere
the collective and the product, one after the other, which give the same. Either way one collective is recorded. Arguments
beyond MindSpore's documents are refused.
"""
from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, ops

from ..errors import CommError
from ..internals.target import ascend_kernels, cpu_kernels
from .group import Group
from .pretended import executing
from .record import note

RANKS = (2, 4, 8)
INNER = range(256, 65535)


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`; MindSpore has no product of bfloat16 on CPU, so it is computed in float32 there and rounded once."""
    dry = executing()
    if dry is not None:
        return dry.product(a, b, note().phase)
    if a.dtype == ms.bfloat16 and cpu_kernels():
        return mint.matmul(a.astype(ms.float32), b.astype(ms.float32)).astype(ms.bfloat16)
    return mint.matmul(a, b)


def all_gather_matmul(group: Group, x: Tensor, w: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """(gathered @ w, gathered), with all members' `x`, `[m, k]` each, gathered to `[m * ranks, k]`.

    Args:
        group: the members.
        x: this rank's rows; all have as many.
        w: `[k, n]`, or `[n, k]` if transposed.
        transposed: whether it is.

    Raises:
        CommError: what the kernel does not take, on an Ascend.
    """
    if not ascend_kernels():
        gathered: Any = group.all_gather(x, 0, [x._shape[0]] * group.size)
        return product(gathered, mint.transpose(w, 0, 1) if transposed else w), gathered
    _check("all_gather_matmul", group, x, w)
    name = group.backend.communicator(group.ranks)
    return group._done("all_gather", x, group.size - 1, lambda: ops.all_gather_matmul(
        x, w, name, group.size, trans_x2=transposed))


def matmul_reduce_scatter(group: Group, x: Tensor, w: Tensor, transposed: bool) -> Tensor:
    """This rank's `[m / ranks, n]` of the sum of all members' `x @ w`, with x `[m, k]`; arguments as above."""
    rows, columns = x._shape[0] // group.size, w._shape[0 if transposed else 1]
    if not ascend_kernels():
        whole = product(x, mint.transpose(w, 0, 1) if transposed else w)
        return group.reduce_scatter(whole, "sum", 0, [rows] * group.size)  # type: ignore[return-value]
    _check("matmul_reduce_scatter", group, x, w)
    name, sent = group.backend.communicator(group.ranks), columns / x._shape[1] * (group.size - 1) / group.size
    return group._done("reduce_scatter", x, sent, lambda: ops.matmul_reduce_scatter(
        x, w, name, group.size, trans_x2=transposed))


def _check(op: str, group: Group, x: Tensor, w: Tensor) -> None:
    if group.size in RANKS and x._shape[1] in INNER and x.dtype == w.dtype and x.dtype in (ms.float16, ms.bfloat16):
        return
    raise CommError(f"For '{op}', the kernel does not take these operands.",
                    f"{x.dtype}{list(x._shape)}, {w.dtype}{list(w._shape)} over {group.size} ranks",
                    f"By MindSpore's documents: float16 or bfloat16, {INNER.start} to {INNER.stop - 1} columns of the first "
                    f"operand, over {', '.join(map(str, RANKS))} ranks.", "pieces=4 in the style, which takes any")
