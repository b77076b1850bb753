# SPDX-License-Identifier: Apache-2.0
"""Products of float32 matrices on a CPU by the oneDNN that comes with MindSpore, without an op around them.

Between two products MindSpore's host code costs as much as a tenth of a product of 256 rows; NumPy's OpenBLAS lays out
both operands anew, which costs as much (a third with 64 rows). oneDNN's `dnnl_sgemm` does neither, and adds to what is
there at no cost. It uses one thread: a process with several has NumPy's products, as has a MindSpore without that library.
"""
from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import mindspore as ms
import numpy as np


def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None, add: bool = False) -> np.ndarray:
    """`a @ b` of two matrices, each in one piece or another's transpose; into `out`, with `add` onto what is there."""
    if out is None:
        out, add = np.empty((a.shape[0], b.shape[1]), a.dtype), False
    sgemm, of_a, of_b = _sgemm(), _form(a), _form(b)
    if sgemm is None or of_a is None or of_b is None or not (out.flags.c_contiguous and out.size and a.size) \
            or not a.dtype == b.dtype == np.float32:
        return np.add(out, a @ b, out=out) if add else np.matmul(a, b, out=out)
    (turn_a, line_a), (turn_b, line_b) = of_a, of_b
    sgemm(turn_a, turn_b, *out.shape, a.shape[1], 1.0, a.ctypes.data, line_a, b.ctypes.data, line_b, float(add),
          out.ctypes.data, out.shape[1])
    return out


def _form(x: np.ndarray) -> tuple[bytes, int] | None:
    """How the library is told of `x`: whether its memory lies turned, and how long a line of it is."""
    if x.flags.c_contiguous:
        return b"N", x.shape[1]
    return (b"T", x.shape[0]) if x.flags.f_contiguous else None


@cache
def _sgemm() -> Callable[..., int] | None:
    """`dnnl_sgemm`; None where this process has several threads, or it is not there or not what it was."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2  # Linux tells
    if os.environ.get("OMP_NUM_THREADS") != "1" and cores > 1:
        return None
    try:
        found = sorted((Path(ms.__file__).parent / "lib").glob("libdnnl.so.*"))
        sgemm = ctypes.CDLL(str(found[0])).dnnl_sgemm
    except (IndexError, OSError, AttributeError):  # MindSpore for another host
        return None
    whole, number, at = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
    sgemm.argtypes = [ctypes.c_char, ctypes.c_char, whole, whole, whole, number, at, whole, at, whole, number, at, whole]
    a, b, c = (np.arange(n, dtype=np.float32).reshape(shape) for n, shape in ((6, (2, 3)), (12, (4, 3)), (8, (2, 4))))
    want = c + a @ b.T
    failed = sgemm(b"N", b"T", 2, 4, 3, 1.0, a.ctypes.data, 3, b.ctypes.data, 3, 1.0, c.ctypes.data, 4)
    return None if failed or (c != want).any() else sgemm
