# SPDX-License-Identifier: Apache-2.0
"""Asks MindSpore what a call gives, with stand-ins: a rank whose shard is empty cannot learn it from a run of its own.

Where sharding leaves some rank without elements, every rank runs the call once, when it is planned, on ones and zeros of
the first rank's local shapes. What comes back, or the error a kernel raises, is then the same on all ranks, and what
empty shards return is made after it. Invariant: nothing is communicated and no random number is drawn.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import mindspore as ms
from mindspore import Tensor, ops
from mindspore._c_expression import NoFallbackGuard
from mindspore.common._grad_function import _Function
from mindspore.common.api import _pynative_executor

from .run import Result, filled

_DIFFERENTIABLE = ("float", "bfloat", "complex")


class Question(NamedTuple):
    """A call of the first rank: (shape, dtype) of its operands, and the local form it runs, as `run_local` takes it."""

    likes: tuple[tuple[tuple[int, ...], str], ...]
    form: tuple | None


class Answer(NamedTuple):
    """What a call gives: `kind` is tuple or list, or None for one tensor; per result its dtype and whether a gradient
    goes through it."""

    kind: type | None
    dtypes: tuple[str, ...]
    connected: tuple[bool, ...]

    def fill(self, shapes) -> tuple[Result, ...]:
        """Descriptions of these results from (local shape, fill value) of each."""
        return tuple(Result(shape, value, dtype, connected)
                     for (shape, value), dtype, connected in zip(shapes, self.dtypes, self.connected))


class _End(_Function):
    """A loss of any tensor; nothing flows back."""

    @staticmethod
    def forward(ctx, x):
        ctx.like = x._shape, x.dtype
        return Tensor(0.0)

    @staticmethod
    def backward(ctx, _):
        return ops.zeros(*ctx.like)


def ask(question: Question, call) -> Answer:
    """Runs `call`, a function of the list of local operands, on stand-ins; raises what it raises."""
    answers: list[Any] = []
    active = [i for i, (_, dtype) in enumerate(question.likes) if dtype.startswith(_DIFFERENTIABLE)]
    tensors = [filled(shape, float(i in active), dtype) for i, (shape, dtype) in enumerate(question.likes)]

    def run(*differentiated):
        for i, x in zip(active, differentiated):
            tensors[i] = x
        try:
            with NoFallbackGuard():
                result = call(tensors)
        except Exception as error:  # noqa: BLE001  raised below: one that leaves `ms.grad` would spoil a user's gradient
            answers.append(error)
        else:
            several = result if isinstance(result, tuple | list) else (result,)
            answers.append(Answer(type(result) if several is result else None,
                                  tuple(str(r.dtype).lower() for r in several), tuple(r._requires_grad for r in several)))
        return _End.apply(differentiated[0]) if differentiated else None
    if active:
        enabled = _pynative_executor.enable_grad()
        _pynative_executor.set_enable_grad(True)  # inside `_no_grad` MindSpore refuses to differentiate
        try:
            ms.grad(run, tuple(range(len(active))))(*(tensors[i] for i in active))
        finally:
            _pynative_executor.set_enable_grad(enabled)
    else:
        run()
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]
