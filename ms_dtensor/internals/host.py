# SPDX-License-Identifier: Apache-2.0
"""The memory of a tensor on the host, as NumPy's.

`asnumpy` asks a tensor for its buffer, whose format NumPy reads in Python: 15 us on MindSpore 2.10, and kernels ask fifty
times a layer; of views, even those of one piece, it gives copies. Address, shape and dtype tell the same in 2; who asks for
an address waits as for `asnumpy`.
"""
from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.common import dtype as mstype

_dtypes: dict[int, tuple[np.dtype, Any]] = {}  # by the id of MindSpore's dtype, which is kept: its hash costs 1 us


def numpy_dtype(dtype: Any) -> np.dtype:
    """The NumPy dtype whose arrays `Tensor.from_numpy` turns into `dtype`."""
    known = _dtypes.get(id(dtype))
    if known is None:
        if dtype == mstype.bfloat16:  # NumPy has none; MindSpore brings its own
            made = Tensor([0.0], mstype.bfloat16).asnumpy().dtype
        else:
            made = np.dtype(str(dtype).lower())  # what MindSpore has for it warns each user of its own end
        known = _dtypes[id(dtype)] = made, dtype
    return known[0]


@lru_cache(maxsize=4096)
def _bytes(count: int) -> type[ctypes.Array]:
    return ctypes.c_char * count


def host_array(x: Tensor, gaps: bool = False) -> np.ndarray:
    """The values of a host tensor, on its memory; of a DTensor this rank's.

    For who uses them at once: who gives the tensor other data meanwhile takes the memory away.

    Args:
        gaps: of a view with gaps, too, to write into it; else that is copied in one piece.
    """
    whole = Tensor.is_contiguous(x)
    start = Tensor.data_ptr(x) if (whole or gaps) and not x.has_init else 0
    if not start:  # or empty
        return Tensor._make_subclass(Tensor, x).asnumpy()
    kind, shape = numpy_dtype(x.dtype), x._shape
    strides = () if whole else [n * kind.itemsize for n in Tensor.stride(x)]
    count = x._nbytes if whole else sum((n - 1) * s for n, s in zip(shape, strides)) + kind.itemsize
    memory: Any = _bytes(count).from_address(start)
    memory.owner = x  # keeps it
    return np.ndarray(shape, kind, memory) if whole else np.ndarray(shape, kind, memory, strides=strides)
