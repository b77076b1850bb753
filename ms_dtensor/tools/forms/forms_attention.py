# SPDX-License-Identifier: Apache-2.0
"""Fused attention and rotary embedding: batch and heads sharded, grouped keys, masks; what keeps a cache is refused."""
from __future__ import annotations

import numpy as np
from mindspore import ops

from ...errors import OpRuleError
from .form import Form


def of(*shapes):
    """Arguments: one float32 array per shape."""
    return lambda rng: tuple(rng.normal(size=s).astype(np.float32) for s in shapes)


def masked(*shapes, mask):
    """Arguments: arrays, then a boolean mask of shape `mask` that hides the future."""
    def make(rng):
        hidden = np.triu(np.ones(mask[-2:], bool), 1)
        return (*(rng.normal(size=s).astype(np.float32) for s in shapes), np.broadcast_to(hidden, mask).copy())
    return make


def _flash(heads, layout, **static):
    def call(q, k, v, mask=None):
        return ops.flash_attention_score(q, k, v, heads, attn_mask=mask, input_layout=layout, scalar_value=0.5, **static)
    return call


B, N, S, D = 2, 4, 3, 4
BNSD, BSH, SBH, BSND = ((B, N, S, D),) * 3, ((B, S, N * D),) * 3, ((S, B, N * D),) * 3, ((B, S, N, D),) * 3
GROUPED = ((3, 4, S, D), (3, 2, 5, D), (3, 2, 5, D))

PACKED, ENDS = ((8, N, D), (12, 2, D), (12, 2, D)), {"actual_seq_qlen": (2, 4, 6, 8), "actual_seq_kvlen": (3, 6, 9, 12)}
UNEVEN = {"actual_seq_qlen": (3, 4, 4, 8), "actual_seq_kvlen": (1, 6, 7, 12)}  # between the second and the third, in halves
TRIANGLE = np.triu(np.ones((2048, 2048), np.uint8), 1)


def compressed(*shapes):
    """Arguments: arrays, then the mask of sparse modes 2 to 4."""
    return lambda rng: (*of(*shapes)(rng), TRIANGLE)


def _speed(form, **static):
    return lambda q, k, v: ops.speed_fusion_attention(q, k, v, N, form, scale=0.5, **static)[:4]


def _two_results(rng):
    """Arguments of `ring_attention_update`: eight equal statistics per row."""
    def result():
        top, total = (np.repeat(rng.uniform(0.5, 2, (B, N, S, 1)), 8, -1).astype(np.float32) for _ in range(2))
        return rng.normal(size=(S, B, N * D)).astype(np.float32), top, total
    return *result(), *result()


def _turn(mode):
    return lambda x, c, s: ops.rotary_position_embedding(x, c, s, mode)


TURNED = ((2, 3, 4, 8), (1, 3, 1, 8), (1, 3, 1, 8))
FORMS = [
    Form("ops.flash_attention_score(BNSD)", _flash(N, "BNSD"), (of(*BNSD), of(*GROUPED), of((2, 4, 3, 4), *((2, 1, 3, 4),) * 2))),
    Form("ops.flash_attention_score(BSH)", _flash(N, "BSH"), (of(*BSH), of((3, 2, 16), (3, 5, 8), (3, 5, 8)))),
    Form("ops.flash_attention_score(SBH)", _flash(N, "SBH"), of(*SBH)),
    Form("ops.flash_attention_score(BSND)", _flash(N, "BSND"), of(*BSND)),
    Form("ops.flash_attention_score(TND)", _flash(N, "TND", **ENDS), of(*PACKED)),
    Form("ops.flash_attention_score(TND, uneven)", _flash(N, "TND", **UNEVEN), of(*PACKED)),
    Form("ops.flash_attention_score(TND, sparse_mode)", _flash(N, "TND", sparse_mode=3, **ENDS), compressed(*PACKED)),
    Form("ops.flash_attention_score(attn_mask)", _flash(N, "BNSD"),
         (masked(*BNSD, mask=(S, S)), masked(*BNSD, mask=(B, 1, S, S)), masked(*BNSD, mask=(B, N, S, S)))),
    Form("ops.flash_attention_score(sparse_mode=1)", _flash(N, "BSND", sparse_mode=1), masked(*BSND, mask=(B, 1, S, S))),
    *(Form(f"ops.flash_attention_score(sparse_mode={m})", _flash(N, form, sparse_mode=m, **band), compressed(*shapes))
      for m, form, shapes, band in ((2, "BNSD", BNSD, {}), (3, "BSH", BSH, {}), (4, "BSND", BSND, {"pre_tokens": 1, "next_tokens": 1}))),
    Form("ops.flash_attention_score(band)", _flash(N, "BSH", pre_tokens=1, next_tokens=0), masked(*BSH, mask=(S, S))),
    Form("ops.flash_attention_score(real_shift)",
         lambda q, k, v, p: ops.flash_attention_score(q, k, v, N, real_shift=p, input_layout="BNSD"),
         (of(*BNSD, (B, N, S, S)), of(*BNSD, (1, N, S, S)))),
    *(Form(f"ops.flash_attention_score({form}, keep_prob)", _flash(N, form, keep_prob=0.6), of(*shapes)) for form, shapes in (
        ("BNSD", ((B, N, S, D), (B, 2, 8, D), (B, 2, 8, D))), ("BSH", ((B, 4, N * D), (B, 8, N * D), (B, 8, N * D))),
        ("SBH", ((S, B, N * D), (8, B, N * D), (8, B, N * D))))),
    Form("ops.flash_attention_score(keep_prob, 5 keys)", _flash(N, "BNSD", keep_prob=0.5), of(*GROUPED), raises=OpRuleError),
    Form("ops.flash_attention_score(sparse_mode=2, no mask)", _flash(N, "BNSD", sparse_mode=2), of(*BNSD), raises=OpRuleError),
    Form("ops.flash_attention_score(sparse_mode=2, small mask)", _flash(N, "BNSD", sparse_mode=2),
         masked(*BNSD, mask=(S, S)), raises=OpRuleError),
    Form("ops.flash_attention_score(sparse_mode=5)", _flash(N, "BNSD", sparse_mode=5), masked(*BNSD, mask=(B, N, S, S)),
         raises=OpRuleError),
    Form("ops.flash_attention_score(drop_mask)",
         lambda q, k, v, m: ops.flash_attention_score(q, k, v, N, drop_mask=m, keep_prob=0.5, input_layout="BNSD"),
         lambda rng: (*of(*((B, N, 8, D),) * 3)(rng), np.full((B, N, 8, 1), 255, np.uint8)), raises=OpRuleError),
    Form("ops.flash_attention_score(BNSD, lengths)", _flash(N, "BNSD", **ENDS), of(*BNSD), raises=OpRuleError),
    Form("ops.flash_attention_score(TND, no lengths)", _flash(N, "TND"), of(*PACKED), raises=OpRuleError),
    Form("ops.flash_attention_score(TND, keep_prob)", _flash(N, "TND", keep_prob=0.5, **ENDS), of(*PACKED), raises=OpRuleError),
    Form("ops.rotary_position_embedding(mode=0)", _turn(0), (of(*TURNED), of((2, 3, 4, 6), (2, 3, 4, 6), (2, 3, 4, 6)))),
    *(Form(f"ops.rotary_position_embedding(mode={m})", _turn(m), of(*TURNED)) for m in (1, 2, 3)),
    Form("ops.rotary_position_embedding(mode=4)", _turn(4), of(*TURNED), raises=OpRuleError),
    Form("ops.rotary_position_embedding(mode=2, 6)", _turn(2), of(*((2, 3, 4, 6),) * 3), raises=OpRuleError),
    *(Form(f"ops.speed_fusion_attention({form}, {static})", _speed(form, **static), args) for form, static, args in (
        ("BNSD", {}, of(*BNSD)), ("BSH", {"keep_prob": 0.6}, of((B, 4, N * D), (B, 8, N * D), (B, 8, N * D))),
        ("TND", ENDS, of(*PACKED)))),
    Form("ops.speed_fusion_attention(sparse_mode=3)",
         lambda q, k, v, m: ops.speed_fusion_attention(q, k, v, N, "BSND", atten_mask=m, sparse_mode=3), compressed(*BSND)),
    Form("ops.speed_fusion_attention(pse_type=2)", _speed("BNSD", pse_type=2), of(*BNSD), raises=OpRuleError),
    Form("auto_generate.ring_attention_update", ops.auto_generate.ring_attention_update, _two_results),
    Form("auto_generate.ring_attention_update(TND)",
         lambda *xs: ops.auto_generate.ring_attention_update(*xs, layout="TND"),
         of((8, N, D), (8, N, 8), (8, N, 8), (8, N, D), (8, N, 8), (8, N, 8)), raises=OpRuleError),
    Form("ops.ApplyRotaryPosEmb", lambda q, k, c, s, p: ops.ApplyRotaryPosEmb(2)(q, k, c, s, p),
         lambda rng: (*of((2, 8, 16), (2, 8, 8), (32, 4), (32, 4))(rng), np.zeros(2, np.int32)), raises=OpRuleError),
    Form("ops.all_gather_matmul", lambda x, w: ops.all_gather_matmul(x, w, "a group", 2), of((4, 6), (6, 2)), raises=OpRuleError),
    Form("ops.matmul_reduce_scatter", lambda x, w: ops.matmul_reduce_scatter(x, w, "a group", 2), of((4, 6), (6, 2)),
         raises=OpRuleError),
    Form("ops.prompt_flash_attention",
         lambda q, k, v: ops.prompt_flash_attention(q, k, v, None, num_heads=N, input_layout="BNSD"), of(*BNSD),
         raises=OpRuleError),
    Form("ops.incre_flash_attention",
         lambda q, k, v: ops.incre_flash_attention(q, [k], [v], None, num_heads=N, input_layout="BNSD"), of(*BNSD),
         raises=OpRuleError),
]
