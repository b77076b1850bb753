# SPDX-License-Identifier: Apache-2.0
"""NumPy's answer for the mixture-of-experts decompositions, row by row as Ascend's documents put it."""
from __future__ import annotations

import numpy as np

from .references import I32, a, pos, softmax

N, K, E, H = 5, 2, 4, 3
CHOSEN = np.array([[2, 0], [0, 1], [2, 1], [1, 0], [0, 2]], I32)  # expert 3 has no token
BACK = np.array([7, 0, 3, 9, 1, 4, 8, 2, 6, 5], I32)
NUMBERS = np.arange(N * K, dtype=I32).reshape(K, N).T.copy()
ENDS, SIZES = np.array([2, 2, 7]), np.array([2, 0, 5])


def by_expert(chosen):
    """(token, choice) pairs, expert by expert, in the order of tokens."""
    chosen = chosen.reshape(len(chosen), -1)
    return [(i, j) for e in range(chosen.max() + 1) for i in range(chosen.shape[0]) for j in range(chosen.shape[1])
            if chosen[i, j] == e]


def permute(x, chosen, count=None):
    pairs, k = by_expert(chosen), chosen.reshape(len(chosen), -1).shape[1]
    where = np.zeros(len(pairs), int)
    for place, (i, j) in enumerate(pairs):
        where[i * k + j] = place
    return np.stack([x[i] for i, _ in pairs])[:count or None], where


def unpermute(rows, where, probs=None):
    rows = np.concatenate([rows, np.zeros((len(where), rows.shape[1]))])
    if probs is None:
        return np.stack([rows[w] for w in where])
    n, k = probs.shape
    return np.stack([sum(probs[i, j] * rows[where[i * k + j]] for j in range(k)) for i in range(n)])


def gating(x, _=None, k=1):
    p, order = softmax(x), np.argsort(-x, -1, "stable")[:, :k]
    return np.take_along_axis(p, order, -1), order, np.array([[j * len(x) + i for j in range(k)] for i in range(len(x))])


def init_routing(x, numbers, chosen, active):
    pairs, where = by_expert(chosen), np.zeros(chosen.size, int)
    for place, (i, j) in enumerate(pairs):
        where[numbers[i, j]] = place
    rows = np.stack([x[i] for i, _ in pairs])[:min(active, len(x)) * chosen.shape[1]]
    return rows, where, np.array([chosen[p] for p in pairs])


def init_routing_v2(x, chosen, active, capacity, experts, drop, count, before):
    sizes = np.array([(chosen == e).sum() for e in range(experts)])
    if not drop:
        rows, where = permute(x, chosen, active)
        return rows, where, {0: 0 * sizes, 1: np.cumsum(sizes), 2: sizes}[count], 0 * sizes
    rows, where, used = np.zeros((experts, capacity, x.shape[1])), np.full(chosen.size, -1), [0] * experts
    for i, j in by_expert(chosen):
        e = chosen[i, j]
        if used[e] < capacity:
            rows[e, used[e]], where[i * chosen.shape[1] + j] = x[i], e * capacity + used[e]
            used[e] += 1
    return rows, where, 0 * sizes, sizes * before


def finalize(rows, x1, x2, bias, scales, where, chosen):
    out = x1 + (0 if x2 is None else x2)
    for i in range(len(x1)):
        for j in range(scales.shape[1]):
            out[i] = out[i] + scales[i, j] * (rows[where[i + j * len(x1)]] + bias[chosen[i, j]])
    return out


def grouped(x, w, b, ends):
    out, at = np.zeros((len(x), w.shape[2])), 0
    for e, end in enumerate(ends):
        out[at:end] = x[at:end] @ w[e] + (0 if b is None else b[e])
        at = end
    return (out,)


def products(first, place, *static, ends=ENDS):
    """(arguments, reference) of a grouped product whose groups are the argument at `place`."""
    args: list = [None] * 14
    args[0], args[1], args[place] = [a(8, H)], [a(3, H, 4)], first
    for k, v in static:
        args[k] = v
    last = max(place, *(k for k, _ in static)) + 1
    return tuple(args[:last]), lambda x, w, b=None, *_: grouped(x[0], w[0], None if b is None else b[0], ends)


LIST = (([a(4, 6), a(3, 6)], [a(6, 5), a(6, 2)], [a(5), a(2)]),
        lambda x, w, b: tuple(p @ q + c for p, q, c in zip(x, w, b)))

MOE = {
    "MoeTokenPermute": [((a(N, H), CHOSEN), permute), ((a(N, H), CHOSEN, 7), permute),
                        ((a(N, H), CHOSEN[:, 0].copy()), permute)],
    "MoeTokenUnpermute": [((a(N * K, H), BACK, pos(N, K)), unpermute), ((a(N * K, H), BACK), unpermute),
                          ((a(7, H), BACK, pos(N, K)), unpermute)],
    "InnerMoeTokenUnpermute": [((a(N * K, H), BACK, pos(N, K)), unpermute)],
    "MoeGatingTopKSoftmax": [((a(N, E), None, K), gating), ((a(N, E),), gating)],
    "MoeInitRouting": [((a(N, H), NUMBERS, CHOSEN, n), init_routing) for n in (N, 3)],
    "MoeInitRoutingV2": [((a(N, H), CHOSEN, *static), init_routing_v2) for static in (
        (0, 0, E, 0, 1, False), (7, 0, E, 0, 2, False), (0, 3, E, 1, 0, True), (0, 2, E, 1, 0, False))],
    "MoeFinalizeRouting": [((a(N * K, H), a(N, H), x2, a(E, H), pos(N, K), BACK, CHOSEN), finalize)
                           for x2 in (None, a(N, H))],
    "MoeComputeExpertTokens": [((np.sort(CHOSEN, None), E), lambda e, n: np.array([(e <= i).sum() for i in range(n)]))],
    "GroupedMatmul": [products(ENDS, 7, (8, 3), (9, 0)), products(ENDS, 7, (2, [a(3, 4)]), (8, 3), (9, 0)), LIST],
    "GroupedMatmulV2": [products((2, 2, 7), 7, (8, 3), (9, 0)), LIST],
    "GroupedMatmulV4": [products(ENDS, 8, (12, 3), (13, 0)), LIST],
    "Gmm": [products((2, 2, 7), 3, (4, 0)), products((2, 0, 5), 3, (4, 0), (5, 1))],
    "GmmV2": [products(ENDS, 3, (4, 0)), products(SIZES, 3, (4, 0), (5, 1))],
}
