# SPDX-License-Identifier: Apache-2.0
"""Local forms of ops on lists of tensors.

`einsum` is composed of permutations and batched products, operand by operand: MindSpore 2.10 has the native one on
Ascend only. It works on every device and is differentiable by its parts.
"""
from __future__ import annotations

import math

from mindspore import mint

from ..rules.lists import parse_equation
from .cpu_math import total


def stack(tensors, dim=0):
    """`StackExt`, and `ops.stack`, which itself would be redirected here (`patches/functions.py`)."""
    return mint.cat([mint.unsqueeze(x, dim) for x in tensors], dim)


def add_n(tensors):
    """The sum of all."""
    out = tensors[0]
    for x in tensors[1:]:
        out = out + x
    return out if len(tensors) > 1 else out * 1


def einsum(equation, operands):
    """Any equation without a letter twice in one operand."""
    labels, out = parse_equation(equation, [len(x._shape) for x in operands])
    size: dict[str, int] = {}
    for text, x in zip(labels, operands):
        for c, n in zip(text, x._shape):
            size[c] = n if size.get(c, 1) == 1 else size[c]
    x, have = _reduced(operands[0], labels[0], set("".join(labels[1:])) | set(out))
    for i in range(1, len(operands)):
        later = set("".join(labels[i + 1:])) | set(out)
        y, new = _reduced(operands[i], labels[i], set(have) | later)
        x, have = _product(x, have, y, new, later, size)
    if set(have) != set(out) or have != out:
        x = mint.permute(x, tuple(have.index(c) for c in out)) if len(out) > 1 else x
    return x * 1 if x is operands[0] else x


def _reduced(x, labels: str, wanted: set):
    """Letters nobody else has are summed over at once."""
    gone = tuple(d for d, c in enumerate(labels) if c not in wanted)
    return total(x, gone), "".join(c for c in labels if c in wanted)


def _product(x, a: str, y, b: str, later: set, size):
    """x[a] * y[b], summed over the letters both have and nobody needs later, as one batched matrix product."""
    both = [c for c in a if c in b]
    batch, inner = [c for c in both if c in later], [c for c in both if c not in later]
    left, right = [c for c in a if c not in b], [c for c in b if c not in a]
    x = _arranged(x, a, batch + left + inner, size, (batch, left, inner))
    y = _arranged(y, b, batch + inner + right, size, (batch, inner, right))
    out = mint.bmm(x, y)
    return mint.reshape(out, tuple(size[c] for c in batch + left + right)), "".join(batch + left + right)


def _arranged(x, labels: str, order, size, groups):
    """x with its dims in `order`, dims of size 1 broadcast, and each group of dims merged into one."""
    if list(labels) != order:
        x = mint.permute(x, tuple(labels.index(c) for c in order))
    shape = tuple(size[c] for c in order)
    if tuple(x._shape) != shape:
        x = mint.broadcast_to(x, shape)
    return mint.reshape(x, tuple(math.prod(size[c] for c in group) for group in groups))


TABLE = {"stack": stack, "add_n": add_n, "einsum": einsum}
