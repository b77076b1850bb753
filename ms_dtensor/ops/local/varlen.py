# SPDX-License-Identifier: Apache-2.0
"""Attention of packed tokens [n, h, e] on local tensors: whole runs by the fused kernel, or one block of keys at a time.

Runs of queries lie one behind another, and so do the keys that each of them sees: its last query sees its last key. A block
is some of a run's keys; what blocks give is merged by the greatest score and the sum of weights of each query, and the
gradient of a block needs these two of the whole. Not here: who has which keys (`core/tokens.py`), communication.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor, mint

from ...core.balance import Mask
from ..rules.attention import FAR
from .attention import flash_attention
from .dtypes import wider


@lru_cache(maxsize=1)
def _triangle() -> Tensor:
    """The kernel's compressed mask."""
    return Tensor(np.triu(np.ones((2048, 2048), np.uint8), 1))


def runs(q: Tensor, k: Tensor, v: Tensor, q_ends: Sequence[int], k_ends: Sequence[int], mask: Mask, scale: float) -> Tensor:
    """Attention of runs of queries, each over keys of its own; differentiable.

    Args:
        q: [T, h, e], runs one behind another.
        k: [S, g, e], the keys of run 0, of run 1, ...; h is a multiple of g.
        v: [S, g, e].
        q_ends: where each run ends.
        k_ends: where its keys end.
        mask: which of them a query sees; causal: the last query of a run stands where its last key does.
        scale: of the products.
    """
    mode = {"sparse_mode": 0, "pre_tokens": FAR, "next_tokens": FAR}
    if mask.causal:
        mode = {"sparse_mode": 3, "pre_tokens": FAR, "next_tokens": 0}
    if mask.window is not None:
        mode = {"sparse_mode": 4, "pre_tokens": mask.window - 1, "next_tokens": 0}
    run: Any = flash_attention
    return run(q, k, v, None, _triangle() if mask.causal else None, q._shape[1], 1.0, scale, form="TND",
               lengths=(tuple(q_ends), tuple(k_ends)), dropped=None, **mode)[3]


class Block(NamedTuple):
    """What queries make of some of their keys: [h, t, e] not divided, and [h, t, 1] each."""

    out: Tensor
    top: Tensor
    total: Tensor


def by_heads(x: Tensor, groups: int) -> Tensor:
    """[t, h, e] -> [groups, h/groups * t, e], wide: the queries that share keys, beside each other."""
    t, h, e = x._shape
    return mint.reshape(mint.permute(mint.reshape(wider(x), (t, groups, h // groups, e)), (1, 2, 0, 3)),
                        (groups, h // groups * t, e))


def by_tokens(x: Tensor, t: int) -> Tensor:
    """And back: [groups, h/groups * t, e] -> [t, h, e]."""
    groups, rows, e = x._shape
    return mint.reshape(mint.permute(mint.reshape(x, (groups, rows // t, t, e)), (2, 0, 1, 3)), (t, groups * rows // t, e))


def _weights(q: Tensor, k: Tensor, hidden: np.ndarray | None, scale: float) -> Tensor:
    """Scores [groups, h/groups * t, s]; where a query must not look so low that whatever it sees elsewhere outweighs it.

    Finite: a query that sees nothing of this block would make NaN of infinities.
    """
    scores = mint.matmul(q, mint.transpose(k, 1, 2)) * scale
    if hidden is None:
        return scores
    all_heads = np.broadcast_to(hidden, (scores._shape[1] // len(hidden), *hidden.shape)).reshape(scores._shape[1:])
    return mint.where(Tensor(all_heads), Tensor(-1e30, scores.dtype), scores)


def block(q: Tensor, k: Tensor, v: Tensor, hidden: np.ndarray | None, scale: float) -> Block:
    """Queries and keys `by_heads`; what queries that see no key of the block get is outweighed once blocks are merged."""
    scores = _weights(q, k, hidden, scale)
    top = mint.amax(scores, (2,), keepdim=True)
    weights = mint.exp(scores - top)
    return Block(mint.matmul(weights, v), top, mint.sum(weights, (2,), keepdim=True))


def merged(a: Block | None, b: Block) -> Block:
    """Of two sets of keys together."""
    if a is None:
        return b
    top = mint.maximum(a.top, b.top)
    f, g = mint.exp(a.top - top), mint.exp(b.top - top)
    return Block(a.out * f + b.out * g, top, a.total * f + b.total * g)


def block_grad(q: Tensor, k: Tensor, v: Tensor, hidden: np.ndarray | None, scale: float, dout: Tensor, log_total: Tensor,
               delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (q, k, v) from one block of keys.

    Args:
        q: queries, keys and values `by_heads`.
        k: as q.
        v: as q.
        hidden: bool[t, s], where a query must not look.
        scale: of the products.
        dout: of the whole result, as q.
        log_total: log of the sum of exp(score) over *all* keys of a query, [groups, rows, 1].
        delta: sum of dout * out of a query, as that.
    """
    weights = mint.exp(_weights(q, k, hidden, scale) - log_total)
    ds = weights * (mint.matmul(dout, mint.transpose(v, 1, 2)) - delta) * scale
    return (mint.matmul(ds, k), mint.matmul(mint.transpose(ds, 1, 2), q), mint.matmul(mint.transpose(weights, 1, 2), dout))
