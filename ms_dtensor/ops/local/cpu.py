# SPDX-License-Identifier: Apache-2.0
"""Decompositions of primitives that MindSpore 2.10 has no CPU kernel for, by primitive name.

On a CPU mesh the dispatcher calls these with the primitive's own arguments, so that a model written for Ascend runs on
a laptop; elsewhere the native kernel runs. Each is differentiable by its parts and compared with NumPy in the tests.
The families are in `cpu_math`, `cpu_matmul`, `cpu_index`, `cpu_nn` and beside the local forms they belong to.
"""
from __future__ import annotations

import functools
import inspect

from ..rules.names import ALIASES
from . import cpu_elementwise, cpu_index, cpu_math, cpu_matmul, cpu_nn


def by_public_names(fn):
    """`fn` under all names that the public forms give its arguments (`axis` for `dim`, ...)."""
    known = inspect.signature(fn).parameters

    @functools.wraps(fn)
    def call(*args, **kwargs):
        if kwargs:
            kwargs = {k if k in known else ALIASES.get(k, k): v for k, v in kwargs.items()}
        return fn(*args, **kwargs)
    return call


TABLE = {name: by_public_names(fn) for family in (cpu_math, cpu_matmul, cpu_index, cpu_nn, cpu_elementwise)
         for name, fn in family.TABLE.items()}
