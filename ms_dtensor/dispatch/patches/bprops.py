# SPDX-License-Identifier: Apache-2.0
"""Backwards that users write, a cell's `bprop` and a `_Function`'s, on DTensors; and a `bprop` in a recording.

MindSpore hands them this rank's shards: a sum in them would be one of this rank's rows, and so would the gradient of a
weight. Here they get DTensors, laid out as what the forward took and gave, and what they return is brought to where each
gradient is expected. In a `Recording` MindSpore cannot run a `bprop` at all: there plain tensors go this way, too. Not here:
DFunctions, which say how they lie; their cell's `bprop` is one rank's part (`custom_ops/function.py`).
"""
from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from mindspore import Tensor, mint, nn

from ...core.tree import first_dtensor, leaves, map_leaves
from ...errors import MixedOperandError, OpRuleError
from ...internals.names import Function, UsersFunction, no_grad
from .. import modes
from ..operands import as_local, detached, local_alias, recording, redistribute, wrap
from .gradients import recorded_apart

OF_LOCAL = "_ms_dtensor_bprop_of_local"  # class attribute: its `bprop` is written for one rank's tensors


class _Place(int):
    """Where a tensor was: its number among those taken and given."""


class _Call:
    """One call with a backward of its own, its tensors left out: what the node of that keeps beside them.

    Attributes:
        backward: of arguments, results, what was kept, and the results' gradients; gives the arguments' gradients.
    """

    def __init__(self, name: str, backward: Callable, args: tuple, result: Any, kept: Any = None):
        self.name, self.backward = name, backward
        taken, given = leaves(args, Tensor), leaves((result,), Tensor)
        self.layouts = [getattr(x, "_layout", None) for x in (*taken, *given)]
        places = iter(range(len(self.layouts)))
        self.args, self.result = map_leaves(lambda x: _Place(next(places)), (args, result), Tensor)
        # what is kept of these is the node's, else it would keep itself
        known = {id(x): _Place(i) for i, x in reversed([*enumerate((*taken, *given))])}
        self.kept = map_leaves(lambda x: known.get(id(x), x), kept, Tensor)
        # a forward's words about plain tensors hold for its backward; `watch` is asked of a forward's own calls alone
        self.blocks = tuple(block for block in modes.open_blocks() if "watch" not in block[1])

    def recorded(self, args: tuple, result: Any) -> Any:
        """The results, behind a node."""
        local = [x if getattr(x, "_layout", None) is None else as_local(x) for x in leaves(args, Tensor)]
        out = _OwnBackward.apply(self, [local_alias(detached(y)) for y in leaves((result,), Tensor)], *local)
        return self._filled(self.result, [None] * len(local) + list(out))

    def _filled(self, tree: Any, tensors: list, layouts: list | None = None) -> Any:
        def put(i):
            layout = (layouts or self.layouts)[i]
            return tensors[i] if layout is None else wrap(tensors[i], layout)
        return map_leaves(put, tree, _Place)

    def gradients(self, saved: list, grads: tuple) -> list:
        """Of the tensors taken, as local tensors; None where there is none."""
        cotangents = [None if layout is None else layout.gradient() for layout in self.layouts]
        args, result, kept = self._filled((self.args, self.result, self.kept), saved)
        dout = self._filled(self.result, [None] * (len(cotangents) - len(grads)) + list(grads), cotangents)
        with modes.reopened(self.blocks):
            out = self.backward(args, result, kept, dout)
            out = list(out) if isinstance(out, tuple | list) else [out]
            while len(out) > len(args) and out[-1] is None:  # of an argument with a default, which nobody gave
                out.pop()
            if len(out) != len(args):
                raise OpRuleError(f"For '{self.name}', {len(out)} gradients came for {len(args)} arguments.", "",
                                  "There is one gradient for each argument of the forward, in order.",
                                  "return None for those that have none")
            flat: list = []
            for places, grad in zip([leaves((arg,), _Place) for arg in self.args], out):
                found = leaves((grad,), Tensor)
                flat += found if len(found) == len(places) else [None] * len(places)
            return [None if g is None else self._expected(g, saved[i], cotangents[i]) for i, g in enumerate(flat)]

    def _expected(self, grad: Tensor, x: Tensor, wanted) -> Tensor:
        """A gradient as the local tensor that the producer of `x` expects; summed where `x` was broadcast."""
        shape = tuple(x.shape) if wanted is None else wanted.shape
        more = grad.ndim - len(shape)
        dims = [d for d in range(grad.ndim) if d < more or shape[d - more] == 1 != grad.shape[d]]
        if dims:
            grad = mint.sum(grad, dims, keepdim=True).reshape(shape)
        grad = grad if grad.dtype == x.dtype else grad.astype(x.dtype)
        if wanted is None:
            return grad
        if getattr(grad, "_layout", None) is None:
            if not modes.mode.get().implicit_replication:
                raise MixedOperandError(
                    f"For '{self.name}', a gradient is a plain Tensor of shape {list(grad.shape)}.", wanted.describe(),
                    "A plain tensor does not say how it is laid out, so one rank's data could pass for the whole.",
                    ("compute it from what comes in, which are DTensors", "ops.zeros_like(x)"))
            grad = wrap(grad, wanted.replicated())
        return local_alias(redistribute(grad, wanted))


class _OwnBackward(Function):
    """What a call gave, as it is; backward, what its writer says."""

    @staticmethod
    def forward(ctx, call: _Call, results: list, *taken):
        ctx.call = call
        ctx.save_for_backward(*taken, *results)
        return tuple(results)

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *ctx.call.gradients(list(ctx.saved_tensors), grads)


def _call_custom_bprop(original):
    @functools.wraps(original)
    def call(self, *args, **kwargs):
        met = first_dtensor(args, kwargs) is not None or recorded_apart()
        if not met or not recording() or hasattr(type(self), OF_LOCAL):
            return original(self, *args, **kwargs)
        bound = self._construct_sig.bind(*args, **kwargs)
        bound.apply_defaults()
        args = *bound.args, *bound.kwargs.values()
        with no_grad():
            result = self.construct(*bound.args, **bound.kwargs)

        def backward(args, result, kept, dout):
            return self.bprop(*args, result, dout)
        return _Call(f"{type(self).__name__}.bprop", backward, args, result).recorded(args, result)
    return call


class _Context:
    """What a `_Function` gets as its `ctx`."""

    saved_tensors: tuple = ()

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors):
        """Its gradient comes as zeros, as that of each result that nobody reads."""

    set_materialize_grads = mark_non_differentiable

    def mark_dirty(self, *tensors):
        raise OpRuleError("For 'mark_dirty', a DTensor was written.", "",
                          "What a function writes into a DTensor has no gradient here.", "return a new tensor")


def _apply(original):
    @functools.wraps(original.__func__)
    def apply(cls, *args, **kwargs):
        if first_dtensor(args, kwargs) is None or not recording() or cls.__module__.startswith("mindspore."):
            return original.__func__(cls, *args, **kwargs)
        ctx, apart = _Context(), cls.setup_context is not UsersFunction.setup_context
        with no_grad():
            result = cls.forward(*args, **kwargs) if apart else cls.forward(ctx, *args, **kwargs)
            if apart:
                cls.setup_context(ctx, args, result)

        def backward(args, result, kept, dout):
            again = copy.copy(ctx)
            again.saved_tensors = kept
            return cls.backward(again, *(dout if isinstance(dout, tuple) else (dout,)))
        given, args = ctx.__dict__.pop("saved_tensors", ()), (*args, *kwargs.values())
        return _Call(f"{cls.__name__}.backward", backward, args, result, given).recorded(args, result)
    return classmethod(apply)


DOORS = ((nn.Cell, "_call_custom_bprop", _call_custom_bprop), (UsersFunction, "apply", _apply))
