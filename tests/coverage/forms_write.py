# SPDX-License-Identifier: Apache-2.0
"""Writing by index: the rule behind `x[...] = value`, whose result takes the place of x (`tests/dist/cases_bypass.py`)."""
from __future__ import annotations

from .form import Form
from .forms_index import looked_up
from .forms_view import several


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


FORMS = [
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
