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


def add_product_once(kind, input, a, b, beta, alpha, share):
    """The summand of one rank: `input` counts where `share` is 1. Every rank runs the same ops."""
    product = (addbmm if kind == "addbmm" else addmm)(input, a, b, 0, alpha)
    return product if beta == 0 else input * (beta * share) + product


FORMS = {"add_product_once": add_product_once}
TABLE = {**dict.fromkeys(("Mm", "Mv", "Dot", "Vdot"), matmul), "Outer": outer,
         **dict.fromkeys(("Addmm", "Addmv", "Baddbmm"), addmm), "Addbmm": addbmm}
