# SPDX-License-Identifier: Apache-2.0
"""Fused attention and rotary embedding: batch and heads sharded, grouped keys, masks; what keeps a cache is refused."""
from __future__ import annotations

import numpy as np
from mindspore import ops

from ms_dtensor.errors import OpRuleError
from tests.coverage.form import Form


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

FORMS = [
    Form("ops.flash_attention_score(BNSD)", _flash(N, "BNSD"), (of(*BNSD), of(*GROUPED))),
    Form("ops.flash_attention_score(BSH)", _flash(N, "BSH"), (of(*BSH), of((3, 2, 16), (3, 5, 8), (3, 5, 8)))),
    Form("ops.flash_attention_score(SBH)", _flash(N, "SBH"), of(*SBH)),
    Form("ops.flash_attention_score(BSND)", _flash(N, "BSND"), of(*BSND)),
    Form("ops.flash_attention_score(attn_mask)", _flash(N, "BNSD"),
         (masked(*BNSD, mask=(S, S)), masked(*BNSD, mask=(B, 1, S, S)), masked(*BNSD, mask=(B, N, S, S)))),
    Form("ops.flash_attention_score(sparse_mode=2)", _flash(N, "BNSD", sparse_mode=2), masked(*BNSD, mask=(S, S))),
    Form("ops.flash_attention_score(band)", _flash(N, "BSH", pre_tokens=1, next_tokens=0), masked(*BSH, mask=(S, S))),
    Form("ops.flash_attention_score(keep_prob)", _flash(N, "BNSD", keep_prob=0.5), of(*BNSD), raises=OpRuleError),
    Form("ops.rotary_position_embedding(mode=0)", lambda x, c, s: ops.rotary_position_embedding(x, c, s, 0),
         (of((2, 3, 4, 6), (1, 3, 1, 6), (1, 3, 1, 6)), of((2, 3, 4, 6), (2, 3, 4, 6), (2, 3, 4, 6)))),
    Form("ops.rotary_position_embedding(mode=1)", lambda x, c, s: ops.rotary_position_embedding(x, c, s, 1),
         of((2, 3, 4, 6), (1, 1, 4, 6), (1, 1, 4, 6))),
    Form("ops.prompt_flash_attention",
         lambda q, k, v: ops.prompt_flash_attention(q, k, v, None, num_heads=N, input_layout="BNSD"), of(*BNSD),
         raises=OpRuleError),
    Form("ops.incre_flash_attention",
         lambda q, k, v: ops.incre_flash_attention(q, [k], [v], None, num_heads=N, input_layout="BNSD"), of(*BNSD),
         raises=OpRuleError),
]
