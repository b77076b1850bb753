# SPDX-License-Identifier: Apache-2.0
"""Local shards as arrays: NumPy's on CPU, MindSpore's tensors on a device, so that one formula serves both.

`xp()` is the module whose functions take them; operators, `sum`, `reshape` and slices are alike in both. The one
invariant: what is to change is written by `write`, since in-place arithmetic of tensors changes nothing on CPU. On a
device nothing here asks for a value. All of it runs inside `NoFallbackGuard` (see `base.py`).

On CPU, `asnumpy` of a tensor that owns its storage is a writable view of it, so in-place NumPy is both correct and fast
there. Of a slice, `view` or transpose it is a *copy*, contiguous or not: addresses are compared before anything is written.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, ops

from ..comm.pretended import executing
from ..comm.world import synchronize
from ..dispatch.memo import stepped
from ..internals.names import NoFallbackGuard
from ..internals.target import on_cpu

Array = Any  # np.ndarray or mindspore.Tensor
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


def xp():
    """The module whose functions take the arrays."""
    return np if on_cpu() else mint


def join(arrays: list[Array], dim: int = 0) -> Array:
    """Arrays joined along a dim; one alone is given as it is."""
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays, dim) if on_cpu() else mint.cat(arrays, dim)


def precision(param) -> Any:
    """The dtype in which a parameter is stepped: float32, for float64 parameters float64."""
    wide = param.dtype == ms.float64
    return (np.float64 if wide else np.float32) if on_cpu() else (ms.float64 if wide else ms.float32)


def values(x, dtype) -> Array:
    """The local shard [local shape] in a dtype; not to be written."""
    if on_cpu():
        return local_array(x).reshape(x._shape).astype(dtype, copy=False)
    return ops.stop_gradient(x).astype(dtype)


def total(x: Array, dim: int | None = None) -> Array:
    """The sum over a dim, or over all; of no elements 0, which MindSpore's kernels do not all say."""
    if on_cpu() or math.prod(x.shape):
        return x.sum() if dim is None else x.sum(dim)
    return ops.zeros(() if dim is None else x.shape[:dim] + x.shape[x.ndim + dim + 1:], x.dtype)


def zeros(shape, dtype) -> Array:
    """An optimizer's state, to be written by `write`."""
    dry = executing()
    if dry is not None:
        return dry.state(shape, dtype)
    return np.zeros(shape, dtype) if on_cpu() else Parameter(ops.zeros(shape, dtype), requires_grad=False)


def write(target: Array, value: Array) -> None:
    """Writes a value into a state, a parameter or a piece that `chunks` gave."""
    if executing() is not None:
        return
    if not math.prod(target.shape if isinstance(target, np.ndarray) else target._shape):
        return  # NumPy crashes where it copies no elements of MindSpore's bfloat16
    if isinstance(target, np.ndarray):
        target[...] = value
        return
    if not on_cpu():
        target.copy_(value.astype(target.dtype))
    elif (view := local_view(target)) is not None:
        np.copyto(view, value.reshape(-1), casting="unsafe")
    else:
        dtype = local_array(target).dtype
        ops.assign(target, Tensor(np.ascontiguousarray(value.astype(dtype)).reshape(target._shape)))
    stepped(target)


def chunks(first: Array, *others: Array | None) -> Iterator[tuple]:
    """Aligned pieces of contiguous arrays of one size (a None stays one): on CPU such as stay in cache, else the whole."""
    if not on_cpu():
        yield first, *others
        return
    flat = [None if a is None else a.reshape(-1) for a in (first, *others)]
    for lo in range(0, first.size, CHUNK):
        yield tuple(None if a is None else a[lo:lo + CHUNK] for a in flat)


def new_master(param) -> Array | None:
    """Float32 values of a parameter of 16 bits: in bfloat16 1.0 - 3e-4 is 1.0, and a model would stand still."""
    if param.dtype not in (ms.float16, ms.bfloat16):
        return None
    master = zeros(param._shape, precision(param))
    if executing() is None:
        write(master, values(param, precision(param)))
    return master


@contextmanager
def opened(param, master: Array | None) -> Iterator[Array]:
    """What a step changes by `write`: the parameter's storage, or its master, which is rounded into it afterwards.

    Where a parameter no longer is its master rounded (weights were loaded), the master starts anew from it.
    """
    if on_cpu():
        synchronize()
    if master is None:
        if not on_cpu():
            yield param
            stepped(param)
            return
        view = local_view(param)
        array = (local_array(param).copy() if view is None else view).reshape(param._shape)
        yield array
        if view is None:
            write(param, array)
        else:
            stepped(param)
        return
    if on_cpu():
        now = local_array(param).reshape(master.shape)
        for m, p in chunks(master, now):
            np.copyto(m, p, where=m.astype(p.dtype) != p, casting="unsafe")
    else:
        now = param.astype(master.dtype)
        write(master, ops.select(master.astype(param.dtype).astype(master.dtype) == now, master, now))
    yield master
    write(param, master)


def to_tensor(x: Array) -> Tensor:
    """For a collective."""
    return Tensor.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x


def to_array(x: Array | Tensor) -> Array:
    """Of a collective, or of a file."""
    if isinstance(x, np.ndarray):
        return x if on_cpu() else Tensor(x)
    return Tensor.asnumpy(x) if on_cpu() else x
