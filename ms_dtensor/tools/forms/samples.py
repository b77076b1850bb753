# SPDX-License-Identifier: Apache-2.0
"""Sample arguments: small arrays of many shapes, and the same op under each of its public spellings."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mindspore import Tensor, mint, ops

from .form import Form

F = mint.nn.functional
MODULES = {"mint": mint, "ops": ops, "F": F}


def arrays(*shapes, dtype="float32", low=None, high=None):
    """A maker of one array per shape: normal, or uniform between `low` and `high`; integers are small, none is 0."""
    def make(rng: np.random.Generator) -> tuple:
        return tuple(_array(rng, shape, dtype, low, high) for shape in shapes)
    return make


def _array(rng, shape, dtype, low, high):
    if dtype == "bool":
        return np.asarray(rng.random(shape) > 0.5)
    if "int" in dtype:
        return np.asarray(rng.integers(1 if low is None else low, 9 if high is None else high, shape), dtype)
    x = rng.normal(size=shape) if low is None else rng.uniform(low, high, shape)
    return np.asarray(x, dtype)


def then(make, *static):
    """The same arrays followed by static arguments."""
    return lambda rng: (*make(rng), *static)


def both(*makers):
    """The arrays of several makers, one after another."""
    return lambda rng: tuple(a for make in makers for a in make(rng))


def targets(shape, classes: int, ignored: int | None = None, share: float = 0.4, dtype="int32"):
    """A maker of class numbers, some of them `ignored`, unevenly: mostly among the first rows."""
    def make(rng: np.random.Generator) -> tuple:
        out = rng.integers(0, classes, shape).astype(dtype)
        if ignored is not None and out.ndim:
            rows = np.arange(shape[0]).reshape(-1, *(1,) * (out.ndim - 1))
            out = np.where(rng.random(shape) < share * 2 * (rows * 2 < shape[0]), ignored, out).astype(dtype)
        return (out,)
    return make


def unary(low=None, high=None, half=True, empty=True) -> tuple:
    """Variants for an op of one tensor; `empty`: the plain op accepts tensors without elements."""
    kinds: tuple = (arrays((4, 3), low=low, high=high), arrays((5,), low=low, high=high),
                    arrays((1, 2, 3), low=low, high=high),
                    arrays((0, 2), low=low, high=high), arrays((), low=low, high=high))
    kinds = kinds if empty else kinds[:3] + kinds[4:]
    return (*kinds, arrays((3, 2), dtype="float16", low=low, high=high)) if half else kinds


def binary(low=None, high=None, ints=True, empty=True) -> tuple:
    """Variants for an op of two tensors that broadcast; `empty`: the plain op accepts tensors without elements."""
    pairs = (((4, 3), (4, 3)), ((5, 3), (3,)), ((2, 1), (1, 3)), ((0, 3), (3,)), ((), (4,)))
    out = tuple(arrays(*p, low=low, high=high) for p in pairs if empty or (0, 3) not in p)
    return (*out, arrays((3, 2), (2,), dtype="int32")) if ints else out


def named(prefix: str, names: str, args, wrap: Callable | None = None) -> list[Form]:
    """`mint.abs`, `mint.neg`, ... for the names given: functions of a module, or methods for the prefix "x"."""
    out = []
    for name in names.split():
        if prefix == "x":
            if not hasattr(Tensor, name):
                raise AttributeError(f"Tensor has no {name}")
            fn = _method(name)
        else:
            fn = getattr(MODULES[prefix], name)
        out.append(Form(f"{prefix}.{name}" + ("()" if prefix == "x" else ""), wrap(fn) if wrap else fn, args))
    return out


def _method(name):
    return lambda x, *rest: getattr(x, name)(*rest)


def forms(args, calls: dict[str, Callable]) -> list[Form]:
    """One form per spelling, all with the same arguments."""
    return [Form(name, fn, args) for name, fn in calls.items()]
