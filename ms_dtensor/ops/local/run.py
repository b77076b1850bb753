# SPDX-License-Identifier: Apache-2.0
"""Running one rank's part of a planned call: the original, another local form, or nothing where its shards are empty.

Invariant: whether a rank's shard is empty changes neither what it returns nor whether autograd makes a node.
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import ops
from mindspore.common._grad_function import _Function

from ..rules.spec import Operand


class EmptyShard(_Function):
    """The results of a call for which this rank's shards hold nothing; still connected to every operand."""

    @staticmethod
    def forward(ctx, results, *tensors):
        ctx.likes = [(t._shape, t.dtype) if t.is_floating_point() else None for t in tensors]
        # No kernel runs, not even to learn a dtype: one that refuses empty input would leave autograd in a broken state.
        made = tuple(_full(shape, value, getattr(ms, dtype if dtype != "bool" else "bool_"))
                     for shape, value, dtype in results)
        return made if len(made) > 1 else made[0]

    @staticmethod
    def backward(ctx, *grads):
        return None, *(None if like is None else ops.zeros(*like) for like in ctx.likes)


def _full(shape, value, dtype):
    if dtype == ms.bool_:
        return ops.zeros(shape, dtype) if value <= 0 else ops.ones(shape, dtype)
    if value in (float("inf"), float("-inf")) and "Int" in str(dtype):
        info = np.iinfo(str(dtype).lower())
        value = info.max if value > 0 else info.min
    if dtype == ms.bfloat16:  # no such kernel on CPU
        return ops.full(shape, value, dtype=ms.float32).astype(dtype)
    return ops.full(shape, value, dtype=dtype)


def run_local(original, form, empty, tensors):
    """One rank's part of a planned call.

    Args:
        original: the call as MindSpore made it, a function of the list of tensors.
        form: (function, argument template, keywords) of another local form, or None.
        empty: (shape, fill value, dtype) per result where `empty_results` says so, or None.
        tensors: the local operands.
    """
    if form is not None:
        fn, template, named = form

        def original(xs):
            return fn(*fill_operands(template, xs), **named)
    if empty is not None:
        if form is not None and hasattr(form[0], "skip"):  # a random op draws in step with the other ranks
            form[0].skip()
        return EmptyShard.apply(empty, *tensors)
    return original(tensors)


def fill_operands(template, tensors):
    """An argument template with each `Operand` replaced by its tensor."""
    return [tensors[t.index] if t.__class__ is Operand else
            tuple(fill_operands(t, tensors)) if t.__class__ is tuple else t for t in template]
