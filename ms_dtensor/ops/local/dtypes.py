# SPDX-License-Identifier: Apache-2.0
"""bfloat16 on CPU: MindSpore has hardly any kernel for it there, so a call is computed in float32 and rounded once.

Casts are differentiable, so the backward is computed in float32 too. The invariant: a result is what one float32
computation of the whole local call gives, rounded to bfloat16 at the very end. Also here: MindSpore passes a dtype as a
number in some calls.
"""
from __future__ import annotations

import functools
from collections.abc import Callable

import mindspore as ms
from mindspore import Tensor

from ...core.tree import map_leaves

TYPE_IDS = {30: ms.bool_, 32: ms.int8, 33: ms.int16, 34: ms.int32, 35: ms.int64, 37: ms.uint8, 38: ms.uint16,
            39: ms.uint32, 40: ms.uint64, 42: ms.float16, 43: ms.float32, 44: ms.float64, 45: ms.bfloat16,
            51: ms.complex64, 52: ms.complex128}

# Moves and casts have bfloat16 kernels, forward and backward.
_NATIVE = frozenset(("cast", "reshape", "identity", "permute", "swap", "matrix_transpose", "clone"))


def as_dtype(dtype):
    """A dtype, or MindSpore's number of one, as a dtype; None stays None."""
    return TYPE_IDS[dtype] if isinstance(dtype, int) else dtype


def wrapper_in_float32(op: str, tensors) -> Callable[[Callable], Callable] | None:
    """`in_float32` for a call with these operands; None where none is bfloat16, or the op has a kernel for that."""
    floating = {str(x.dtype) for x in tensors if x.is_floating_point()}
    if op in _NATIVE or "BFloat16" not in floating:
        return None
    return functools.partial(in_float32, narrow=len(floating) == 1)


def in_float32(func: Callable, narrow: bool) -> Callable:
    """`func` on operands cast to float32; with `narrow` its results are cast back."""
    @functools.wraps(func, assigned=())
    def call(*args, **kwargs):
        args, kwargs = _cast(args, ms.bfloat16, ms.float32), _cast(kwargs, ms.bfloat16, ms.float32)
        wanted = kwargs.get("dtype")
        if str(as_dtype(wanted)) == "BFloat16":
            kwargs["dtype"] = ms.float32
        result = func(*args, **kwargs)
        keep = wanted is not None and str(as_dtype(wanted)) != "BFloat16"
        return _cast(result, ms.float32, ms.bfloat16) if narrow and not keep else result
    return call


def _cast(value, frm, to):
    return map_leaves(lambda x: x.astype(to) if x.dtype == frm else x, value, Tensor)
