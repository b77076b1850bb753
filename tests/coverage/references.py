# SPDX-License-Identifier: Apache-2.0
"""NumPy's answer for each CPU decomposition, written from the op's definition and sharing no code with it.

`REFERENCES`: primitive -> list of (arguments, function of the same arguments). Arrays of float32 are differentiated: the
reference is run in float64, so that its finite differences are the gradient to compare with.
"""
import itertools
import math

import numpy as np

_RNG = np.random.default_rng(20240921)


def a(*shape):
    """A random float32 array without equal elements or kinks near zero."""
    x = _RNG.permutation(int(np.prod(shape))).reshape(shape).astype(np.float64) + 0.5
    return ((x / max(x.size, 1) - 0.5) * 3.1).astype(np.float32)


def pos(*shape):
    """Positive."""
    return np.abs(a(*shape)) + np.float32(0.3)


def softmax(x, d=-1):
    e = np.exp(x - x.max(d, keepdims=True))
    return e / e.sum(d, keepdims=True)


def erf(x):
    return np.vectorize(math.erf)(x)


def sig(x):
    return 1 / (1 + np.exp(-x))


def reduced(x, how):
    return {0: x.sum(), 1: x.mean(), 2: x}[how]  # MindSpore's numbers


def conv(x, w, b=None, stride=1, padding=0, dilation=1, groups=1):
    """Convolution by its definition, one output element at a time."""
    n = w.ndim - 2
    if x.ndim == n + 1:
        return conv(x[None], w, b, stride, padding, dilation, groups)[0]
    stride, dilation = (np.broadcast_to(v, n) for v in (stride, dilation))
    kernel = np.array(w.shape[2:])
    reach = dilation * (kernel - 1) + 1
    if isinstance(padding, str):
        total = np.maximum((-(-np.array(x.shape[2:]) // stride) - 1) * stride + reach - x.shape[2:], 0) * (padding == "same")
        pads = [(t // 2, t - t // 2) for t in total]
    else:
        pads = [(p, p) for p in np.broadcast_to(padding, n)]
    x = np.pad(x, [(0, 0), (0, 0), *pads])
    space = [(s - r) // st + 1 for s, r, st in zip(x.shape[2:], reach, stride)]
    out = np.zeros((x.shape[0], w.shape[0], *space), x.dtype)
    share, made = w.shape[1], w.shape[0] // groups
    for at in itertools.product(*map(range, space)):
        window = tuple(slice(i * s, i * s + r, d) for i, s, r, d in zip(at, stride, reach, dilation))
        for g in range(groups):
            patch = x[(slice(None), slice(g * share, (g + 1) * share), *window)].reshape(x.shape[0], -1)
            out[(slice(None), slice(g * made, (g + 1) * made), *at)] = patch @ w[g * made:(g + 1) * made].reshape(made, -1).T
    return out if b is None else out + b.reshape(1, -1, *(1,) * n)


def conv_transpose(x, w, b=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """Each input element adds its kernel to the result."""
    n = w.ndim - 2
    stride, padding, extra, dilation = (np.broadcast_to(v, n) for v in (stride, padding, output_padding, dilation))
    full = [(i - 1) * s + d * (k - 1) + 1 + e for i, s, d, k, e in zip(x.shape[2:], stride, dilation, w.shape[2:], extra)]
    out = np.zeros((x.shape[0], w.shape[1] * groups, *full), x.dtype)
    share, made = x.shape[1] // groups, w.shape[1]
    for at in itertools.product(*map(range, x.shape[2:])):
        for tap in itertools.product(*map(range, w.shape[2:])):
            place = tuple(i * s + t * d for i, s, t, d in zip(at, stride, tap, dilation))
            for g in range(groups):
                mine = slice(g * share, (g + 1) * share)
                part = x[(slice(None), mine, *at)] @ w[(mine, slice(None), *tap)]
                out[(slice(None), slice(g * made, (g + 1) * made), *place)] += part
    out = out[(slice(None), slice(None), *(slice(p, f - p) for p, f in zip(padding, full)))]
    return out if b is None else out + b.reshape(1, -1, *(1,) * n)


def pool(x, kernel, stride, padding, fn, ceil=False):
    """`fn(values, inside)` of every window of the last dims; `inside`: which of them are real."""
    n = len(kernel)
    inside = np.pad(np.ones(x.shape[-n:], bool), [(p, p + k) for p, k in zip(padding, kernel)])
    x = np.pad(x, [(0, 0)] * (x.ndim - n) + [(p, p + k) for p, k in zip(padding, kernel)])
    space = []
    for s, k, st, p in zip(x.shape[-n:], kernel, stride, padding):
        size = s - k  # without the room added for windows that hang over
        count = (size - k) // st + 1 if not ceil else -(-(size - k) // st) + 1
        space.append(count - 1 if ceil and (count - 1) * st >= size - p else count)
    out = np.zeros((*x.shape[:-n], *space), x.dtype)
    for at in itertools.product(*map(range, space)):
        window = tuple(slice(i * st, i * st + k) for i, st, k in zip(at, stride, kernel))
        out[(..., *at)] = fn(x[(..., *window)].reshape(*x.shape[:-n], -1), inside[window].reshape(-1))
    return out


def mean_inside(v, inside):
    return v[..., inside].mean(-1)


def max_inside(v, inside):
    return v[..., inside].max(-1)


def adaptive(x, size, fn):
    n = len(size)
    out = np.zeros((*x.shape[:-n], *size), x.dtype)
    for at in itertools.product(*map(range, size)):
        window = tuple(slice(i * e // s, -(-(i + 1) * e // s)) for i, e, s in zip(at, x.shape[-n:], size))
        out[(..., *at)] = fn(x[(..., *window)].reshape(*x.shape[:-n], -1), -1)
    return out


def linear_1d(x, out, align, d):
    """Interpolation along dim d by evaluating the broken line."""
    n = x.shape[d]
    at = np.arange(out) * (n - 1) / max(out - 1, 1) if align else np.clip((np.arange(out) + 0.5) * n / out - 0.5, 0, n - 1)
    return np.apply_along_axis(lambda line: np.interp(at, np.arange(n), line), d, x)


def cubic_1d(x, out, d):
    """Keys' cubic convolution with a = -0.75, borders repeated."""
    n, x = x.shape[d], np.moveaxis(x, d, -1)
    rows = []
    for i in range(out):
        at = (i + 0.5) * n / out - 0.5
        lo, total = math.floor(at), 0
        for j in range(lo - 1, lo + 3):
            t = abs(at - j)
            w = 1.25 * t**3 - 2.25 * t**2 + 1 if t <= 1 else -0.75 * t**3 + 3.75 * t**2 - 6 * t + 3
            total = total + w * x[..., min(max(j, 0), n - 1)]
        rows.append(total)
    return np.moveaxis(np.stack(rows, -1), -1, d)


def scatter_add(x, dim, index, src):
    out = x.copy()
    for at in np.ndindex(index.shape):
        to = list(at)
        to[dim] = index[at]
        out[tuple(to)] += src[at]
    return out


def patches(x, k):
    """Windows of k x k, as columns."""
    n, c, h, w = x.shape
    cols = [x[:, :, i:i + k, j:j + k].reshape(n, c * k * k) for i in range(h - k + 1) for j in range(w - k + 1)]
    return np.stack(cols, -1)


def unpatch(cols, size, k):
    n, c, _ = cols.shape
    out = np.zeros((n, c // (k * k), *size), cols.dtype)
    for t, (i, j) in enumerate(itertools.product(range(size[0] - k + 1), range(size[1] - k + 1))):
        out[:, :, i:i + k, j:j + k] += cols[:, :, t].reshape(n, -1, k, k)
    return out


I32, TRUE = np.int32, np.ones
ROWS = np.array([[0, 2], [1, 1]], I32)
X, Y, Q = a(4, 5), a(4, 5), (a(2, 4, 3, 4), a(2, 2, 5, 4), a(2, 2, 5, 4))
FLAT = (a(2, 3, 8), a(2, 3, 8), a(2, 3, 8))

REFERENCES: dict = {
    "Clone": [((X,), lambda x: x), ((X > 0,), lambda x: x)],
    "Var": [((X,), lambda x: x.var(ddof=1)), ((X, (0,), 0, True), lambda x, d, c, k: x.var(0, ddof=0, keepdims=True)),
            ((X, -1), lambda x, d: x.var(-1, ddof=1))],
    "Std": [((X, 1), lambda x, d: x.std(1, ddof=1))],
    "VarMean": [((X, 1), lambda x, d: (x.var(1, ddof=1), x.mean(1)))],
    "StdMean": [((X, 0, 0), lambda x, d, c: (x.std(0), x.mean(0)))],
    "LogSumExp": [((X, -1), lambda x, d: np.log(np.exp(x).sum(-1))),
                  ((X, (0, 1), True), lambda x, d, k: np.log(np.exp(x).sum(keepdims=True))),
                  ((np.full((2, 3), -np.inf, np.float32), 1), lambda x, d: np.full(2, -np.inf))],
    "LinalgVectorNorm": [((X,), lambda x: np.sqrt((x * x).sum())),
                         ((X, 1, 1, True), lambda x, *_: np.abs(x).sum(1, keepdims=True)),
                         ((X, 3, 0), lambda x, *_: (np.abs(x)**3).sum(0)**(1 / 3)),
                         ((X, float("inf"), 0), lambda x, *_: np.abs(x).max(0)),
                         ((X, 0, 0), lambda x, *_: (x != 0).sum(0).astype(float))],
    "Norm": [((X, 2.0, (0, 1)), lambda x, *_: np.sqrt((x * x).sum()))],
    "CountNonZero": [((X * (X > 0), 1), lambda x, d: (x != 0).sum(1)), ((X * (X > 0),), lambda x: (x != 0).sum())],
    "DeprecatedCountNonzero": [((X * (X > 0), 1), lambda x, d: (x != 0).sum(1, dtype=np.int32)),
                               ((X * (X > 0), (), True), lambda x, d, k: (x != 0).sum(keepdims=True, dtype=np.int32))],
    "TraceExt": [((X,), np.trace)],
    "CumsumExt": [((X, 1), lambda x, d: x.cumsum(1)), ((ROWS, 0), lambda x, d: x.cumsum(0, dtype=np.int64)),
                  ((X > 0, -1), lambda x, d: x.cumsum(-1, dtype=np.int64))],
    "DeprecatedCumsum": [((X, 1), lambda x, d: x.cumsum(1)), ((X,), lambda x: x.cumsum()),
                         ((X > 0, -1), lambda x, d: x.cumsum(-1, dtype=np.int32)), ((X[:0], 1), lambda x, d: x)],
    "CumSum": [((X, 1), lambda x, d: x.cumsum(1)), ((X, 1, True), lambda x, *_: x.cumsum(1) - x),
               ((X, 0, False, True), lambda x, *_: x[::-1].cumsum(0)[::-1]), ((X[:0], 1), lambda x, d: x)],
    "TopkExt": [((X, 2), lambda x, k: (-np.sort(-x)[:, :2], np.argsort(-x)[:, :2])),
                ((X, 3, 0, False), lambda x, k, d, g: (np.sort(x, 0)[:3], np.argsort(x, 0)[:3]))],
    "SortExt": [((X,), lambda x: (np.sort(x), np.argsort(x))),
                ((X, 0, True), lambda x, d, g: (-np.sort(-x, 0), np.argsort(-x, 0)))],
    "ArgSort": [((X, 0), lambda x, d: np.argsort(x, 0))],
    "ArgMaxExt": [((X, 1), lambda x, d: x.argmax(1)), ((X,), np.argmax), ((X, 0, True), lambda x, d, k: x.argmax(0)[None])],
    "ArgMinExt": [((X, 1), lambda x, d: x.argmin(1)), ((ROWS,), np.argmin)],
    "AddcmulExt": [((X, Y, a(5), 2), lambda x, y, z, v: x + 2 * y * z)],
    "AddcdivExt": [((X, Y, pos(5), 2), lambda x, y, z, v: x + 2 * y / z)],
    "Atan2Ext": [((X, pos(4, 5)), np.arctan2)],
    "Log2": [((pos(4, 5),), np.log2)],
    "GeluExt": [((X,), lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2)))),
                ((X, "tanh"), lambda x, m: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))],
    "Swiglu": [((a(3, 4),), lambda x: x[:, :2] * sig(x[:, :2]) * x[:, 2:]),
               ((a(4, 3), 0), lambda x, d: x[:2] * sig(x[:2]) * x[2:])],
    "EluExt": [((X, 0.7), lambda x, s: np.where(x > 0, x, 0.7 * (np.exp(x) - 1))),
               ((X * 100,), lambda x: np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1))],
    "LeakyReLUExt": [((X, 0.1), lambda x, s: np.where(x > 0, x, 0.1 * x))],
    "SoftplusExt": [((X, 2, 20), lambda x, b, t: np.log1p(np.exp(2 * x)) / 2), ((X * 30,), lambda x: np.logaddexp(0, x))],
    "MishExt": [((X,), lambda x: x * np.tanh(np.log1p(np.exp(x))))],
    "LogSigmoid": [((X,), lambda x: (-np.logaddexp(0, -x), None)), ((X * 50,), lambda x: (-np.logaddexp(0, -x), None))],
    "LogSoftmaxExt": [((X, 1), lambda x, d: np.log(softmax(x, 1))), ((X, 0), lambda x, d: np.log(softmax(x, 0)))],
    "RmsNorm": [((X, pos(5)), lambda x, g: (x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g,
                                            1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)))],
    "LayerNormExt": [((a(3, 2, 4), (2, 4), a(2, 4), a(2, 4)),
                      lambda x, s, w, b: _layer_norm(x, (1, 2), w, b)),
                     ((X, (5,)), lambda x, s: _layer_norm(x, (1,), 1.0, 0.0))],
    "MSELossExt": [((X, Y, r), lambda x, y, r: reduced((x - y)**2, r)) for r in (0, 1, 2)],
    "L1LossExt": [((X, Y, r), lambda x, y, r: reduced(np.abs(x - y), r)) for r in (0, 1, 2)],
    "KLDiv": [((X, pos(4, 5), r), lambda x, t, r: reduced(t * (np.log(t) - x), r)) for r in (0, 1, 2)]
             + [((X, Y, 0, True), lambda x, t, r, g: (np.exp(t) * (t - x)).sum())],
    "StackExt": [(([X, Y], 1), lambda xs, d: np.stack(xs, 1)), (([X, Y],), np.stack)],
    "TrilExt": [((X, 1), np.tril), ((X > 0, -1), np.tril)],
    "IndexSelect": [((X, 1, np.array([3, 0, 3], I32)), lambda x, d, i: x[:, i])],
    "Embedding": [((ROWS, a(3, 4)), lambda i, w: w[i])],
    "RepeatInterleaveInt": [((X, 2, 1), lambda x, n, d: x.repeat(2, 1)), ((X, 3), lambda x, n: x.repeat(3))],
    "Repeat": [((X, 2, 1), lambda x, *n: np.tile(x, n)), ((X, (2, 1, 3)), np.tile)],
    "Roll": [((X, 2, 1), np.roll), ((X, (1, -2), (0, 1)), np.roll), ((X, 3), np.roll)],
    "ScatterAddExt": [((a(4, 2), 0, np.array([[0, 3], [2, 3]], I32), a(2, 2)), scatter_add),
                      ((a(4, 2), 0, np.array([[0, 3], [2, 3]], I32), a(3, 2)), scatter_add)],
    "ConstantPadND": [((X, (1, 2), 0.5), lambda x, p, v: np.pad(x, [(0, 0), (1, 2)], constant_values=0.5)),
                      ((X, (1, -2, 0, 1)), lambda x, p: np.pad(x, [(0, 1), (1, 0)])[:, :-2])],
    "OneHotExt": [((ROWS, 3, np.array(1, I32), np.array(0, I32)), lambda i, n, on, off: np.eye(3, dtype=I32)[i])],
    "FullLike": [((X, 2.5), np.full_like)], "ZerosLikeExt": [((X,), np.zeros_like)], "OnesLikeExt": [((X,), np.ones_like)],
    "EmptyLike": [((X,), np.zeros_like)], "NewZeros": [((X, (2, 3)), lambda x, s: np.zeros(s))],
    "NewOnes": [((X, 3), lambda x, s: np.ones(s))], "NewEmpty": [((X, (2,)), lambda x, s: np.zeros(s))],
    "NewFull": [((X, (2, 3), 1.5), lambda x, s, v: np.full(s, v))],
    "Mm": [((a(4, 3), a(3, 2)), np.matmul)], "Mv": [((a(4, 3), a(3)), np.matmul)], "Dot": [((a(4), a(4)), np.dot)],
    "Vdot": [((a(4), a(4)), np.dot)], "Outer": [((a(4), a(3)), np.outer)],
    "MatMulExt": [(s, np.matmul) for s in ((a(1, 1, 4), a(4, 2)), (a(1, 3, 1, 4), a(1, 4, 2)),
                                           (a(2, 1, 3, 1, 4), a(1, 4, 2)),
                                           (a(3, 4), a(2, 4, 2)), (a(1, 1, 4), a(4)))],
    "Addmm": [((a(4, 2), a(4, 3), a(3, 2), 0.5, 2), lambda x, p, q, b, g: 0.5 * x + 2 * (p @ q)),
              ((np.full((4, 2), np.nan, np.float32), a(4, 3), a(3, 2), 0), lambda x, p, q, b: p @ q)],
    "Addmv": [((a(4), a(4, 3), a(3)), lambda x, p, q: x + p @ q)],
    "Baddbmm": [((a(2, 4, 2), a(2, 4, 3), a(2, 3, 2)), lambda x, p, q: x + p @ q)],
    "Addbmm": [((a(4, 2), a(3, 4, 3), a(3, 3, 2), 1, 2), lambda x, p, q, b, g: x + 2 * (p @ q).sum(0))],
    "Conv1DExt": [((a(2, 4, 7), a(6, 4, 3), a(6), 2, 1), conv)],
    "Conv2DExt": [((a(2, 4, 5, 4), a(6, 2, 3, 2), a(6), (1, 2), (1, 0), 1, 2), conv),
                  ((a(4, 5, 5), a(3, 4, 2, 2), None, 1, 0, 2), conv)],
    "Conv3DExt": [((a(2, 2, 4, 3, 3), a(4, 2, 2, 2, 2), a(4), 1, 1), conv),
                  ((a(1, 4, 3, 3, 3), a(4, 2, 2, 2, 2), None, 1, 0, 1, 2), conv)],
    "Conv1DPadding": [((a(2, 4, 7), a(6, 4, 4), a(6), 1, "same"), conv)],
    "Conv2DPadding": [((a(2, 4, 5, 4), a(3, 4, 2, 3), a(3), 1, "same"), conv),
                      ((a(2, 4, 5, 4), a(3, 4, 2, 3), None, 2, "valid"), conv)],
    "Conv3DPadding": [((a(1, 2, 3, 3, 4), a(2, 2, 2, 1, 3), None, 1, "same"), conv)],
    "Convolution": [((a(2, 4, 5, 4), a(6, 4, 3, 2), None, (1, 1), (1, 0), (1, 1)),
                     lambda x, w, b, s, p, d: conv(x, w, b, s, p, d)),
                    ((a(2, 4, 3, 3), a(4, 3, 3, 2), None, (2, 2), (1, 0), (1, 1), True, (1, 0)),
                     lambda x, w, b, s, p, d, t, e: conv_transpose(x, w, b, s, p, e, 1, d))],
    "ConvolutionStr": [((a(2, 4, 5, 4), a(6, 4, 3, 2), None, 1, "same"), lambda x, w, b, s, p: conv(x, w, b, s, p))],
    "ConvTranspose2D": [((a(2, 4, 3, 3), a(4, 3, 3, 3), a(3), 2, 1, 1), conv_transpose),
                        ((a(2, 4, 3, 3), a(4, 3, 2, 2), a(6), 1, 0, 0, 2, 2), conv_transpose)],
    "FuncMaxPool2D": [((a(2, 3, 5, 6), (3, 2), (2, 2), (1, 1)), lambda x, k, s, p: (pool(x, k, s, p, max_inside), None))],
    "AvgPool1D": [((a(2, 3, 7), 2), lambda x, k: pool(x, (2,), (2,), (0,), mean_inside))],
    "AvgPool2D": [((a(2, 3, 5, 6), 2, 2, 1, False, False), lambda x, *_: pool(x, (2, 2), (2, 2), (1, 1), mean_inside)),
                  ((a(3, 5, 6), (2, 3), 1), lambda x, *_: pool(x, (2, 3), (1, 1), (0, 0), mean_inside)),
                  ((a(2, 3, 5, 6), 2, 2, 0, True), lambda x, *_: pool(x, (2, 2), (2, 2), (0, 0), mean_inside, True))],
    "AvgPool3DExt": [((a(2, 1, 4, 3, 4), 2), lambda x, k: pool(x, (2,) * 3, (2,) * 3, (0,) * 3, mean_inside))],
    "AdaptiveAvgPool1D": [((a(2, 3, 7), 3), lambda x, s: adaptive(x, (3,), np.mean))],
    "AdaptiveAvgPool2DExt": [((a(2, 3, 5, 6), (2, 4)), lambda x, s: adaptive(x, s, np.mean))],
    "AdaptiveAvgPool3DExt": [((a(2, 1, 4, 3, 5), (2, 2, 2)), lambda x, s: adaptive(x, s, np.mean))],
    "AdaptiveMaxPool1D": [((a(2, 3, 7), 3), lambda x, s: (adaptive(x, (3,), np.max), None))],
    "UpsampleLinear1D": [((a(2, 3, 5), (8,), None, False), lambda x, *_: linear_1d(x, 8, False, 2)),
                         ((a(2, 3, 5), (9,), None, True), lambda x, *_: linear_1d(x, 9, True, 2))],
    "UpsampleBilinear2D": [((a(2, 3, 4, 5), None, (2.0, 2.0), False),
                            lambda x, *_: linear_1d(linear_1d(x, 8, False, 2), 10, False, 3))],
    "UpsampleTrilinear3D": [((a(1, 2, 3, 4, 2), (5, 5, 3), None, True),
                             lambda x, *_: linear_1d(linear_1d(linear_1d(x, 5, True, 2), 5, True, 3), 3, True, 4))],
    "UpsampleBicubic2D": [((a(1, 2, 4, 5), (7, 6), None, False), lambda x, *_: cubic_1d(cubic_1d(x, 7, 2), 6, 3))],
    "Im2ColExt": [((a(2, 3, 4, 4), (2, 2)), lambda x, k: patches(x, 2))],
    "Col2ImExt": [((a(2, 8, 9), (4, 4), (2, 2)), lambda x, s, k: unpatch(x, (4, 4), 2))],
}


def _layer_norm(x, dims, w, b):
    middle = x.mean(dims, keepdims=True)
    scale = 1 / np.sqrt(x.var(dims, keepdims=True) + 1e-5)
    return (x - middle) * scale * w + b, middle, scale


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
