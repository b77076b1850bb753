# SPDX-License-Identifier: Apache-2.0
"""Indexing, lookups, scatters and what is refused because its shape depends on data, in every public spelling."""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from ...errors import OpRuleError
from .form import Form
from .forms_view import CUBE, MATRIX, of
from .samples import arrays

F = mint.nn.functional
PLAIN = MATRIX[:2] + CUBE[:1]


def looked_up(shape, index_shape, below, *, low=0, dtype="int64", source=None):
    """Arguments: a table, an index of numbers in [low, below), and a source of its own shape, if given."""
    def make(rng):
        out = [rng.normal(size=shape).astype("float32"), rng.integers(low, below, index_shape).astype(dtype)]
        if source is not None:
            out.append(rng.normal(size=source).astype("float32"))
        return tuple(out)
    return make


def distinct(shape, rows, dim=0, *, source, dtype="int32", column=False):
    """Arguments: a table, different row numbers of `dim`, and a source."""
    def make(rng):
        ids = rng.permutation(shape[dim])[:rows].astype(dtype)
        return (rng.normal(size=shape).astype("float32"), ids.reshape(-1, 1) if column else ids,
                rng.normal(size=source).astype("float32"))
    return make


def scattered(shape, dim, rows):
    """Arguments: a table, an index of `rows` rows along `dim` without duplicates, and a source of the index's shape."""
    def make(rng):
        order = rng.normal(size=shape).argsort(dim)
        ids = np.take(order, range(rows), dim)
        return rng.normal(size=shape).astype("float32"), ids, rng.normal(size=ids.shape).astype("float32")
    return make


ROWS = (looked_up((5, 4), (3,), 5), looked_up((6, 3), (2, 4), 6), looked_up((4, 6), (4,), 4, low=-4),
        looked_up((7, 1), (1,), 7, dtype="int32"))
COLUMNS = (looked_up((3, 5), (4,), 5), looked_up((2, 4, 3), (2,), 3, low=-3))
ALONG = (looked_up((4, 6), (4, 6), 4), looked_up((5, 3), (2, 3), 5), looked_up((4, 2), (4, 2), 4, low=-4))
TOKENS = (looked_up((8, 4), (2, 3), 8), looked_up((5, 3), (4,), 5), looked_up((6, 2), (1, 1), 6, dtype="int32"))
ROWWISE = (distinct((4, 6), 2, source=(2, 6)), distinct((5, 3), 4, source=(4, 3)), distinct((4, 2, 3), 3, source=(3, 2, 3)))
COLUMNWISE = (distinct((6, 4), 2, 1, source=(6, 2)), distinct((3, 5), 3, 1, source=(3, 3)))
STACKED = (distinct((4, 6), 2, source=(2, 6), column=True), distinct((5, 2, 2), 3, source=(3, 2, 2), column=True))


def index(name, fn, args):
    """An indexing form: `fn(x)` or `fn(x, i)`."""
    return Form(name, fn, args)


def repeated(shape):
    """Arguments: a table, and how often each row is repeated."""
    return lambda rng: (rng.normal(size=shape).astype("f"), rng.integers(0, 3, shape[0]))


TRUE = np.array([[True, False, True], [False] * 3, [True] * 3, [False, True, False]])
DATA = (lambda rng: (rng.integers(-2, 3, (4, 3)).astype("f"),), lambda rng: (rng.integers(0, 3, (7,)).astype("f"),),
        lambda rng: (np.zeros((3, 2), "f"),))
BY_DATA = {
    "mint.masked_select": lambda x: mint.masked_select(x, x > 0), "ops.masked_select": lambda x: ops.masked_select(x, x > 0), "x.masked_select": lambda x: x.masked_select(x > 0),
    "mint.nonzero": mint.nonzero, "mint.nonzero(as_tuple)": lambda x: mint.nonzero(x, as_tuple=True), "ops.nonzero": ops.nonzero, "x.nonzero()": lambda x: x.nonzero(),
    "ops.argwhere": ops.argwhere, "x.argwhere()": lambda x: x.argwhere(), "mint.where(condition)": lambda x: mint.where(x > 0),
    "mint.unique": mint.unique, "mint.unique(inverse, counts)": lambda x: mint.unique(x, return_inverse=True, return_counts=True),
    "mint.unique(dim)": lambda x: mint.unique(x, dim=0), "ops.unique": ops.unique, "x.unique()": lambda x: x.unique(), "ops.unique_consecutive": ops.unique_consecutive,
    "mint.unique_consecutive": mint.unique_consecutive, "x.unique_consecutive(counts)": lambda x: x.unique_consecutive(return_inverse=True, return_counts=True),
    "mint.bincount": lambda x: mint.bincount((x * x).astype(ms.int32))}
FLAT = ("mint.bincount", "ops.unique")  # another is made flat first, of whatever the gathered data are
COUNTS = {"mint.bincount(minlength)": lambda _, x: mint.bincount(x, minlength=9), "x.bincount": lambda _, x: x.bincount(),
          "mint.bincount(weights)": lambda _, x: mint.bincount(x, weights=x.astype(ms.float32) * 0.5)}
BINS = {"mint.histc": lambda x: mint.histc(x, 4, -1, 1), "x.histc": lambda x: x.histc(4, -1, 1), "ops.histc": lambda x: ops.histc(x, 4, -1.0, 1.0)}
REPEATS = {"mint.repeat_interleave(tensor)": lambda x, n: mint.repeat_interleave(x, n, 0), "x.repeat_interleave(tensor)": lambda x, n: x.repeat_interleave(n, 0),
           "mint.repeat_interleave(tensor, flat)": lambda x, n: mint.repeat_interleave(x.reshape(-1)[:n.shape[0]], n),
           "x.repeat_interleave(list)": lambda x, n: x.repeat_interleave([1, 0, 2, 3, 1][:n.shape[0]], 0), "ops.repeat_interleave(list)": lambda x, n: ops.repeat_interleave(x, [2, 0, 1, 1, 3][:n.shape[0]], 0)}

FORMS = [
    # -- basic indexing
    index("x[0]", lambda x: x[0], PLAIN), index("x[-1]", lambda x: x[-1], PLAIN), index("x[a:b]", lambda x: x[1:3], PLAIN),
    index("x[:-1]", lambda x: x[:-1], PLAIN), index("x[::2]", lambda x: x[::2], PLAIN), index("x[::-1]", lambda x: x[::-1], PLAIN),
    index("x[3:0:-2]", lambda x: x[3:0:-2], PLAIN), index("x[:, 0]", lambda x: x[:, 0], PLAIN), index("x[:, a:b]", lambda x: x[:, 1:3], PLAIN),
    index("x[0, 1]", lambda x: x[0, 1], PLAIN), index("x[..., 0]", lambda x: x[..., 0], PLAIN), index("x[..., a:]", lambda x: x[..., 1:], PLAIN),
    index("x[None]", lambda x: x[None], PLAIN), index("x[:, None]", lambda x: x[:, None], PLAIN), index("x[:, None, 1]", lambda x: x[:, None, 1], PLAIN),
    index("x[1:, ..., None]", lambda x: x[1:, ..., None], PLAIN), index("x[...]", lambda x: x[...], PLAIN), index("x[:, -1:]", lambda x: x[:, -1:], PLAIN),
    index("x[2:1] empty", lambda x: x[2:1], PLAIN), index("x[()]", lambda x: x[()], PLAIN), index("iteration", lambda x: [r * 1 for r in x], PLAIN),
    index("x[..., :n] halves", lambda x: mint.cat((-x[..., 1:], x[..., :1]), -1), PLAIN),
    # -- advanced indexing
    index("x[i]", lambda x, i: x[i], ROWS), index("x[[0, 2]]", lambda x: x[[0, 2]], PLAIN[:2]), index("x[array]", lambda x: x[np.array([[0, 1], [-1, 0]])], PLAIN),
    index("x[:, i]", lambda x, i: x[:, i], COLUMNS[:1]), index("x[..., i]", lambda x, i: x[..., i], COLUMNS),
    index("x[i, i]", lambda x, i: x[i, i], (looked_up((5, 6), (3,), 5), looked_up((4, 4, 2), (2, 2), 4, low=-4))),
    index("x[i, 0]", lambda x, i: x[i, 0], ROWS[:3]), index("x[0, i]", lambda x, i: x[0, i], COLUMNS[:1]), index("x[i, :, 0]", lambda x, i: x[i, :, 0], (looked_up((4, 3, 2), (3,), 4),)),
    index("x[i, :, i]", lambda x, i: x[i, :, i], (looked_up((3, 4, 3), (2,), 3), looked_up((5, 2, 6), (2, 3), 5))),
    index("x[:, i, i]", lambda x, i: x[:, i, i], (looked_up((4, 3, 3), (2,), 3, low=-3), looked_up((3, 5, 5), (4,), 5))),
    index("x[i, None]", lambda x, i: x[i, None], ROWS[:2]), index("x[i, a:b]", lambda x, i: x[i, 1:3], ROWS[:3]), index("x[a:b, i]", lambda x, i: x[1:, i], COLUMNS[:1]),
    index("x[i[:, None], i]", lambda x, i: x[i[:, None], i], (looked_up((4, 4), (3,), 4), looked_up((5, 6), (2,), 5))),
    index("x[np.ix_]", lambda x: x[np.ix_([0, 2], [1, 2, 0])], PLAIN[:2]), index("x[i, None, i]", lambda x, i: x[i, None, i], (looked_up((4, 4), (3,), 4),)),
    Form("x[rows mask]", lambda x: x[np.array([True, False, True, False])], of(4, 3)),
    Form("x[:, columns mask]", lambda x: x[:, [True, False, True]], of(4, 3)), Form("x[array mask]", lambda x: x[TRUE], of(4, 3)),
    Form("x[mask, i]", lambda x: x[np.array([True, False, True, False]), [0, 2]], of(4, 3)),
    # -- lookups
    Form("ops.gather", lambda x, i: ops.gather(x, i, 0), ROWS), Form("ops.gather(axis)", lambda x, i: ops.gather(x, i, 1), COLUMNS[:1]),
    Form("ops.gather(batch_dims)", lambda x, i: ops.gather(x, i, 1, 1), (looked_up((4, 5), (4, 2), 5), looked_up((3, 4, 2), (3, 2), 4))),
    Form("ops.Gather", lambda x, i: ops.Gather()(x, i, 0), ROWS), Form("x.gather(index, axis)", lambda x, i: x.gather(i, 0), ROWS),
    Form("ops.index_select", lambda x, i: ops.index_select(x, 0, i), ROWS[:1] + ROWS[2:]), Form("mint.index_select", lambda x, i: mint.index_select(x, 0, i), ROWS[:1] + ROWS[2:]),
    Form("x.index_select", lambda x, i: x.index_select(1, i), COLUMNS[:1]),
    Form("x.take()", lambda x, i: x.take(i), ROWS), Form("mint.take", mint.take, ROWS),
    Form("x.take(axis)", lambda x, i: x.take(i, 0), ROWS), Form("x.take(axis=1)", lambda x, i: x.take(i, axis=1), COLUMNS[:1]),
    Form("x.take(mode)", lambda x, i: x.take(i, 0, mode="wrap"), (looked_up((4, 3), (3,), 9),)),
    Form("mint.gather", lambda x, i: mint.gather(x, 0, i), ALONG), Form("x.gather(dim, index)", lambda x, i: x.gather(0, i), ALONG),
    Form("x.gather(dim=, index=)", lambda x, i: x.gather(dim=0, index=i), ALONG), Form("ops.gather_elements", lambda x, i: ops.gather_elements(x, 0, i), ALONG),
    Form("ops.gather_d", lambda x, i: ops.gather_d(x, 0, i), ALONG), Form("ops.GatherD", lambda x, i: ops.GatherD()(x, 0, i), ALONG),
    Form("ops.gather_nd", ops.gather_nd, (looked_up((4, 6), (3, 1), 4), looked_up((3, 4, 2), (5, 2), 3))),
    Form("ops.GatherNd", lambda x, i: ops.GatherNd()(x, i), (looked_up((4, 6), (2, 3, 1), 4), looked_up((3, 4), (5, 2), 3))),
    Form("F.embedding", lambda w, i: F.embedding(i, w), TOKENS), Form("F.embedding(padding_idx)", lambda w, i: F.embedding(i, w, padding_idx=1), TOKENS),
    Form("ops.embedding", lambda w, i: ops.embedding(i, w), TOKENS), Form("ops.EmbeddingLookup", lambda w, i: ops.EmbeddingLookup()(w, i, 0), TOKENS),
    Form("nn.Embedding", lambda i: nn.Embedding(6, 4)(i), lambda rng: (rng.integers(0, 6, (2, 3)).astype("int32"),)),
    Form("mint.nn.Embedding", lambda i: mint.nn.Embedding(6, 4)(i), lambda rng: (rng.integers(0, 6, (2, 3)),)),
    # -- scatters
    Form("mint.scatter", lambda x, i, s: mint.scatter(x, 0, i, s), (scattered((4, 6), 0, 4), scattered((5, 3), 0, 2))),
    Form("ops.scatter", lambda x, i, s: ops.scatter(x, 1, i, s), (scattered((4, 6), 1, 3), scattered((2, 3), 1, 2))),
    Form("x.scatter", lambda x, i, s: x.scatter(0, i, s), (scattered((4, 6), 0, 2), scattered((3, 2, 4), 0, 2))),
    Form("x.scatter(src=)", lambda x, i, s: x.scatter(dim=0, index=i, src=s), (scattered((4, 6), 0, 2),)),
    Form("x.scatter(value)", lambda x, i, s: x.scatter(0, i, 2.0), (scattered((4, 6), 0, 2), scattered((5, 3), 0, 3))),
    Form("mint.scatter(value)", lambda x, i, s: mint.scatter(x, -1, i, 2.0), (scattered((4, 6), 1, 2),)),
    Form("x.scatter(add)", lambda x, i, s: x.scatter(0, i, s, reduce="add"), (scattered((4, 6), 0, 2),)),
    Form("x.scatter(multiply)", lambda x, i, s: x.scatter(0, i, s, reduce="multiply"), scattered((4, 6), 0, 2), raises=OpRuleError),
    Form("mint.scatter_add", lambda x, i, s: mint.scatter_add(x, 0, i, s), (looked_up((4, 6), (5, 6), 4, source=(5, 6)), looked_up((5, 3), (2, 3), 5, source=(4, 3)))),
    Form("x.scatter_add", lambda x, i, s: x.scatter_add(1, i, s), (looked_up((6, 4), (6, 5), 4, source=(6, 5)), looked_up((2, 3), (2, 2), 3, source=(2, 2)))),
    Form("ops.tensor_scatter_elements", lambda x, i, s: ops.tensor_scatter_elements(x, i, s, 0), (scattered((4, 6), 0, 2), scattered((5, 3), 0, 5))),
    Form("ops.tensor_scatter_elements(add)", lambda x, i, s: ops.tensor_scatter_elements(x, i, s, 0, "add"), (looked_up((4, 6), (5, 6), 4, source=(5, 6)),)),
    *(Form(f"ops.tensor_scatter_{k}", lambda x, i, s, fn=getattr(ops, f"tensor_scatter_{k}"): fn(x, i, s), STACKED) for k in ("add", "sub", "max", "min", "mul", "div")),
    *(Form(f"ops.TensorScatter{k}", lambda x, i, s, fn=getattr(ops, f"TensorScatter{k}"): fn()(x, i, s), STACKED) for k in ("Update", "Add", "Sub", "Max")),
    Form("ops.scatter_nd", lambda x, i, s: ops.scatter_nd(i, s, (4, 6)), STACKED[:1]), Form("ops.ScatterNd", lambda x, i, s: ops.ScatterNd()(i, s, (5, 2, 2)), STACKED[1:]),
    Form("mint.index_add", lambda x, i, s: mint.index_add(x, 0, i, s), ROWWISE), Form("mint.index_add(alpha)", lambda x, i, s: mint.index_add(x, 0, i, s, alpha=2), ROWWISE[:2]),
    Form("ops.index_add", lambda x, i, s: ops.index_add(x * 1, i, s, 0), ROWWISE), Form("x.index_add(dim)", lambda x, i, s: x.index_add(1, i, s), COLUMNWISE),
    Form("x.index_add(indices, y, axis)", lambda x, i, s: x.index_add(i, s, 0), ROWWISE[:2]),
    Form("ops.index_fill", lambda x, i, s: ops.index_fill(x, 0, i, 0.5), ROWWISE[:2]), Form("x.index_fill", lambda x, i, s: x.index_fill(1, i, 0.5), COLUMNWISE),
    Form("x.masked_scatter", lambda x, m, s: x.masked_scatter(m, s), lambda rng: (rng.normal(size=(4, 3)).astype("f"), rng.normal(size=(4, 3)) > 0, rng.normal(size=12).astype("f"))),
    # -- classes and places
    Form("ops.one_hot", lambda x, i: ops.one_hot(i, 5), (looked_up((1,), (4,), 5), looked_up((1,), (2, 3), 5, dtype="int32"))),
    Form("ops.one_hot(values)", lambda x, i: ops.one_hot(i, 5, 1.5, -0.5), (looked_up((1,), (4,), 5),)), Form("ops.one_hot(axis)", lambda x, i: ops.one_hot(i, 3, axis=0), (looked_up((1,), (4, 2), 3),)),
    Form("F.one_hot", lambda x, i: F.one_hot(i, 5), (looked_up((1,), (4,), 5), looked_up((1,), (2, 3), 5))), Form("nn.OneHot", lambda x, i: nn.OneHot(depth=5)(i), (looked_up((1,), (4,), 5, dtype="int32"),)),
    Form("ops.OneHot", lambda x, i: ops.OneHot(axis=0)(i, 5, Tensor(1.0), Tensor(0.0)), (looked_up((1,), (4,), 5, dtype="int32"),)),
    Form("mint.searchsorted", lambda a, b: mint.searchsorted(a, b), lambda rng: (np.sort(rng.normal(size=6)).astype("f"), rng.normal(size=(4, 3)).astype("f"))),
    Form("ops.searchsorted(rows)", lambda a, b: ops.searchsorted(a, b), lambda rng: (np.sort(rng.normal(size=(4, 6)), -1).astype("f"), rng.normal(size=(4, 3)).astype("f"))),
    Form("ops.searchsorted(right)", lambda a, b: ops.searchsorted(a, b, right=True), lambda rng: (np.sort(rng.normal(size=6)).astype("f"), rng.normal(size=(4,)).astype("f"))),
    # -- shape depends on data
    *(Form(name, fn, DATA[1:2] if name in FLAT else DATA) for name, fn in BY_DATA.items()),
    *(Form(f"{name} of a shard", fn, DATA[1:2], raises=OpRuleError) for name, fn in BY_DATA.items()),
    *(Form(name, fn, (looked_up((1,), (5,), 5), looked_up((1,), (7,), 4))) for name, fn in COUNTS.items()),
    *(Form(name, fn, (arrays((4, 3)), arrays((5,)), arrays((6, 2)))) for name, fn in BINS.items()),
    Form("x.histc(range of the data)", lambda x: x.histc(4), arrays((4, 3))),
    *(Form(name, fn, (repeated((4, 3)), repeated((5,)))) for name, fn in REPEATS.items()),
    Form("x[mask] of a shard", lambda x, m: x[m > 0], lambda rng: (rng.normal(size=(4, 3)), rng.normal(size=(4, 3))), raises=OpRuleError),
    Form("F.one_hot without classes", lambda x, i: F.one_hot(i), (looked_up((1,), (4,), 5), looked_up((1,), (2, 3), 5)), travels=True),
    Form("ops.one_hot without classes", lambda x: ops.one_hot(x.astype(ms.int64), -1), arrays((4, 3)), raises=OpRuleError),
]
