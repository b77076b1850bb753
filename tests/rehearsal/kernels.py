# SPDX-License-Identifier: Apache-2.0
"""What a device's branch needs of kernels that MindSpore's CPU plugin lacks or gets wrong, and the counts of what it runs.

Stood in for: in-place ops, which on CPU leave the tensor as it was, and `copy_` from and into views, which is refused or
lost there. Counted: kernels that the packing of collectives launches and the bytes they write; what makes the host wait
(`asnumpy`, `float()`, `data_ptr`, `resize_`, `synchronize`, ...) and what copies values of the host to the device, by line,
except where the line is there for CPU kernels only; and computation, as the bytes that are saved for the backward, and read
again by it.
"""
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from ms_dtensor.comm import packing
from ms_dtensor.internals.names import executor, recording
from tests.rehearsal.emulator import _data_ptr, _stride, memory
from tests.rehearsal.tables import before_joining, copied

IN_PLACE = ("add_", "sub_", "mul_", "div_")
SYNCS = ("asnumpy", "numpy", "item", "tolist", "data_ptr", "assign_value", "__float__", "__int__", "__bool__", "__index__",
         "__array__")
# lines that only run because the kernels, or the wires, are the CPU's
EXEMPT = ("/tests/rehearsal/", "/comm/shm/", "/comm/fake.py", "/dispatch/inplace.py", "_cpu.py")
_storage = Tensor.untyped_storage  # a rehearsal counts who resizes it
PACKS = ("/comm/packing.py", "/comm/device.py", "/comm/hccl.py", "/comm/nccl.py")


def _site() -> str:
    """The innermost line that is neither MindSpore's nor this file's, nor of a function that is asked for values."""
    frame = sys._getframe(2)
    while frame is not None and ("/mindspore/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__
                                 or frame.f_code.co_name in ("host_values", "host_array")):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _Mint:
    """`mint` as packing sees it, counting its kernels; views are none."""

    views = ("permute", "narrow", "split", "empty")

    def __init__(self, device):
        self._device = device

    def __getattr__(self, name):
        call = getattr(mint, name)

        def counted(*args, **kwargs):
            out = call(*args, **kwargs)
            kernel = name not in self.views
            if name == "reshape":  # a view, where the elements lie so
                kernel = _data_ptr(out) != _data_ptr(args[0]) and math.prod(out._shape) > 1
            if kernel:
                launched(self._device, out)
            if name == "cat":
                self._device.cann.update(before_joining([_view(x) for x in args[0]]))
            return out
        return counted


def _view(x: Tensor) -> tuple:
    """Its shape, strides, offset, and how many elements its storage has."""
    return x._shape, _stride(x), x.storage_offset(), _storage(x).nbytes() // Tensor.itemsize.__get__(x)


def launched(device, out) -> None:
    device.counts["kernels"] += 1
    device.counts["copied"] += memory(out).nbytes


def _written(original, name, device):
    """An in-place method that writes: NumPy into the tensor's own memory. MindSpore's still checks and counts versions."""
    def write(self, *args, **kwargs):
        recorded = recording() and executor.enable_grad()
        if recorded or name == "copy_" and hasattr(self, "_layout"):  # autograd's, or dispatch's own
            return original(self, *args, **kwargs)
        device.touched(name, [self, *(a for a in args if isinstance(a, Tensor))], True)
        if name == "copy_":
            values = memory(args[0]).astype(memory(self).dtype)
            device.counts["written"] += 1
            device.cann.update(copied(self._shape, _stride(self), _view(args[0]), args[0].dtype != self.dtype))
            if sys._getframe(1).f_code.co_filename.endswith(PACKS):
                launched(device, self)
        else:
            result = original(self, *args, **kwargs)
            if hasattr(result, "_layout"):  # dispatched, and written there
                return result
            values = memory(result).copy()
        bump(self, values)
        memory(self)[...] = values
        return self
    bump_copy = Tensor.copy_

    def bump(target, values):
        if values.size and target.is_contiguous() and target.untyped_storage().nbytes() == values.size * target.itemsize:
            bump_copy(target, Tensor.from_numpy(np.array(np.broadcast_to(values, target._shape), order="C")))
    return write


def _launching(original, name, device):
    """A method that is a kernel unless it has nothing to do."""
    def call(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        if sys._getframe(1).f_code.co_filename.endswith(PACKS):
            if not self.is_contiguous() if name == "contiguous" else self.dtype != out.dtype:
                launched(device, out)
        return out
    return call


def _waiting(original, state, device):
    def call(*args, **kwargs):
        if state["inside"]:
            return original(*args, **kwargs)
        state["inside"] = True
        try:
            site = _site()
            if not any(part in site for part in EXEMPT):
                device.counts["syncs"] += 1
                device.syncs.append(site)
            return original(*args, **kwargs)
        finally:
            state["inside"] = False
    return call


def _copying(original, device, of):
    """What makes a tensor of host values, which are copied to the device; `of`: the arguments, values first."""
    def call(*args, **kwargs):
        out = original(*args, **kwargs)
        values = of(args)
        if values and isinstance(values[0], np.ndarray | np.generic | list | tuple | int | float) \
                and sys._getframe(1).f_code.co_filename != __file__:
            site = _site()
            if not any(part in site for part in EXEMPT):
                device.counts["host to device"] += 1
                device.uploads.append(site)
        return out
    return call


class _Storage:
    """A tensor's storage, whose `resize_` waits until MindSpore's launch queue is empty (read in its C++ sources)."""

    def __init__(self, real, wait, resized):
        self._real, self._wait, self._resized = real, wait, resized

    def __getattr__(self, name):
        return getattr(self._real, name)

    def resize_(self, size):
        before = self._real.size()
        out = self._wait(self._real.resize_)(size)
        if self._real.size() != before:
            self._resized.append(self._real.size())
        return out


@contextmanager
def stood_in(device, clock: bool = True) -> Iterator[None]:
    """Inside, the kernels are stood in for and counted on `device`; `clock` also lets its compute clock go."""
    state = {"inside": False}
    new = {name: _written(getattr(Tensor, name), name, device) for name in (*IN_PLACE, "copy_")}
    new |= {name: _launching(getattr(Tensor, name), name, device) for name in ("contiguous", "astype")}
    new |= {name: _waiting(getattr(Tensor, name), state, device) for name in SYNCS if hasattr(Tensor, name)}
    storage, synchronize, matmul = Tensor.untyped_storage, ms.runtime.synchronize, mint.matmul
    new["untyped_storage"] = lambda self: _Storage(storage(self), lambda call: _waiting(call, state, device), device.resized)
    new["__init__"] = _copying(Tensor.__init__, device, lambda args: args[1:])
    new["from_numpy"] = staticmethod(_copying(Tensor.from_numpy, device, lambda args: args))
    before = {name: Tensor.__dict__.get(name) for name in new}

    def tick(x):
        device.compute += math.prod(x._shape) * Tensor.itemsize.__get__(x) / device.rates.saved
        return x
    def multiplied(a, b):
        device.compute += 2 * math.prod(a._shape) * b._shape[-1] / device.rates.flops
        return matmul(a, b)
    packing.mint, mint.matmul = _Mint(device), multiplied
    ms.runtime.synchronize = _waiting(synchronize, state, device)
    for name, function in new.items():
        setattr(Tensor, name, function)
    try:
        if clock:
            with ms.saved_tensors_hooks(tick, tick):
                yield
        else:
            yield
    finally:
        packing.mint, mint.matmul, ms.runtime.synchronize = mint, matmul, synchronize
        for name, function in before.items():
            if function is None:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, function)
