# SPDX-License-Identifier: Apache-2.0
"""Decompositions for CPU: the members of the matmul family that only `mint` names."""
from __future__ import annotations

from mindspore import mint


def matmul(input, other):
    """`Mm`, `Mv`, `Dot`."""
    return mint.matmul(input, other)


def outer(input, other):
    """`Outer`."""
    return mint.reshape(input, (-1, 1)) * mint.reshape(other, (1, -1))


def _add(input, product, beta, alpha):
    product = product if alpha == 1 else product * alpha
    if beta == 0:  # then `input` does not count at all, not even its NaNs
        return product
    return (input if beta == 1 else input * beta) + product


def addmm(input, mat1, mat2, beta=1, alpha=1):
    """`Addmm`, `Addmv`, `Baddbmm`: beta * input + alpha * mat1 @ mat2."""
    return _add(input, mint.matmul(mat1, mat2), beta, alpha)


def addbmm(input, batch1, batch2, beta=1, alpha=1):
    """`Addbmm`: beta * input + alpha * the sum of the batch's products, as one contraction over batch and inner dim."""
    b, n, k = batch1._shape
    left = mint.reshape(mint.permute(batch1, (1, 0, 2)), (n, b * k))
    return _add(input, mint.matmul(left, mint.reshape(batch2, (b * k, batch2._shape[2]))), beta, alpha)


TABLE = {"Mm": matmul, "Mv": matmul, "Dot": matmul, "Outer": outer, "Addmm": addmm, "Addmv": addmm, "Baddbmm": addmm,
         "Addbmm": addbmm}
