# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts ops from gathers and products, by Ascend's documents, where there is no kernel for them.

Indices are data, not operands of a gradient. Rows that a kernel leaves undefined are zeros here.
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.ops import auto_generate

from ...internals.target import ascend_kernels
from .basic import TakenOnce
from .cpu_math import topk
from .run import zeros_of


def _sorted(experts) -> np.ndarray:
    return np.argsort(experts.asnumpy().reshape(-1), kind="stable")


def _int32(values) -> Tensor:
    return Tensor(np.asarray(values, np.int32))


def _rows(x, numbers):
    return ops.gather(x, _int32(numbers), 0)


def _placed(order) -> np.ndarray:
    """The inverse of a permutation."""
    out = np.empty_like(order)
    out[order] = np.arange(len(order))
    return out


def permute(tokens, indices, num_out_tokens=None, padded_mode=False):
    """`MoeTokenPermute`: a stable sort by index; each token comes once per column of `indices`."""
    order = _sorted(indices)
    k = len(order) // tokens._shape[0]
    return _rows(tokens, order[:num_out_tokens or None] // k), _int32(_placed(order))


def unpermute(permuted, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    """`MoeTokenUnpermute`: what was dropped counts as zeros."""
    n, h = permuted._shape
    rows = mint.cat((permuted, ops.zeros((1, h), permuted.dtype)))
    rows = ops.gather(rows, mint.minimum(sorted_indices, _int32(n)), 0)
    if probs is None:
        return rows
    rows = mint.reshape(rows, (*probs._shape, h)) * mint.unsqueeze(probs, 2)
    return mint.sum(rows, 1).astype(permuted.dtype)


def gating(x, finished=None, k=1):
    """`MoeGatingTopKSoftmax`."""
    values, experts = topk(mint.softmax(x, -1), k, -1, True, True)
    n = x._shape[0]
    return values, experts.astype(ms.int32), _row_numbers(n, k, n, 0)


def _row_numbers(rows: int, k: int, of: int, offset: int) -> Tensor:
    return _int32(np.arange(rows)[:, None] + offset + np.arange(k) * of)


def gating_of_rows(x, k, of, offset):
    """The same for some rows `of` many, from `offset` on."""
    values, experts, _ = auto_generate.moe_gating_top_k_softmax_op(x, None, k) if ascend_kernels() else gating(x, None, k)
    return values, experts, _row_numbers(x._shape[0], k, of, offset)


def init_routing(x, row_idx, expert_idx, active_num):
    """`MoeInitRouting`: `row_idx` numbers the choices, column by column through all tokens."""
    order, n = _sorted(expert_idx), x._shape[0]
    source = row_idx.asnumpy().reshape(-1)[order]
    active = min(active_num, n) * expert_idx._shape[1]
    return _rows(x, source[:active] % n), _int32(_placed(source)), _int32(expert_idx.asnumpy().reshape(-1)[order])


def init_routing_v2(x, expert_idx, active_num, expert_capacity, expert_num, drop_pad_mode, count_flag, before_flag):
    """`MoeInitRoutingV2`: without dropping as `MoeInitRouting`; with it each expert has `expert_capacity` places."""
    order, k = _sorted(expert_idx), expert_idx._shape[1]
    flat = expert_idx.asnumpy().reshape(-1)
    counts = np.bincount(flat, minlength=expert_num)[:expert_num]
    nothing = np.zeros(expert_num)
    if not drop_pad_mode:
        shown = {0: nothing, 1: counts.cumsum(), 2: counts}[count_flag]
        return _rows(x, order[:active_num or None] // k), _int32(_placed(order)), _int32(shown), _int32(nothing)
    n, h = x._shape
    source, placed = np.full(expert_num * expert_capacity, n), np.full(len(order), -1)
    for e, last in enumerate(counts.cumsum()):
        kept = order[last - counts[e]:last][:expert_capacity]
        at = e * expert_capacity + np.arange(len(kept))
        source[at], placed[kept] = kept // k, at
    rows = _rows(mint.cat((x, ops.zeros((1, h), x.dtype))), source)
    return (mint.reshape(rows, (expert_num, expert_capacity, h)), _int32(placed), _int32(nothing),
            _int32(counts if before_flag else nothing))


def finalize(rows, x1, x2=None, bias=None, scales=None, row_idx=None, expert_idx=None):
    """`MoeFinalizeRouting`: token i's choice j is the row `row_idx[i + j * tokens]`."""
    n, h = x1._shape
    k = row_idx._shape[0] // n
    picked = mint.permute(mint.reshape(ops.gather(rows, row_idx, 0), (k, n, h)), (1, 0, 2))
    if bias is not None:
        picked = picked + mint.reshape(ops.gather(bias, mint.reshape(expert_idx, (-1,)), 0), (n, k, h))
    if scales is not None:
        picked = picked * mint.unsqueeze(scales, 2)
    out = x1 + mint.sum(picked, 1)
    return out if x2 is None else out + x2


def finalize_once(rows, x1, x2, bias, scales, row_idx, expert_idx, mine):
    """The same of rows that are summands: one rank takes in what is whole."""
    x1, x2, bias = (None if x is None else TakenOnce.apply(x, mine, -0.0) for x in (x1, x2, bias))
    run = auto_generate.moe_finalize_routing if ascend_kernels() else finalize
    return run(rows, x1, x2, bias, scales, row_idx, expert_idx)


def expert_tokens(sorted_experts, num_expert):
    """`MoeComputeExpertTokens`: the number of rows of experts up to each."""
    return _int32(np.searchsorted(sorted_experts.asnumpy(), np.arange(num_expert), "right"))


def _product(x, w, b):
    out = mint.matmul(x, w)
    return out if b is None else out + b


def grouped(xs, ws, bs, group_list, group_type, counts):
    """All grouped products; `counts`: the list holds sizes of groups, else their ends."""
    bs = bs or [None] * len(xs)
    if group_type == -1:
        return tuple(map(_product, xs, ws, bs))
    (x,), (w,), (b,) = xs, ws, bs
    ends = np.asarray(group_list.asnumpy() if isinstance(group_list, Tensor) else group_list)
    parts, at = [], 0
    for e, end in enumerate(ends.cumsum() if counts else ends):
        if end > at:
            own = (mint.reshape(mint.narrow(t, 0, e, 1), t._shape[1:]) for t in (w, b) if t is not None)
            parts.append(_product(mint.narrow(x, 0, at, int(end) - at), *own, *(() if b is not None else (None,))))
            at = int(end)
    if at < x._shape[0]:
        parts.append(zeros_of([t for t in (x, w, b) if t is not None], (x._shape[0] - at, w._shape[2])))
    return (mint.cat(parts) if len(parts) > 1 else parts[0],)


def grouped_matmul(x, weight, bias=None, scale=None, offset=None, antiquant_scale=None, antiquant_offset=None,
                   group_list=None, split_item=0, group_type=-1, *_):
    """`GroupedMatmul`, `GroupedMatmulV2`."""
    return grouped(x, weight, bias, group_list, group_type, False)


def grouped_matmul_v4(x, weight, bias=None, scale=None, offset=None, antiquant_scale=None, antiquant_offset=None,
                      pre_token_scale=None, group_list=None, activation_input=None, activation_quant_scale=None,
                      activation_quant_offset=None, split_item=0, group_type=-1, group_list_type=0, *_):
    """`GroupedMatmulV4`."""
    return grouped(x, weight, bias, group_list, group_type, group_list_type == 1)


def gmm(x, weight, bias=None, group_list=None, group_type=0, group_list_type=0):
    """`Gmm`, `GmmV2`."""
    return grouped(x, weight, bias, group_list, group_type, group_list_type == 1)


TABLE = {"moe_gating": gating_of_rows, "moe_finalize": finalize_once}
CPU = {"MoeTokenPermute": permute, "MoeTokenUnpermute": unpermute, "InnerMoeTokenUnpermute": unpermute,
       "MoeGatingTopKSoftmax": gating, "MoeInitRouting": init_routing, "MoeInitRoutingV2": init_routing_v2,
       "MoeFinalizeRouting": finalize, "MoeComputeExpertTokens": expert_tokens, "GroupedMatmul": grouped_matmul,
       "GroupedMatmulV2": grouped_matmul, "GroupedMatmulV4": grouped_matmul_v4, "Gmm": gmm, "GmmV2": gmm}
