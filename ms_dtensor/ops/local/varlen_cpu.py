# SPDX-License-Identifier: Apache-2.0
"""Attention of packed runs for CPUs, forward and backward, by blocks of queries and the keys that they see.

A block is as large as a core's cache holds, nothing of the size queries x keys outlives it, and what is not seen is not
computed. It is NumPy's, in place: MindSpore's CPU kernels for reductions and broadcasts take several times as long as the
products between them. What is a sum or a difference of each query is a column of a product: a key of ones takes the
greatest score off, a value of ones adds the weights up. Where something is no number, queries of a run are worked on one
by one, each with what it sees: a weight of 0 times NaN is NaN. Invariant: runs, keys and masks are those of
`varlen.runs`; nothing here is recorded.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from threading import local

import numpy as np

from ...core.balance import Mask

Shape = tuple[int, ...]
_ELEMENTS = 1 << 19  # of scores at a time
_ROWS = 64  # queries at a time, of the heads that share keys
_TILE = 96  # keys of a product: OpenBLAS's way without copies is for a million multiplications, 100 numbers a head
_FAR = -1e30  # finite: infinities would make NaN of a query that sees nothing


def _by_groups(x: np.ndarray, groups: int, last: np.ndarray | float | None = None) -> np.ndarray:
    """[t, h, e] -> [groups, h/groups * t, e], queries that share keys beside each other; or e + 1, with `last` in it."""
    t, h, e = x.shape
    out = np.empty((groups, h // groups, t, e + (last is not None)), x.dtype)
    out[..., :e] = x.reshape(t, groups, h // groups, e).transpose(1, 2, 0, 3)
    if last is not None:
        out[..., e:] = np.broadcast_to(last, (t, h, 1)).reshape(t, groups, h // groups, 1).transpose(1, 2, 0, 3)
    return out.reshape(groups, h // groups * t, out.shape[-1])


def _by_tokens(x: np.ndarray, t: int) -> np.ndarray:
    groups, rows, e = x.shape
    return x.reshape(groups, rows // t, t, e).transpose(2, 0, 1, 3).reshape(t, groups * rows // t, e)


def _broken(*arrays: np.ndarray) -> np.ndarray | None:
    """Which rows have a number in one of these that is none; None: there is no such."""
    if all(np.isfinite(x).all() for x in arrays):
        return None
    return ~np.logical_and.reduce([np.isfinite(x).all((1, 2)) for x in arrays])


def _step(keys: int, shared: int) -> int:
    """Queries of a block that see so many keys."""
    return max(16, min(_ROWS, _ELEMENTS // max(keys, 1)) // shared)


def _blocks(q_ends: Sequence[int], k_ends: Sequence[int], mask: Mask, shared: int, broken: Sequence) -> Iterator[tuple]:
    """(queries, keys, what is hidden): rows from and to, and (columns of the block, what to add to scores there).

    `broken`: of the rows of queries and of keys, as `_broken` gives it.
    """
    q0 = k0 = 0
    for q1, k1 in zip(q_ends, k_ends):
        step = _step(k1 - k0, shared)
        if any(x is not None and x[rows].any() for x, rows in zip(broken, (slice(q0, q1), slice(k0, k1)))):
            step = 1  # then nothing of a block is hidden
        ahead = (k1 - k0) - (q1 - q0)  # a run's first query stands at this one of its keys
        for at in range(0, q1 - q0, step):
            end = min(at + step, q1 - q0)
            lo = 0 if mask.window is None else max(0, ahead + at - mask.window + 1)
            hi = ahead + end if mask.causal else k1 - k0
            stands, hidden = np.arange(ahead + at, ahead + end)[:, None], []
            if mask.causal and end - at > 1:
                first = max(lo, ahead + at)
                hidden.append((slice(first - lo, hi - lo), np.where(stands < np.arange(first, hi), _FAR, 0.0)))
            if mask.window is not None and (last := ahead + end - mask.window) > lo:
                hidden.append((slice(0, last - lo), np.where(stands >= np.arange(lo, last) + mask.window, _FAR, 0.0)))
            yield (q0 + at, q0 + end), (k0 + lo, k0 + hi), hidden
        q0, k0 = q1, k1


def _groups(groups: int, scores: int) -> Iterator[slice]:
    """So many at a time that their blocks are in the cache together."""
    step = max(1, _ELEMENTS // max(scores, 1))
    return (slice(at, at + step) for at in range(0, groups, step))


def beside(q: Shape, k: Shape, v: Shape, q_ends: Sequence[int], k_ends: Sequence[int]) -> tuple[list[Shape], ...]:
    """Shapes of what a forward leaves for its backward, and of what each of them has beside what it gives while it runs.

    Scratch is counted in each, as a thread's first call makes it.
    """
    (t, h, e), (s, g, wide) = q, v
    first = second = third = _ELEMENTS
    for rows, keys in zip(np.diff(q_ends, prepend=0).tolist(), np.diff(k_ends, prepend=0).tolist()):
        rows = min(_step(keys, h // g), rows) * (h // g)
        some = min(g, max(1, _ELEMENTS // max(rows * keys, 1)))
        first, second = max(first, some * rows * keys), max(second, some * rows * -(-keys // _TILE) * (wide + 1))
        third = max(third, second, first, some * keys * max(e, wide))
    log, keyed, valued = (t, h, 1), (g, s, e), (g, s, wide + 1)
    return [log], [log, keyed, valued, (first,), (second,)], [(g, s, e + 1), valued, (first,), (third,)]


class _Scratch:
    """Memory that is written again and again."""

    def __init__(self, memory: np.ndarray):
        self._memory = memory

    def of(self, *shape: int) -> np.ndarray:
        if math.prod(shape) > self._memory.size:
            self._memory = np.empty(math.prod(shape), self._memory.dtype)
        return self._memory[:math.prod(shape)].reshape(shape)


class _Kept(local):
    """A thread's memory for two blocks of scores, from call to call: what is new costs more than a product, page by page."""

    def __init__(self) -> None:
        self._blocks: dict[np.dtype, np.ndarray] = {}

    def two(self, dtype: np.dtype) -> tuple[_Scratch, _Scratch]:
        if dtype not in self._blocks:
            self._blocks[dtype] = np.empty((2, _ELEMENTS), dtype)
        first, second = self._blocks[dtype]
        return _Scratch(first), _Scratch(second)


_kept = _Kept()


def _tiles(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Of arrays [groups, keys, n], views [groups, tiles, keys of a tile, n]; then what is left, as one more tile.

    A tile's products are small enough for OpenBLAS to work without copying their operands first, which takes a quarter of
    the time where one side has as few numbers as a head.
    """
    groups, count = arrays[0].shape[:2]
    whole = count - count % _TILE
    if whole:
        yield tuple(x[:, :whole].reshape(groups, -1, _TILE, x.shape[2]) for x in arrays)
    if whole < count:
        yield tuple(x[:, None, whole:] for x in arrays)


def _for_each_key(keys: np.ndarray, of: np.ndarray, out: np.ndarray) -> np.ndarray:
    """[groups, keys, n] x [groups, n, m] -> [groups, keys, m]."""
    for some, into in _tiles(keys, out):
        np.matmul(some, of[:, None], out=into)
    return out


def _over_keys(weights: np.ndarray, values: np.ndarray, scratch: _Scratch) -> np.ndarray:
    """[groups, keys, rows], [groups, keys, e] -> [groups, rows, e], summed over keys."""
    (groups, _, rows), e = weights.shape, values.shape[2]
    total = np.zeros((groups, rows, e), values.dtype)
    for some, of in _tiles(weights, values):
        total += np.matmul(some.swapaxes(2, 3), of, out=scratch.of(groups, some.shape[1], rows, e)).sum(1)
    return total


def _scores(scratch: _Scratch, of: np.ndarray, keys: np.ndarray, hidden: list) -> np.ndarray:
    """[groups, keys, rows], of queries [groups, rows, e]."""
    (groups, count, _), rows = keys.shape, of.shape[1]
    scores = _for_each_key(keys, np.ascontiguousarray(of.swapaxes(1, 2)), scratch.of(groups, count, rows))
    for columns, far in hidden:
        scores[:, columns].reshape(groups, -1, rows // len(far), len(far))[:] += far.T[:, None].astype(scores.dtype)
    return scores


@np.errstate(invalid="ignore")
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
    (t, h, _), g, e = q.shape, k.shape[1], v.shape[2]
    out, top, total = np.empty((t, h, e), q.dtype), *(np.empty((t, h, 1), q.dtype) for _ in range(2))
    keys, values, (scratch, second) = _by_groups(k, g), _by_groups(v, g, 1.0), _kept.two(q.dtype)
    for (a, b), (lo, hi), hidden in _blocks(q_ends, k_ends, mask, h // g, (None, _broken(k, v))):
        of = _by_groups(q[a:b] * q.dtype.type(scale), g)
        most, one = np.empty((*of.shape[:2], 1), q.dtype), np.empty((*of.shape[:2], e + 1), q.dtype)
        for some in _groups(g, of.shape[1] * (hi - lo)):
            weights = _scores(scratch, of[some], keys[some, lo:hi], hidden)
            np.max(weights, 1, out=most[some, :, 0])
            weights -= most[some].swapaxes(1, 2)
            np.exp(weights, out=weights)
            one[some] = _over_keys(weights, values[some, lo:hi], second)
        out[a:b], top[a:b], total[a:b] = (_by_tokens(x, b - a) for x in (one[..., :e] / one[..., e:], most, one[..., e:]))
    return out, top, total


@np.errstate(invalid="ignore")
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
    h, g, e = q.shape[1], k.shape[1], q.shape[2]
    dq, scaled = np.zeros_like(q), q.dtype.type(scale)
    keys, values, (scratch, second) = _by_groups(k, g, 1.0), _by_groups(v, g, 1.0), _kept.two(q.dtype)
    dk, dv = np.zeros((*keys.shape[:2], e), k.dtype), np.zeros((*keys.shape[:2], v.shape[2]), v.dtype)
    broken = _broken(q, dout, out, log_total), _broken(k, v)
    for (a, b), (lo, hi), hidden in _blocks(q_ends, k_ends, mask, h // g, broken):
        of = _by_groups(q[a:b] * scaled, g, -log_total[a:b])
        do = _by_groups(dout[a:b], g, -(dout[a:b] * out[a:b]).sum(2, keepdims=True))
        one = np.empty((*of.shape[:2], e), q.dtype)
        for some in _groups(g, of.shape[1] * (hi - lo)):
            weights = _scores(scratch, of[some], keys[some, lo:hi], hidden)
            np.exp(weights, out=weights)
            dv[some, lo:hi] += _for_each_key(weights, do[some, :, :-1], second.of(*dv[some, lo:hi].shape))
            weights *= _scores(second, do[some], values[some, lo:hi], [])  # gradients of the scores
            one[some] = _over_keys(weights, keys[some, lo:hi, :e], second)
            dk[some, lo:hi] += _for_each_key(weights, of[some, :, :e], second.of(*dk[some, lo:hi].shape))
        dq[a:b] = _by_tokens(one, b - a)
    dq *= scaled
    return dq, *(x.swapaxes(0, 1) for x in (dk, dv))
