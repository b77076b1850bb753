# SPDX-License-Identifier: Apache-2.0
"""`x += y` and its kin: in place or a new tensor, as on one device.

MindSpore 2.10 writes into `x` on Ascend, where `+=` is `add_`. On CPU it makes a new tensor and leaves `x` alone, so
that `residual = h; h += f(h)` keeps the old values; a program must not mean something else on a CPU mesh. The methods
(`add_`, `mul_`, ...) say that they write, and do so everywhere.
"""
from __future__ import annotations

import operator

from mindspore import Tensor

from ..internals.target import on_cpu


def augmented_assignment(cls):
    """Gives a class of DTensors `+= -= *= /= //= %=`; Python makes the others of the operators themselves."""
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
        setattr(cls, f"__i{name}__", _assignment(getattr(operator, name), getattr(Tensor, f"__i{name}__")))
    return cls


def _assignment(new, in_place):
    def assign(self, other):
        return (new if on_cpu() else in_place)(self, other)
    return assign
