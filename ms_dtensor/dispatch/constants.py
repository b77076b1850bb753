# SPDX-License-Identifier: Apache-2.0
"""Operands that MindSpore 2.10 keeps: where they lie in memory that goes, or that an optimizer writes, the op is given a
copy.

It keeps an operand that no op has computed (a constant; in a backward in two parts a leaf, too), and takes it again for any
of the same values, as of another layer: memory that has gone since gives silently wrong gradients of the other operands.
Ops on DTensors come here from `op_plan.py`. Local tensors of constants have a class that is asked when an op takes them.
Not here: vectors, which ops write (running statistics): those have memory of their own (`parallel/sharding/call.py`); what
stands for a parameter whose memory stays (`frozen_alias` in `operands.py`), which MindSpore is told to take for one.
"""
from __future__ import annotations

from mindspore import Tensor

from ..comm.packing import copy
from ..comm.pretended import executing
from ..core.tree import leaves, map_leaves
from ..internals.names import NoFallbackGuard, no_grad, set_requires_grad
from . import classes, modes
from .held import PRODUCTS, holding
from .op_call import op_name
from .operands import local_alias, make

# Of which it does not: those where a copy of a weight would cost.
_LETS_GO = PRODUCTS | {"grouped_matmul", "add", "sub", "mul", "bias_add", "rms_norm", "group_norm"}


def keeps(op: str, x: Tensor, given) -> bool:
    """Whether a recorded op keeps its operand `x`: a gradient of another of those given is asked for."""
    return op not in _LETS_GO and (not x._requires_grad or holding.get() is not None) and any(
        other is not x and other._requires_grad and other.is_floating_point() for other in given)


def copied(x: Tensor) -> Tensor:
    """The local values of a tensor in memory of their own, connected as it is."""
    with NoFallbackGuard():
        if x._requires_grad:
            return local_alias(x) * 1 if executing() is None else local_alias(x)
        with no_grad():
            out = copy(local_alias(x))
        set_requires_grad(out, False)
    return out


class Constant(Tensor):
    """The local tensor of a parameter whose gradient is not asked for, in memory that goes."""

    met = False  # whether there has been one, for which plain ops are to look


def constant(x: Tensor) -> Tensor:
    """A local tensor that is one."""
    Constant.met = True
    return make(Constant, x)


def plain_call(func, args, kwargs):
    """A recorded call on plain tensors, under the guard."""
    given = leaves((args, kwargs or {}), Tensor)
    if any([x.__class__ is Constant for x in given]):
        op = modes.canonical(op_name(func))
        args, kwargs = map_leaves(lambda x: copied(x) if keeps(op, x, given) else x, (args, kwargs or {}), Constant)
    return func(*args, **kwargs) if kwargs else func(*args)


classes.constant = constant
