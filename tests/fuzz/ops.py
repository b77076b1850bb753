# SPDX-License-Identifier: Apache-2.0
"""What random programs are made of: public MindSpore calls, each with a draw of its static arguments.

An `Op` draws from what is there, `draw(rng, xs) -> parameters or None`, and runs alike on tensors and on DTensors,
`run(xs, parameters) -> tensor or tuple`. `orders` says how often plain MindSpore differentiates it rightly. Nothing here
knows of layouts.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

FLOATS = ("float32", "float64")
INTS = ("int32", "int64")


def dtype_of(x) -> str:
    return str(x.dtype).lower().rsplit(".", 1)[-1]


def is_float(x) -> bool:
    return dtype_of(x) in FLOATS


@dataclass(frozen=True)
class Op:
    """One call form. `kinds` says which operands it takes: "f" floats, "i" integers, "b" booleans, "*" anything."""

    name: str
    kinds: str
    run: Callable
    draw: Callable = lambda rng, xs: ()
    orders: int = 2
    writes: bool = False  # into its first operand
    jumps: Callable | None = None  # arrays of operands -> two arrays: where they meet, a value or derivative jumps

    def takes(self, xs) -> bool:
        return all(k == "*" or (k == "f" and is_float(x)) or (k == "i" and dtype_of(x) in INTS) or
                   (k == "n" and dtype_of(x) != "bool") or (k == "b" and dtype_of(x) == "bool")
                   for k, x in zip(self.kinds, xs))


def dim(rng, xs) -> tuple | None:
    n = len(xs[0].shape)
    return (int(rng.integers(-n, n)),) if n else None


def dim_keep(rng, xs) -> tuple | None:
    d = dim(rng, xs)
    return None if d is None else (*d, bool(rng.integers(2)))


def full_dim(rng, xs) -> tuple | None:
    """A dim that is not empty."""
    d = dim(rng, xs)
    return d if d is not None and xs[0].shape[d[0]] else None


def full_dim_keep(rng, xs) -> tuple | None:
    d = full_dim(rng, xs)
    return None if d is None else (*d, bool(rng.integers(2)))


def number(rng, xs) -> tuple:
    return (float(np.round(rng.normal() * 8) / 8),)  # plain MindSpore writes numbers as float32


def alike(rng, xs) -> tuple | None:
    """Operands that broadcast, of one dtype."""
    if dtype_of(xs[0]) != dtype_of(xs[1]):
        return None
    try:
        shape = np.broadcast_shapes(tuple(xs[0].shape), tuple(xs[1].shape))
    except ValueError:
        return None
    return () if math.prod(shape) <= 4096 else None


def products(rng, xs) -> tuple | None:
    a, b = (tuple(x.shape) for x in xs)
    fits = len(a) == len(b) == 2 and a[1] == b[0] and a[1] and dtype_of(xs[0]) == dtype_of(xs[1])
    return () if fits else None


def new_shape(rng, xs) -> tuple | None:
    shape = tuple(xs[0].shape)
    n = math.prod(shape)
    if not n:
        return None
    out = []
    while n > 1 and len(out) < 3:
        factors = [k for k in range(1, n + 1) if n % k == 0]
        out.append(int(rng.choice(factors)))
        n //= out[-1]
    return ((*out, n) if n > 1 or not out else tuple(out),)


def order(rng, xs) -> tuple | None:
    n = len(xs[0].shape)
    return (tuple(int(d) for d in rng.permutation(n)),) if n > 1 else None


def index(rng, xs) -> tuple | None:
    """An index of slices, integers, None and an ellipsis."""
    items: list[Any] = []
    for n in xs[0].shape:
        kind = rng.integers(5)
        if kind == 0 and n:
            items.append(int(rng.integers(-n, n)))
        elif kind == 1:
            items.append(slice(None))
        else:
            lo, hi = sorted(int(k) for k in rng.integers(0, n + 1, 2))
            items.append(slice(lo, hi, int(rng.integers(1, 3))))
    if rng.integers(4) == 0:
        items.insert(int(rng.integers(len(items) + 1)), None)
    if rng.integers(4) == 0:
        items = [*items[:1], Ellipsis, *items[2:]] if len(items) > 1 else [Ellipsis]
    return (tuple(items),)


def rows(rng, xs) -> tuple | None:
    d = full_dim(rng, xs)
    if d is None:
        return None
    n = xs[0].shape[d[0]]
    return (*d, tuple(int(i) for i in rng.integers(0, n, int(rng.integers(1, 4)))))


def pieces(rng, xs) -> tuple | None:
    d = full_dim(rng, xs)
    if d is None:
        return None
    n, sizes = xs[0].shape[d[0]], []
    while sum(sizes) < n:
        sizes.append(int(rng.integers(1, n - sum(sizes) + 1)))
    return (sizes, *d)


def part(rng, xs) -> tuple | None:
    d = full_dim(rng, xs)
    if d is None:
        return None
    lo, hi = sorted(int(k) for k in rng.integers(0, xs[0].shape[d[0]] + 1, 2))
    return (*d, lo, hi - lo)


def wider(rng, xs) -> tuple:
    return ((int(rng.integers(1, 4)), *xs[0].shape),)


def other_dtype(rng, xs) -> tuple:
    return (str(rng.choice((*FLOATS, *INTS))),)


def sliced(rng, xs) -> tuple | None:
    at = index(rng, xs)
    return at and (tuple(i for i in at[0] if i is not None),)


def written(rng, xs) -> tuple | None:
    at = sliced(rng, xs)
    return at and (*at, *((int(rng.integers(9)),) if dtype_of(xs[0]) in INTS else number(rng, xs)))


def zero(x, *_):
    return x, np.zeros_like(x)


def both(x, y):
    return x, y


def integers(x, *_):
    return x, np.round(x)


def best_two(x, d, *_):
    """The largest and the next along a dim."""
    x = np.sort(np.moveaxis(x, d, 0), 0)
    return x[-1:], x[-2:-1]


def _plain_empty(x) -> bool:
    return type(x) is Tensor and 0 in x.shape


def _sum(xs, d, keep):
    """Of no elements plain MindSpore on CPU returns what the memory held."""
    x = xs[0]
    if _plain_empty(x):
        return Tensor(x.asnumpy().sum(d, keepdims=keep, dtype=np.int64 if dtype_of(x) in INTS else None))
    return mint.sum(x, d, keepdim=keep)


def _cumsum(xs, d):
    """Plain MindSpore on CPU divides by the number of elements and ends the process (SIGFPE) where there are none."""
    return xs[0] * 1 if _plain_empty(xs[0]) else xs[0].cumsum(d)


def _softmax(xs, d):
    """A first gradient along a dim of one element spoils all later ones of plain MindSpore on CPU."""
    x = mint.tanh(xs[0])
    return mint.exp(x - x) if type(x) is Tensor and x.shape[d] == 1 else mint.softmax(x, d)


def _index(xs, at):
    """Under a second derivative plain MindSpore on CPU divides by the number of elements here too."""
    x = xs[0]
    return Tensor(x.asnumpy()[at]) if _plain_empty(x) else x[at]


def _split(xs, sizes, d):
    """The backward of plain MindSpore's split on CPU reads a strided cotangent as contiguous; that of narrow is right."""
    x = xs[0]
    if type(x) is not Tensor:
        return mint.split(x, sizes, d)
    return tuple(mint.narrow(x, d, sum(sizes[:k]), n) for k, n in enumerate(sizes))


def _set(xs, at, value):
    xs[0][at] = value
    return xs[0]


def _set_tensor(xs, at):
    target = xs[0][at]
    xs[0][at] = xs[0][at] * 2 if dtype_of(target) != "bool" else target
    return xs[0]


def _fill_view(xs, at, value):
    view = xs[0][at]
    if view.shape:
        view[:] = value
    return view


def _copy(xs):
    x = xs[0] * 1  # not into a view, where plain MindSpore on CPU loses the copy
    x.copy_(x * 3)
    return x


def _cast(xs, name):
    return xs[0].astype(getattr(ms, name))


def _rows(xs, d, ids):
    return mint.index_select(xs[0], d, Tensor(np.array(ids, np.int32))) if type(xs[0]) is Tensor else \
        xs[0].index_select(d, constant_like(xs[0], ids))


def constant_like(x, ids):
    """A literal, laid out where `x` is a DTensor."""
    made = Tensor(np.array(ids, np.int32))
    from ms_dtensor import distribute_tensor
    return distribute_tensor(made, x.device_mesh, src_data_rank=None)


OPS = (
    Op("sin", "f", lambda xs: mint.sin(xs[0])), Op("tanh", "f", lambda xs: mint.tanh(xs[0])),
    Op("exp", "f", lambda xs: mint.exp(mint.tanh(xs[0]))), Op("sigmoid", "f", lambda xs: mint.sigmoid(xs[0]), orders=1),
    Op("relu", "f", lambda xs: mint.nn.functional.relu(xs[0]), orders=1, jumps=zero), Op("neg", "n", lambda xs: -xs[0]),
    Op("abs", "f", lambda xs: mint.abs(xs[0]), orders=1, jumps=zero), Op("square", "f", lambda xs: xs[0] * xs[0]),
    Op("cube", "f", lambda xs: mint.tanh(xs[0]) ** 3), Op("sqrt", "f", lambda xs: mint.sqrt(xs[0] * xs[0] + 0.5)),
    Op("times a number", "f", lambda xs, k: xs[0] * k, number), Op("a number minus", "f", lambda xs, k: k - xs[0], number),
    Op("plus one", "i", lambda xs: xs[0] + 1), Op("times two", "i", lambda xs: 2 * xs[0]),
    Op("add", "nn", lambda xs: xs[0] + xs[1], alike), Op("sub", "nn", lambda xs: mint.sub(xs[0], xs[1]), alike),
    Op("mul", "ff", lambda xs: mint.tanh(xs[0]) * xs[1], alike),
    Op("div", "ff", lambda xs: xs[0] / (xs[1] * xs[1] + 1.0), alike),
    Op("maximum", "nn", lambda xs: mint.maximum(xs[0], xs[1]), alike, 1, jumps=both),
    Op("where", "ff", lambda xs: mint.where(xs[0] > xs[1], xs[0], xs[1] * 2.0), alike, 1, jumps=both),
    Op("matmul", "ff", lambda xs: mint.matmul(mint.tanh(xs[0]), xs[1]), products),
    Op("gram", "f", lambda xs: mint.matmul(mint.tanh(xs[0]), mint.transpose(xs[0], 0, 1)),
       lambda rng, xs: () if len(xs[0].shape) == 2 and 0 not in xs[0].shape else None),
    Op("sum", "f", _sum, dim_keep),
    Op("sum of all", "f", lambda xs: xs[0].sum(), lambda rng, xs: () if math.prod(xs[0].shape) else None),
    Op("mean", "f", lambda xs, d, k: mint.mean(xs[0], d, keepdim=k), full_dim_keep),
    Op("amax", "f", lambda xs, d, k: mint.amax(xs[0], d, keepdim=k), full_dim_keep, 1, jumps=best_two),
    Op("amin", "f", lambda xs, d, k: mint.amin(xs[0], d, keepdim=k), full_dim_keep, 1,
       jumps=lambda x, d, k: best_two(-x, d)),
    Op("sum of integers", "i", _sum, dim_keep, 0),
    Op("cumsum", "f", _cumsum, full_dim),
    Op("var", "f", lambda xs, d: mint.tanh(xs[0]).var(d), full_dim, 1),
    Op("softmax", "f", _softmax, full_dim, 1),
    Op("logsumexp", "f", lambda xs, d: mint.logsumexp(mint.tanh(xs[0]), d), full_dim, 1),
    Op("argmax", "f", lambda xs, d: xs[0].argmax(d), full_dim, 0, jumps=best_two),
    Op("any", "b", lambda xs, d: xs[0].any(d), full_dim, 0), Op("all", "b", lambda xs, d: xs[0].all(d), full_dim, 0),
    Op("greater", "ff", lambda xs: xs[0] > xs[1], alike, 0, jumps=both),
    Op("equal", "ii", lambda xs: xs[0] == xs[1], alike, 0),
    Op("not", "b", lambda xs: mint.logical_not(xs[0]), orders=0),
    Op("masked", "fb", lambda xs: xs[0] * xs[1].astype(xs[0].dtype), lambda rng, xs: alike(rng, (xs[0], xs[0]))
       if tuple(xs[0].shape) == tuple(xs[1].shape) else None),
    Op("cast", "n", _cast, other_dtype, 1, jumps=integers),
    Op("reshape", "*", lambda xs, s: mint.reshape(xs[0], s), new_shape),
    Op("view", "*", lambda xs, s: xs[0].reshape(s) if len(xs[0].shape) > 3 else xs[0].contiguous().view(s), new_shape),
    Op("permute", "*", lambda xs, o: mint.permute(xs[0], o), order),
    Op("transpose", "*", lambda xs, d, e: mint.transpose(xs[0], d, e),
       lambda rng, xs: (*dim(rng, xs), *dim(rng, xs)) if len(xs[0].shape) > 1 else None),
    Op("unsqueeze", "*", lambda xs, d: mint.unsqueeze(xs[0], d), lambda rng, xs: (int(rng.integers(len(xs[0].shape) + 1)),)),
    Op("squeeze", "*", lambda xs, d: mint.squeeze(xs[0], d), dim),
    Op("expand", "*", lambda xs, s: xs[0].expand(s),
       lambda rng, xs: wider(rng, xs) if math.prod(xs[0].shape) < 500 else None),
    Op("index", "*", _index, index),
    Op("narrow", "*", lambda xs, d, a, n: mint.narrow(xs[0], d, a, n), part, 1),
    Op("rows", "*", _rows, rows), Op("split", "*", _split, pieces),
    Op("chunk", "*", lambda xs, d, n: mint.chunk(xs[0], n, d),
       lambda rng, xs: (d := full_dim(rng, xs)) and (*d, int(rng.integers(1, 4)))),
    Op("unbind", "*", lambda xs, d: ops.unbind(xs[0], d),
       lambda rng, xs: d if (d := full_dim(rng, xs)) and xs[0].shape[d[0]] < 5 else None, 1),
    Op("cat", "**", lambda xs, d: mint.cat([xs[0], xs[1]], d), lambda rng, xs: full_dim(rng, xs)
       if tuple(xs[0].shape) == tuple(xs[1].shape) and dtype_of(xs[0]) == dtype_of(xs[1]) else None),
    Op("stack", "**", lambda xs, d: ops.stack([xs[0], xs[1]], d), lambda rng, xs: (int(rng.integers(len(xs[0].shape) + 1)),)
       if tuple(xs[0].shape) == tuple(xs[1].shape) and dtype_of(xs[0]) == dtype_of(xs[1]) else None),
    Op("detach", "f", lambda xs: ops.stop_gradient(xs[0]) + xs[0] * 0.5, orders=1),
    Op("write a number", "n", _set, written, 0, True), Op("write its double", "n", _set_tensor, sliced, 0, True),
    Op("write through a view", "n", _fill_view, written, 0, True), Op("copy", "f", _copy, orders=0),
)
