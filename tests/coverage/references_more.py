# SPDX-License-Identifier: Apache-2.0
"""NumPy's answer for the element-wise, statistical and index decompositions, and for mixtures of experts, row by row as
Ascend's documents put it; goes on where `references.py` ends.
"""
import math

import numpy as np

from .references import I32, a, pos, reduced, sig, softmax

X, Y = a(4, 5), a(4, 5)[::-1].copy()
SMALL = (a(4, 5) / 3).astype(np.float32)
IDS = np.array([3, 0, 3], I32)
WHOLE = (a(4, 5) * 10).astype(I32)
TRUTH, OTHER = X > 0, Y > 0.4
ROWS = np.array([[0, 3, 1], [2, 3, 0]], I32)
ONCE = np.array([[0, 3, 1], [2, 1, 0]], I32)  # what a column writes twice has no gradient that anyone agrees on
PROB = (pos(4, 3) / 3).astype(np.float32)
TARGET = (pos(4, 3)[::-1] / 3).astype(np.float32).copy()
CLASSES = np.array([2, 0, -100, 1], I32)
MAPS = np.array([[[2, 0], [1, -100]], [[0, 0], [2, 1]]], I32)


def nll(x, t, w=None, how=1, ignored=-100):
    w = np.ones(x.shape[1]) if w is None else w
    kept = np.array([0.0 if c == ignored else w[c] for c in t.reshape(-1)]).reshape(t.shape)
    picked = np.take_along_axis(x, np.where(t == ignored, 0, t)[:, None], 1)[:, 0]
    loss = -picked * kept
    return {0: loss.sum(), 1: loss.sum() / kept.sum(), 2: loss}[how], None


def bce(x, t, w=1.0, how=1):
    return reduced(-(t * np.log(x) + (1 - t) * np.log(1 - x)) * w, how)


def bce_logits(x, t, w=1.0, p=1.0, how=1):
    return reduced(-(p * t * np.log(sig(x)) + (1 - t) * np.log(1 - sig(x))) * w, how)


def batch_norm(x, w, b, mean, var, training=False, momentum=0.1, eps=1e-5):
    dims, shape = (0, *range(2, x.ndim)), (1, -1, *(1,) * (x.ndim - 2))
    m, v = (x.mean(dims), x.var(dims)) if training else (mean, var)
    out = (x - m.reshape(shape)) / np.sqrt(v.reshape(shape) + eps) * w.reshape(shape) + b.reshape(shape)
    return out, m, v


def index_add(x, dim, index, src, alpha=1):
    out = x.copy()
    np.add.at(np.moveaxis(out, dim, 0), index, np.moveaxis(alpha * src, dim, 0))
    return out


def scatter(x, dim, index, src, how=0):
    out = x.copy()
    for at in np.ndindex(index.shape):
        to = list(at)
        to[dim] = index[at]
        value = src[at] if np.ndim(src) else src
        out[tuple(to)] = out[tuple(to)] + value if how else value
    return out


def padded(mode, n):
    return lambda x, p: np.pad(x, [(0, 0)] * (x.ndim - n) + [(p[2 * (n - 1 - d)], p[2 * (n - 1 - d) + 1]) for d in range(n)],
                               mode=mode)


FIVE = (a(3, 2, 4), a(2), a(2), a(2), pos(2))
def put(x, value, indices, made):
    out = x.copy()
    if made["accumulate"]:
        np.add.at(out, tuple(indices), value)
    else:
        out[tuple(indices)] = value
    return out


def rms(x, y, w, eps=1e-6):
    x = x + y
    scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * scale * w, scale, x


def layer(x, y, w, b, eps=1e-5):
    x = x + y
    middle, scale = x.mean(-1, keepdims=True), 1 / np.sqrt(x.var(-1, keepdims=True) + eps)
    return (x - middle) * scale * w + b, middle, scale, x


def cross_entropy(x, t, w=None, how=1, ignored=-100, smooth=0.0):
    log = x - np.log(np.exp(x).sum(-1, keepdims=True))
    w = np.ones(x.shape[1]) if w is None else w
    kept = t != ignored
    at = np.where(kept, t, 0)
    loss = -(1 - smooth) * np.take_along_axis(log, at[:, None], 1)[:, 0] * w[at] - smooth * (log * w).mean(-1)
    loss = loss * kept
    return np.reshape({0: loss.sum(), 1: loss.sum() / (w[at] * kept).sum(), 2: loss}[how], -1), log, np.zeros(0), np.zeros(0)


def distinct(x, inverse=False, counts=False, dim=None):
    values, back, count = np.unique(x, return_inverse=True, return_counts=True, axis=dim)
    back = back.reshape(x.shape if dim is None else -1)
    return values, back if inverse else np.zeros(0, int), count if counts else np.zeros(0, int)


def runs(x, inverse=False, counts=False, dim=None):
    rows = list(x.ravel()) if dim is None else list(np.moveaxis(x, dim, 0))
    values, back, count = [], [], []
    for row in rows:
        if not values or not np.array_equal(values[-1], row):
            values.append(row)
            count.append(0)
        count[-1] += 1
        back.append(len(values) - 1)
    out = np.array(values) if dim is None else np.moveaxis(np.array(values), 0, dim)
    back = np.reshape(back, x.shape if dim is None else -1)
    return out, back if inverse else np.zeros(0, int), np.array(count) if counts else np.zeros(0, int)


def kth(x, k, dim=-1, keepdim=False):
    return tuple(np.take(f(x, dim), [k - 1] if keepdim else k - 1, dim) for f in (np.sort, np.argsort))


FEW = np.array([[1, 1, 0], [2, 2, 2], [1, 0, 0], [1, 0, 0]], I32)
WELL = (a(2, 3, 3) / 4 + np.eye(3)).astype(np.float32)
TALL = a(4, 3)
BY_SHAPE = {  # linear algebra, what depends on data, fused kernels
    "IndexPut": [((a(4, 5), a(3, 5), [np.array([3, 0, 2])], {"accumulate": False}), put),
                 ((a(4, 5), a(2, 1), [np.array([[0, 2], [1, -1]]), np.array([[1], [3]])], {"accumulate": False}), put),
                 ((a(4, 5), a(3, 5), [np.array([3, 0, 3])], {"accumulate": True}), put),
                 ((a(4, 5, 2), a(2), [np.array([1, 1, 3]), np.array([2, 2, -5])], {"accumulate": True}), put)],
    "NonZeroExt": [((FEW,), lambda x: np.nonzero(x))],
    "Unique2": [((FEW, True, *k), lambda x, s, *k: distinct(x, *k)) for k in ((False, False), (True, False), (True, True))],
    "UniqueDim": [((FEW, True, True, d), lambda x, s, i, d: distinct(x, True, True, d)) for d in (0, 1)],
    "DeprecatedUnique": [((FEW,), np.unique), ((FEW, True, True, True), lambda x, *_: distinct(x, True, True)),
                         ((FEW, True, False, True, 0), lambda x, *_: distinct(x, True, True, 0)[::2])],
    "UniqueConsecutive": [((FEW, *k), runs) for k in ((False, False), (True, True), (True, True, 0), (False, True, 1))],
    "BincountExt": [((FEW.ravel(),), np.bincount), ((FEW.ravel(), None, 5), lambda x, w, n: np.bincount(x, minlength=n)),
                    ((FEW.ravel(), a(12), 2), lambda x, w, n: np.bincount(x, w, n))],
    "RepeatInterleaveTensor": [((a(3, 4), np.array([2, 0, 3]), 0), np.repeat),
                               ((a(2, 2), np.array([2, 0, 1, 3])), np.repeat),
                               ((a(3, 2), (1, 2), 1), np.repeat)],
    "Kthvalue": [((a(4, 5), 2), kth), ((a(4, 5), 3, 0, True), kth)],
    "HistcExt": [((X, 4, -1, 1), lambda x, n, lo, hi: np.histogram(x, n, (lo, hi))[0].astype(float)),
                 ((X,), lambda x: np.histogram(x, 100)[0].astype(float)),
                 ((WHOLE, 5, -9, 9), lambda x, n, lo, hi: np.histogram(x, n, (lo, hi))[0])],
    "Eig": [((np.diag([1, 2, 3]).astype(np.float32), False),
             lambda x, v: (np.array([1, 2, 3], complex), np.zeros((), complex)))],
    "MatrixInverseExt": [((WELL,), np.linalg.inv)],
    "LinalgQr": [((TALL,), lambda x: np.linalg.qr(x)), ((TALL, 1), lambda x, _: np.linalg.qr(x, "complete"))],
    "AddRmsNorm": [((a(4, 5), a(4, 5), a(5)), rms), ((a(4, 5), a(4, 5), a(5), 1e-2), rms)],
    "AddLayerNormV2": [((a(4, 5), a(4, 5), a(5), a(5)), layer), ((a(4, 5), a(4, 5), a(5), a(5), 1e-2), layer)],
    "CrossEntropyLoss": [((a(4, 3), CLASSES, *k), cross_entropy) 
                         for k in ((), (None, 0), (pos(3), 1), (pos(3), 2, -100, 0.2), (None, 1, -100, 0.1))],
}

NO_GRADIENT = frozenset((*BY_SHAPE.keys() - {"IndexPut", "BincountExt", "RepeatInterleaveTensor", "Kthvalue",
                                             "MatrixInverseExt",
                                             "AddRmsNorm", "AddLayerNormV2", "CrossEntropyLoss"},
                         "IsNegInf", "EqualExt", "FloorDivScalar", "BatchNorm", "BatchNormExt", "BinaryCrossEntropy",
                         "BCEWithLogitsLoss", "NLLLoss", "NLLLoss2d"))  # some operands are constants by definition

MORE = {
    **BY_SHAPE,
    "Log10": [((pos(4, 5),), np.log10)], "AsinExt": [((SMALL,), np.arcsin)], "AcosExt": [((SMALL,), np.arccos)],
    "AtanExt": [((X,), np.arctan)], "AsinhExt": [((X,), np.arcsinh)],
    "AcoshExt": [(((pos(4, 5) + 1).astype(np.float32),), np.arccosh)],
    "NextAfter": [((a(4, 3), a(3)), np.nextafter)], "Frac": [((X,), lambda x: x - np.trunc(x))], "Exp2": [((X,), np.exp2)],
    "IsNegInf": [((np.array([-np.inf, 1, np.inf, np.nan], np.float32),), np.isneginf)],
    "BitwiseNot": [((WHOLE,), np.invert), ((TRUTH,), np.invert)],
    **{f"Bitwise{name}{kind}": [((WHOLE, WHOLE[::-1].copy() if kind == "Tensor" else 6), fn),
                                ((TRUTH, OTHER if kind == "Tensor" else True), fn)]
       for name, fn in (("And", np.bitwise_and), ("Or", np.bitwise_or), ("Xor", np.bitwise_xor))
       for kind in ("Tensor", "Scalar")},
    "FloorDivScalar": [((X, 0.7), lambda x, y: np.floor(x / y)), ((WHOLE, 3), lambda x, y: x // y)],
    "Hardtanh": [((X, -0.5, 0.8), np.clip), ((X,), lambda x: np.clip(x, -1, 1))],
    "SeLUExt": [((X,), lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * (np.exp(x) - 1)))],
    "LogAddExp": [((X * 30, Y * 30), np.logaddexp)], "LogAddExp2": [((X * 30, Y * 30), np.logaddexp2)],
    "Threshold": [((X, 0.2, 7.0), lambda x, t, v: np.where(x > t, x, v))],
    "MedianExt": [((a(3, 5),), np.median), ((a(2, 3),), lambda x: np.sort(x.ravel())[2])],
    "MedianDim": [((X, 1), lambda x, d: (np.sort(x, 1)[:, 2], np.argsort(x, 1)[:, 2])),
                  ((X, 0, True), lambda x, d, k: (np.sort(x, 0)[1:2], np.argsort(x, 0)[1:2]))],
    "CumminExt": [((X, 1), lambda x, d: (np.minimum.accumulate(x, 1), None))],
    "EqualExt": [((X, X), np.array_equal), ((X, Y), np.array_equal), ((X, a(3)), np.array_equal)],
    "SoftMarginLoss": [((X, np.sign(Y), r), lambda x, t, r: reduced(np.log1p(np.exp(-t * x)), r)) for r in (0, 1, 2)],
    "NLLLoss": [((a(4, 3), CLASSES, w, r), nll) for r in (0, 1, 2) for w in (None, pos(3))],
    "NLLLoss2d": [((a(2, 3, 2, 2), MAPS, pos(3), r), nll) for r in (0, 1, 2)],
    "BinaryCrossEntropy": [((PROB, TARGET, pos(4, 3), r), bce) for r in (0, 1, 2)]
                          + [((PROB[:1, :1], TARGET[:1, :1], None, 0), lambda x, t, w, r: bce(x, t, 1.0, r))],
    "BCEWithLogitsLoss": [((a(s, 3), TARGET[:s], pos(s, 3), pos(3), r), bce_logits) for r in (0, 1, 2) for s in (4, 3)],
    "BatchNorm": [(FIVE, lambda *v: (batch_norm(*v)[0], None, None, None, None)),
                  ((*FIVE, True, 1e-3, 0.3), lambda x, w, b, m, v, t, e, g: (
                      batch_norm(x, w, b, m, v, t, g, e)[0], None, None, *batch_norm(x, w, b, m, v, True)[1:]))],
    "BatchNormExt": [(FIVE, lambda *v: (batch_norm(*v)[0], None, None)),
                     ((*FIVE, True, 0.3), lambda *v: (batch_norm(*v)[0], None, None))],
    "LpNormV2": [((X, math.inf), lambda x, p: np.abs(x).max()), ((X, 2.0, 1), lambda x, p, d: np.sqrt((x * x).sum(1)))],
    "MaskedFill": [((X, TRUTH, v), lambda x, m, v: np.where(m, v, x)) for v in (2, 2.5)],
    "Gather": [((X, IDS, 1), lambda x, i, d: x[:, i]), ((X, ROWS, 0), lambda x, i, d: x[i])],
    "DeprecatedGather": [((X, IDS, 1), lambda x, i, d: x[:, i])],
    "Take": [((X, ROWS), np.take)],
    "EmbeddingLookup": [((X, np.array([[1, 4], [2, 9]], I32), 1),
                         lambda x, i, o: np.where(((i >= 1) & (i < 5))[..., None], x[np.clip(i - 1, 0, 3)], 0))],
    "ReverseV2": [((X, (0, 1)), np.flip), ((X, (-1,)), np.flip)],
    **dict.fromkeys(("SplitTensor", "SplitTensorView", "DeprecatedSplit"), [
        ((X, 2, 1), lambda x, n, d: (x[:, :2], x[:, 2:4], x[:, 4:])), ((X, 3), lambda x, n: (x[:3], x[3:]))]),
    **dict.fromkeys(("SplitWithSize", "SplitWithSizeView"), [((X, (1, 4), -1), lambda x, n, d: (x[:, :1], x[:, 1:]))]),
    **dict.fromkeys(("Any", "AnyExt"), [((X * 0 + 3 * (X > 0.6),), np.any), ((X * 0,), np.any)]),
    **dict.fromkeys(("ReduceAny", "DeprecatedReduceAny"), [
        ((X * 0 + 2 * (X > 0.6), 0, True), lambda x, d, k: x.any(d, keepdims=k)), ((WHOLE > 2, 1), np.any)]),
    "UnstackExtView": [((X, 1), lambda x, d: tuple(np.moveaxis(x, 1, 0)))],
    "SelectExtView": [((X, 1, -2), lambda x, d, i: x[:, -2])],
    "DiagExt": [((a(3), 1), np.diag), ((X, -1), np.diag)], "TraceExt": [((X,), np.trace)],
    **{f"{kind}Pad{n}D": [((a(*shape), (1, 2, 2, 1, 1, 0)[:2 * n]), padded(mode, n))]
       for kind, mode in (("Reflection", "reflect"), ("Replication", "edge"))
       for n, shape in ((1, (2, 3, 4)), (2, (2, 2, 3, 4)), (3, (2, 2, 3, 3, 4)))},
    "IndexAddExt": [((X, 1, IDS, a(4, 3), 2), index_add), ((X, 0, IDS, a(3, 5)), index_add)],
    "DeprecatedIndexAdd": [((X, IDS, a(3, 5), 0), lambda x, i, s, d: index_add(x, d, i, s))],
    "IndexAdd": [((X, IDS, a(4, 3), {"axis": 1}), lambda x, i, s, made: index_add(x, 1, i, s))],
    "Scatter": [((X, 0, ONCE, a(2, 3)), scatter), ((X, 0, ROWS, a(2, 3), 1), scatter)],
    "ScatterValue": [((X, 0, ROWS, 2.5), scatter)],
}

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
