# SPDX-License-Identifier: Apache-2.0
"""A backward in two parts: the gradients of the inputs at once, those of the weights later.

The rank before waits for a stage's input gradient and for nothing else, so gradients of weights may fill the time in which
a rank would be idle. A *held product* of an activation and a weight has a small graph of its own, cut off at the
activation; in the outer graph a node stands for it. Its backward asks the small graph for the activation's gradient, and
keeps what came, to ask for the weight's later. Weights enter through *gates*, leaves with the values of a parameter: a
parameter's own chain (hooks, the one node of a `fully_shard` unit, buckets) runs once, later, with the gate's gradients of
both parts added up.

What is no such product (norms, embeddings, biases added apart) leads to its gate in the outer graph, and is done in the
first part. So a product that is missed costs time, never a gradient.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor

from ..core.tree import leaves
from ..internals.names import Function, NoFallbackGuard, executor, run_backward, set_requires_grad
from . import classes, modes
from .memo import memo_of
from .op_call import OpCall, op_name, refill
from .operands import leaf_of, local_alias, make

PRODUCTS = frozenset(("matmul", "linear"))  # as rules call them
holding: ContextVar[Holding | None] = ContextVar("ms_dtensor_holding", default=None)  # of the forward under way


class GatedTensor(Tensor):
    """Stands for a plain parameter; the class is what dispatch is asked for."""

    requires_grad = True


class Holding:
    """What one forward leaves for later.

    Attributes:
        anchor: a leaf to which each held product leads, and by which the first part reaches them all.
    """

    anchor: Any = None

    def __init__(self) -> None:
        if Holding.anchor is None:
            Holding.anchor = leaf_of(Tensor([0.0], ms.float32), True)
        self.gates: dict[int, tuple[Tensor, Any]] = {}  # by id of what they stand for: it must not go before
        self.weights: dict[int, Tensor] = {}  # gates, and what is theirs in another dtype, while the forward runs
        self.shared = False  # whether there is a node that both parts may run
        self.cutting = False  # while a product's own graph is recorded
        self.products: list[tuple[Tensor, Tensor]] = []  # a small graph's result and its cotangent

    def gate(self, x, kind: type | None = None) -> Tensor:
        """The leaf that stands for a parameter, or for what a unit made of one."""
        if id(x) not in self.gates:
            layout = getattr(x, "_layout", None)
            with NoFallbackGuard():
                out = make(kind or (GatedTensor if layout is None else classes.GATED), ms.ops.stop_gradient(local_alias(x)))
            set_requires_grad(out, True)
            if layout is not None:
                out._layout = layout
                if x._memo is not None:
                    memo_of(out).partial_grad_axes, memo_of(out).reads = x._memo.partial_grad_axes, x._memo.reads
            if isinstance(x, Parameter):
                out.inited_param = x  # which cells list in its place
            self.gates[id(x)] = out, x
            self.weights[id(out)] = out
        return self.gates[id(x)][0]

    def weight(self, x: Tensor) -> None:
        """What is computed of weights alone is a weight: a transposed one, one in another dtype."""
        self.shared = self.shared or not x._is_leaf
        if x.__class__ in (Tensor, classes.DTENSOR):  # results, at which dispatch does not look
            x.__class__ = GatedTensor if x.__class__ is Tensor else classes.GATED
        self.weights[id(x)] = x

    def computed(self, given: Sequence[Tensor], out: Any) -> None:
        """The result of an op on tensors."""
        if isinstance(out, Tensor) and out._requires_grad and all(id(x) in self.weights for x in given):
            self.weight(out)

    def product(self, run: Callable[[list], Tensor], operands: Sequence[Tensor], given: Sequence[Tensor]) -> Any:
        """The result of a product of weights and others; `given`: operands before anything was done to them."""
        others = [i for i, x in enumerate(given) if id(x) not in self.weights]
        if not others or len(others) == len(given) or not all(operands[i].is_floating_point() for i in others):
            return run(list(operands))

        def on(xs: list[Tensor]) -> Tensor:
            filled = list(operands)
            for i, x in zip(others, xs):
                filled[i] = x
            return run(filled)
        return _Held.apply(self, self.anchor, on, *(local_alias(operands[i]) for i in others))


class _Held(Function):
    """A product with a graph of its own."""

    @staticmethod
    def forward(ctx, store: Holding, anchor, run: Callable, *xs):
        cut = [x.view(x._shape) for x in xs]  # unrecorded here, and so a leaf
        for leaf, x in zip(cut, xs):
            set_requires_grad(leaf, x._requires_grad)
        was = executor.grad_flag(), executor.enable_grad()
        executor.set_grad_flag(True)
        executor.set_enable_grad(True)
        store.cutting = True
        try:
            y = run(cut)
        finally:
            store.cutting = False
            executor.set_grad_flag(was[0])
            executor.set_enable_grad(was[1])
        ctx.held = store, cut, y
        return y.view(y._shape)

    @staticmethod
    def backward(ctx, dy):
        (store, cut, y), ctx.held = ctx.held, None
        asked = tuple(x for x in cut if x._requires_grad)
        found = iter(run_backward((y,), (dy,), True, False, asked, True, accumulate_grad=False) if asked else ())
        store.products.append((y, dy))
        return None, None, None, *(next(found) if x._requires_grad else None for x in cut)


def plain_product(store: Holding, func, args, kwargs) -> Any:
    """A call on plain tensors and gates, under the guard."""
    primitive = None
    if len(args) == 3 and isinstance(args[0], ms.ops.Primitive):
        primitive, _, args = args
    given = leaves((args, kwargs or {}), Tensor)
    call = OpCall(func, primitive, args, kwargs, given)

    def run(xs: list) -> Tensor:
        it = iter(xs)
        return call.compute(*refill(tuple(args), it), **refill(kwargs or {}, it))
    out = store.product(run, given, given) if modes.canonical(op_name(func)) in PRODUCTS else run(given)
    store.computed(given, out)
    return out
