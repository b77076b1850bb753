# SPDX-License-Identifier: Apache-2.0
"""Rows through SwiGLUs that lie beside each other, each row through one of them, for CPUs: one node, and NumPy's products.

How many rows an expert has differs each step. MindSpore's CPU backend builds a kernel for each shape that it meets, which
takes as long as a third of a product of 256 rows, and keeps it with 0.3 MB of scratch: a run would slow down and grow.
NumPy's products are as quick and keep nothing, and a gradient is written at its place among those of all experts. Not
here: who has which rows (`parallel/experts.py`). Invariant: what a backward needs is the operands and two hidden arrays.
"""
from __future__ import annotations

import numpy as np
from mindspore import Tensor

from ...errors import OpRuleError
from ...internals.names import Function, recording


class SwigluRows(Function):
    """`SwigluRows.apply(sizes, at, k, rows, w1, w2, w3)`: the choices' results f[choices, d], of each row its `k` choices.

    `at`: the numbers of the choices, expert by expert: the first `sizes[0]` are those of expert 0, and so on. Choice i is
    one of row `i // k`. What no expert has is zeros.
    """

    @staticmethod
    def forward(ctx, sizes: np.ndarray, at: np.ndarray, k: int, rows: Tensor, w1: Tensor, w2: Tensor, w3: Tensor):
        ctx.save_for_backward(rows, w1, w2, w3)
        ctx.table = sizes, at, k
        y, ctx.hidden = forward(sizes, at, k, *(x.asnumpy() for x in (rows, w1, w2, w3)))
        return Tensor.from_numpy(y)

    @staticmethod
    def backward(ctx, dout: Tensor):
        if recording():
            raise OpRuleError("For 'moe', a second derivative is asked for.", "", "Experts on a CPU are differentiated once.",
                              "float operands through ordinary ops: mint.matmul for each expert")
        operands = (x.asnumpy() for x in ctx.saved_tensors)
        return None, None, None, *map(Tensor.from_numpy, backward(*ctx.table, *operands, *ctx.hidden, dout.asnumpy()))


def _parts(sizes: np.ndarray):
    """(expert, from, to) of those that have rows."""
    ends = np.cumsum(sizes)
    return ((e, int(end - size), int(end)) for e, (size, end) in enumerate(zip(sizes, ends)) if size)


def _at_most(sizes: np.ndarray, *widths: int, dtype) -> list[np.ndarray]:
    """Memory for the largest part, again and again: pages that are new take longer than what is done with them."""
    return [np.empty((int(sizes.max(initial=0)), w), dtype) for w in widths]


def forward(sizes: np.ndarray, at: np.ndarray, k: int, rows: np.ndarray, w1: np.ndarray, w2: np.ndarray,
            w3: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """The result, and of each choice w1 x and w3 x, expert by expert."""
    (n, d), f = rows.shape, w1.shape[1]
    gate, up = np.empty((len(at), f), rows.dtype), np.empty((len(at), f), rows.dtype)
    y = np.empty((n * k, d), rows.dtype) if len(at) == n * k else np.zeros((n * k, d), rows.dtype)
    mine, hidden = _at_most(sizes, d, f, dtype=rows.dtype)
    token = at // k
    for e, a, b in _parts(sizes):
        x, h = np.take(rows, token[a:b], 0, out=mine[:b - a], mode="clip"), hidden[:b - a]
        np.matmul(x, w1[e].T, out=gate[a:b])
        np.matmul(x, w3[e].T, out=up[a:b])
        _sigmoid(gate[a:b], h)
        h *= gate[a:b]
        h *= up[a:b]
        y[at[a:b]] = np.matmul(h, w2[e].T, out=x)
    return y, (gate, up)


def backward(sizes: np.ndarray, at: np.ndarray, k: int, rows: np.ndarray, w1: np.ndarray, w2: np.ndarray, w3: np.ndarray,
             gate: np.ndarray, up: np.ndarray, dout: np.ndarray) -> tuple[np.ndarray, ...]:
    """Gradients of (rows, w1, w2, w3); of experts without rows they are zeros."""
    (n, d), f = rows.shape, w1.shape[1]
    drows = np.empty((n * k, d), rows.dtype) if len(at) == n * k else np.zeros((n * k, d), rows.dtype)
    dw1, dw2, dw3 = (np.empty_like(w) for w in (w1, w2, w3))
    token, memory = at // k, _at_most(sizes, d, d, f, f, f, f, dtype=rows.dtype)
    for e in np.flatnonzero(sizes == 0):
        dw1[e] = dw2[e] = dw3[e] = 0
    for e, a, b in _parts(sizes):
        g, (x, dy, share, silu, dup, dh) = gate[a:b], (m[:b - a] for m in memory)
        np.take(rows, token[a:b], 0, out=x, mode="clip")
        np.take(dout, at[a:b], 0, out=dy, mode="clip")
        np.multiply(g, _sigmoid(g, share), out=silu)
        np.matmul(dy.T, np.multiply(silu, up[a:b], out=dup), out=dw2[e])
        np.matmul(dy, w2[e], out=dh)
        np.matmul(np.multiply(dh, silu, out=dup).T, x, out=dw3[e])
        dgate = np.subtract(g, silu, out=silu)  # the derivative is share (1 + g (1 - share))
        dgate += 1
        dgate *= share
        dgate *= dh
        dgate *= up[a:b]
        np.matmul(dgate.T, x, out=dw1[e])
        dx = np.matmul(dgate, w1[e], out=x)
        dx += np.matmul(dup, w3[e], out=dy)
        drows[at[a:b]] = dx
    return drows if k == 1 else np.add.reduce(drows.reshape(n, k, d), 1), dw1, dw2, dw3


def _sigmoid(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # 1 / infinity is right
        np.exp(np.negative(x, out=out), out=out)
    out += 1
    return np.reciprocal(out, out=out)
