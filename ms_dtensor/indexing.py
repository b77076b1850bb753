# SPDX-License-Identifier: Apache-2.0
"""`x[...]` on a DTensor: MindSpore's own indexing bypasses dispatch, so indices are turned into ruled ops here.

Integers, slices, None and Ellipsis become one "slice" op; a tensor or list in one dim becomes a lookup. What cannot be
said in those ops is refused. Invariant: bounds are checked against the global shape.
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor

from .dispatch import call
from .errors import OpRuleError


def get_item(x, index):
    """`x[index]` with global indices."""
    items = list(index) if isinstance(index, tuple) else [index]
    consumed = sum(i is not None and i is not Ellipsis for i in items)
    if sum(i is Ellipsis for i in items) > 1 or consumed > x.ndim:
        raise IndexError(f"For 'DTensor', index {index} does not fit a tensor of {x.ndim} dims.")
    if not any(i is Ellipsis for i in items):
        items.append(Ellipsis)
    at = next(k for k, i in enumerate(items) if i is Ellipsis)
    items[at:at + 1] = [slice(None)] * (x.ndim - consumed)
    bounds, drop, new, lookups = [], [], [], {}
    dim = 0
    for item in items:
        if item is None:
            new.append(dim - len(drop) + len(new))
            continue
        n = x.shape[dim]
        if isinstance(item, slice):
            lo, hi, step = item.indices(n)
            bounds.append((lo, max(hi, lo), step) if step > 0 else (lo, hi, step))
        elif isinstance(item, int | np.integer) and not isinstance(item, bool):
            if not -n <= item < n:
                raise IndexError(f"For 'DTensor', index {item} is out of range for dim {dim} of size {n}.")
            bounds.append((int(item) % n, int(item) % n + 1, 1))
            drop.append(dim)
        else:
            lookups[dim] = item
            bounds.append((0, n, 1))
        dim += 1
    if len(lookups) > 1 or any(_is_mask(i) for i in lookups.values()):
        raise OpRuleError("For 'getitem', several index tensors or a boolean mask are not supported.",
                          x.layout.describe(), "The result's shape or order would depend on other ranks' data.",
                          ("use where() or masked_fill() for masks", "index one dim at a time"))
    if drop or any(b != (0, n, 1) for b, n in zip(bounds, x.shape)):
        x = call("slice", input=x, bounds=tuple(bounds), drop=tuple(drop))
    for dim, item in lookups.items():
        if not isinstance(item, Tensor):
            item = Tensor(np.asarray(item, dtype=np.int32))
        if not hasattr(item, "layout") or item._layout is None:
            from .distribute import replicate_constant
            item = replicate_constant(item, x.device_mesh)
        x = call("gather", input=x, index=item, dim=dim - sum(d < dim for d in drop))
    for d in new:
        x = ms.mint.unsqueeze(x, d)
    return x


def set_item(x, index, value):
    """Refused: a write to a slice of a shard has no rule yet."""
    raise OpRuleError("For 'setitem', writing into a DTensor by index is not supported.", x.layout.describe(),
                      "The write would reach this rank's shard only.",
                      ("build the new value with where() or masked_fill()", "write to x.to_local() on purpose"))


def _is_mask(item) -> bool:
    if isinstance(item, Tensor):
        return item.dtype == ms.bool_
    return np.asarray(item).dtype == bool
