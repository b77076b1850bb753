# SPDX-License-Identifier: Apache-2.0
"""Decompositions for CPU: the members of the matmul family that only `mint` names."""
from __future__ import annotations

import math

import mindspore as ms
from mindspore import mint

from .run import zeros_of


def matmul(input, other):
    """`Mm`, `Mv`, `Dot`, and `MatMulExt` itself, whose backward in MindSpore 2.10 fails, or gives a gradient of another
    rank, for some operands of unlike rank with leading dims of extent 1, and for a column times a row with such dims;
    other operands of like rank and plain matrices are safe."""
    a, b = input._shape, other._shape
    if len(a) > 2 and len(b) > 2 and len(a) != len(b):
        n = max(len(a), len(b))
        input, other = (mint.reshape(x, (*(1,) * (n - len(x._shape)), *x._shape)) for x in (input, other))
    elif len(a) > 2 and len(b) <= 2 and math.prod(a[:-1]) == 1:
        return mint.reshape(mint.matmul(mint.reshape(input, (1, a[-1])), other), (*a[:-1], *b[1:]))
    elif len(a) > 2 and a[-1] == 1 == math.prod(a[:-2]) and math.prod(b[:-2]) == 1:
        return mint.reshape(mint.matmul(mint.reshape(input, a[-2:]), mint.reshape(other, b[-2:])), (*a[:-1], b[-1]))
    return mint.matmul(input, other)


def matmul_ext(input, other):
    """`MatMulExt`: `matmul`, needed only for unlike ranks."""
    return matmul(input, other)


vars(matmul_ext)["unneeded"] = lambda input, other: len(input) == len(other)


def outer(input, other):
    """`Outer`."""
    return mint.reshape(input, (-1, 1)) * mint.reshape(other, (1, -1))


def product(a, b):
    """`a @ b`; over a dim without elements MindSpore's kernel leaves the result uninitialised."""
    if a._shape[-1]:
        return mint.matmul(a, b)
    shape = (*a._shape[:-1], *b._shape[len(a._shape) - 1:])  # [m, k] @ [k(, n)], [d, m, k] @ [d, k, n]
    return zeros_of((a, b), shape)


def _add(input, product, beta, alpha):
    product = product if alpha == 1 else product * alpha
    if beta == 0:  # then `input` does not count at all, not even its NaNs
        return product
    return (input if beta == 1 else input * beta) + product


def addmm(input, mat1, mat2, beta=1, alpha=1):
    """`Addmm`, `Addmv`, `Baddbmm`: beta * input + alpha * mat1 @ mat2."""
    return _add(input, product(mat1, mat2), beta, alpha)


def addbmm(input, batch1, batch2, beta=1, alpha=1):
    """`Addbmm`: beta * input + alpha * the sum of the batch's products, as one contraction over batch and inner dim.

    Small integers add up in int64, as a sum of them does.
    """
    if batch1.dtype in (ms.int8, ms.int16, ms.int32, ms.uint8):
        input, batch1, batch2 = (x.astype(ms.int64) for x in (input, batch1, batch2))
    b, n, k = batch1._shape
    left = mint.reshape(mint.permute(batch1, (1, 0, 2)), (n, b * k))
    return _add(input, product(left, mint.reshape(batch2, (b * k, batch2._shape[2]))), beta, alpha)


def add_product_once(kind, input, a, b, beta, alpha, share):
    """The summand of one rank: `input` counts where `share` is 1. Every rank runs the same ops."""
    product = (addbmm if kind == "addbmm" else addmm)(input, a, b, 0, alpha)
    return product if beta == 0 else input * (beta * share) + product


FORMS = {"matmul": matmul, "add_product_once": add_product_once}
TABLE = {**dict.fromkeys(("Mm", "Mv", "Dot", "Vdot"), matmul), "MatMulExt": matmul_ext, "Outer": outer,
         "Addmm": addmm,
         "Baddbmm": lambda input, batch1, batch2, beta=1, alpha=1: addmm(input, batch1, batch2, beta, alpha),
         "Addmv": lambda input, mat, vec, beta=1, alpha=1: addmm(input, mat, vec, beta, alpha),
         "Addbmm": addbmm}
