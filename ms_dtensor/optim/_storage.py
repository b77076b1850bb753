# SPDX-License-Identifier: Apache-2.0
"""What an optimizer touches: the local storage of a Tensor, Parameter or DTensor, without dispatch.

The invariant: nothing here communicates. On CPU, MindSpore's in-place arithmetic silently changes nothing, but
`asnumpy` of a tensor that owns its storage is a writable view of it, so in-place NumPy is both correct and fast there.
Of a slice, `view` or transpose it is a *copy*, contiguous or not: addresses are compared before anything is written.
"""
from __future__ import annotations

import numpy as np
from mindspore import Tensor

from ..internals.names import NoFallbackGuard

CHUNK = 1 << 15  # elements worked on at a time, so that an update's passes stay in the second-level cache


def local_view(x: Tensor) -> np.ndarray | None:
    """The storage of the local shard, as a writable array [its elements], or None where `asnumpy` gives a copy."""
    with NoFallbackGuard():
        array = Tensor.asnumpy(x)
        shared = Tensor.is_contiguous(x) and array.flags.writeable and array.ctypes.data == Tensor.data_ptr(x)
    return array.reshape(-1) if shared else None


def local_array(x: Tensor) -> np.ndarray:
    """The values of the local shard, as an array [its elements] that must not be written."""
    with NoFallbackGuard():
        return np.ascontiguousarray(Tensor.asnumpy(x)).reshape(-1)


def layout_of(x):
    """The layout of a DTensor, None for a plain tensor."""
    return getattr(x, "layout", None)
