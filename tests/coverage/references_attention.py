# SPDX-License-Identifier: Apache-2.0
"""NumPy's answer for attention and rotary embeddings, query by query as Ascend's documents put it."""
from __future__ import annotations

import numpy as np

from .references import FLAT, TRUE, Q, a, pos, softmax

FAR = 2**31 - 1
TRIANGLE = np.triu(TRUE((2048, 2048), np.uint8), 1)
FUTURE = np.triu(TRUE((3, 5), bool), 1)
PER_HEAD = np.random.default_rng(3).random((2, 4, 3, 5)) > 0.6
PER_HEAD[..., 1] = False
PACKED = (a(7, 4, 3), a(9, 2, 3), a(9, 2, 2))
ENDS = (3, 3, 7), (4, 4, 9)


def flash(*tensors, pse=None, mask=None, ends=(None, None), **static):
    """FlashAttentionScore's arguments."""
    values = {"head_num": 4, "keep_prob": 1.0, "scale": 0.5, "pre": FAR, "next": FAR, "precise": 0,
              "layout": 1, "sparse": 0, **static}
    return (*tensors, pse, None, None, mask, None, *ends, *values.values())


def sees(i, j, rows, cols, mode, pre, nxt, mask):
    """Whether query i looks at key j of so many, of one head."""
    right = i + cols - rows  # where its diagonal is, if the triangle is aligned right
    if mask is None:
        return True
    return {0: lambda: not mask[i, j] and i - pre <= j <= i + nxt, 1: lambda: not mask[i, j], 2: lambda: j <= i,
            3: lambda: j <= right, 4: lambda: right - pre <= j <= right + nxt}[mode]()


def attention(q, k, v, pse, mask, scale, pre, nxt, mode):
    """Heads apart: [batch, heads, sequence, depth]; without what nobody reads."""
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    masks = None if mask is None else mask if mode > 1 else np.broadcast_to(mask, (*q.shape[:3], k.shape[2]))
    for b, h, i in np.ndindex(q.shape[:3]):
        key = h // (q.shape[1] // k.shape[1])
        scores = k[b, key] @ q[b, h, i] + (0 if pse is None else np.broadcast_to(pse, (*q.shape[:3], k.shape[2]))[b, h, i])
        own = masks if masks is None or mode > 1 else masks[b, h]
        seen = [j for j in range(k.shape[2]) if sees(i, j, q.shape[2], k.shape[2], mode, pre, nxt, own)]
        out[b, h, i] = softmax(scale * scores[seen]) @ v[b, key][seen]
    return out


def apart(x, heads):
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def of_form(q, k, v, pse, drop, padding, mask, prefix, q_ends, k_ends, heads, keep, scale, pre, nxt, precise, layout, mode):
    """Each layout from batch, heads, sequence, depth."""
    rest = pse, mask, scale, pre, nxt, mode
    if layout == 4:
        parts = [attention(*(x[lo:hi].swapaxes(0, 1)[None] for x, lo, hi in ((q, a, b), (k, c, d), (v, c, d))), *rest)
                 for a, b, c, d in zip((0, *q_ends), q_ends, (0, *k_ends), k_ends) if b > a]
        return None, None, None, np.concatenate([p[0].swapaxes(0, 1) for p in parts])
    if layout == 1:
        return None, None, None, attention(q, k, v, *rest)
    if layout == 3:
        return None, None, None, attention(*(x.swapaxes(1, 2) for x in (q, k, v)), *rest).swapaxes(1, 2)
    groups = heads * k.shape[-1] // q.shape[-1]
    first = (lambda x: x) if layout == 0 else (lambda x: x.swapaxes(0, 1))
    out = attention(apart(first(q), heads), apart(first(k), groups), apart(first(v), groups), *rest).swapaxes(1, 2)
    return None, None, None, first(out.reshape(*out.shape[:2], -1))


def rotate(x, c, s, mode):
    n = x.shape[-1]
    q = n // 4
    evens, odds = x[..., ::2], x[..., 1::2]
    if mode == 3:
        return np.concatenate([evens, odds], -1) * c + np.concatenate([-odds, evens], -1) * s
    turned = {0: lambda: np.concatenate([-x[..., n // 2:], x[..., :n // 2]], -1),
              1: lambda: np.stack([-odds, evens], -1).reshape(x.shape),
              2: lambda: np.concatenate([-x[..., q:2 * q], x[..., :q], -x[..., 3 * q:], x[..., 2 * q:3 * q]], -1)}[mode]()
    return x * c + turned * s


def speed(q, k, v, heads, layout, seed, offset, pse, padding, mask, scale, keep, *rest):
    (pre, nxt, _, _, *ends), mode = rest[:6], rest[6]
    out = of_form(q, k, v, pse, None, None, mask, None, *ends, heads, keep, scale, pre, nxt, 0, layout, mode)[3]
    return out, None, None, np.zeros(0), *[np.zeros((), int)] * 3


def both(first, top, total, second, other_top, other_total):
    """As if all weights had been summed in one go, [S, B, H]."""
    highest = np.maximum(top, other_top)
    weights = [s * np.exp(t - highest) for s, t in ((total, top), (other_total, other_top))]
    by_row = [np.repeat(w[..., 0].transpose(2, 0, 1), first.shape[2] // top.shape[1], -1) for w in weights]
    return (first * by_row[0] + second * by_row[1]) / sum(by_row), highest, sum(weights)


def statistics(*shape):
    return np.repeat(pos(*shape, 1), 8, -1)


SWAPPED = tuple(x.swapaxes(1, 2).copy() for x in Q)
GROUPED = (a(3, 2, 8), a(5, 2, 4), a(5, 2, 6))
ATTENTION = {
    "FlashAttentionScore": [(args, of_form) for args in (
        flash(*Q), flash(*Q, mask=FUTURE), flash(*Q, mask=PER_HEAD, sparse=1), flash(*Q, pse=a(2, 4, 3, 5)),
        flash(*Q, mask=FUTURE, pre=1, next=0), flash(*Q, mask=FUTURE, pre=1, next=0, sparse=1), flash(*Q, pre=1, next=0),
        *(flash(*Q, mask=TRIANGLE, sparse=m) for m in (2, 3)), flash(*Q, mask=TRIANGLE, sparse=4, pre=1, next=1),
        flash(*Q, mask=TRIANGLE, sparse=4, pre=3, next=-1), flash(*FLAT, layout=0), flash(*GROUPED, layout=2),
        flash(*SWAPPED, layout=3, mask=FUTURE), *(flash(*PACKED, ends=ENDS, layout=4, **k) for k in (
            {}, {"mask": TRIANGLE, "sparse": 2}, {"mask": TRIANGLE, "sparse": 3},
            {"mask": TRIANGLE, "sparse": 4, "pre": 1, "next": 1})))],
    "SpeedFusionAttention": [((*Q, 4, 1, np.zeros((), int), np.ones((), int), pse, None, mask, 0.5, 1.0, FAR, FAR, 0, None,
                               None, None, mode), speed)
                             for pse, mask, mode in ((None, None, 0), (a(2, 4, 3, 5), None, 0), (None, TRIANGLE, 3))],
    "RingAttentionUpdate": [((a(3, 2, 8), statistics(2, 4, 3), statistics(2, 4, 3), a(3, 2, 8), statistics(2, 4, 3) + 1,
                              statistics(2, 4, 3)), both)],
    "RotaryPositionEmbedding": [((a(2, 3, 8), a(1, 3, 8), a(1, 3, 8), m), rotate) for m in range(4)],
}
