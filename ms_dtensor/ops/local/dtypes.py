# SPDX-License-Identifier: Apache-2.0
"""bfloat16 on CPU: MindSpore has hardly any kernel for it there, so a call is computed in float32 and rounded once.

Casts are differentiable, so the backward is computed in float32 too. The invariant: a result is what one float32
computation of the whole local call gives, rounded to bfloat16 at the very end. Also here: MindSpore passes a dtype as a
number in some calls; tensors of one value, which have no kernel of some dtypes.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from ...core.tree import map_leaves
from ..rules.spec import TYPE_IDS

# Moves and casts have bfloat16 kernels, forward and backward.
_NATIVE = frozenset(("cast", "reshape", "identity", "permute", "swap", "matrix_transpose", "clone"))


def as_dtype(dtype):
    """A dtype, or MindSpore's number of one, as a dtype; None stays None."""
    if isinstance(dtype, int):
        name = TYPE_IDS[dtype]
        return getattr(ms, "bool_" if name == "bool" else name)
    return dtype


def wrapper_in_float32(op: str, tensors, promised: tuple[str, ...],
                       place: int | None) -> Callable[[Callable], Callable] | None:
    """`in_float32` for a call with these operands; None where nothing is bfloat16, or the op has a kernel for that.

    Args:
        op: canonical op.
        tensors: its operands.
        promised: the dtype of each result.
        place: of a dtype among the call's positional arguments, or None.
    """
    if op in _NATIVE or ("bfloat16" not in promised and not any(x.dtype == ms.bfloat16 for x in tensors)):
        return None
    return functools.partial(in_float32, promised=promised, place=place)


def in_float32(func: Callable, promised: tuple[str, ...], place: int | None = None) -> Callable:
    """`func` on operands cast to float32; results that are `promised` as bfloat16 are cast back."""
    @functools.wraps(func, assigned=())
    def call(*args, **kwargs):
        args, kwargs = _cast(args, ms.bfloat16, ms.float32), _cast(kwargs, ms.bfloat16, ms.float32)
        if place is not None and len(args) > place and as_dtype(args[place]) == ms.bfloat16:
            args = *args[:place], ms.float32, *args[place + 1:]
        if as_dtype(kwargs.get("dtype")) == ms.bfloat16:
            kwargs["dtype"] = ms.float32
        result = func(*args, **kwargs)
        if isinstance(result, tuple | list):
            return type(result)(map(_narrowed, result, promised))
        return _narrowed(result, promised[0])
    return call


def _narrowed(x, dtype: str):
    return x.astype(ms.bfloat16) if dtype == "bfloat16" and x.dtype == ms.float32 else x


def _cast(value, frm, to):
    return map_leaves(lambda x: x.astype(to) if x.dtype == frm else x, value, Tensor)


def wider(x):
    """16-bit floats as float32: their sums leave the range of their means and roots, and one device adds them up wider."""
    return x.astype(ms.float32) if x.dtype in (ms.float16, ms.bfloat16) else x


def rounded(result, x):
    """What was computed from `wider(x)`, in the dtype of `x`."""
    return result.astype(x.dtype) if x.dtype in (ms.float16, ms.bfloat16) else result


def full(shape, value, dtype):
    """A tensor of one value, a number or 0-d tensor; an infinite one is the extreme of integers and booleans."""
    if isinstance(value, Tensor):
        return mint.broadcast_to(value.astype(dtype), tuple(shape))
    if value in (math.inf, -math.inf) and (dtype == ms.bool_ or "Int" in str(dtype)):
        value = value > 0 if dtype == ms.bool_ else getattr(np.iinfo(str(dtype).lower()), "max" if value > 0 else "min")
    if dtype in (ms.bool_, ms.bfloat16):  # no such kernels on CPU
        return ops.full(tuple(shape), float(value), dtype=ms.float32).astype(dtype)
    return ops.full(tuple(shape), value, dtype=dtype)
