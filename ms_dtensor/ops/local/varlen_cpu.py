# SPDX-License-Identifier: Apache-2.0
"""Attention of packed runs for CPUs, forward and backward, by blocks of queries and the keys that they see.

Nothing of the size queries x keys outlives a block, and what is not seen is not computed. Products are MindSpore's; what is
between them is written in place by NumPy, as reductions and broadcasts of MindSpore's CPU kernels take several times as long
as the products themselves. Invariant: runs, keys and masks are those of `varlen.runs`; nothing here is recorded.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from mindspore import Tensor, ops

from ...core.balance import Mask

_ELEMENTS = 1 << 21  # of scores at a time
_FAR = -1e30  # finite: infinities would make NaN of a query that sees nothing


@lru_cache(maxsize=4)
def _matmul(a: bool, b: bool):
    return ops.BatchMatMul(transpose_a=a, transpose_b=b)


def _product(a: np.ndarray, b: np.ndarray, ta: bool = False, tb: bool = False) -> np.ndarray:
    """Writable, also where MindSpore's memory is seen."""
    if a.dtype != np.float32:
        return (a.swapaxes(1, 2) if ta else a) @ (b.swapaxes(1, 2) if tb else b)
    out = _matmul(ta, tb)(Tensor.from_numpy(np.ascontiguousarray(a)), Tensor.from_numpy(np.ascontiguousarray(b))).asnumpy()
    return out if out.flags.writeable else out.copy()


def _by_heads(x: np.ndarray, groups: int) -> np.ndarray:
    """[t, h, e] -> [groups, h/groups * t, e]."""
    t, h, e = x.shape
    apart = x.reshape(t, groups, h // groups, e).transpose(1, 2, 0, 3)
    return np.ascontiguousarray(apart).reshape(groups, h // groups * t, e)


def _by_tokens(x: np.ndarray, t: int) -> np.ndarray:
    groups, rows, e = x.shape
    return x.reshape(groups, rows // t, t, e).transpose(2, 0, 1, 3).reshape(t, groups * rows // t, e)


def _blocks(q_ends: Sequence[int], k_ends: Sequence[int], mask: Mask, heads: int) -> Iterator[tuple]:
    """(queries, keys, what is hidden or None): rows from and to, and what to add to scores [queries, keys]."""
    q0 = k0 = 0
    for q1, k1 in zip(q_ends, k_ends):
        step = max(16, _ELEMENTS // (heads * max(k1 - k0, 1)))
        ahead = (k1 - k0) - (q1 - q0)  # a run's first query stands at this one of its keys
        for at in range(0, q1 - q0, step):
            end = min(at + step, q1 - q0)
            lo = 0 if mask.window is None else max(0, ahead + at - mask.window + 1)
            hi = ahead + end if mask.causal else k1 - k0
            hidden = None
            if mask.causal:
                far = np.arange(ahead + at, ahead + end)[:, None] - np.arange(lo, hi)
                out = far < 0 if mask.window is None else (far < 0) | (far >= mask.window)
                hidden = np.where(out, _FAR, 0.0) if out.any() else None
            yield (q0 + at, q0 + end), (k0 + lo, k0 + hi), hidden
        q0, k0 = q1, k1


def _scores(of: np.ndarray, keys: np.ndarray, hidden: np.ndarray | None, scale: float) -> np.ndarray:
    scores = _product(of * of.dtype.type(scale), keys, tb=True)
    if hidden is not None:
        groups, rows, count = scores.shape
        scores.reshape(groups, rows // len(hidden), len(hidden), count)[...] += hidden.astype(scores.dtype)
    return scores


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, q_ends: Sequence[int], k_ends: Sequence[int], mask: Mask,
            scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(result [T, h, e], greatest score and sum of weights of each query, [T, h, 1] each).

    Args:
        q: [T, h, e]; float32 or float64, as k and v.
        k: [S, g, e].
        v: [S, g, e'].
        q_ends: where each run ends.
        k_ends: where its keys end.
        mask: which of them a query sees; causal: the last query of a run stands where its last key does.
        scale: of the products.
    """
    (t, h, _), g = q.shape, k.shape[1]
    out, top, total = np.empty((t, h, v.shape[2]), q.dtype), *(np.empty((t, h, 1), q.dtype) for _ in range(2))
    for (a, b), (lo, hi), hidden in _blocks(q_ends, k_ends, mask, h):
        weights = _scores(_by_heads(q[a:b], g), k[lo:hi].swapaxes(0, 1), hidden, scale)
        most = weights.max(2, keepdims=True)
        weights -= most
        np.exp(weights, out=weights)
        sums = weights.sum(2, keepdims=True)
        one = _product(weights, v[lo:hi].swapaxes(0, 1))
        one /= sums
        out[a:b], top[a:b], total[a:b] = (_by_tokens(x, b - a) for x in (one, most, sums))
    return out, top, total


def backward(q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, out: np.ndarray, log_total: np.ndarray,
             q_ends: Sequence[int], k_ends: Sequence[int], mask: Mask, scale: float) -> tuple[np.ndarray, ...]:
    """Gradients of (q, k, v) as in `forward`, from these keys.

    Args:
        q: as in `forward`.
        k: as in `forward`.
        v: as in `forward`.
        dout: of the whole result, [T, h, e'].
        out: the result over *all* keys of a query.
        log_total: log of the sum of exp(score) over all of them, [T, h, 1].
        q_ends: as in `forward`.
        k_ends: as in `forward`.
        mask: as in `forward`.
        scale: as in `forward`.
    """
    h, g = q.shape[1], k.shape[1]
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    delta = (dout * out).sum(2, keepdims=True)
    for (a, b), (lo, hi), hidden in _blocks(q_ends, k_ends, mask, h):
        of, do, logs, mean = (_by_heads(x[a:b], g) for x in (q, dout, log_total, delta))
        keys, values = (x[lo:hi].swapaxes(0, 1) for x in (k, v))
        weights = _scores(of, keys, hidden, scale)
        weights -= logs
        np.exp(weights, out=weights)
        dv[lo:hi] += _product(weights, do, ta=True).swapaxes(0, 1)
        ds = _product(do, values, tb=True)
        ds -= mean
        ds *= weights
        ds *= ds.dtype.type(scale)
        dq[a:b] = _by_tokens(_product(ds, keys), b - a)
        dk[lo:hi] += _product(ds, of, ta=True).swapaxes(0, 1)
    return dq, dk, dv
