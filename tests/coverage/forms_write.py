# SPDX-License-Identifier: Apache-2.0
"""In-place ops and writing by index: the rules of the values that take the place of x (`tests/dist/cases_bypass.py`)."""
from __future__ import annotations

from .form import Form
from .forms_index import looked_up
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

FORMS = [
    *IN_PLACE,
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
