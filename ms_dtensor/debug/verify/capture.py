# SPDX-License-Identifier: Apache-2.0
"""What a public call turns into: the primitive calls that reach `__fallback__`, with their tensors.

A probe is a Tensor subclass that records every call and computes it plainly. It works for any public form (function,
method, operator, Cell), so the verifier checks what users write and not what we believe it becomes. On CPU a primitive
without a kernel is computed by its decomposition, as dispatch would.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from ...core.layout import Layout
from ...core.mesh import DeviceMesh
from ...core.tree import leaves, map_leaves
from ...dispatch import patches
from ...dispatch.op_call import OpCall, attributes, bind_arguments, op_name
from ...dispatch.operands import dtype_name
from ...dispatch.planner import as_operands
from ...internals.names import NoFallbackGuard
from ...internals.target import cpu_kernels
from ...ops.local import CPU, LOCAL_OPS, WRITES, decomposition, fill_operands
from ...ops.rules import RULES, Call, Local, Operand
from ...ops.rules.write import INPLACE


@dataclass(frozen=True, slots=True)
class Captured:
    """One call: `compute(*args, **kwargs)` with concrete plain tensors.

    Attributes:
        name: of the primitive, or of the op of our own.
        compute: MindSpore's function, the decomposition that takes its place, or an op of our own on one rank.
        args: arguments.
        kwargs: keyword arguments.
        result: what it gave.
        primitive: the classic primitive that was called, if it was one.
        own: of an op of our own: (canonical name, argument names).
    """

    name: str
    compute: Callable
    args: tuple
    kwargs: dict
    result: Any
    primitive: Any = None
    own: tuple[str, tuple[str, ...]] | None = None


class Probe(Tensor):
    """A tensor that notes the calls it takes part in."""

    _log: list[Captured]
    __array_ufunc__ = None
    inited_param, has_init = None, False  # what a Cell asks its parameters, should a probe stand in for one

    def __new__(cls, tensor, log=None):
        out = Tensor._make_subclass(cls, tensor)
        out._log = log
        return out

    def __fallback__(self, func, args=(), kwargs=None):
        primitive = None
        if len(args) == 3 and isinstance(args[1], str) and isinstance(args[0], ops.Primitive):
            primitive, _, args = args
        name, kwargs = op_name(func), kwargs or {}
        if name in INPLACE:
            return self._written(name, args, kwargs, primitive)
        args, kwargs = _plain(tuple(args)), _plain(kwargs)
        before = copied(args), copied(kwargs)  # the op may write into an operand, and a later one into its result
        compute = OpCall(func, primitive, args, kwargs, []).compute
        if name in CPU and cpu_kernels():  # there is no kernel; dispatch does the same
            compute = decomposition(name, {} if primitive is None else attributes(primitive))
        with NoFallbackGuard():
            result = compute(*args, **kwargs)
        if name != "typeof":
            self._log.append(Captured(name, compute, *before, copied(_plain(result)), primitive))
        return _probe(result, self._log)

    def _written(self, name, args, kwargs, primitive):
        """An in-place op: what gives the new value is an op of our own, which `dispatch/inplace.py` then stores."""
        op, params = INPLACE[name]
        arguments = bind_arguments(name, params, args, kwargs, primitive)
        new = self._run(f"in-place {op}", op, {k: v for k, v in arguments.items() if k != "attrs"}, WRITES)
        target = next(v for v in arguments.values() if isinstance(v, Probe))
        with NoFallbackGuard():
            Tensor.copy_(_plain(target), _plain(new))
        return target

    def __getitem__(self, index):
        from ...tensor.indexing import get_item
        return get_item(self, index)

    def __setitem__(self, index, value):
        from ...tensor.indexing import set_item
        set_item(self, index, value)

    def __iter__(self):
        return (self[i] for i in range(self._shape[0]))

    def _run_own_op(self, op, arguments):
        return self._run(op, op, arguments, LOCAL_OPS)

    def _run(self, name, op, arguments, forms):
        args = tuple(_plain(v) for v in arguments.values())
        whole = on_one_rank(op, arguments, forms)
        with NoFallbackGuard():
            result = whole(*args)
        self._log.append(Captured(name, whole, copied(args), {}, copied(_plain(result)), own=(op, tuple(arguments))))
        return _probe(result, self._log)


def on_one_rank(op: str, arguments: dict, forms: dict):
    """An op of our own as a function of its arguments: the local form that its rule gives for a mesh of one rank."""
    tensors = leaves(arguments, Tensor)
    operands = tuple(Operand(i, tuple(t._shape), dtype_name(t.dtype)) for i, t in enumerate(tensors))
    it = iter(operands)
    call = Call(op, {k: as_operands(v, it) for k, v in arguments.items()}, operands)
    spec = RULES[op](call)
    mesh = DeviceMesh("cpu", [0])
    ins = tuple(Layout(mesh, None, o.shape, o.dtype) for o in operands)
    outs = tuple(Layout(mesh, None, shape) for shape in spec.shapes)
    named = spec.local(Local(ins, outs, (0,))) if spec.local else None
    fn, template, kwargs = (forms[op], tuple(call.args.values()), {}) if named is None else (
        LOCAL_OPS[named.name], named.args, named.kwargs)
    return lambda *args: fn(*fill_operands(template, leaves(args, Tensor)), **kwargs)


def copied(tree):
    """`tree` with tensors of their own."""
    return map_leaves(lambda x: Tensor(x.asnumpy().copy()) if x.dtype != ms.bfloat16 else x, tree, Tensor)


def _plain(tree):
    return map_leaves(lambda x: Tensor._make_subclass(Tensor, x), tree, Tensor)


def _probe(tree, log):
    return map_leaves(lambda x: Probe(x, log), tree, Tensor)


def capture(fn, *args, **kwargs) -> list[Captured]:
    """The primitive calls made by `fn(*args, **kwargs)`, its tensors replaced by probes."""
    patches.install()
    log: list[Captured] = []
    fn(*_probe(args, log), **{k: _probe(v, log) for k, v in kwargs.items()})
    return log
