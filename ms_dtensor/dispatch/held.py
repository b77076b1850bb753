# SPDX-License-Identifier: Apache-2.0
"""A backward in two parts: the gradients of the inputs at once, those of the weights later.

The rank before waits for a stage's input gradient and for nothing else, so gradients of weights may fill the time in which
a rank would be idle. A *held product* of an activation and a weight has a small graph of its own, cut off at the
activation; in the outer graph a node stands for it. Its backward asks the small graph for the activation's gradient, and
keeps what came, to ask for the weight's later. Of plain matrices the node computes both itself, and there is no such graph.
Weights enter through *gates*, leaves with the values of a parameter: a parameter's own chain (hooks, the one node of a
`fully_shard` unit, buckets) runs once, later, with the gate's gradients of both parts added up.

What is no such product (norms, embeddings, biases added apart) leads to its gate in the outer graph, and is done in the
first part. So a product that is missed costs time, never a gradient.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import Parameter, Tensor, mint

from ..comm.pretended import executing
from ..core.tree import leaves
from ..internals.names import (
    Function,
    NoFallbackGuard,
    detach,
    executor,
    run_backward,
    set_requires_grad,
)
from . import classes, modes
from .memo import memo_of
from .op_call import OpCall, op_name, refill
from .operands import leaf_of, local_alias, make

PRODUCTS = frozenset(("matmul", "linear"))  # as rules call them
Late = Callable[[], Iterable[tuple[Tensor, Tensor]]]  # gives tensors that lead to weights, and the cotangent of each
holding: ContextVar[Holding | None] = ContextVar("ms_dtensor_holding", default=None)  # of the forward under way


class Matrices(NamedTuple):
    """What is known of a product of an activation and a matrix of weights."""

    transposed: bool  # the matrix is
    classic: bool  # MindSpore's backward runs `MatMul`, which transposes in the kernel, or else `mint.matmul`: bits
    keeps_both: bool = False  # MindSpore's node does, whatever is asked: of what is recomputed, as many are saved each time
    tensors: int = 2


# By MindSpore's name of the op, and what follows the two; Tensor: a bias. Without one `Dense` is, on CPU, `mint.matmul` with
# the turned weight, whose gradient is turned back: in the other order last bits differ where a CPU has no AVX-512.
KNOWN: dict[str, dict[tuple, Matrices]] = {
    "Dense": {(None,): Matrices(True, False, True), (Tensor,): Matrices(True, True, True, 3)},
    "MatMul": {(False, True): Matrices(True, True), (False, False): Matrices(False, True)},
    "MatMulExt": {(): Matrices(False, False)}}


class Gate(Tensor):
    """What a forward finds in a parameter's place: it has its values, in its memory."""

    requires_grad = True

    @property
    def name(self) -> str:
        return self.inited_param.name

    def set_data(self, data: Tensor, slice_shape: bool = False) -> Tensor:
        """As that of the parameter."""
        ms.ops.assign(self, data)
        return self

    def assign_value(self, value: Tensor) -> Tensor:
        """As that of the parameter."""
        return self.set_data(value)


class GatedTensor(Gate):
    """Stands for a plain parameter; the class is what dispatch is asked for."""

    def register_hook(self, hook):
        hooked(self)
        return super().register_hook(hook)


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
        self.cut = frozenset[int]()  # while a product's own graph is recorded, ids of its leaves
        self.products: list[Late] = []  # what each of them leaves for the second part

    def gate(self, x, kind: type | None = None, data: Tensor | None = None) -> Tensor:
        """The leaf that stands for a parameter, or for what a unit made of one, with the values of that or of `data`."""
        if id(x) not in self.gates:
            layout = getattr(x, "_layout", None)
            dry = executing() if layout is None and data is None else None  # where a plain parameter is never made
            if dry is None:
                values = detach(local_alias(x if data is None else data))
            else:  # laid out as all else is there: each use would lay it out anew, and both parts would run that
                with NoFallbackGuard():
                    values = dry.nameless(x.shape, x.dtype)
                    layout = dry.alone(values)._layout
            out = make(kind or (GatedTensor if layout is None else classes.GATED), values)
            set_requires_grad(out, True)
            if layout is not None:
                out._layout = layout
                if getattr(x, "_memo", None) is not None:
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
        weights = self.weights
        if all([id(x) in weights for x in given]) and isinstance(out, Tensor) and out._requires_grad:
            self.weight(out)

    def product(self, run: Callable[..., Tensor], operands: Sequence[Tensor], given: Sequence[Tensor],
                known: Matrices | None = None) -> Any:
        """The result of a product of weights and others, which `run` computes of operands.

        `given` are operands before anything was done to them; `known`: `run` is MindSpore's function alone.
        """
        weights = self.weights
        if known is not None and id(given[0]) not in weights and all([id(w) in weights for w in given[1:]]):
            x, w, *_ = operands
            if w.ndim == 2 and x.ndim > 1 and x.dtype == w.dtype and x.is_floating_point():
                return _OfMatrices.apply((known, run, operands[1:], self.products), self.anchor,
                                         x if x.__class__ is Tensor else local_alias(x))
        others = [i for i, x in enumerate(given) if id(x) not in weights]
        xs = [operands[i] for i in others]
        if not others or len(others) == len(given) or not all([x._requires_grad or x.is_floating_point() for x in xs]):
            return run(*operands)
        return _Held.apply((self, run, operands, others), self.anchor,
                           *[x if x.__class__ is Tensor else local_alias(x) for x in xs])


def hooked(x: Tensor) -> None:
    """What has a hook of its own is no weight: both parts would call it, each with a part of the gradient."""
    if (store := holding.get()) is not None:
        store.weights.pop(id(x), None)


class _Held(Function):
    """A product with a graph of its own."""

    @staticmethod
    def forward(ctx, what: tuple, anchor, *xs):  # few arguments: each costs the engine a gradient that is None
        store, run, operands, others = what
        filled, cut = list(operands), []
        for i, x in zip(others, xs):
            leaf = filled[i] = detach(x)
            if x._requires_grad:
                set_requires_grad(leaf, True)
            cut.append(leaf)
        executor.set_enable_grad(True)  # a node's forward is not recorded
        store.cut = frozenset(map(id, cut))
        try:
            y = run(*filled)
        finally:
            store.cut = frozenset()
            executor.set_enable_grad(False)
        ctx.held = store, cut, y
        return detach(y)

    @staticmethod
    def backward(ctx, dy):
        (store, cut, y), ctx.held = ctx.held, None
        asked = tuple([x for x in cut if x._requires_grad])
        found = run_backward((y,), (dy,), True, False, asked, True, accumulate_grad=False) if asked else ()
        store.products.append(lambda: ((y, dy),))
        if len(found) == len(cut):  # as a rule
            return None, None, *found
        it = iter(found)
        return None, None, *(next(it) if x._requires_grad else None for x in cut)


class _OfMatrices(Function):
    """`x @ w.T`, to which a bias may be added, or `x @ w`. Its gradients are products, too: a graph for them, with a
    backward of its own, costs as much."""

    @staticmethod
    def forward(ctx, what: tuple, anchor, x):
        known, run, weights, _ = what
        ctx.what = what, x._requires_grad
        ctx.save_for_backward(*((x, detach(weights[0])) if x._requires_grad or known.keeps_both else (x,)))
        return run(x, *weights)

    @staticmethod
    def backward(ctx, dy):
        (x, *saved), ((known, _, weights, products), asked) = ctx.saved_tensors, ctx.what
        products.append(partial(_of_weights, known, weights, x, dy))
        if not asked:
            return None, None, None
        if not known.classic:
            return None, None, mint.matmul(dy, saved[0] if known.transposed else saved[0].t())
        dx = _classic(False, not known.transposed)(_rows(dy), saved[0])
        return None, None, dx if dx.ndim == x.ndim else dx.reshape(x._shape)


def _of_weights(known: Matrices, weights: Sequence[Tensor], x: Tensor, dy: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    if 0 in x._shape:  # of no rows the kernel writes nothing: what lay there would be a gradient
        return ()
    x, dy = _rows(x), _rows(dy)
    if known.classic:
        product = _classic(True, False)(*((dy, x) if known.transposed else (x, dy)))
    else:
        product = mint.matmul(x.t(), dy)
        product = product.t() if known.transposed else product
    return zip(weights, (product, mint.sum(dy, 0)) if len(weights) > 1 else (product,))


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.flatten(0, -2)


@cache
def _classic(a: bool, b: bool) -> Callable[..., Tensor]:
    """The product of two matrices, of which these are transposed."""
    return ms.ops.MatMul(a, b)


class WeightGradients:
    """The gradients of weights that an `autograd.Function` gives in the second part; its backward calls it in the first.

    Such a node takes `anchor` and weights that are cut off (`cut`), so that its own gradients are of the first part alone.
    """

    def __init__(self, store: Holding, weights: Sequence[Tensor]):
        self._products, self.anchor, self.cut = store.products, store.anchor, [detach(w) for w in weights]
        self._weights = [w if w._requires_grad else None for w in weights]
        store.shared = store.shared or not all([w._is_leaf for w in weights])

    def __call__(self, gradients: Callable[[], Sequence[Tensor]]) -> None:
        """`gradients()` are those of the weights, and holds what it needs for them."""
        if any([w is not None for w in self._weights]):
            self._products.append(lambda: [(w, g) for w, g in zip(self._weights, gradients()) if w is not None])


def known_matrices(func, args, kwargs) -> Matrices | None:
    """What is known of a call; None: what MindSpore records of it is needed."""
    kinds = None if kwargs or len(args) < 2 else KNOWN.get(op_name(func))
    return None if kinds is None else kinds.get(tuple([Tensor if isinstance(x, Tensor) else x for x in args[2:]]))


def plain_product(store: Holding, func, args, kwargs) -> Any:
    """A call on plain tensors and gates, under the guard."""
    known = known_matrices(func, args, kwargs)
    if known is not None:
        given, after = args[:known.tensors], args[known.tensors:]
        out = store.product(func if not after else lambda *xs: func(*xs, *after), given, given, known)
    else:
        run, given = _of_tensors(func, args, kwargs)
        out = store.product(run, given, given) if modes.canonical(op_name(func)) in PRODUCTS else run(*given)
    store.computed(given, out)
    return out


def _of_tensors(func, args, kwargs) -> tuple[Callable[..., Any], Sequence[Tensor]]:
    """A call as a function of its tensors, and these."""
    primitive: Any = None
    if len(args) == 3 and isinstance(args[0], ms.ops.Primitive):
        primitive, _, args = args
    n = 0  # tensors come first, as a rule, and then what is never one
    while n < len(args) and isinstance(args[n], Tensor):
        n += 1
    rest = args[n:]
    if kwargs or not all([a is None or a.__class__ is bool for a in rest]):
        given = leaves((args, kwargs or {}), Tensor)
        call = OpCall(func, primitive, args, kwargs, given)

        def run(*xs):
            it = iter(xs)
            return call.compute(*refill(tuple(args), it), **refill(kwargs or {}, it))
        return run, given
    if primitive is not None:
        return lambda *xs: func(primitive, primitive.name, (*xs, *rest)), args[:n]
    return (lambda *xs: func(*xs, *rest)) if rest else func, args[:n]
