# SPDX-License-Identifier: Apache-2.0
"""What `debug.checks` does: a user's rule or gradient is tried on made-up values before its first real use.

The values depend on shapes and dtypes only, so all ranks come to the same verdict without talking. Each signature is
checked once. Not here: the proof itself (`verify/`, `DFunction.check_gradients`).
"""
from __future__ import annotations

import math

import numpy as np
from mindspore import Tensor

from ..core.tree import argument_names, map_leaves
from ..dispatch.operands import dtype_name

_done: set = set()  # (what, who, signature) that were checked, or are being checked
running = 0  # checks under way: their gradients are taken inside the user's, and are no second derivatives
_EXTENTS = (6, 4, 5, 8, 3, 7)  # extents of named dims: even, odd, and not all divisible by the axes of `verify`


def rule_once(registration, fn, args: tuple, kwargs: dict) -> None:
    """Verifies a registered rule on values like those of this call of `fn`; None, for a built-in one, is passed over.

    Raises:
        OpRuleError: the rule is wrong.
    """
    if registration is not None:
        _once(("rule", registration, fn, _signature((args, kwargs))),
              lambda: registration.check(fn, *_made_up(args), **_made_up(kwargs)))


def gradients_once(cls, args: tuple, kwargs: dict) -> None:
    """Compares a DFunction's backward with finite differences on values like those of this call.

    Raises:
        OpRuleError: they differ.
    """
    _once(("gradients", cls, _signature((args, kwargs))),
          lambda: cls.check_gradients(*_tensors(_made_up(args)), **_tensors(_made_up(kwargs))))


def by_names(registration, fn, shapes: str) -> None:
    """Verifies a rule whose `shapes` is text on operands made from it, if `fn` takes just these."""
    operands = [entry.split() for entry in shapes.split("->")[0].split(",")]
    if len(argument_names(fn)) != len(operands):
        return  # there are other arguments, which only a call can tell
    extent = dict(zip(sorted({n for names in operands for n in names}), _EXTENTS * math.ceil(len(operands))))
    rng = np.random.default_rng(0)
    made = [rng.normal(size=[int(n) if n.isdigit() else extent[n] for n in names]).astype(np.float32) for names in operands]
    _once(("rule", registration, fn), lambda: registration.check(fn, *made))


def _once(key, check) -> None:
    if key in _done:
        return
    global running
    _done.add(key)
    running += 1
    try:
        check()
    except BaseException:
        _done.discard(key)
        raise
    finally:
        running -= 1


def _signature(tree):
    if isinstance(tree, Tensor):
        return tuple(tree.shape), dtype_name(tree.dtype)
    if isinstance(tree, dict):
        return tuple((k, _signature(v)) for k, v in tree.items())
    return tuple(map(_signature, tree)) if isinstance(tree, tuple | list) else str(tree)


def _made_up(tree):
    """Arrays of the global shapes: random, integers 0 or 1, as they are legal indices almost anywhere."""
    def made(x):
        rng, kind = np.random.default_rng(len(x.shape)), dtype_name(x.dtype)
        if "float" in kind:
            return rng.normal(size=x.shape).astype(np.float32 if kind == "bfloat16" else kind)
        return rng.integers(0, 2, x.shape).astype(kind)
    return map_leaves(made, tree, Tensor)


def _tensors(tree):
    return map_leaves(Tensor, tree, np.ndarray)
