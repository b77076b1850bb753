# SPDX-License-Identifier: Apache-2.0
"""Running one rank's part of a planned call: the original, another local form, or nothing where its shards are empty.

Invariant: whether a rank's shard is empty changes neither what it returns nor whether autograd makes a node; what that is
on the other ranks `ask.py` finds out.
"""
from __future__ import annotations

from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import ops
from mindspore.common._grad_function import _Function

from ..rules.spec import Operand


class Result(NamedTuple):
    """A local result that no kernel computes: its shape, the value everywhere, its dtype, whether a gradient goes through."""

    shape: tuple[int, ...]
    value: float
    dtype: str
    connected: bool = True


class EmptyShard(_Function):
    """The results of a call for which this rank's shards hold nothing, as a tuple; still connected to every operand."""

    @staticmethod
    def forward(ctx, results, *tensors):
        ctx.likes = [(t._shape, t.dtype) if t.is_floating_point() or "Complex" in str(t.dtype) else None
                     for t in tensors]
        return tuple(filled(r.shape, r.value, r.dtype) for r in results)

    @staticmethod
    def backward(ctx, *grads):
        return None, *(None if like is None else ops.zeros(*like) for like in ctx.likes)


def empty_results(results: tuple[Result, ...], kind: type | None, tensors):
    """What a rank returns that has nothing to compute: `kind` of them (tuple or list), or the one."""
    made = EmptyShard.apply(results, *tensors)
    made = [x if r.connected else filled(r.shape, r.value, r.dtype) for x, r in zip(made, results)]
    return made[0] if kind is None else kind(made)


def filled(shape, value, dtype: str):
    """A tensor with the value everywhere; infinities are an integer's extremes."""
    dtype = getattr(ms, dtype if dtype != "bool" else "bool_")
    if dtype == ms.bool_:
        return ops.zeros(shape, dtype) if value <= 0 else ops.ones(shape, dtype)
    if value in (float("inf"), float("-inf")) and "Int" in str(dtype):
        info = np.iinfo(str(dtype).lower())
        value = info.max if value > 0 else info.min
    if dtype == ms.bfloat16:  # no such kernel on CPU
        return ops.full(shape, value, dtype=ms.float32).astype(dtype)
    return ops.full(shape, value, dtype=dtype)


def run_local(original, form, empty, tensors, kind=None):
    """One rank's part of a planned call.

    Args:
        original: the call as MindSpore made it, a function of the list of tensors.
        form: (function, argument template, keywords) of another local form, or None.
        empty: a `Result` per result where there is nothing to compute, or None.
        tensors: the local operands.
        kind: in what the results come then, see `empty_results`.
    """
    if form is not None:
        fn, template, named = form

        def original(xs):
            return fn(*fill_operands(template, xs), **named)
    if empty is not None:
        if form is not None and hasattr(form[0], "skip"):  # a random op draws in step with the other ranks
            form[0].skip()
        return empty_results(empty, kind, tensors)
    return original(tensors)


def fill_operands(template, tensors):
    """An argument template with each `Operand` replaced by its tensor."""
    return [tensors[t.index] if t.__class__ is Operand else
            tuple(fill_operands(t, tensors)) if t.__class__ is tuple else t for t in template]
