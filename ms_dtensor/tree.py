# SPDX-License-Identifier: Apache-2.0
"""Nested arguments: tensors within tuples, lists and dicts, as calls have them. Read next: `dispatch.py`."""
from __future__ import annotations

from collections.abc import Callable


def map_leaves(fn: Callable, tree, kind: type):
    """`tree` with each leaf of a kind replaced by `fn(leaf)`; everything else stays as it is."""
    if isinstance(tree, kind):
        return fn(tree)
    if isinstance(tree, tuple | list):
        return type(tree)(map_leaves(fn, v, kind) for v in tree)
    if isinstance(tree, dict):
        return {k: map_leaves(fn, v, kind) for k, v in tree.items()}
    return tree


def leaves(tree, kind: type) -> list:
    """The leaves of a kind, in order of appearance."""
    if isinstance(tree, kind):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    return [leaf for v in values for leaf in leaves(v, kind)]
