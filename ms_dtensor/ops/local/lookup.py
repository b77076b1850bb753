# SPDX-License-Identifier: Apache-2.0
"""Looking up rows on shards: own rows by masking, and several index tensors at once.

A rank that holds rows `lo`... of a table of `n` clamps the indices into its shard, looks up, and multiplies what is
not its own with zero: a summand of the answer. Negative indices count from the global end; one that is out of range is
an error on every rank alike, as on one device, and never a silent zero.
"""
from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import mint, ops

from ...internals.target import on_cpu


def _checked(ids, n: int):
    """Indices wrapped into 0..n-1; on CPU, where values are at hand, an index out of range raises."""
    if on_cpu():
        values = host_values(ids)
        if values.size and (values.min() < -n or values.max() >= n):
            raise IndexError(f"For 'gather', an index is out of range [{-n}, {n}) of the dim it looks up.")
        if not values.size or values.min() >= 0:
            return ids
    return ops.select(ids < 0, ids + n, ids)


def host_values(x):
    """The local values as an array; local forms get the DTensor object itself, whose `asnumpy` means the global one."""
    return ms.Tensor._make_subclass(ms.Tensor, x).asnumpy()


def own_rows(ids, lo: int, rows: int, n: int):
    """Local row numbers clamped into the shard, and which of them are the shard's own."""
    local = _checked(ids, n) - lo
    mine = mint.logical_and(local >= 0, local < rows)
    return local * mine.astype(local.dtype), mine


def _rows_of_shard(x, ids, dim, lo, n):
    local, mine = own_rows(ids, lo, x._shape[dim], n)
    out = ops.gather(x, local, dim)
    return out, mint.reshape(mine, (*(1,) * dim, *ids._shape, *(1,) * (len(x._shape) - dim - 1)))


def gather_shard(x, ids, dim, lo, n):
    """Rows of the global table that this shard (rows `lo`...) owns, zeros for the others."""
    out, mask = _rows_of_shard(x, ids, dim, lo, n)
    return masked(out, mask)


def masked(x, mask):
    """`x` where the mask is true, else zero; an infinity elsewhere leaves no trace."""
    repeats = tuple(n // m if m else 1 for n, m in zip(x._shape, mask._shape))
    mask = ops.tile(mask, repeats)  # on CPU an expanded view is fifty times as slow
    return ops.select(mask, x, ops.zeros_like(x))


def take_along_shard(x, ids, dim, lo, n):
    """`gather_elements` of the elements this shard owns, zeros for the others."""
    local, mine = own_rows(ids, lo, x._shape[dim], n)
    return masked(ops.gather_elements(x, dim, local), mine)


def embedding_shard(weight, ids, lo, n, padding_idx):
    """`embedding` of the rows this shard owns, zeros for the others."""
    return _without_padding(gather_shard(weight, ids, 0, lo, n), ids, padding_idx, n)


def _without_padding(rows, ids, padding_idx, n):
    if padding_idx is None:
        return rows
    is_padding = mint.reshape(ids == padding_idx % n, (*ids._shape, 1))
    return ops.select(mint.broadcast_to(is_padding, rows._shape), ops.stop_gradient(rows), rows)


def index(x, indices, dims, at, offsets, sizes, split):
    """NumPy's advanced indexing: see the rule `advanced`. `offsets` and `sizes`: where the shard lies in `sizes`."""
    rest = [d for d in range(len(x._shape)) if d not in dims]
    shape = x._shape
    flat: Any = None
    mine: Any = None
    for ids, d, lo, n in zip(indices, dims, offsets, sizes):
        if split:
            ids, own = own_rows(ids, lo, shape[d], n)
            mine = own if mine is None else mint.logical_and(mine, own)
        else:
            ids = _checked(ids, n)
        flat = ids if flat is None else flat * shape[d] + ids
    if mine is not None:  # a coordinate of another shard was clamped to 0; the sum of all may still be anywhere
        flat = flat * mine.astype(flat.dtype)
    x = mint.permute(x, (*dims, *rest)) if (*dims, *rest) != tuple(range(len(shape))) else x
    count = 1
    for d in dims:
        count *= shape[d]
    out = ops.gather(mint.reshape(x, (count, *(shape[d] for d in rest))), flat, 0)
    wide = len(flat._shape)
    if mine is not None:
        out = masked(out, mint.reshape(mine, (*mine._shape, *(1,) * len(rest))))
    if at:
        order = (*range(wide, wide + at), *range(wide), *range(wide + at, wide + len(rest)))
        out = mint.permute(out, order)
    return out


def gather(input, index, dim, batch_dims=0):
    """`Gather`, whose CPU kernel loses the gradient of rows that are looked up by a negative index."""
    n = input._shape[dim]
    if n and (not on_cpu() or (host_values(index) < 0).any()):  # to ask would make the host wait
        index = _checked(index, n)
    return ops.gather(input, index, dim, batch_dims)


def embedding_lookup(x, index, offset=0):
    """`EmbeddingLookup`, whose backward fails on CPU: rows `index - offset`, zeros where that is out of range."""
    local = index - offset
    mine = mint.logical_and(local >= 0, local < x._shape[0])
    rows = ops.gather(x, local * mine.astype(local.dtype), 0)
    return masked(rows, mint.reshape(mine, (*mine._shape, *(1,) * (len(x._shape) - 1))))


def take(x, index):
    """`Take` from the flat tensor."""
    return gather(mint.reshape(x, (-1,)), index, 0)


def gather_method(input, input_indices, axis, batch_dims=0):
    """`x.gather(input_indices, axis)`."""
    return gather(input, input_indices, axis, batch_dims)


TABLE = {"gather": gather, "gather_shard": gather_shard, "take_along_shard": take_along_shard,
         "embedding_shard": embedding_shard, "index": index}
CPU = {"Gather": gather, "DeprecatedGather": gather_method, "Take": take, "EmbeddingLookup": embedding_lookup}
