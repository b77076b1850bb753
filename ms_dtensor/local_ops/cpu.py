# SPDX-License-Identifier: Apache-2.0
"""Decompositions of primitives that MindSpore 2.10 has no CPU kernel for, by primitive name.

On a CPU mesh the dispatcher calls these with the primitive's own arguments, so that a model written for Ascend runs on
a laptop; elsewhere the native kernel runs. Each is differentiable by its parts and compared with NumPy in the tests.
"""
from __future__ import annotations

from mindspore import ops


def silent_clone(x):
    """`Clone`."""
    return ops.logical_not(ops.logical_not(x)) if str(x.dtype) == "Bool" else x * 1


TABLE = {"Clone": silent_clone}
