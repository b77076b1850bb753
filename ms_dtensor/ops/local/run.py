# SPDX-License-Identifier: Apache-2.0
"""Running one rank's part of a planned call: the original, another local form, or either on stand-ins for empty shards.

MindSpore's CPU kernels answer empty sums with uninitialised memory, and some refuse empty input, so they never see any.
Invariant: whether a rank's shard is empty changes neither the dtype and structure of what it returns, nor what a kernel
refuses, nor which nodes autograd makes, to any order: the collectives of every backward stay in one order on all ranks.
"""
from __future__ import annotations

from mindspore import Tensor

from ...internals.names import Function, detach
from ..rules.spec import EmptyShard, Operand
from .dtypes import full


class StandIn(Function):
    """A constant in a tensor's place, still connected to it by a gradient of zeros."""

    @staticmethod
    def forward(ctx, x, shape, value):
        ctx.like = tuple(x._shape)
        return full(shape, value, x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return StandIn.apply(grad, ctx.like, 0), None, None


class HandedOn(Function):
    """The tensor itself as a node: beside ranks with stand-ins, so that gradients arrive in one order on all."""

    @staticmethod
    def forward(ctx, x):
        return detach(x)  # what `x` itself would be, a view, may not be written to (statistics)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Nothing(Function):
    """Zeros that depend on tensors, and whose gradients are zeros that depend on these and the cotangent, to any order."""

    @staticmethod
    def forward(ctx, shape, dtype, *tensors):
        ctx.save_for_backward(*tensors)
        return full(shape, 0, dtype)

    @staticmethod
    def backward(ctx, grad):
        tensors = ctx.saved_tensors
        return None, None, *(Nothing.apply(tuple(x._shape), x.dtype, grad, *tensors) for x in tensors)


def run_local(original, form, empty: EmptyShard | None, tensors, again=None):
    """One rank's part of a planned call.

    Args:
        original: the call as MindSpore made it, a function of the list of tensors.
        form: (function, argument template, keywords) of another local form, or None.
        empty: what stands in for operands and results where this rank's shards are empty, or None.
        tensors: the local operands.
        again: runs it such that its gradient can be differentiated, see `orders.py`.
    """
    if form is not None:
        fn, template, named = form

        def original(xs):
            return fn(*fill_operands(template, xs), **named)
    if again is not None:
        once = original

        def original(xs):
            return again(once, xs)
    return original(tensors) if empty is None else on_stand_ins(original, empty, tensors)


def on_stand_ins(original, empty: EmptyShard, tensors):
    """The results of an empty shard, from a call whose own nobody sees, unless they are not what the rule promised.

    Then the ranks with data are about to refuse theirs, and so is this one, if it is handed the same.
    """
    def of(r, made):
        return r if made[1] is None else StandIn.apply(r, *made)
    result = original([StandIn.apply(x, *made) for x, made in zip(tensors, empty.stand_ins)])
    given = (result,) if isinstance(result, Tensor) else result
    if empty.promised is not None and any(tuple(r._shape) != shape for r, shape in zip(given, empty.promised)):
        return result
    return of(result, empty.results[0]) if isinstance(result, Tensor) else type(result)(map(of, result, empty.results))


def zeros_of(tensors, shape):
    """A sum of no products of these tensors, still connected to each."""
    parts = [StandIn.apply(x, shape, 0) for x in tensors]
    return sum(parts[1:], parts[0])


def fill_operands(template, tensors):
    """An argument template with each `Operand` replaced by its tensor."""
    return [tensors[t.index] if t.__class__ is Operand else
            tuple(fill_operands(t, tensors)) if t.__class__ is tuple else t for t in template]
