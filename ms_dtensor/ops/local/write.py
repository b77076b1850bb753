# SPDX-License-Identifier: Apache-2.0
"""New values for old places, out of place and differentiable: the local forms of `setitem` and of in-place ops.

A write is a lookup turned round: for each local element of the target, which element of the value lands there, or none.
That table is NumPy on the host; the values themselves go through one gather and one select, so that gradients reach the
value and stop at what was overwritten. The caller puts the result into the target's storage (`dispatch/inplace.py`).
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from ..rules.write import labels
from . import arrange, cpu_index
from .dtypes import full
from .lookup import host_values, masked


def write(x, value, bounds, drop, dims, indices, front, held, value_held, value_shape):
    """`x` with the local part of `x[index] = value` done; see the rule of this name.

    `held`: per dim, the runs of global rows that the shard is made of; `value_held` those of the value's.
    """
    local = tuple(x._shape)
    tensor = isinstance(value, Tensor)
    strides = _strides(tuple(value._shape)) if tensor else ()
    wide = np.broadcast_shapes(*(tuple(i._shape) for i in indices)) if dims else ()
    region = labels(len(local), drop, dims, front, len(wide))

    def place(r, k):  # where in the local value the places k along region dim r are
        v = r - len(region) + len(value_shape)
        return np.zeros_like(k) if v < 0 or value_shape[v] == 1 else _local(k, value_held[v]) * strides[v]
    rest = [d for d in range(len(local)) if d not in dims]
    inside = np.ones((), bool)
    position = np.zeros((), np.int64)
    for d in rest:  # one axis after the other: which local rows the slice takes, and where in the value they come from
        lo, hi, st = bounds[d]
        k, odd = np.divmod(_rows(held[d]) - lo, st)
        count = len(range(lo, hi, st))
        inside = inside[..., None] & ((odd == 0) & (k >= 0) & (k < count))
        position = position[..., None] + (place(region.index(d), k) if d in region else 0)
    table = np.where(inside, position, -1)
    if dims:
        table = _at_indices(table, wide, region, place, [host_values(i) for i in indices], dims, bounds, held, local)
        order = [*dims, *rest]
        table = table.transpose([order.index(d) for d in range(len(local))])
    mask = Tensor(np.ascontiguousarray(np.broadcast_to(table >= 0, local)))
    if tensor:
        source = Tensor(np.ascontiguousarray(np.maximum(table, 0)).astype(np.int32))
        new = ops.gather(mint.reshape(value, (-1,)).astype(x.dtype), source, 0)
    else:
        new = full(local, value, x.dtype)
    return _select(mask, new, x)


def write_add(x, value, dims, indices, held, value_held, value_shape, shape, factor):
    """`x` with `factor` times the local part of `value` added at index tensors of neighbouring `dims`.

    What belongs to other shards is added to the first row as zeros, so that every rank runs the same ops.
    """
    local, wide = tuple(x._shape), np.broadcast_shapes(*(tuple(i._shape) for i in indices))
    first, after = dims[0], dims[-1] + 1
    region = (*local[:first], *wide, *local[after:])
    position = np.zeros(region, np.int64)
    strides = _strides(tuple(value._shape))
    for v, n in enumerate(value_shape):  # where in the local value each element of the region comes from
        r = v - len(value_shape) + len(region)
        d = r if r < first else r - len(wide) - first + after if r >= first + len(wide) else None
        if n != 1:
            at = np.arange(region[r]) if d is None else _rows(held[d])
            position = position + (_local(at, value_held[v]) * strides[v]).reshape(-1, *(1,) * (len(region) - r - 1))
    flat, mine = np.zeros(wide, np.int64), np.ones(wide, bool)
    for ids, d in zip(map(host_values, indices), dims):
        own, here = _own_rows(ids, d, shape[d], held[d])
        mine = mine & here
        flat = flat * local[d] + own
    rows = np.where(mine, flat, 0).reshape(-1, 1)
    order = (*range(first, first + len(wide)), *range(first), *range(first + len(wide), len(region)))
    table = np.ascontiguousarray(position.transpose(order)).astype(np.int32)
    parts = ops.gather(mint.reshape(value, (-1,)).astype(x.dtype), Tensor(table), 0) * factor
    rest = (*local[:first], *local[after:])
    parts = masked(mint.reshape(parts, (-1, *rest)), Tensor(mine.reshape(-1, *(1,) * len(rest))))
    moved = (*dims, *(d for d in range(len(local)) if d not in dims))
    target = mint.reshape(mint.permute(x, moved), (-1, *rest))
    out = mint.reshape(ops.tensor_scatter_add(target, Tensor(rows.astype(np.int32)), parts), [local[d] for d in moved])
    return mint.permute(out, tuple(moved.index(d) for d in range(len(local))))


def index_put(x, value, indices, attrs):
    """`IndexPut`, whose CPU kernel takes no value that broadcasts, nor one of several dims."""
    dims, (whole, all_of_it) = tuple(range(len(indices))), (tuple(((0, n),) for n in y._shape) for y in (x, value))
    if attrs.get("accumulate"):
        return write_add(x, value, dims, indices, whole, all_of_it, value._shape, x._shape, 1)
    return write(x, value, tuple((0, n, 1) for n in x._shape), (), dims, indices, False, whole, all_of_it,
                 tuple(value._shape))


vars(index_put)["takes_attributes"] = True


def _rows(runs) -> np.ndarray:
    """The global rows of a shard of these runs, in its order, which is theirs."""
    return np.concatenate([np.arange(lo, hi) for lo, hi in runs])


def _local(rows: np.ndarray, runs) -> np.ndarray:
    """Where in a shard of these runs its global rows are; of others it says nothing."""
    return rows - runs[0][0] if len(runs) == 1 else np.searchsorted(_rows(runs), rows)


def _own_rows(ids, dim: int, n: int, runs):
    """Where in this shard the rows are that an index of `dim`, which has `n`, addresses; and which of them are here."""
    if ids.size and (ids.min() < -n or ids.max() >= n):
        raise IndexError(f"For 'DTensor', an index is out of range for dim {dim} of size {n}.")
    rows = np.where(ids < 0, ids + n, ids)
    here = np.zeros(rows.shape, bool)
    for lo, hi in runs:
        here |= (rows >= lo) & (rows < hi)
    return _local(rows, runs), here


def _strides(shape):
    out, n = [], 1
    for size in reversed(shape):
        out.append(n)
        n *= size
    return out[::-1]


def _at_indices(table, wide, region, place, indices, dims, bounds, held, local):
    """The table with index dims in front: rows that some index element addresses take that element's part of the value."""
    size = int(np.prod(wide, dtype=int))
    base = np.zeros(wide, np.int64)
    for j, n in enumerate(wide):
        base = base + place(region.index(("index", j)), np.arange(n)).reshape(n, *(1,) * (len(wide) - j - 1))
    mine = np.ones(size, bool)
    at = []
    for ids, d in zip(indices, dims):
        own, here = (np.broadcast_to(a, wide).reshape(-1) for a in _own_rows(ids, d, bounds[d][1], held[d]))
        mine &= here
        at.append(own)
    out = np.full((*(local[d] for d in dims), *table.shape), -1, np.int64)
    rows = np.where(table >= 0, base.reshape(-1)[mine].reshape(-1, *(1,) * table.ndim) + table, -1)
    out[tuple(i[mine] for i in at)] = rows
    return out


def _select(mask, new, old):
    wide = {ms.bool_: ms.int32, ms.bfloat16: ms.float32}.get(old.dtype, old.dtype)
    out = ops.select(mask, new.astype(wide), old.astype(wide)).astype(old.dtype)
    return out if old._shape else mint.reshape(out, ())  # of scalars MindSpore makes a tensor of one dim


def fill(x, value):
    """Every element the same; `value` is a number or a 0-d tensor."""
    if isinstance(value, Tensor):
        return mint.broadcast_to(mint.reshape(value, (1,) * len(x._shape)).astype(x.dtype), x._shape)
    return full(x._shape, value, x.dtype)


def copy(x, src, non_blocking=False):
    """`src` in the shape and dtype of `x`."""
    src = src.astype(x.dtype)
    return mint.broadcast_to(src, x._shape) if tuple(src._shape) != tuple(x._shape) else src


def where(condition, new, old):
    """`new` where the condition holds; `new` is a number or a tensor."""
    if not isinstance(new, Tensor):
        new = full(old._shape, new, old.dtype)
    new = mint.broadcast_to(new.astype(old.dtype), old._shape)
    return _select(mint.broadcast_to(condition, old._shape), new, old)


def masked_fill(x, mask, value):
    """`value` where the mask holds."""
    return where(mask, value, x) if not isinstance(value, Tensor) else where(mask, fill(x, value), x)


def _by_rows(fn):
    """`fn` of an index of any shape into dim 0."""
    return lambda x, ids, src: fn(x, mint.reshape(ids, (-1, 1)), mint.reshape(src, (-1, *x._shape[1:])))


# what an in-place op puts into its target, by the name of the rule
WRITES = {
    "fill": fill, "zero": lambda x: ops.zeros(x._shape, x.dtype), "copy": copy, "where": where,
    "add": lambda x, other, alpha=1: mint.add(x, other, alpha=1 if alpha is None else alpha),
    "sub": lambda x, other, alpha=1: mint.sub(x, other, alpha=1 if alpha is None else alpha),
    "mul": mint.mul, "div": mint.div,
    "divmod": lambda x, other, rounding_mode=None: ops.div(x, other, rounding_mode=rounding_mode),
    "floor_divide": lambda x, other: x // other, "remainder": lambda x, other: x % other,
    "clamp": lambda x, low=None, high=None: ops.clamp(x, low, high), "masked_fill": masked_fill,
    "threshold": lambda x, threshold, value: _select(x > threshold, x, full(x._shape, value, x.dtype)),
    "exp": mint.exp, "log": mint.log, "floor": mint.floor, "sigmoid": mint.sigmoid, "tanh": mint.tanh, "relu": ops.relu,
    "silu": ops.silu, "erfinv": mint.erfinv, "sign": ops.sign,
    "hardtanh": lambda x, low=-1.0, high=1.0: ops.clamp(x, low, high),
    "scatter": arrange.scatter, "scatter_add": cpu_index.scatter_add, "index_add": arrange.index_add,
    "masked_scatter": lambda x, mask, src: x.masked_scatter(mask, src), "nd_update": ops.TensorScatterUpdate(),
    **{f"nd_{k}": getattr(ops, f"tensor_scatter_{k}") for k in ("add", "sub", "max", "min", "mul", "div")},
    **{f"rows_{k}": _by_rows(getattr(ops, f"tensor_scatter_{k}")) for k in ("max", "min", "mul", "div")},
}

TABLE = {"write": write, "write_add": write_add}
CPU = {"IndexPut": index_put}
