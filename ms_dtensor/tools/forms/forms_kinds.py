# SPDX-License-Identifier: Apache-2.0
"""Values that ordinary samples lack: ties, integers, booleans and complex numbers, rows of -inf, dims without elements."""
from __future__ import annotations

import numpy as np
from mindspore import mint, ops

from .form import Form
from .samples import F, arrays, forms

INF = float("inf")


def ties(*shape):
    """A maker of few different numbers, so that extremes have equals, unevenly over shards."""
    return lambda rng: (rng.integers(0, 3, shape).astype(np.float32),)


def lowest(rng):
    """Rows with -inf among them; the last is nothing else (after such a row MindSpore's kernel writes no other)."""
    x = rng.normal(size=(4, 6)).astype(np.float32)
    x[0, :3], x[1, 2:], x[3] = -INF, -INF, -INF
    return (x,)


TIES = (ties(6, 3), ties(5, 2), ties(8,), lambda rng: (np.zeros((4, 2), np.float32),))
WHOLE = tuple(arrays(s, dtype=d, low=0, high=4) for s, d in (
    ((5, 3), "int32"), ((4, 3), "int64"), ((3, 2), "int8"), ((2, 3), "uint8")))
BOOLEANS = arrays((5, 3), dtype="bool")
ODD = (*WHOLE, BOOLEANS, lambda rng: ((rng.normal(size=(5, 3)) + 1j * rng.normal(size=(5, 3))).astype(np.complex64),))
EMPTY = (arrays((0, 3)), arrays((0, 0)))

FORMS = [
    *forms(TIES, {
        "mint.max of ties": mint.max, "mint.min of ties": mint.min, "mint.amax of ties": lambda x: mint.amax(x, 0),
        "mint.amin of ties(keepdim)": lambda x: mint.amin(x, -1, True), "ops.ReduceMax of ties": lambda x: ops.ReduceMax()(x, 0),
        "x.max(axis) of ties": lambda x: x.max(axis=0), "x.min(axis) of ties": lambda x: x.min(axis=-1, keepdims=True),
        "x.max(axes) of ties": lambda x: x.max(axis=(0,)), "mint.max(dim) of ties": lambda x: mint.max(x, 0),
        "mint.norm(inf) of ties": lambda x: mint.norm(x, INF, 0), "mint.norm(-inf) of ties": lambda x: mint.norm(x, -INF),
        "x.ptp of ties": lambda x: x.ptp(0), "mint.maximum of ties": lambda x: mint.maximum(x, 2 - x),
        "ops.aminmax of ties": lambda x: ops.aminmax(x, axis=0), "mint.median of ties": lambda x: mint.median(x, 0)}),
    *forms(ODD, {
        "1 - odd": lambda x: 1 - x, "odd * 2": lambda x: x * 2, "odd ** 2": lambda x: x ** 2, "odd + 1.5": lambda x: x + 1.5,
        "odd / 2": lambda x: x / 2, "odd == 1": lambda x: x == 1, "mint.sum of odd": lambda x: mint.sum(x, 0),
        "mint.prod of odd": lambda x: mint.prod(x, 0), "odd.float": lambda x: x * x,
        "ops.ReduceSum of odd": lambda x: ops.ReduceSum()(x, 0), "ops.select of odd": lambda x: mint.where(x == 1, x, x * x)}),
    *forms(WHOLE, {
        "mint.mean of integers": lambda x: mint.mean(x, 0), "mint.mean() of integers": mint.mean,
        "x.mean of integers": lambda x: x.mean(-1), "ops.ReduceMean of integers": lambda x: ops.ReduceMean()(x, 0),
        "mint.square of integers": mint.square, "mint.nansum of integers": lambda x: mint.nansum(x, 0), "mint.amax of integers": lambda x: mint.amax(x, 0),
        "mint.amin of integers": lambda x: mint.amin(x, 0), "ops.cumsum of integers": lambda x: ops.cumsum(x, 0)}),
    *forms((BOOLEANS,), {"mint.any of booleans": lambda x: mint.any(x, 0), "mint.all of booleans": lambda x: mint.all(x, 0),
                      "mint.nansum of booleans": lambda x: mint.nansum(x, 0)}),
    *forms((WHOLE[0], ties(5, 3)), {"mint.any of numbers": lambda x: mint.any(x * x, 0)}),
    *forms((ODD[-1],), {"mint.exp of complex": mint.exp, "mint.mean of complex": lambda x: mint.mean(x, 0)}),
    *forms((lowest,), {"mint.softmax of -inf": lambda x: mint.softmax(x, -1), "ops.softmax of -inf": lambda x: ops.softmax(x, 1),
                       "ops.log_softmax of -inf": lambda x: ops.log_softmax(x[:3], -1), "x.max of -inf": lambda x: mint.amax(x, 1)}),
    *forms(EMPTY, {
        "mint.sum of nothing": mint.sum, "mint.sum of nothing(dim)": lambda x: mint.sum(x, 0), "mint.mean of nothing": lambda x:
        mint.mean(x, 0), "mint.prod of nothing": lambda x: mint.prod(x, 0), "mint.any of nothing": lambda x: mint.any(x == 0, 0),
        "F.mse_loss of nothing": lambda x: F.mse_loss(x, x, "sum"), "mint.add to nothing": lambda x: x + mint.sum(x, 0)}),
    Form("mint.matmul of nothing", mint.matmul, (arrays((3, 0), (0, 4)), arrays((0, 3), (3, 2)), arrays((0,), (0,)))),
    Form("F.linear of nothing", F.linear, (arrays((3, 0), (4, 0), (4,)), arrays((3, 0), (4, 0)))),
    Form("mint.addmm of nothing", mint.addmm, (arrays((3, 4), (3, 0), (0, 4)),)),
]
