# SPDX-License-Identifier: Apache-2.0
"""What the cache holds for a key: a plan, and the short way through it once its results' layouts are known.

A plan that moves no operand takes the short way from its second run on: operands as plain aliases, the op, its result as
a DTensor. Neither a guard nor an autograd node of ours is needed then, because an alias shares the autograd identity of
anything but a Parameter. Making an alias waits for the operand's data, so where ops are issued asynchronously the
operands themselves go in, under a guard, unless Python code would ask them for their shape.
"""
from __future__ import annotations

from sys import getrefcount
from typing import Any

from mindspore import Tensor

from ..comm.world import ops_block
from ..internals.names import NoFallbackGuard, TensorOverloadCall
from . import classes
from .memo import memo_of
from .op_call import OpCall
from .op_plan import HELD_ONCE, OpPlan
from .operands import make, recording
from .views import link


class ShortWay:
    """What `CachedCall.run` needs to know of a plan, flat: each look into another object shows in the cost of a call.

    Attributes:
        layout: of the first result, whose class will be `dtensor`.
        function: what runs on `filled` (arguments with room for the operands) and `named`; None: what was called does.
        places: ((place among the arguments, operand), ...), taken as plain aliases if `aliased`.
        native: see `LocalRun`.
        varying: not while recording: an operand is varying, or a result partial in a way that no gradient fits.
        view: see `OpPlan`.
    """

    __slots__ = ("aliased", "dtensor", "filled", "function", "layout", "named", "native", "places", "varying", "view")

    def __init__(self, plan: OpPlan):
        local = plan.local
        self.layout, self.view, self.places, self.native = plan.results.layouts[0], plan.view, local.places, local.native
        form: tuple[Any, Any, Any] = local.form or (local.substitute, None, None)
        self.function, self.filled, self.named = form[0], None if form[1] is None else list(form[1]), form[2]
        self.dtensor = classes.DTENSOR
        self.aliased = ops_block() or not getattr(local.substitute, "takes_dtensors", local.substitute is None)
        self.varying = bool(plan.reduced) or plan.uneven or any(step.cotangent is not None for step in plan.steps)


class CachedCall:
    """A plan (an `OpPlan`, or a `Composition`, which is never short), how often it ran, and its short way."""

    __slots__ = ("plan", "short", "uses")
    short: ShortWay | None

    def __init__(self, plan):
        self.plan, self.short, self.uses = plan, None, 0

    def run(self, func, primitive, args, kwargs, tensors):
        """The results of one call, as DTensors; arguments as in `OpCall`, which is only made where it is needed."""
        self.uses += 1
        short = self.short
        if short is None or (short.varying and recording()):
            return self._in_full(OpCall(func, primitive, args, kwargs, tensors))
        aliased = short.aliased or not (short.native or func.__class__ is not TensorOverloadCall)  # `is_native`, inlined
        filled, fn, dtensor = short.filled, short.function, short.dtensor
        xs: Any
        if filled is None:
            xs, named = list(args), kwargs
        else:
            xs, named = filled.copy(), short.named
        for place, i in short.places:
            x = tensors[i]
            if x.__class__ is not dtensor and recording():
                return self._in_full(OpCall(func, primitive, args, kwargs, tensors))
            xs[place] = make(Tensor, x) if aliased else x
        if fn is None:
            fn = func
            if primitive is not None:
                xs = primitive, primitive.name, tuple(xs)
        if aliased:
            result = fn(*xs, **named) if named else fn(*xs)
        else:
            with NoFallbackGuard():
                result = fn(*xs, **named) if named else fn(*xs)
        if result.__class__ is Tensor and getrefcount(result) == HELD_ONCE:
            result.__class__ = dtensor  # `retag`, inlined
            result._layout = short.layout
            out = result
        else:
            out = self.plan.results.wrap(result, False)
        if short.view is not None:
            first = tensors[0]
            link(first, out, short.view)
            if recording() and not first._is_leaf and out.__class__ is dtensor:
                memo_of(out).view_of = first, self.plan, (func, primitive, args, kwargs, tensors)
        return out

    def _in_full(self, call: OpCall):
        out = self.plan.run(call)
        if self.short is None and self.plan.short:
            self.short = ShortWay(self.plan)
        return out
