# SPDX-License-Identifier: Apache-2.0
"""Fused attention on local tensors: Ascend's kernel where it is, elsewhere the same from products and a softmax.

`attn_mask` is true where a query must *not* look, as in MindSpore.
"""
from __future__ import annotations

import functools
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from ...internals.target import ascend_kernels
from .. import rng
from ..rules.attention import FAR, layout_name
from .dtypes import wider

# layout -> the permutation to batch, heads, sequence, depth, once heads and depth are apart
_TO_BNSD = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3)}
_kernel = functools.lru_cache(ops.operations.nn_ops.FlashAttentionScore)


def flash_attention(query, key, value, real_shift, attn_mask, heads, keep, scale, pre_tokens, next_tokens, form, sparse_mode,
                    lengths=None, dropped=None):
    """(softmax max, softmax sum, nothing, result) of one rank's heads, rows or sequences.

    Args:
        heads: this rank's query heads.
        keep: the share of weights that is kept.
        lengths: where this rank's sequences end, among its queries and its keys, if they are packed.
        dropped: (shape of the global scores, this rank's box of them), if weights are dropped.
    """
    kept = None if dropped is None else rng.keep_mask(rng.next_key(), dropped[0], keep, dropped[1])
    ends = lengths or (None, None)
    if not ascend_kernels():
        return composed(query, key, value, real_shift, attn_mask, heads, scale, pre_tokens, next_tokens, form, sparse_mode,
                        ends, kept, keep)
    bits = None if kept is None else Tensor(np.packbits(kept, -1, "little"))
    kernel = _kernel(heads, keep, scale, pre_tokens, next_tokens, 0, form, sparse_mode)
    return kernel(query, key, value, real_shift, bits, None, attn_mask, None, *ends)


def composed(query, key, value, real_shift, attn_mask, heads, scale, pre_tokens, next_tokens, form, sparse_mode,
             ends=(None, None), kept=None, keep=1.0):
    """The same from batched products; 16-bit floats are computed in float32 and rounded once."""
    if form == "TND":
        return _of_sequences(query, key, value, attn_mask, heads, scale, pre_tokens, next_tokens, sparse_mode, ends)
    depth = query._shape[-1] // (1 if "N" in form else heads)
    groups = key._shape[form.index("N")] if "N" in form else key._shape[-1] // depth
    q, k = (_bnsd(x, form, depth) for x in (query, key))
    v = _bnsd(value, form, value._shape[-1] // (1 if "N" in form else groups))
    if heads > groups:
        k, v = (_repeated(x, heads // groups) for x in (k, v))
    scores = mint.matmul(q, mint.transpose(k, 2, 3))
    if real_shift is not None:
        scores = scores + real_shift.astype(scores.dtype)
    scores = scores * scale_of(scale, scores)
    hidden = _hidden(attn_mask, scores._shape[2], scores._shape[3], pre_tokens, next_tokens, sparse_mode)
    if hidden is not None:
        scores = mint.where(hidden, Tensor(np.finfo(np.float32).min, scores.dtype), scores)
    top = ops.stop_gradient(mint.amax(scores, (3,), keepdim=True))
    weights = mint.exp(scores - top)
    total = mint.sum(weights, (3,), keepdim=True)
    weights = weights / total
    if kept is not None:
        weights = weights * Tensor(kept.astype(np.float32) / np.float32(keep))
    out = mint.matmul(weights, v)
    stats = [mint.broadcast_to(s, (*s._shape[:3], 8)) for s in (top, ops.stop_gradient(total))]
    return stats[0], stats[1], ops.zeros((1,), query.dtype), _back(out, form).astype(query.dtype)


def scale_of(scale: float, x: Tensor):
    """A factor as exact as x: MindSpore rounds a number beside a float64 tensor to float32."""
    return Tensor(scale, x.dtype) if x.dtype == ms.float64 else scale


def _of_sequences(query, key, value, attn_mask, heads, scale, pre_tokens, next_tokens, sparse_mode, ends):
    """Packed sequences, one after another."""
    done, q0, k0 = [], 0, 0
    for q1, k1 in zip(*ends):
        if q1 > q0:
            q, k, v = (mint.unsqueeze(mint.narrow(x, 0, lo, hi - lo), 0)
                       for x, lo, hi in ((query, q0, q1), (key, k0, k1), (value, k0, k1)))
            done.append(composed(q, k, v, None, attn_mask, heads, scale, pre_tokens, next_tokens, "BSND", sparse_mode))
        q0, k0 = q1, k1
    tops, totals, _, outs = zip(*done)
    stats = (mint.cat([mint.permute(mint.squeeze(s, 0), (1, 0, 2)) for s in x]) for x in (tops, totals))
    return *stats, ops.zeros((1,), query.dtype), mint.cat([mint.squeeze(o, 0) for o in outs])


def _bnsd(x, form, depth):
    if "N" not in form:
        x = mint.reshape(x, (*x._shape[:2], x._shape[2] // depth, depth))
    return wider(mint.permute(x, _TO_BNSD[form]))


def _back(x, form):
    order = _TO_BNSD[form]
    x = mint.permute(x, tuple(order.index(d) for d in range(4)))
    return x if "N" in form else mint.reshape(x, (*x._shape[:2], x._shape[2] * x._shape[3]))


def _repeated(x, times: int):
    b, n, s, d = x._shape
    return mint.reshape(mint.broadcast_to(mint.unsqueeze(x, 2), (b, n, times, s, d)), (b, n * times, s, d))


def _hidden(mask, rows: int, cols: int, pre: int, nxt: int, sparse_mode: int):
    """Where a query must not look, as one boolean tensor, or None. Without a mask no mode and no band counts."""
    if mask is None:
        return None
    i, j = np.arange(rows)[:, None], np.arange(cols)[None, :]
    if sparse_mode == 2:  # causal, aligned left; the mask is the kernel's compressed one
        return Tensor(j > i)
    if sparse_mode == 3:  # causal, aligned right
        return Tensor(j > i + cols - rows)
    if sparse_mode == 4:  # a band, aligned right
        return Tensor((j > i + cols - rows + nxt) | (j < i + cols - rows - pre))
    hidden = mask.astype(ms.bool_)
    if sparse_mode == 0 and (pre < FAR or nxt < FAR):
        return mint.logical_or(hidden, Tensor((j > i + nxt) | (j < i - pre)))
    return hidden


def speed_attention(*args, lengths=None, dropped=None):
    """`flash_attention` in the order of `SpeedFusionAttention`."""
    run: Any = flash_attention
    return _speed_results(*run(*args, lengths=lengths, dropped=dropped))


def _speed_results(top, total, nothing, out):
    """The kernel's seed, offset and size of its mask are zeros: it draws nothing."""
    return out, top, total, mint.narrow(nothing, 0, 0, 0), *(ops.zeros((), ms.int64) for _ in range(3))


def speed_fusion_attention(query, key, value, head_num, input_layout, seed, offset, pse=None, padding_mask=None,
                           atten_mask=None, scale=1.0, keep_prob=1.0, pre_tokens=FAR, next_tokens=FAR, inner_precise=0,
                           prefix=None, actual_q=None, actual_kv=None, sparse_mode=0, *_):
    """`SpeedFusionAttention`; what is dropped comes from our stream."""
    return _speed_results(*flash_attention_score(
        query, key, value, pse, None, None, atten_mask, None, actual_q, actual_kv, head_num, keep_prob, scale, pre_tokens,
        next_tokens, 0, input_layout, sparse_mode))


def ring_update(attn_out, softmax_max, softmax_sum, other_out, other_max, other_sum, actual_seq_qlen=None, layout="SBH"):
    """`RingAttentionUpdate` of [S, B, H]: each result counts as much as the sum of its weights."""
    top = mint.maximum(softmax_max, other_max)
    mine, its = softmax_sum * mint.exp(softmax_max - top), other_sum * mint.exp(other_max - top)
    total = mine + its

    def share(out, part):
        heads = part._shape[1]
        x = mint.reshape(out.astype(ms.float32), (*out._shape[:2], heads, out._shape[2] // heads))
        return x * mint.permute(mint.narrow(part / total, 3, 0, 1), (2, 0, 1, 3))
    out = mint.reshape(share(attn_out, mine) + share(other_out, its), attn_out._shape)
    return out.astype(attn_out.dtype), top, total


def flash_attention_score(query, key, value, real_shift=None, drop_mask=None, padding_mask=None, attn_mask=None,
                          prefix=None, actual_q=None, actual_kv=None, head_num=1, keep_prob=1.0, scale=1.0,
                          pre_tokens=FAR, next_tokens=FAR, inner_precise=0, input_layout="BSH", sparse_mode=0):
    """`FlashAttentionScore`; what is dropped comes from our stream."""
    form = layout_name(input_layout)
    kept = None
    if keep_prob < 1.0:
        batch, seq = form.index("B"), form.index("S")
        kept = rng.keep_mask(rng.next_key(), (query._shape[batch], head_num, query._shape[seq], key._shape[seq]), keep_prob)
    return composed(query, key, value, real_shift, attn_mask, head_num, scale, pre_tokens, next_tokens, form, sparse_mode,
                    (actual_q, actual_kv), kept, keep_prob)


TABLE = {"flash_attention": flash_attention, "dropout_attention": flash_attention, "speed_attention": speed_attention,
         "dropout_speed_attention": speed_attention}
CPU = {"FlashAttentionScore": flash_attention_score, "SpeedFusionAttention": speed_fusion_attention,
       "RingAttentionUpdate": ring_update}
