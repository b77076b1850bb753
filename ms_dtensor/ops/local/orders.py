# SPDX-License-Identifier: Apache-2.0
"""Derivatives of derivatives on one rank: which local ops MindSpore differentiates again, and nodes for those it does not.

MindSpore 2.10 forgets the history of a gradient that a view made while the backward is recorded itself: behind a reshape,
a transpose, a sum along a dim, a broadcast or a concatenation a second derivative is 0 or a fraction, on one device too.
What is linear gets a node here whose backward is such a node again, products one that knows its three factors, and
operands that broadcast are expanded first, so that all is right to any order. An op in no table is refused where a second
derivative may be asked for. Read next: `dispatch/planner.py`.
"""
from __future__ import annotations

from contextlib import contextmanager

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from ...comm.packing import copy
from ...internals.names import Function, NoFallbackGuard, executor, recording

# element by element, or without a gradient: MindSpore's own backward makes no view, if all operands have one shape
AGAIN = frozenset("""
    add sub mul div neg square squared_difference pow exp expm1 exp2 log log1p log2 log10 sqrt rsqrt reciprocal sin cos tan
    sinh cosh tanh asin acos atan asinh acosh atanh sigmoid erf erfc silu abs relu maximum minimum cast clone identity where
    masked_fill fill full_like zeros_like ones_like empty_like new_full new_ones new_zeros new_empty
    eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf isfinite isneginf isclose any all
    argmax argmax_classic argmax_method argsort count_nonzero one_hot sign floor ceil round rint trunc heaviside
""".split())
LINEAR = frozenset("""
    reshape view_as flatten flatten_primitive permute swap matrix_transpose unsqueeze squeeze expand expand_as tile split
    chunk split_equal unbind cat stack meshgrid slice strided_slice narrow select gather gather_nd take take_along
    embedding index index_select diag diag_all diagonal trace tril triu sum mean add_n cumsum roll flip repeat_interleave
    pad_pairs copy bias_add
""".split())
PRODUCTS = frozenset(("matmul", "outer", "linear"))  # the last one with a bias, too
CONVOLUTIONS = frozenset(("conv_classic", "conv_transpose_classic"))
BILINEAR = PRODUCTS | CONVOLUTIONS


def to_any_order(op: str):
    """What runs an op's local function such that it can be differentiated again; None: the op is in no table."""
    return (broadcast_first if op in AGAIN else linear_node if op in LINEAR else bilinear_node if op in PRODUCTS else
            convolution_node if op in CONVOLUTIONS else None)


def broadcast_first(function, tensors):
    """`function(tensors)` on tensors of one shape."""
    shapes = [tuple(x._shape) for x in tensors]
    if len(set(shapes)) > 1:
        wide = np.broadcast_shapes(*shapes)
        tensors = [x if tuple(x._shape) == wide else linear_node(lambda xs: mint.broadcast_to(xs[0], wide), [x])
                   for x in tensors]
    return function(tensors)


class Linear(Function):
    """`maps` = (f, its transpose), both from lists of tensors to lists of tensors."""

    @staticmethod
    def forward(ctx, maps, *tensors):
        ctx.maps = maps
        return _as_results(maps[0]([_plain(x) for x in tensors]))

    @staticmethod
    def backward(ctx, *grads):
        f, transposed = ctx.maps
        if not recording():
            return None, *transposed(list(grads))
        out = Linear.apply((transposed, f), *grads)
        return None, *(out if isinstance(out, tuple) else (out,))


def linear_node(function, tensors):
    """`function(tensors)`, linear in the floating ones, as one node that is right to any order."""
    held = [ops.stop_gradient(_plain(x)) for x in tensors]
    floating = [i for i, x in enumerate(held) if x.is_floating_point()]
    if not floating:
        return function(tensors)
    kind: list = []

    def f(xs):
        full = list(held)
        for i, x in zip(floating, xs):
            full[i] = x
        result = function(full)
        kind[:] = [None if isinstance(result, Tensor) else type(result)]
        return [result] if isinstance(result, Tensor) else list(result)
    out = Linear.apply((f, lambda grads: _transposed(f, [held[i] for i in floating], grads)),
                       *(tensors[i] for i in floating))
    return out if kind[0] is None else kind[0](out if isinstance(out, tuple) else (out,))


class Bilinear(Function):
    """Of the trilinear form <f(a, b), g>, its derivative by slot `k`: f itself for 2, f's gradients for 0 and 1."""

    @staticmethod
    def forward(ctx, maps, k, first, second):
        ctx.maps, ctx.k = maps, k
        ctx.save_for_backward(first, second)
        return _as_results([maps[k](_plain(first), _plain(second))])

    @staticmethod
    def backward(ctx, grad):
        maps, k = ctx.maps, ctx.k
        i, j = (s for s in range(3) if s != k)
        held = {k: grad, **dict(zip((i, j), ctx.saved_tensors))}
        out = []
        for slot in (i, j):
            others = [held[s] for s in range(3) if s != slot]
            out.append(Bilinear.apply(maps, slot, *others) if recording() else maps[slot](*map(_plain, others)))
        return None, None, *out


def _plain(x):
    return Tensor._make_subclass(Tensor, x)


def bilinear_node(function, tensors, constant=_plain):
    """`function((a, b))`, linear in each, as one node that is right to any order; what is linear in the others is added."""
    if tensors[2:]:
        none = [ops.zeros(x._shape, x.dtype) for x in tensors]
        product = bilinear_node(lambda both: function([*both, *none[2:]]), tensors[:2], constant)
        return product + linear_node(lambda others: function([*none[:2], *others]), tensors[2:])
    a, b = (ops.stop_gradient(_plain(x)) for x in tensors)

    def by_first(y, grad):
        held = constant(y)
        return _transposed(lambda xs: [function([xs[0], held])], [a], [grad])[0]

    def by_second(x, grad):
        held = constant(x)
        return _transposed(lambda xs: [function([held, xs[0]])], [b], [grad])[0]
    maps = by_first, by_second, lambda x, y: function([x, y])
    return Bilinear.apply(maps, 2, *tensors)


def convolution_node(function, tensors):
    """`bilinear_node(function, tensors)`, whose gradients are taken beside a copy: MindSpore keeps the operand that a
    gradient is not of, by its values; an optimizer writes a weight, and others of the same values would be given that."""
    return bilinear_node(function, tensors, copy)


def _transposed(f, at, grads):
    """The gradients of the linear `f`, for given cotangents."""
    grads = [ops.stop_gradient(g) for g in grads]
    with NoFallbackGuard(), _gradients_enabled():
        got = ms.grad(lambda *xs: sum((y * g).sum() for y, g in zip(f(xs), grads)), tuple(range(len(at))))(*at)
    return list(got) if isinstance(got, tuple) else [got]


def _as_results(made):
    made = [x.copy() for x in made]  # the history of a view would be forgotten
    return made[0] if len(made) == 1 else tuple(made)


@contextmanager
def _gradients_enabled():
    """MindSpore runs a `Function` without gradients, and refuses to take one there."""
    before = executor.enable_grad()
    executor.set_enable_grad(True)
    try:
        yield
    finally:
        executor.set_enable_grad(before)
