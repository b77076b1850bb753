# SPDX-License-Identifier: Apache-2.0
"""SwiGLU, and linear layers that read one input, each as one node of several products, for CPUs (`train.compile`).

Between two products of 256 rows MindSpore's host code, which the product has driven from the core's cache, takes a tenth of
the product's time; calls of the library below it do not (`internals/gemm.py`), and add to a gradient where it lies. A node
makes gradients of its inputs and of its weights together; where a pipeline holds the latter back, a node of plain tensors
leaves them for `WeightGradients`, and on a mesh the layers run one by one, as in 16 bits. Not here: attention (`cpu.py`).
"""
from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_dtensor import DTensor
from ms_dtensor.dispatch.held import WeightGradients, holding
from ms_dtensor.internals.cells import is_hooked
from ms_dtensor.internals.gemm import matmul
from ms_dtensor.internals.host import host_array
from ms_dtensor.internals.names import Function
from ms_dtensor.ops.local.rows_cpu import parts

from .cpu import differentiated_once


def fits(x: Tensor, *cells: nn.Cell) -> bool:
    """Whether a node may stand for these layers of this input: not for one that is another cell by now, hooked, or cast."""
    return _computes(x, *cells) and all(type(cell) is nn.Dense and not is_hooked(cell) for cell in cells)


def _computes(x: Tensor, *cells: nn.Dense) -> bool:
    return x.dtype == ms.float32 and not (holding.get() and isinstance(x, DTensor)) and not any(
        cell.has_bias or cell.activation_flag or cell.mixed_precision_type for cell in cells)


class Products(Function):
    """`run(Products, x, *weights)`: x @ w.T of each, of x [n, d] and weights [columns, d]."""

    @staticmethod
    def forward(ctx, later: WeightGradients | None, _anchor: Tensor | None, x: Tensor, *weights: Tensor):
        ctx.later = later
        ctx.save_for_backward(x, *weights)
        rows = host_array(x)
        made = tuple(Tensor.from_numpy(matmul(rows, host_array(w).T)) for w in weights)
        return made if len(made) > 1 else made[0]

    @staticmethod
    def backward(ctx, *cotangents: Tensor):
        differentiated_once("Products at once are")
        x, *weights = (host_array(t) for t in ctx.saved_tensors)
        dx, dys = None, [host_array(d) for d in cotangents]
        for dy, w in zip(dys, weights):
            dx = matmul(dy, w, dx, add=True)
        return gradients(ctx, dx, [(dy, x) for dy in dys])


class Gated(Function):
    """`run(Gated, x, w1, w3, w2)`: w2(silu(w1 x) * w3 x), of x [n, d]; keeps what the two products give."""

    @staticmethod
    def forward(ctx, later: WeightGradients | None, _anchor: Tensor | None, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor):
        ctx.later = later
        ctx.save_for_backward(x, w1, w3, w2)
        rows = host_array(x)
        gate, up = matmul(rows, host_array(w1).T), matmul(rows, host_array(w3).T)
        ctx.hidden = gate, up
        h = np.empty_like(gate)
        for a, b, _ in parts(gate, 3):
            part = _sigmoid(gate[a:b], h[a:b])
            part *= gate[a:b]
            part *= up[a:b]
        return Tensor.from_numpy(matmul(h, host_array(w2).T))

    @staticmethod
    def backward(ctx, dout: Tensor):
        differentiated_once("Products at once are")
        x, w1, w3, w2 = (host_array(t) for t in ctx.saved_tensors)
        (gate, up), dy = ctx.hidden, host_array(dout)
        dh = matmul(dy, w2)
        h, dgate = np.empty_like(gate), np.empty_like(gate)
        for a, b, (share, silu, *_) in parts(gate, 6):  # as many as are at work
            g, u, d, slope = gate[a:b], up[a:b], dh[a:b], dgate[a:b]
            np.multiply(g, _sigmoid(g, share), out=silu)
            np.multiply(silu, u, out=h[a:b])
            np.subtract(g, silu, out=slope)  # the derivative is share (1 + g (1 - share))
            slope += 1
            slope *= share
            slope *= d
            slope *= u
            d *= silu  # what came goes: it is of u now
        return gradients(ctx, matmul(dh, w3, matmul(dgate, w1), add=True), [(dgate, x), (dh, x), (dy, h)])


def _sigmoid(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # 1 / infinity is right
        np.exp(np.negative(x, out=out), out=out)
    out += 1
    return np.reciprocal(out, out=out)


def gradients(ctx, dx: np.ndarray, operands: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple:
    """What a node gives: of x, and of each weight the product of two, now or in the backward's second part."""
    def of_weights() -> tuple[Tensor, ...]:
        return tuple(Tensor.from_numpy(matmul(dy.T, x)) for dy, x in operands)
    later, dweights = ctx.later, (None,) * len(operands)
    if later is None:
        dweights = of_weights()
    else:
        later(of_weights)
    return None, None, Tensor.from_numpy(dx), *dweights


def run(node: type[Function], x: Tensor, *weights: Tensor):
    """`node` of these; where no gate stands for a weight, all gradients come in the first part."""
    store = holding.get()
    if store is None or any(w._requires_grad and id(w) not in store.weights for w in weights):
        return node.apply(None, None, x, *weights)
    later = WeightGradients(store, weights)
    return node.apply(later, later.anchor, x, *later.cut)


def products(x: Tensor, *weights: Tensor):
    """`Products`, by a name of its own: what is mapped over a mesh is a function."""
    return run(Products, x, *weights)


def gated(x: Tensor, *weights: Tensor) -> Tensor:
    """`Gated`."""
    return run(Gated, x, *weights)


class Head(nn.Dense):
    """A linear layer that is called as it was, by a pipeline that counts its cells, too, and computes `core`."""

    core = staticmethod(products)

    def construct(self, x):
        return self.core(x, self.weight) if _computes(x, self) else super().construct(x)


def compile_products(model: nn.Cell) -> None:
    """Lets linear layers of blocks, and the head, run at once; before `parallelize`, where nobody is to find single ones."""
    if type(model.output) is nn.Dense:
        model.output.__class__ = Head
    for layer in model.layers:
        if not layer.mixed and not layer.feed_forward.joined:  # of weights that are one there is one product as it is
            layer.feed_forward.core = gated
        cells = [layer.attention._cells.get(name) for name in ("wq", "wk", "wv", "wo")]  # others are joined, or latent
        if all(cell is not None and not cell.has_bias for cell in cells):
            layer.attention.products = products
