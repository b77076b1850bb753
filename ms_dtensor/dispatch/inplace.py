# SPDX-License-Identifier: Apache-2.0
"""In-place ops and `x[...] = v`: the new value is computed out of place, then put into the target's storage.

MindSpore's CPU arithmetic in-place ops return the right result and leave the object as it was (`add_`, `+=` on a
Parameter); here the object changes, keeps its identity and its placement, and its memos are dropped. The other operands
are moved to where the target is. Two things are refused, because a write would be lost or seen by some ranks only: a
target whose placement would have to change, and a target that one device would have as a view of another living tensor
but that is a copy here (`y = x[1:3]` of a sharded dim). Views that share storage write through, as on one device.

Under autograd the write is a recorded `copy_`, which MindSpore guards with a version check; views are refused there.
"""
from __future__ import annotations

import math

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from ..comm.packing import write
from ..comm.pretended import executing
from ..errors import MixedOperandError, OpRuleError
from ..internals.names import NoFallbackGuard
from ..internals.target import cpu_kernels
from . import classes
from .memo import memo_of, wrote
from .operands import wrap
from .views import is_repeated, relatives_of


def check_writable(x, op: str, recording: bool, versioned: bool) -> None:
    """Raises unless a write to `x` reaches everything that it reaches on one device.

    Raises:
        MixedOperandError: `x` is a plain tensor.
        OpRuleError: a view that is a copy here; under autograd also any view, and, but for `ops.assign` and `x[...] = v`,
            which MindSpore takes, a leaf that requires a gradient.
    """
    if getattr(x, "_layout", None) is None:
        raise MixedOperandError(f"For in-place '{op}', a plain Tensor cannot take a DTensor's values.",
                                f"plain {type(x).__name__}{list(x._shape)}", "It would hold this rank's shard only.",
                                ("x = x + value and the like, which makes a DTensor",
                                 "distribute_tensor(x, device_mesh, placements) first",
                                 "x.copy_(value.to_local()), on purpose"))
    if is_repeated(x):
        raise OpRuleError("For an in-place op, several elements of the target share one place.", x._layout.describe(),
                          "It is an expanded view.", "x = x.clone() first")
    relatives = list(relatives_of(x))
    for other, shared in relatives:
        if not shared:
            raise OpRuleError(f"For in-place '{op}', the target is a view on one device, but a copy here.",
                              f"{x._layout.describe()}, related to {other._layout.describe()}",
                              "The dim was gathered or moved for the view, so a write would reach only one of the two.",
                              ("write by index into the original: x[1:3] = value", "take the view as x[...].clone()"))
    if recording and relatives:
        raise OpRuleError(f"For in-place '{op}', the target is a view, or has views, under autograd.",
                          x._layout.describe(), "The gradient of a write through a view is not recorded.",
                          ("write by index into the original: x[1:3] = value", "work out of place"))
    if recording and versioned and isinstance(x, Parameter) and x.requires_grad:
        raise OpRuleError(f"For in-place '{op}', parameter '{x.name}' is a leaf that requires a gradient.",
                          x._layout.describe(), "As in MindSpore, a leaf is not written while its gradient is recorded.",
                          ("write outside of value_and_grad", "ops.assign(parameter, value)", "work out of place"))


def set_(self, *args, **kwargs):
    """Refused: it would make this rank's shard another tensor's storage, of whatever shape.

    Raises:
        OpRuleError: always.
    """
    raise OpRuleError("For 'set_', a DTensor does not change its storage.", self._layout.describe(),
                      "Its layout, and its views, speak of the one that it has.", ("x.copy_(value)", "x = value"))


def fresh(x):
    """A recorded copy of `x` to compute from: what the backward saves must not be overwritten by the write."""
    if not x.is_floating_point():
        return x
    with NoFallbackGuard():
        return wrap(x * 1, x._layout)


def store(x, new, recording: bool, versioned: bool) -> None:
    """Puts the local values of `new` into the storage of `x`, which views share; drops what was derived from `x`.

    `versioned`: MindSpore is to refuse a backward that needs the old values, as for `copy_`; of `ops.assign` it is not told.
    """
    with NoFallbackGuard():
        local, given = Tensor._make_subclass(Tensor, new), isinstance(x, Parameter) or hasattr(x, "inited_param")
        if recording and given:  # as `assign` on one device: neither a leaf nor what requires no gradient takes history
            local = ms.ops.stop_gradient(local)
        if (dry := executing()) is not None:
            dry.overwritten(x, local, recording and not given)
        elif x.__class__ is classes.UNSHARDED and not versioned:
            memory, param = x._memo.lent
            write(memory.values(param), local)
        elif recording and given and not versioned:
            write(Tensor._make_subclass(Tensor, x), local)
        elif _owns_storage(x) or not cpu_kernels():
            Tensor.copy_(x, local)
        elif not recording:
            _write_strided(x, local)
        else:
            raise OpRuleError("For an in-place op, the target's local storage is a part of another's.",
                              x._layout.describe(), "MindSpore's recorded copy loses such writes on CPU.",
                              "x = x.clone() first")
    for other in (x, *(o for o, _ in relatives_of(x))):
        source = memo_of(other).source if other.__class__ is classes.UNSHARDED else None  # it tells the place
        memo_of(other).forget_values()
        memo_of(other).source = source
        wrote(other, versioned)


def written_since(x, version: int) -> bool:
    """Whether a tensor, or a view of it, was written since it had this `_version`, which counts no writes to views."""
    return x._version != version or (getattr(x, "_memo", None) is not None and x._memo.written > 0)


def _owns_storage(x) -> bool:
    """Whether the local tensor is all of its storage, in order: elsewhere MindSpore's `copy_` on CPU loses writes."""
    return Tensor.is_contiguous(x) and Tensor.storage_offset(x) == 0 and (
        Tensor.untyped_storage(x).nbytes() == math.prod(x._shape) * Tensor.itemsize.__get__(x))


def _write_strided(x, local) -> None:
    """Writes a view through the memory of what it is a view of."""
    for other, _ in relatives_of(x):
        if not _owns_storage(other):
            continue
        memory = Tensor._make_subclass(Tensor, other).asnumpy().reshape(-1)
        if memory.ctypes.data != Tensor.data_ptr(other):  # a copy
            continue
        strides, shape = Tensor.stride(x), tuple(x._shape)
        at = Tensor.storage_offset(x) - Tensor.storage_offset(other)
        np.lib.stride_tricks.as_strided(memory[at:], shape, [s * memory.itemsize for s in strides])[...] = local.asnumpy()
        return
    if any(relatives_of(x)):
        raise OpRuleError("For an in-place op, the target's local storage is strided.", x._layout.describe(),
                          "MindSpore loses such writes on CPU.", "x = x.clone() first")
    Tensor.assign_value(x, local.contiguous())  # nobody else can see the old storage
