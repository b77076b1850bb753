# SPDX-License-Identifier: Apache-2.0
"""Nested arguments: tensors within tuples, lists, dicts and dataclasses, as calls have them."""
from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable


def map_leaves(fn: Callable, tree, kind: type | tuple[type, ...]):
    """`tree` with each leaf of a kind, or of one of several, replaced by `fn(leaf)`; everything else stays as it is."""
    if isinstance(tree, kind):
        return fn(tree)
    if isinstance(tree, tuple | list):
        values = (map_leaves(fn, v, kind) for v in tree)
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)  # a named tuple takes them singly
    if isinstance(tree, dict):
        return {k: map_leaves(fn, v, kind) for k, v in tree.items()}
    if hasattr(tree, "__dataclass_fields__") and not isinstance(tree, type):
        now = {k: getattr(tree, k) for k in tree.__dataclass_fields__ if hasattr(tree, k)}
        new = {k: map_leaves(fn, v, kind) for k, v in now.items()}
        if any(new[k] is not now[k] for k in now):
            tree = copy.copy(tree)
            for k, v in new.items():
                object.__setattr__(tree, k, v)  # a frozen one, too
    return tree


def leaves(tree, kind: type) -> list:
    """The leaves of a kind, in order of appearance; in an object of another kind none."""
    if isinstance(tree, kind):
        return [tree]
    if tree.__class__ is not tuple and tree.__class__ is not list:  # the commonest, of which the rest need not be asked
        if hasattr(tree, "__dataclass_fields__") and not isinstance(tree, type):
            tree = [getattr(tree, k, None) for k in tree.__dataclass_fields__]
        if not isinstance(tree, Iterable):
            return []
    out: list = []
    for v in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(v, kind):  # without a call: this runs at every use of a DFunction
            out.append(v)
        elif isinstance(v, tuple | list | dict) or hasattr(v, "__dataclass_fields__"):
            out += leaves(v, kind)
    return out


def first_dtensor(args, kwargs=None, mark: str = "_layout"):
    """The first DTensor of a call's arguments, or in lists, tuples and dicts of them; None if there is none.

    `mark` is the attribute that tells one; "_run_own_op" tells a verifier's probe, too.
    """
    for v in (*args, *kwargs.values()) if kwargs else args:
        if v.__class__ is tuple or v.__class__ is list or v.__class__ is dict:
            v = first_dtensor(v.values() if v.__class__ is dict else v, None, mark)
            if v is not None:  # never its truth value, which would communicate
                return v
        elif getattr(v, mark, None) is not None:
            return v
    return None


@functools.cache
def argument_names(fn: Callable, skip: int = 0) -> tuple[str, ...]:
    """Names of a function's parameters after the first `skip`, as rules see them; `*rest` takes what remains."""
    names = []
    for p in list(inspect.signature(fn).parameters.values())[skip:]:
        if p.kind is p.VAR_POSITIONAL:
            names.append("*" + p.name)
        elif p.kind is not p.VAR_KEYWORD:
            names.append(p.name)
    return tuple(names)
