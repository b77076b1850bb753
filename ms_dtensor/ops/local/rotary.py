# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings from products with two constants, by Ascend's documents."""
from __future__ import annotations

from mindspore import mint


def _halves(x):
    n = x._shape[-1] // 2
    return mint.narrow(x, -1, 0, n), mint.narrow(x, -1, n, n)


def _turned(x):
    first, second = _halves(x)
    return mint.cat((-second, first), -1)


def _in_pairs(x):
    return mint.reshape(x, (*x._shape[:-1], x._shape[-1] // 2, 2))


def rotary(x, cos, sin, mode=0):
    """`RotaryPositionEmbedding`: 0 turns halves, 1 neighbours, 2 halves of halves; 3 sorts neighbours into halves first."""
    if mode == 3:  # the even places, then the odd ones
        x = mint.reshape(mint.transpose(_in_pairs(x), -1, -2), x._shape)
    if mode in (0, 3):
        turned = _turned(x)
    elif mode == 1:
        turned = mint.reshape(_turned(_in_pairs(x)), x._shape)
    else:
        turned = mint.cat([_turned(half) for half in _halves(x)], -1)
    return (x * cos + turned * sin).astype(x.dtype)


CPU = {"RotaryPositionEmbedding": rotary}
TABLE: dict = {}
