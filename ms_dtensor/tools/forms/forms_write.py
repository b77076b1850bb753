# SPDX-License-Identifier: Apache-2.0
"""In-place ops and writing by index: the rules of the values that take the place of x (`tests/tensor/cases_in_place.py`)."""
from __future__ import annotations

import numpy as np
from mindspore import ops

from .form import Form
from .forms_index import distinct, looked_up, scattered
from .forms_view import several
from .samples import arrays


def setting(index, value=None):
    """`x[index] = v` (or a number), as a function of x and v."""
    def fn(x, v):
        x[index] = v if value is None else value
    return fn


def at_tensor(x, i, v):
    """`x[i] = v`."""
    x[i] = v


def at_columns(x, i, v):
    """`x[:, i] = v`."""
    x[:, i] = v


def at_pairs(x, i, v):
    """`x[i, i] = v`."""
    x[i, i] = v


def in_place(method, *static):
    """`x.method_(other, *static)`."""
    return lambda x, *others: getattr(x, method)(*others, *static)


SAME = (several((4, 6), (4, 6)), several((5, 3), (3,)), several((4, 2, 3), (1, 2, 1)))
ALONE = (several((4, 6)), several((5, 3)))
_POSITIVE = (arrays((4, 6), low=0.5, high=2.0), arrays((5, 3), low=0.5, high=2.0))


def _mask(x, m):
    x.masked_fill_(m > 0, 2.5)


IN_PLACE = [
    *(Form(f"x.{m}(y)", in_place(m), SAME) for m in ("add_", "sub_", "mul_", "copy_")),
    *(Form(f"x.{m}(number)", in_place(m, 1.5), ALONE) for m in ("add_", "sub_", "mul_", "div_", "fill_")),
    Form("x.div_(y)", in_place("div_"), (arrays((4, 6), (4, 6), low=0.5, high=2.0), arrays((5, 3), (3,), low=0.5, high=2.0))),
    Form("x.add_(y, alpha)", lambda x, y: x.add_(y, alpha=0.5), SAME),
    Form("x.sub_(y, alpha)", lambda x, y: x.sub_(y, alpha=0.5), SAME),
    *(Form(f"x.{m}()", in_place(m), ALONE) for m in ("zero_", "exp_", "floor_", "tanh_", "sigmoid_")),
    Form("x.log_()", in_place("log_"), _POSITIVE),
    Form("x.clamp_(a, b)", in_place("clamp_", -0.5, 0.5), ALONE),
    Form("x.masked_fill_(m, number)", _mask, SAME[:2]),
    Form("x.remainder_(number)", in_place("remainder_", 0.7), ALONE),
    Form("x.floor_divide_(number)", in_place("floor_divide_", 0.7), ALONE),
]

def put(*at, dims=1, source, accumulate=False, low=0):
    """Arguments of `x.index_put`: a table, `dims` index tensors (of different rows, if they are not added up), values."""
    def make(rng):
        shape, ids = at[0], at[1]
        n = int(np.prod(ids))
        picked = [rng.integers(low, shape[d], ids) if accumulate else (rng.permutation(shape[d])[:n] + low).reshape(ids)
                  for d in range(dims)]
        return rng.normal(size=shape).astype("f"), *picked, rng.normal(size=source).astype("f")
    return make


def _put(**named):
    return lambda x, *rest: x.index_put(rest[:-1], rest[-1], **named)


def _put_(x, *rest, **named):
    x.index_put_(rest[:-1], rest[-1], **named)


PUT = (put((6, 4), (3,), source=(3, 4)), put((5, 3), (2,), source=(3,)), put((4, 6), (2, 2), source=(2, 2, 6), low=-4),
       put((6, 5), (3,), dims=2, source=(3,)), put((4, 5, 3), (2,), dims=2, source=(2, 3)), put((5, 4, 3), (), dims=3, source=()))
ADD = tuple(put(*a, accumulate=True, **k) for a, k in (
    (((6, 4), (5,)), {"source": (5, 4)}), (((5, 3), (7,)), {"source": (3,)}), (((4, 6), (2, 3)), {"source": (2, 3, 1), "low": -4}),
    (((4, 5), (6,)), {"dims": 2, "source": (6,)}), (((4, 3, 5), (2,)), {"dims": 2, "source": (1, 5)})))
ROWS = (distinct((4, 6), 2, source=(2, 6)), distinct((5, 3), 4, source=(4, 3)), distinct((4, 2, 3), 3, source=(3, 2, 3)))
REPEATED = (looked_up((4, 6), (3,), 4, source=(3, 6), dtype="int32"), looked_up((5, 3), (2, 2), 5, source=(2, 2, 3), dtype="int32"))
COLUMNS = (distinct((6, 4), 2, 1, source=(6, 2), dtype="int64"), distinct((3, 5), 3, 1, source=(3, 3), dtype="int64"))
POINTS = (distinct((4, 6), 2, source=(2, 6), column=True), distinct((5, 2, 2), 3, source=(3, 2, 2), column=True))
MASKED = (lambda rng: (rng.normal(size=(4, 3)).astype("f"), rng.normal(size=(4, 3)) > 0, rng.normal(size=12).astype("f")),)


def _rows(name):
    return lambda x, i, v: getattr(ops, name)(x, i, v)


BY_INDEX = [
    Form("x.index_put", _put(), PUT), Form("x.index_put(accumulate)", _put(accumulate=True), ADD),
    Form("x.index_put_", _put_, PUT), Form("x.index_put_(accumulate)", lambda x, *r: _put_(x, *r, accumulate=True), ADD),
    Form("x.index_add_", lambda x, i, v: x.index_add_(0, i, v), ROWS), Form("x.index_add_(alpha)", lambda x, i, v: x.index_add_(1, i, v, alpha=2), COLUMNS),
    Form("x.index_copy_", lambda x, i, v: x.index_copy_(0, i, v), ROWS), Form("x.index_copy_(dim)", lambda x, i, v: x.index_copy_(1, i, v), COLUMNS),
    Form("x.index_fill_", lambda x, i, v: x.index_fill_(0, i, 1.5), ROWS), Form("x.index_fill_(dim)", lambda x, i, v: x.index_fill_(-1, i, 1.5), COLUMNS),
    Form("x.index_fill_(tensor)", lambda x, i, v: x.index_fill_(0, i, v.sum()), ROWS[:1]),
    Form("x.index_fill(tensor)", lambda x, i, v: x.index_fill(0, i, v.sum()), ROWS[:1]),
    Form("x.scatter_", lambda x, i, v: x.scatter_(0, i, v), (scattered((4, 6), 0, 2), scattered((5, 3), 0, 3))),
    Form("x.scatter_(value)", lambda x, i, v: x.scatter_(1, i, 2.5), (scattered((4, 6), 1, 2),)),
    Form("x.scatter_(reduce)", lambda x, i, v: x.scatter_(0, i, v, reduce="add"), (scattered((4, 6), 0, 2),)),
    Form("x.scatter_add_", lambda x, i, v: x.scatter_add_(0, i, v), (looked_up((4, 6), (5, 6), 4, source=(5, 6)),)),
    Form("x.masked_scatter_", lambda x, m, v: x.masked_scatter_(m, v), MASKED),
    Form("x.masked_fill_(m, tensor)", lambda x, y: x.masked_fill_(y > 0, y.max()), SAME[:1]),
    *(Form(f"ops.scatter_{k}", _rows(f"scatter_{k}"), REPEATED if k == "add" else ROWS) for k in ("update", "add", "max", "min", "mul", "div")),
    Form("ops.ScatterUpdate", lambda x, i, v: ops.ScatterUpdate()(x, i, v), ROWS), Form("ops.ScatterSub", lambda x, i, v: ops.ScatterSub()(x, i, v), REPEATED),
    *(Form(f"ops.scatter_nd_{k}", _rows(f"scatter_nd_{k}"), POINTS) for k in ("add", "sub", "max", "min", "mul", "div")),
    Form("ops.ScatterNdUpdate", lambda x, i, v: ops.ScatterNdUpdate()(x, i, v), POINTS),
]

FORMS = [
    *IN_PLACE, *BY_INDEX,
    Form("x[a:b] = v", setting(slice(1, 3)), (several((4, 6), (2, 6)), several((5, 3), (3,)), several((4, 2, 3), (1, 2, 1)))),
    Form("x[a:b] = number", setting(slice(1, 3), 2.5), (several((4, 6), (1,)), several((5, 3), (1,)))),
    Form("x[0] = v", setting(0), (several((4, 6), (6,)), several((5, 3), (1,)), several((4, 2, 3), (2, 3)))),
    Form("x[-1, 2] = v", setting((-1, 2)), (several((4, 6), ()), several((5, 3), ()))),
    Form("x[:, a:b] = v", setting((slice(None), slice(1, 3))), (several((4, 6), (4, 2)), several((5, 4), (5, 1)))),
    Form("x[:, 1] = v", setting((slice(None), 1)), (several((4, 6), (4,)), several((5, 3), (1,)))),
    Form("x[::-2] = v", setting(slice(None, None, -2)), (several((4, 6), (2, 6)), several((5, 3), (3, 3)))),
    Form("x[...] = v", setting(Ellipsis), (several((4, 6), (4, 6)), several((5, 3), (3,)))),
    Form("x[:, None] = v", setting((slice(None), None)), (several((4, 6), (4, 1, 6)), several((5, 3), (1, 3)))),
    Form("x[[0, 2]] = v", setting([0, 2]), (several((4, 6), (2, 6)), several((5, 3), (1, 3)))),
    Form("x[1:, [0, 2]] = v", setting((slice(1, None), [0, 2])), (several((4, 6), (3, 2)), several((5, 3), (1, 2)))),
    Form("x[[0, 2], [1, 0]] = v", setting(([0, 2], [1, 0])), (several((4, 6), (2,)), several((5, 3, 2), (2, 2)))),
    Form("x[[0, 1], :, [1, 0]] = v", setting(([0, 1], slice(None), [1, 0])), (several((4, 3, 2), (2, 3)), several((3, 5, 4), (2, 1)))),
    Form("x[i] = v", at_tensor, (looked_up((6, 4), (1,), 6, source=(1, 4)), looked_up((5, 3), (1,), 5, low=-5, source=(3,)))),
    Form("x[:, i] = v", at_columns, (looked_up((3, 6), (1,), 6, source=(3, 1)),)),
    Form("x[i, i] = v", at_pairs, (looked_up((4, 6), (1,), 4, source=(1,)),)),
]
