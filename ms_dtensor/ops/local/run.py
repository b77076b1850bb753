# SPDX-License-Identifier: Apache-2.0
"""Running one rank's part of a planned call: the original, another local form, or a stand-in where its shards are empty.

Invariant: whether a rank's shard is empty changes neither what it returns nor what autograd records. So a rank without
elements, where others have some, runs the first rank's call on ones and zeros, and fills its results with neutral
elements: structure, dtypes, errors and every node are the others'. Only where nobody has any does no kernel run.
"""
from __future__ import annotations

from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore._c_expression import NoFallbackGuard
from mindspore.common._grad_function import _Function
from mindspore.common.api import _pynative_executor

from ..rng import frozen
from ..rules.spec import Operand


class Question(NamedTuple):
    """A call of the first rank: (shape, dtype) of its operands, and the local form it runs, as `run_local` takes it."""

    likes: tuple[tuple[tuple[int, ...], str], ...]
    form: tuple | None


class Answer(NamedTuple):
    """What a call gives: `kind` is tuple or list, or None for one tensor, and the dtype of each result."""

    kind: type | None
    dtypes: tuple[str, ...]


class Fill(NamedTuple):
    """A local result that no kernel computes: its shape, the value everywhere (None: what the stand-ins give), its dtype
    as far as a rule knows it."""

    shape: tuple[int, ...]
    value: float | None
    dtype: str


class Stand(_Function):
    """Another constant tensor in the place of `x`; cotangents end here."""

    @staticmethod
    def forward(ctx, x, fill):
        ctx.like = x._shape, x.dtype
        return filled(*fill)

    @staticmethod
    def backward(ctx, _):
        return ops.zeros(*ctx.like), None


class EmptyShard(_Function):
    """The results of a call from which there is nothing to compute, as a tuple; still connected to its operands."""

    @staticmethod
    def forward(ctx, fills, *tensors):
        ctx.likes = [(t._shape, t.dtype) if t.is_floating_point() or "Complex" in str(t.dtype) else None for t in tensors]
        return tuple(filled(*fill) for fill in fills)

    @staticmethod
    def backward(ctx, *grads):
        return None, *(None if like is None else ops.zeros(*like) for like in ctx.likes)


def ask(question: Question, original) -> Answer:
    """Runs the first rank's call on stand-ins, unrecorded, and tells what comes; raises what it raises."""
    enabled = _pynative_executor.enable_grad()
    _pynative_executor.set_enable_grad(False)
    try:
        with NoFallbackGuard(), frozen(0):  # a random op draws nothing from the stream
            result = run_local(original, question.form, None, _stand_ins(question))
    finally:
        _pynative_executor.set_enable_grad(enabled)
    several = result if isinstance(result, tuple | list) else (result,)
    return Answer(type(result) if several is result else None, tuple(str(r.dtype).lower() for r in several))


def _stand_ins(question: Question, tensors=None) -> list:
    fills = [(shape, float("int" not in dtype), dtype) for shape, dtype in question.likes]
    return [filled(*f) for f in fills] if tensors is None else [Stand.apply(x, f) for x, f in zip(tensors, fills)]


def stand_in(question: Question, original, fills, tensors):
    """The results of an empty shard, from the first rank's call."""
    def of(r, fill):
        return r if fill.value is None else Stand.apply(r, fill._replace(dtype=str(r.dtype).lower()))
    result = run_local(original, question.form, None, _stand_ins(question, tensors))
    return of(result, fills[0]) if isinstance(result, Tensor) else type(result)(map(of, result, fills))


def nothing(fills, kind: type | None, tensors):
    """Results where no rank has anything to compute: `kind` of them (tuple or list), or the one."""
    made = EmptyShard.apply(tuple(fills), *tensors)
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


def run_local(original, form, empty, tensors, question=None, answer=None):
    """One rank's part of a planned call.

    Args:
        original: the call as MindSpore made it, a function of the list of tensors.
        form: (function, argument template, keywords) of another local form, or None.
        empty: a `Fill` per result where this rank has nothing to compute, or None.
        tensors: the local operands.
        question: the first rank's call, if that has something to compute; None: nobody has.
        answer: what the call gives, if it was asked.
    """
    if empty is not None and question is not None:
        return stand_in(question, original, empty, tensors)
    if empty is not None:
        if form is not None and hasattr(form[0], "skip"):  # a random op counts as drawn
            form[0].skip()
        kind = answer.kind if answer else tuple if len(empty) > 1 else None
        return nothing([f._replace(dtype=d) for f, d in zip(empty, answer.dtypes)] if answer else empty, kind, tensors)
    if form is None:
        return original(tensors)
    fn, template, named = form
    return fn(*fill_operands(template, tensors), **named)


def fill_operands(template, tensors):
    """An argument template with each `Operand` replaced by its tensor."""
    return [tensors[t.index] if t.__class__ is Operand else
            tuple(fill_operands(t, tensors)) if t.__class__ is tuple else t for t in template]
