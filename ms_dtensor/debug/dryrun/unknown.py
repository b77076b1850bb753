# SPDX-License-Identifier: Apache-2.0
"""What plain code makes of a tensor that was taken out of a dry run: it runs with kernels, and has no value either.

Floating values read as NaN, which kernels hand on; a whole number or a truth has no such element, so what is made of the
tensor is marked, and is refused where the user asks for it. A mark is a class of its own, which MindSpore asks at each op.
Not here: plain tensors into which such a one is written by index, of which nobody hears.
"""
from __future__ import annotations

from typing import Any

from mindspore import Tensor, ops

from ...core.tree import leaves, map_leaves
from ...dispatch.op_call import OpCall
from ...dispatch.operands import DIFFERENTIABLE, dtype_name, local_alias
from ...internals.names import NoFallbackGuard
from ...ops.local import LOCAL_OPS
from ..verify.capture import on_one_rank


class Unknown(Tensor):
    """A plain tensor whose value is not known, and neither is that of what is made of it."""

    def __fallback__(self, func, args=(), kwargs=None):
        kwargs, primitive = kwargs or {}, None
        if _dtensor((args, kwargs)) is not None:
            return func(*_plain(args), **_plain(kwargs))  # the DTensor's op: it says what it takes beside it
        if len(args) == 3 and isinstance(args[1], str) and isinstance(args[0], ops.Primitive):
            primitive, _, args = args
        with NoFallbackGuard():  # these objects: an alias would not see what is written in place
            return marked(OpCall(func, primitive, args, kwargs, []).compute(*args, **kwargs))

    def _run_own_op(self, op, arguments):
        arguments = _plain(arguments)
        if (x := _dtensor(arguments)) is not None:
            return x._run_own_op(op, arguments)
        with NoFallbackGuard():
            return marked(on_one_rank(op, arguments, LOCAL_OPS)(*arguments.values()))

    def __getitem__(self, index):
        return marked(local_alias(self)[_plain(index)])

    def __iter__(self):
        return (self[i] for i in range(self._shape[0]))


def marked(tree):
    """Plain tensors that nobody else holds, as unknown ones."""
    def mark(x):
        if x.__class__ is Tensor:
            x.__class__ = Unknown
        return x
    return map_leaves(mark, tree, Tensor)


def shows_itself(x: Tensor) -> bool:
    """Whether whoever reads a tensor sees that it has no value: there is none, or each is NaN."""
    if 0 in x._shape:
        return True
    with NoFallbackGuard():
        return dtype_name(x.dtype).startswith(DIFFERENTIABLE) and bool(ops.isnan(local_alias(x)).all())


def _dtensor(tree) -> Any:
    return next((x for x in leaves(tree, Tensor) if getattr(x, "_layout", None) is not None), None)


def _plain(tree):
    return map_leaves(lambda x: local_alias(x) if x.__class__ is Unknown else x, tree, Tensor)
