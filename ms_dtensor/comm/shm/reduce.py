# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a reduction over flat arrays, in group order, in blocks that stay in cache.

Not communication. Every element is computed by the same operations in the same order whoever computes it, so replicas
are bit-identical; float16 and bfloat16 accumulate in float32 and round once.
"""
from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

_UFUNC: dict[str, np.ufunc] = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
_BLOCK = 32 << 10  # elements


# bfloat16 as the engine sees it, two bytes: to assign an empty slice of MindSpore's own type crashes NumPy.
BFLOAT16 = np.dtype("V2")


def is_bfloat16(dtype: np.dtype) -> bool:
    """NumPy has no bfloat16; MindSpore and ml_dtypes each bring a type, and `BFLOAT16` stands for them."""
    return dtype.kind == "V"


def widen(x: np.ndarray) -> np.ndarray:
    """float16 or bfloat16 to float32, exactly."""
    if is_bfloat16(x.dtype):
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def narrow(x: np.ndarray, out: np.ndarray) -> None:
    """float32 into a float16 or bfloat16 array, rounding to nearest even."""
    if not is_bfloat16(out.dtype):
        out[...] = x
        return
    bits = x.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        rounded[nan] = 0x7FC0
    out.view(np.uint16)[...] = rounded


def _quiet(dtype: np.dtype) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if dtype.kind in "iub" else np.errstate(all="ignore")


def reduce_into(outs: Sequence[np.ndarray], op: str, views: Sequence[np.ndarray]) -> None:
    """Writes the reduction of `views` (all flat, of one length and dtype) into each of `outs`.

    An output may be one of the views: a block is read from all of them before it is written.
    """
    ufunc, count, out = _UFUNC[op], len(views), outs[0]
    low = is_bfloat16(out.dtype) or out.dtype == np.float16
    scratch: Any = None if low or count < 3 else np.empty(min(_BLOCK, out.size), out.dtype)
    with _quiet(out.dtype):  # overflow to inf or wrap-around is the dtype's meaning, as on a device
        for s in range(0, out.size, _BLOCK):
            o = out[s:s + _BLOCK]
            parts = [v[s:s + _BLOCK] for v in views] if out.size > _BLOCK else views
            acc = parts[0]
            if low:
                acc = widen(acc)
                for p in parts[1:]:
                    ufunc(acc, widen(p), out=acc)
                if op == "avg":
                    acc /= count
                narrow(acc, o)
            else:
                for p in parts[1:-1]:
                    acc = ufunc(acc, p, out=scratch[:o.size])
                if count > 1:
                    ufunc(acc, parts[-1], out=o)
                else:
                    o[...] = acc
                if op == "avg":
                    np.divide(o, count, out=o)
            for other in outs[1:]:
                other[s:s + _BLOCK] = o
