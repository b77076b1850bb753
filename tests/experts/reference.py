# SPDX-License-Identifier: Apache-2.0
"""Every token through every expert on one device, most of them weighted with 0: nothing is sorted, sent or skipped."""
import mindspore as ms
import numpy as np
from mindspore import Tensor, mint


def dense(x, weights, chosen, w1, w2, w3):
    """`moe`, of plain tensors; `chosen` a NumPy array."""
    out = 0
    for e in range(w1.shape[0]):
        own = Tensor((chosen == e).astype(x.asnumpy().dtype))
        gate, down, up = (mint.transpose(w[e], 0, 1) for w in (w1, w2, w3))
        h = mint.matmul(x, gate)
        out = out + mint.matmul(h * mint.sigmoid(h) * mint.matmul(x, up), down) * (weights * own).sum(1, keepdims=True)
    return out


def operands(seed, n, experts, k, d=6, f=5):
    """x, weights, dout and [w1, w2, w3] in float64."""
    rng = np.random.default_rng(seed)
    ws = [rng.normal(size=s) * 0.5 for s in ((experts, f, d), (experts, d, f), (experts, f, d))]
    return rng.normal(size=(n, d)), rng.random((n, k)) + 0.1, rng.normal(size=(n, d)), ws


def expected(x, weights, chosen, dout, ws):
    """Result and gradients of x, weights, w1, w2, w3, as NumPy."""
    args = [Tensor(a) for a in (x, weights, *ws)]

    def loss(x, weights, *w):
        return (dense(x, weights, chosen, *w) * Tensor(dout)).sum()
    return [dense(args[0], args[1], chosen, *args[2:]).asnumpy()] + [
        g.asnumpy() for g in ms.grad(loss, (0, 1, 2, 3, 4))(*args)]


def random_choice(rng, n, experts, k):
    return np.stack([rng.choice(experts, k, replace=False) for _ in range(n)]).astype(np.int32)


def np_router(logits, k, score="softmax", groups=1, group_limit=1, normalise=True, scale=1.0, bias=None):
    """(weights, chosen) token by token, in plain Python over float64."""
    weights, chosen = [], []
    for row in np.asarray(logits, np.float64):
        exp = np.exp(row - row.max())
        s = exp / exp.sum() if score == "softmax" else 1 / (1 + np.exp(-row))
        by = s if bias is None else s + bias
        each = len(row) // groups
        parts = [sorted(by[g * each:(g + 1) * each], reverse=True) for g in range(groups)]
        worth = [sum(p[:2]) if score == "sigmoid" else p[0] for p in parts]
        best = sorted(range(groups), key=lambda g: (-worth[g], g))[:group_limit]
        among = [e for e in range(len(row)) if groups == 1 or e // each in best]
        pick = sorted(among, key=lambda e: (-by[e], e))[:k]
        w = s[pick]
        weights.append((w / w.sum() if normalise else w) * scale)
        chosen.append(pick)
    return np.array(weights), np.array(chosen)


