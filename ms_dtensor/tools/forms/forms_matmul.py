# SPDX-License-Identifier: Apache-2.0
"""The matmul family: every public form, over 1-D to 4-D operands, broadcast batches, sizes 0 and 1, several dtypes."""
from __future__ import annotations

import mindspore.mint.nn.functional as F  # noqa: N812
import numpy as np
from mindspore import mint, nn, ops

from ...errors import OpRuleError
from .form import Form


def of(*shapes, dtype=np.float32):
    """Arguments: one array per shape."""
    def make(rng):
        if np.issubdtype(dtype, np.integer):
            return tuple(rng.integers(-3, 4, s).astype(dtype) for s in shapes)
        return tuple(rng.normal(size=s).astype(dtype) for s in shapes)
    return make


def einsum(equation, *shapes):
    """Arguments: the equation, then arrays."""
    return lambda rng: (equation, *(rng.normal(size=s).astype(np.float32) for s in shapes))


PLAIN = (of((4, 6), (6, 2)), of((5, 3), (3, 7)), of((1, 4), (4, 1)), of((3, 5), (5, 4), dtype=np.int32))
SHAPES = (((4, 6), (6, 2)), ((5, 3), (3, 1)), ((6,), (6,)), ((6,), (6, 4)), ((4, 6), (6,)), ((2, 3, 4), (2, 4, 5)),
          ((1, 3, 4), (5, 4, 2)), ((3, 2, 4), (4, 5)), ((2, 1, 3, 4), (3, 4, 2)), ((0, 4), (4, 3)))
MATMUL, SAMPLE = tuple(of(*s) for s in SHAPES), tuple(of(*SHAPES[i]) for i in (0, 2, 6, 8))
BATCH = (of((4, 3, 5), (4, 5, 2)), of((3, 1, 4), (3, 4, 5)))
VECTORS = (of((6,), (6,)), of((5,), (5,)), of((1,), (1,)))
LINEAR = (of((4, 6), (3, 6)), of((5, 3), (7, 3)), of((2, 3, 4), (5, 4)), of((2, 2, 3, 4), (2, 4)))
LINEAR_BIAS = (of((4, 6), (3, 6), (3,)), of((5, 3), (7, 3), (7,)), of((2, 3, 4), (6, 4), (6,)))
ADDMM = (of((4, 2), (4, 6), (6, 2)), of((2,), (5, 3), (3, 2)), of((1, 2), (5, 3), (3, 2)))
EINSUM = tuple(einsum(*a) for a in (
    ("ij,jk->ik", (4, 6), (6, 2)), ("bhqd,bhkd->bhqk", (2, 2, 3, 4), (2, 2, 5, 4)), ("...ij,jk", (2, 3, 4), (4, 5)),
    ("ij->ji", (3, 4)), ("ij->", (3, 4)), ("i,j->ij", (3,), (4,)), ("ij,ij,jk->k", (3, 4), (3, 4), (4, 2)), ("i,i", (5,), (5,)),
    ("...,...->...", (2, 1, 4), (3, 4)), ("ijk,jl->kil", (2, 3, 4), (3, 5))))


def _dense(x, w, b):
    cell = nn.Dense(w.shape[1], w.shape[0])
    return _with(cell, x, weight=w, bias=b)


def _with(cell, *inputs, **params):
    for name, value in params.items():
        cell._params[name] = value  # a probe or a DTensor in place of the parameter
        if name in cell.__dict__:
            cell.__dict__[name] = value
    cell._is_check_and_refresh = True  # the check would ask a probe for its name
    return cell(*inputs)


FORMS = [
    Form("mint.matmul", mint.matmul, MATMUL),
    Form("ops.matmul", ops.matmul, SAMPLE),
    Form("x.matmul", lambda x, y: x.matmul(y), SAMPLE),
    Form("x @ y", lambda x, y: x @ y, SAMPLE),
    Form("mint.mm", mint.mm, PLAIN),
    Form("ops.mm", ops.mm, PLAIN[:3]),
    Form("x.mm", lambda x, y: x.mm(y), PLAIN),
    Form("mint.bmm", mint.bmm, BATCH),
    Form("ops.bmm", ops.bmm, BATCH),
    Form("x.bmm", lambda x, y: x.bmm(y), BATCH),
    Form("mint.mv", mint.mv, (of((4, 6), (6,)), of((5, 3), (3,)))),
    Form("ops.mv", ops.mv, (of((4, 6), (6,)), of((5, 3), (3,)))),
    Form("mint.dot", mint.dot, VECTORS),
    Form("x.dot", lambda x, y: x.dot(y), VECTORS),
    Form("ops.dot", ops.dot, (of((4, 6), (6, 2)), of((2, 3, 4), (4, 3)))),
    Form("mint.vdot", mint.vdot, VECTORS),
    Form("ops.inner", ops.inner, (of((4, 6), (3, 6)), of((5,), (5,)))),
    Form("x.inner", lambda x, y: x.inner(y), of((4, 6), (3, 6))),
    Form("mint.outer", mint.outer, (of((4,), (6,)), of((5,), (1,)))),
    Form("ops.outer", ops.outer, (of((4,), (6,)), of((5,), (1,)))),
    Form("x.outer", lambda x, y: x.outer(y), (of((4,), (6,)), of((5,), (1,)))),
    Form("ops.ger", ops.ger, (of((4,), (6,)), of((5,), (3,)))),
    Form("x.ger", lambda x, y: x.ger(y), of((4,), (6,))),
    Form("mint.addmm", mint.addmm, ADDMM),
    Form("mint.addmm(beta, alpha)", lambda x, a, b: mint.addmm(x, a, b, beta=0.5, alpha=2), ADDMM),
    Form("ops.addmm", ops.addmm, ADDMM),
    Form("x.addmm", lambda x, a, b: x.addmm(a, b, beta=2, alpha=0.5), ADDMM),
    Form("mint.addmv", mint.addmv, (of((4,), (4, 6), (6,)), of((5,), (5, 3), (3,)))),
    Form("ops.addmv", ops.addmv, (of((4,), (4, 6), (6,)), of((5,), (5, 3), (3,)))),
    Form("x.addmv", lambda x, a, b: x.addmv(a, b), of((4,), (4, 6), (6,))),
    Form("mint.baddbmm", mint.baddbmm, (of((4, 3, 2), (4, 3, 5), (4, 5, 2)), of((3, 2, 2), (3, 2, 4), (3, 4, 2)))),
    Form("ops.baddbmm", ops.baddbmm, of((4, 3, 2), (4, 3, 5), (4, 5, 2))),
    Form("x.baddbmm", lambda x, a, b: x.baddbmm(a, b, beta=0.5), of((4, 3, 2), (4, 3, 5), (4, 5, 2))),
    Form("mint.addbmm", mint.addbmm, (of((3, 2), (4, 3, 5), (4, 5, 2)), of((2, 2), (3, 2, 4), (3, 4, 2)))),
    Form("ops.addbmm", ops.addbmm, of((3, 2), (4, 3, 5), (4, 5, 2))),
    Form("x.addbmm", lambda x, a, b: x.addbmm(a, b), of((3, 2), (4, 3, 5), (4, 5, 2))),
    Form("ops.addr", ops.addr, of((4, 6), (4,), (6,))),
    Form("x.addr", lambda x, a, b: x.addr(a, b), of((4, 6), (4,), (6,))),
    Form("F.linear", F.linear, LINEAR),
    Form("F.linear(bias)", F.linear, LINEAR_BIAS),
    Form("ops.dense", ops.dense, LINEAR),
    Form("ops.dense(bias)", ops.dense, LINEAR_BIAS),
    Form("nn.Dense", _dense, LINEAR_BIAS),
    Form("mint.nn.Linear", lambda x, w, b: _with(mint.nn.Linear(w.shape[1], w.shape[0]), x, weight=w, bias=b), LINEAR_BIAS),
    Form("mint.nn.Linear(bias=False)",
         lambda x, w: _with(mint.nn.Linear(w.shape[1], w.shape[0], bias=False), x, weight=w), LINEAR),
    Form("ops.bias_add", ops.bias_add, (of((4, 3), (3,)), of((5, 2), (2,)))),
    Form("ops.MatMul", ops.MatMul(), PLAIN[:3]),
    Form("ops.MatMul(transpose_b)", ops.MatMul(transpose_b=True), of((4, 6), (3, 6))),
    Form("ops.MatMul(transpose_a)", ops.MatMul(transpose_a=True), of((6, 4), (6, 3))),
    Form("ops.BatchMatMul", ops.BatchMatMul(), BATCH),
    Form("ops.BatchMatMul(transpose_b)", ops.BatchMatMul(transpose_b=True), of((4, 3, 5), (4, 2, 5))),
    Form("ops.BatchMatMul(transpose_a)", ops.BatchMatMul(transpose_a=True), of((4, 5, 3), (4, 5, 2))),
    Form("mint.einsum", lambda equation, *xs: mint.einsum(equation, *xs), EINSUM),
    Form("ops.einsum", lambda equation, *xs: ops.einsum(equation, *xs), EINSUM[:3]),
    Form("mint.einsum(diagonal)", lambda x: mint.einsum("ii->i", x), of((3, 3)), raises=OpRuleError),
    Form("ops.tensor_dot", lambda x, y: ops.tensor_dot(x, y, ((1, 2), (0, 1))), of((2, 3, 4), (3, 4, 5))),
    Form("ops.batch_dot", ops.batch_dot, of((2, 3, 4), (2, 4, 5))),
    Form("ops.kron", ops.kron, of((2, 3), (4, 2))),
    Form("mint.stack (list)", lambda x, y: mint.stack([x, y], dim=1), (of((4, 3), (4, 3)), of((5, 1), (5, 1)))),
    Form("ops.stack", lambda x, y: ops.stack([x, y], axis=-1), (of((4, 3), (4, 3)), of((5, 1), (5, 1)))),
    Form("ops.addn", lambda x, y: ops.addn([x, y]), of((4, 3), (4, 3))),
]