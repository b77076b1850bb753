# SPDX-License-Identifier: Apache-2.0
"""Rows through some of the SwiGLUs that lie beside each other, weighed and added up, for CPUs: one node of host products.

How many rows an expert has differs each step. MindSpore's CPU backend builds a kernel for each shape that it meets, which
takes as long as a third of a product of 256 rows, and keeps it with 0.3 MB of scratch: a run would slow down and grow.
Products of `internals/gemm.py` are as quick and keep nothing, and a gradient is written at its place among those of all
experts. Not here: who has which rows (`parallel/experts.py`). Invariant: what a backward needs is the operands and two
hidden arrays.
"""
from __future__ import annotations

import numpy as np
from mindspore import Tensor

from ...errors import OpRuleError
from ...internals.gemm import matmul
from ...internals.host import host_array
from ...internals.names import Function, recording

_FORWARD, _BACKWARD = "df", "ddffff"  # how wide the memory is that each takes for a part: as a row, or as what is hidden


class SwigluRows(Function):
    """`SwigluRows.apply(sizes, at, rows, weights, w1, w2, w3)`: the weighted sum of what each row's experts make.

    `weights` [n, k] of rows [n, d]; choice i is one of row `i // k`. `at`: the numbers of the choices, expert by expert: the
    first `sizes[0]` are those of expert 0, and so on. A choice that is not among them counts nothing.
    """

    @staticmethod
    def forward(ctx, sizes: np.ndarray, at: np.ndarray, *tensors: Tensor):
        ctx.save_for_backward(*tensors)
        ctx.table = sizes, at
        y, ctx.hidden = forward(sizes, at, *(host_array(x) for x in tensors))
        return Tensor.from_numpy(y)

    @staticmethod
    def backward(ctx, dout: Tensor):
        if recording():
            raise OpRuleError("For 'moe', a second derivative is asked for.", "",
                              "Experts on a CPU are differentiated once.", "a product of each expert (mint.matmul)")
        rows, weights, w1, w2, w3 = (host_array(x) for x in ctx.saved_tensors)
        (sizes, at), (gate, up) = ctx.table, ctx.hidden
        grads = backward(sizes, at, rows, weights, w1, w2, w3, gate, up, host_array(dout))
        return None, None, *map(Tensor.from_numpy, grads)


def _parts(sizes: np.ndarray):
    """(expert, from, to) of those that have rows."""
    ends = np.cumsum(sizes)
    return ((e, int(end - size), int(end)) for e, (size, end) in enumerate(zip(sizes, ends)) if size)


def scratch(widths: str, sizes: np.ndarray, d: int, f: int) -> list[tuple[int, int]]:
    """Shapes of the memory that a part has, for the largest: pages that are new take longer than what is done with them."""
    return [(int(sizes.max(initial=0)), d if w == "d" else f) for w in widths]


def beside(sizes: np.ndarray, d: int, f: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Shapes of what a forward, and a backward, has beside what it gives; a part that is added is taken out once more."""
    return scratch(_FORWARD + "d", sizes, d, f), scratch(_BACKWARD + "d", sizes, d, f)


def _add(to: np.ndarray, token: np.ndarray, rows: np.ndarray) -> None:
    """An expert's rows to those of their tokens, which are in order."""
    if (token[1:] == token[:-1]).any():  # one that chose an expert twice
        np.add.at(to, token, rows)
    else:
        to[token] += rows


def forward(sizes: np.ndarray, at: np.ndarray, rows: np.ndarray, weights: np.ndarray, w1: np.ndarray, w2: np.ndarray,
            w3: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """The result, and of each choice w1 x and w3 x, expert by expert."""
    d, f, dtype = rows.shape[1], w1.shape[1], rows.dtype
    y, gate, up = np.zeros_like(rows), np.empty((len(at), f), dtype), np.empty((len(at), f), dtype)
    token, weight = at // weights.shape[1], weights.reshape(-1, 1)[at]
    memory = [np.empty(shape, dtype) for shape in scratch(_FORWARD, sizes, d, f)]
    for e, a, b in _parts(sizes):
        x, h = (m[:b - a] for m in memory)
        np.take(rows, token[a:b], 0, out=x, mode="clip")
        matmul(x, w1[e].T, out=gate[a:b])
        matmul(x, w3[e].T, out=up[a:b])
        h = _sigmoid(gate[a:b], h)
        h *= gate[a:b]
        h *= up[a:b]
        out = matmul(h, w2[e].T, out=x)
        out *= weight[a:b]
        _add(y, token[a:b], out)
    return y, (gate, up)


def backward(sizes: np.ndarray, at: np.ndarray, rows: np.ndarray, weights: np.ndarray, w1: np.ndarray, w2: np.ndarray,
             w3: np.ndarray, gate: np.ndarray, up: np.ndarray, dout: np.ndarray) -> tuple[np.ndarray, ...]:
    """Gradients of (rows, weights, w1, w2, w3); of experts without rows they are zeros."""
    d, f, dtype = rows.shape[1], w1.shape[1], rows.dtype
    drows, dweights, (dw1, dw2, dw3) = np.zeros_like(rows), np.zeros(weights.size, dtype), map(np.empty_like, (w1, w2, w3))
    token, weight = at // weights.shape[1], weights.reshape(-1, 1)[at]
    memory = [np.empty(shape, dtype) for shape in scratch(_BACKWARD, sizes, d, f)]
    for e in np.flatnonzero(sizes == 0):
        dw1[e] = dw2[e] = dw3[e] = 0
    for e, a, b in _parts(sizes):
        g, (x, dy, share, silu, dup, dh) = gate[a:b], (m[:b - a] for m in memory)
        np.take(rows, token[a:b], 0, out=x, mode="clip")
        np.take(dout, token[a:b], 0, out=dy, mode="clip")
        np.multiply(g, _sigmoid(g, share), out=silu)
        h = np.multiply(silu, up[a:b], out=dup)
        matmul(dy, w2[e], out=dh)
        dweights[at[a:b]] = np.einsum("cf,cf->c", h, dh)
        dh *= weight[a:b]
        dy *= weight[a:b]
        matmul(dy.T, h, out=dw2[e])
        matmul(np.multiply(dh, silu, out=dup).T, x, out=dw3[e])
        dgate = np.subtract(g, silu, out=silu)  # the derivative is share (1 + g (1 - share))
        dgate += 1
        dgate *= share
        dgate *= dh
        dgate *= up[a:b]
        matmul(dgate.T, x, out=dw1[e])
        matmul(dgate, w1[e], out=x)
        _add(drows, token[a:b], matmul(dup, w3[e], out=x, add=True))
    return drows, dweights.reshape(weights.shape), dw1, dw2, dw3


def _sigmoid(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # 1 / infinity is right
        np.exp(np.negative(x, out=out), out=out)
    out += 1
    return np.reciprocal(out, out=out)
