# SPDX-License-Identifier: Apache-2.0
"""`x[...]` and `x[...] = v` on a DTensor, in NumPy's meaning and with global indices.

MindSpore's own indexing bypasses dispatch, so an index is parsed here once, against the global shape, and turned into
ruled ops: slices and integers into one "slice", one index tensor into a lookup, several into "index". A write reaches
every rank that holds a part of what is written (`dispatch/inplace.py`). A boolean mask that every rank holds whole is the
positions where it is true; another is refused where the shape would depend on data. Invariant: bounds are checked
before anything is computed, on every rank alike.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ..comm.pretended import executing
from ..dispatch.dispatcher import call, write
from ..dispatch.operands import replicate_constant
from ..errors import OpRuleError
from ..internals.target import on_cpu
from ..ops.rules.write import labels


@dataclass(slots=True)
class Index:
    """A parsed index of a tensor whose `new` dims of size 1 have been inserted.

    Attributes:
        new: positions of the inserted dims, ascending.
        shape: global shape with them.
        bounds: (start, stop, step) per dim; whole for a dim that an array indexes.
        drop: dims indexed by an integer.
        arrays: dim -> index tensor or integer array; with one present, integers count as arrays, as in NumPy.
    """

    new: list[int]
    shape: tuple[int, ...]
    bounds: list[tuple[int, int, int]]
    drop: list[int]
    arrays: dict

    @property
    def front(self) -> bool:
        """Whether the arrays' dims come first in the result: the indexed dims are not neighbours."""
        if not self.arrays:
            return False
        dims = list(self.arrays)
        return dims != list(range(dims[0], dims[0] + len(dims)))


def parse(shape: tuple[int, ...], index, what: str = "getitem") -> Index:
    """An index, against a global shape.

    Raises:
        IndexError: too many indices, or an integer out of range.
        OpRuleError: a boolean mask of which a rank holds a part.
    """
    items = [i for item in (index if isinstance(index, tuple) else (index,)) for i in _picked(item, what)]
    consumed = sum(i is not None and i is not Ellipsis for i in items)
    if sum(i is Ellipsis for i in items) > 1 or consumed > len(shape):
        raise IndexError(f"For 'DTensor', an index of {consumed} dims does not fit a tensor of {len(shape)} dims.")
    if not any(i is Ellipsis for i in items):
        items.append(Ellipsis)
    at = next(k for k, i in enumerate(items) if i is Ellipsis)
    items[at:at + 1] = [slice(None)] * (len(shape) - consumed)
    sizes = iter(shape)
    wide = [1 if i is None else next(sizes) for i in items]
    out = Index([k for k, i in enumerate(items) if i is None], tuple(wide), [], [], {})
    for dim, (item, n) in enumerate(zip(items, wide)):
        whole = (0, n, 1)
        if item is None:
            out.bounds.append(whole)
        elif isinstance(item, slice):
            lo, hi, step = item.indices(n)
            out.bounds.append((lo, max(hi, lo), step) if step > 0 else (lo, min(hi, lo), step))
        elif _is_int(item):
            if not -n <= item < n:
                raise IndexError(f"For 'DTensor', index {item} is out of range for dim {dim} of size {n}.")
            out.bounds.append((int(item) % n, int(item) % n + 1, 1))
            out.drop.append(dim)
        elif isinstance(item, Picked):
            if item.extent != n:
                raise IndexError(f"For 'DTensor', a mask of {item.extent} elements does not fit dim {dim} of size {n}.")
            out.arrays[dim] = item.at.astype(np.int32)
            out.bounds.append(whole)
        else:
            out.arrays[dim] = _as_index(item, dim, n)
            out.bounds.append(whole)
    if out.arrays and out.drop:
        for d in out.drop:
            out.arrays[d] = np.array(out.bounds[d][0], np.int32)
            out.bounds[d] = (0, wide[d], 1)
        out.drop = []
        out.arrays = dict(sorted(out.arrays.items()))
    return out


class Picked(NamedTuple):
    """Where a mask is true, along one of its dims; and that dim's extent."""

    at: np.ndarray
    extent: int


def _whole(mask) -> bool:
    """Whether every rank holds all of a mask."""
    layout = getattr(mask, "_layout", None)
    return layout is None or layout.is_whole()


def _picked(item, what: str) -> list:
    """An item of an index; a boolean mask as the positions, per dim, where it is true."""
    if isinstance(item, Tensor) and item.dtype == ms.bool_:
        if not _whole(item):
            raise OpRuleError(f"For '{what}', a boolean mask is not whole on every rank.", item._layout.describe(),
                              "The shape of what it picks depends on data, and a rank knows a part of it.",
                              ("where(mask, x, other) or masked_fill(mask, value)",
                               "x[mask] = value, with one mask and a scalar",
                               "mask.redistribute(placements=[Replicate()] * mesh.ndim) first"))
        dry, known = executing(), getattr(item, "_known", None)  # a typed tensor is asked, as Python reads it
        seen = Tensor._make_subclass(Tensor, item) if known is None else known(f"{what} of a mask", True)
        mask = seen.asnumpy() if dry is None else dry.array(item, f"{what} of a mask")
    elif isinstance(item, list | np.ndarray):
        mask = np.asarray(item)
    else:
        return [item]
    return [Picked(*pair) for pair in zip(np.nonzero(mask), mask.shape)] if mask.dtype == bool and mask.ndim else [item]


def _is_int(item) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool | np.bool_)


def _as_index(item, dim: int, n: int):
    if isinstance(item, Tensor):
        kind = "bool" if item.dtype == ms.bool_ else "int" if "Int" in str(item.dtype) else str(item.dtype)
        if kind == "int" and on_cpu():
            _check_range(item, dim, n)
    else:
        item = np.asarray(item)
        if item.size == 0:
            item = item.astype(np.int32)
        kind = {"b": "bool", "i": "int", "u": "int"}.get(item.dtype.kind, str(item.dtype))
    if kind != "int":
        raise IndexError(f"For 'DTensor', an index must be an integer, a slice or integers, but got {kind}.")
    if isinstance(item, np.ndarray):
        if item.size and (item.min() < -n or item.max() >= n):
            raise IndexError(f"For 'DTensor', an index is out of range for dim {dim} of size {n}.")
        item = (item % max(n, 1)).astype(np.int32)
    return item


def _check_range(item, dim: int, n: int) -> None:
    """On CPU, where values are at hand: a rank whose shard is empty would not look anything up, and so not notice."""
    layout = getattr(item, "_layout", None)
    if layout is not None and not layout.is_replicated():
        return
    values = Tensor._make_subclass(Tensor, item).asnumpy()
    if values.size and (values.min() < -n or values.max() >= n):
        raise IndexError(f"For 'DTensor', an index is out of range for dim {dim} of size {n}.")


def _run(x, op: str, **arguments):
    """One of our own ops, on a DTensor or on whatever else computes them (the verifier's probe)."""
    run = getattr(x, "_run_own_op", None)
    return call(op, **arguments) if run is None else run(op, arguments)


def get_item(x, index):
    """`x[index]`."""
    at = parse(tuple(x.shape), index)
    if (index is Ellipsis or isinstance(index, tuple)) and not (at.new or at.arrays or at.drop) \
            and all(b == (0, n, 1) for b, n in zip(at.bounds, at.shape)) and hasattr(x, "_layout"):
        return x  # itself, as MindSpore does; x[:] is a view
    for d in at.new:
        x = ms.mint.unsqueeze(x, d)
    if at.drop or any(b != (0, n, 1) for b, n in zip(at.bounds, at.shape)) or not (at.new or at.arrays):
        x = _run(x, "slice", input=x, bounds=tuple(at.bounds), drop=tuple(at.drop))
    if not at.arrays:
        return x
    dims = list(at.arrays)
    indices = [_constant(x, i) for i in at.arrays.values()]
    if len(dims) == 1 and len(indices[0].shape):
        return _run(x, "gather", input=x, index=indices[0], dim=dims[0])
    return _run(x, "index", input=x, indices=tuple(indices), dims=tuple(dims), front=at.front)


def _constant(x, item):
    if not isinstance(item, Tensor):
        item = Tensor(item)
    if item.dtype in (ms.int8, ms.int16):
        item = item.astype(ms.int32)
    if getattr(x, "_layout", None) is not None and getattr(item, "_layout", None) is None:
        return replicate_constant(item, x.device_mesh)  # the same literal in every rank's program
    return item


def set_item(x, index, value):
    """`x[index] = value`: every rank writes its part, into its own storage.

    Raises:
        MixedOperandError: a plain tensor of more than one element as the value.
        OpRuleError: several boolean masks, or a mask with a value whose place would depend on data; a Partial target.
    """
    mask = _mask(index)
    if mask is not None and not (_whole(mask) and np.ndim(value) > len(x.shape) - len(mask.shape)):
        return _set_where(x, mask, value)
    at = parse(tuple(x.shape), index, "setitem")
    wide = np.broadcast_shapes(*(tuple(i.shape) for i in at.arrays.values())) if at.arrays else ()
    region = labels(len(at.shape), at.drop, list(at.arrays), at.front, len(wide))
    sizes = [wide[e[1]] if isinstance(e, tuple) else len(range(*at.bounds[e])) for e in region]
    if 0 in sizes:
        return
    value = _value(x, value)
    if isinstance(value, Tensor):
        for r in sorted((region.index(d) for d in at.new), reverse=True):  # dims that only `None` made
            v = r - len(region) + value.ndim
            if v >= 0:
                value = value.squeeze(v)
    old = [d for d in range(len(at.shape)) if d not in at.new]  # back to the target's own dims
    number = {d: k for k, d in enumerate(old)}
    _write(x, "write", value=value, bounds=tuple(at.bounds[d] for d in old),
                  drop=tuple(number[d] for d in at.drop), dims=tuple(number[d] for d in at.arrays),
                  indices=tuple(_constant(x, i) for i in at.arrays.values()), front=bool(at.arrays) and at.front)


def _mask(index):
    """The index as one boolean mask, or None."""
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if isinstance(index, Tensor):
        return index if index.dtype == ms.bool_ else None
    if isinstance(index, list | np.ndarray):
        array = np.asarray(index)
        return array if array.dtype == bool else None
    return None


def _set_where(x, mask, value):
    shape = tuple(mask.shape)
    if shape != tuple(x.shape[:len(shape)]):
        raise IndexError(f"For 'DTensor', a mask of shape {shape} does not fit a tensor of shape {tuple(x.shape)}.")
    value = _value(x, value)
    if isinstance(value, Tensor) and value.ndim > len(x.shape) - len(shape):
        raise OpRuleError("For 'setitem', a boolean mask that is not whole takes a scalar or one value for each row.",
                          x.layout.describe(), "Which element of a longer value goes where depends on data.",
                          ("x = x.masked_scatter(mask.unsqueeze(-1).broadcast_to(x.shape), value)",
                           "x.copy_(where(mask, value, x)) with a value of x's shape",
                           "mask.redistribute(placements=[Replicate()] * mesh.ndim) first"))
    mask = _constant(x, mask)
    wide = (*shape, *(1,) * (len(x.shape) - len(shape)))
    _write(x, "masked_fill", mask=mask if wide == shape else mask.reshape(wide), value=value)


def _value(x, value):
    """What is written: a number, or a DTensor. A literal is the same in every rank's program; a plain tensor is not."""
    if isinstance(value, Tensor):
        if getattr(value, "_layout", None) is None and value._shape == ():
            return _constant(x, value)
        return value
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return value.item() if hasattr(value, "item") else value
    return _constant(x, np.asarray(value))


def _write(x, op: str, **arguments):
    """One of our own ops with the target as its first operand; `x` takes the result."""
    if getattr(x, "_layout", None) is None:  # a verifier's probe: the rule is what counts
        x._run_own_op(op, {"input": x, **arguments})
        return
    write(op, input=x, **arguments)
