# SPDX-License-Identifier: Apache-2.0
"""Nodes of a dry run's backward that belong to no op: where a value has several uses, and where nobody sees into a function.

Sums of cotangents are work as any other, so they are events, too.
"""
from __future__ import annotations

from mindspore import Parameter

from ...internals.names import Function
from .abstract import nameless


class Fork(Function):
    """A value as two: the one that is used, and the one that further uses are forked from."""

    @staticmethod
    def forward(ctx, x, executor, key):
        ctx.of = executor, key, isinstance(x, Parameter)
        ctx.set_materialize_grads(False)
        return nameless(x._shape, x.dtype), nameless(x._shape, x.dtype)

    @staticmethod
    def backward(ctx, used, rest):
        executor, key, leaf = ctx.of
        executor.forks.pop(key, None)
        if used is None or rest is None:
            out = rest if used is None else used
        else:
            out = executor.sum(used, rest, "activations")
        if leaf and out is not None:
            executor.ledger.is_now(out, "gradients")
        return out, None, None


class Made(Function):
    """What a function has made that nobody saw into: it counts, as any result."""

    @staticmethod
    def forward(ctx, x, executor):
        return executor.ledger.new(x._shape, x.dtype, "activations")

    @staticmethod
    def backward(ctx, grad):
        return grad, None
