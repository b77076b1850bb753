# SPDX-License-Identifier: Apache-2.0
"""Fused attention on local tensors: Ascend's kernel where it is, elsewhere the same from products and a softmax.

`attn_mask` is true where a query must *not* look, as in MindSpore.
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from ...errors import OpRuleError
from ...internals.target import ascend_kernels
from ..rules.attention import layout_name

_EVERYTHING = 2**31 - 1
# layout -> the permutation to batch, heads, sequence, depth, once heads and depth are apart
_TO_BNSD = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3)}


def flash_attention(query, key, value, real_shift, attn_mask, heads, scale, pre_tokens, next_tokens, form, sparse_mode):
    """(softmax max, softmax sum, nothing, result) for `heads` local query heads."""
    if ascend_kernels():
        kernel = ops.operations.nn_ops.FlashAttentionScore(heads, 1.0, scale, pre_tokens, next_tokens, 0, form, sparse_mode)
        return kernel(query, key, value, real_shift, None, None, attn_mask, None)
    return composed(query, key, value, real_shift, attn_mask, heads, scale, pre_tokens, next_tokens, form, sparse_mode)


def composed(query, key, value, real_shift, attn_mask, heads, scale, pre_tokens, next_tokens, form, sparse_mode):
    """The same from batched products; float16 is computed in float32 and rounded once."""
    depth = query._shape[-1] // (1 if "N" in form else heads)
    q, k, v = (_bnsd(x, form, depth) for x in (query, key, value))
    shared = q._shape[1] // k._shape[1]
    if shared > 1:
        k, v = (_repeated(x, shared) for x in (k, v))
    scores = mint.matmul(q, mint.transpose(k, 2, 3))
    if real_shift is not None:
        scores = scores + real_shift.astype(ms.float32)
    scores = scores * scale
    hidden = _hidden(attn_mask, scores._shape[2], scores._shape[3], pre_tokens, next_tokens, sparse_mode)
    if hidden is not None:
        scores = mint.where(hidden, Tensor(np.float32(np.finfo(np.float32).min)), scores)
    top = ops.stop_gradient(mint.amax(scores, (3,), keepdim=True))
    weights = mint.exp(scores - top)
    total = mint.sum(weights, (3,), keepdim=True)
    out = mint.matmul(weights / total, v)
    stats = [mint.broadcast_to(s, (*s._shape[:3], 8)) for s in (top, ops.stop_gradient(total))]
    return stats[0], stats[1], ops.zeros((), query.dtype), _back(out, form).astype(query.dtype)


def _bnsd(x, form, depth):
    if "N" not in form:
        x = mint.reshape(x, (*x._shape[:2], x._shape[2] // depth, depth))
    return mint.permute(x, _TO_BNSD[form]).astype(ms.float32)


def _back(x, form):
    order = _TO_BNSD[form]
    x = mint.permute(x, tuple(order.index(d) for d in range(4)))
    return x if "N" in form else mint.reshape(x, (*x._shape[:2], x._shape[2] * x._shape[3]))


def _repeated(x, times: int):
    b, n, s, d = x._shape
    return mint.reshape(mint.broadcast_to(mint.unsqueeze(x, 2), (b, n, times, s, d)), (b, n * times, s, d))


def _hidden(mask, rows: int, cols: int, pre: int, nxt: int, sparse_mode: int):
    """Where a query must not look, as one boolean tensor, or None."""
    if sparse_mode not in (0, 1, 2, 3, 4):
        raise OpRuleError(f"For 'flash_attention_score', sparse_mode {sparse_mode} is not supported on CPU.", "",
                          "It packs sequences.", "use sparse_mode 0 to 4")
    i, j = np.arange(rows)[:, None], np.arange(cols)[None, :]
    if sparse_mode == 2:  # causal, aligned left; the mask is the kernel's compressed one
        return Tensor(j > i)
    if sparse_mode == 3:  # causal, aligned right
        return Tensor(j > i + cols - rows)
    if sparse_mode == 4:  # a band, aligned right
        return Tensor((j > i + cols - rows + nxt) | (j < i + cols - rows - pre))
    hidden = None if mask is None else mask.astype(ms.bool_)
    if sparse_mode == 0 and mask is not None and (pre < _EVERYTHING or nxt < _EVERYTHING):
        band = Tensor((j > i + nxt) | (j < i - pre))
        hidden = mint.logical_or(hidden, band)
    return hidden


def flash_attention_score(query, key, value, real_shift=None, drop_mask=None, padding_mask=None, attn_mask=None,
                          prefix=None, actual_q=None, actual_kv=None, head_num=1, keep_prob=1.0, scale=1.0,
                          pre_tokens=_EVERYTHING, next_tokens=_EVERYTHING, inner_precise=0, input_layout="BSH",
                          sparse_mode=0):
    """`FlashAttentionScore`."""
    return composed(query, key, value, real_shift, attn_mask, head_num, scale, pre_tokens, next_tokens,
                    layout_name(input_layout), sparse_mode)


def rotary(x, cos, sin, mode=0):
    """`RotaryPositionEmbedding`: mode 0 pairs the halves of the last dim, mode 1 its neighbours."""
    n = x._shape[-1] // 2
    if mode == 0:
        turned = mint.cat((-mint.narrow(x, -1, n, n), mint.narrow(x, -1, 0, n)), -1)
    else:
        pairs = mint.reshape(x, (*x._shape[:-1], n, 2))
        turned = mint.reshape(mint.cat((-mint.narrow(pairs, -1, 1, 1), mint.narrow(pairs, -1, 0, 1)), -1), x._shape)
    return x * cos + turned * sin


TABLE = {"flash_attention": flash_attention}
CPU = {"FlashAttentionScore": flash_attention_score, "RotaryPositionEmbedding": rotary}
