# SPDX-License-Identifier: Apache-2.0
"""Checks a rule that a user registered, with the user's own function as the whole op.

A decorated local function or a `DFunction` is one call of one op, so it needs no capturing; a public MindSpore function
is captured as usual, and must reach the registered primitive.
"""
from __future__ import annotations

import numpy as np
from mindspore import Tensor

from ...core.tree import argument_names, map_leaves
from .capture import Captured
from .check import Report, check_captured, check_rule

AXES = ((2,), (3,), (2, 2))


def check_registered(registration, fn, args, kwargs) -> Report:
    """The report of checking `registration` with sample arguments of `fn`."""
    report = Report()
    if hasattr(fn, "_op_name"):  # a DFunction
        whole, names = fn.apply, argument_names(fn.forward, 1)
    elif getattr(fn, "registration", None) is not None:
        whole, names = fn.__wrapped__, argument_names(fn)
    else:
        check_rule(fn, *args, axes=AXES, report=report, **kwargs)
        if registration.op not in report.ops:
            report.wrong.append(f"the function does not reach {registration.op!r}, but {sorted(report.ops)}")
        return report
    args, kwargs = map_leaves(Tensor, (tuple(args), kwargs), np.ndarray)
    result = whole(*args, **kwargs)
    names = (*names, *(k for k in kwargs if k not in names))
    captured = Captured(registration.op, whole, args, kwargs, result, own=(registration.op, names))
    check_captured(captured, AXES, np.random.default_rng(0), report)
    return report
