# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: routing, grouped products, and what puts the tokens back in their order."""
from __future__ import annotations

import numpy as np
from mindspore import ops
from mindspore.ops import auto_generate as ag

from ...errors import OpRuleError
from .form import Form

TOKENS, K, EXPERTS, HIDDEN = 6, 2, 4, 5
ROWS = TOKENS * K


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def experts(rng, tokens=TOKENS, k=K, dtype=np.int32):
    """k different experts for each token; the last expert has none."""
    return np.stack([rng.permutation(EXPERTS - 1)[:k] for _ in range(tokens)]).astype(dtype)


def permuted(rng):
    return normal(rng, TOKENS, HIDDEN), experts(rng)


def back(rng, rows=ROWS):
    """Rows in the order of experts (the last may have been dropped), and where each choice went."""
    return normal(rng, rows, HIDDEN), rng.permutation(ROWS).astype(np.int32)


def weighted(rng, rows=ROWS):
    return *back(rng, rows), rng.uniform(0.1, 1, (TOKENS, K)).astype(np.float32)


def products(rng, rows=10, inner=6, outer=4):
    return normal(rng, rows, inner), normal(rng, 3, inner, outer)


ENDS, SIZES = np.array([3, 3, 10]), np.array([3, 0, 7])
PADDED = np.array([2, 5, 8])  # two rows belong to nobody


def ends(rng):
    return *products(rng), ENDS


def sizes(rng):
    return *products(rng), SIZES


def padded(rng):
    return *products(rng, 10, 3, 5), PADDED


def with_bias(rng):
    return *products(rng), ENDS, normal(rng, 3, 4)


def pairs(rng):
    return normal(rng, 4, 6), normal(rng, 3, 6), normal(rng, 6, 5), normal(rng, 6, 2)


def pairs_with_bias(rng):
    return *pairs(rng), normal(rng, 5), normal(rng, 2)


def numbered(rng):
    return *permuted(rng), np.arange(ROWS, dtype=np.int32).reshape(K, TOKENS).T.copy()


def final(rng, tokens=TOKENS):
    return (normal(rng, tokens * K, HIDDEN), normal(rng, tokens, HIDDEN), normal(rng, EXPERTS, HIDDEN),
            rng.uniform(0.1, 1, (tokens, K)).astype(np.float32), rng.permutation(tokens * K).astype(np.int32),
            experts(rng, tokens))


def init_v2(*static):
    return lambda x, e: ops.moe_init_routing_v2(x, e, *static)


FORMS = [
    Form("ops.moe_token_permute", ops.moe_token_permute, (permuted, lambda r: (normal(r, 5, 3), experts(r, 5, 3, np.int64)))),
    Form("ops.moe_token_permute(1-d)", ops.moe_token_permute, lambda r: (normal(r, 7, 4), experts(r, 7, 1).reshape(-1))),
    Form("ops.moe_token_permute(num_out_tokens)", lambda x, i: ops.moe_token_permute(x, i, 7), permuted),
    Form("ops.moe_token_permute(padded_mode)", lambda x, i: ops.moe_token_permute(x, i, None, True), permuted, OpRuleError),
    Form("ops.moe_token_unpermute", ops.moe_token_unpermute, back),
    Form("ops.moe_token_unpermute(probs)", ops.moe_token_unpermute, (weighted, lambda r: weighted(r, 8))),
    Form("ops.moe_token_unpermute of dropped", ops.moe_token_unpermute, lambda r: back(r, 7)),
    Form("auto_generate.inner_moe_token_unpermute", ag.inner_moe_token_unpermute, weighted),
    Form("auto_generate.grouped_matmul",
         lambda x, w, g: ag.grouped_matmul([x], [w], group_list=g, split_item=3, group_type=0), (ends, padded)),
    Form("auto_generate.grouped_matmul(bias)",
         lambda x, w, g, b: ag.grouped_matmul([x], [w], [b], group_list=g, split_item=3, group_type=0), with_bias),
    Form("auto_generate.grouped_matmul(list)", lambda x, y, v, w: ag.grouped_matmul([x, y], [v, w]),
         (pairs, lambda r: (normal(r, 2, 3, 4), normal(r, 5, 4), normal(r, 4, 3), normal(r, 4, 6)))),
    Form("auto_generate.grouped_matmul(list, bias)",
         lambda x, y, v, w, a, b: ag.grouped_matmul([x, y], [v, w], [a, b]), pairs_with_bias),
    Form("auto_generate.GroupedMatmul",
         lambda x, w, g: ag.GroupedMatmul(3, 0)([x], [w], None, None, None, None, None, g), ends),
    Form("auto_generate.GroupedMatmul(list)", lambda x, y, v, w: ag.GroupedMatmul()([x, y], [v, w]), pairs),
    Form("auto_generate.grouped_matmul_v2",
         lambda x, w: ag.grouped_matmul_v2([x], [w], group_list=(3, 3, 10), split_item=3, group_type=0), products),
    Form("auto_generate.grouped_matmul_v4",
         lambda x, w, g: ag.grouped_matmul_v4([x], [w], group_list=g, split_item=3, group_type=0), (ends, padded)),
    Form("auto_generate.grouped_matmul_v4(group_list_type=1)",
         lambda x, w, g: ag.grouped_matmul_v4([x], [w], group_list=g, split_item=3, group_type=0, group_list_type=1), sizes),
    Form("auto_generate.grouped_matmul_v4(bias)",
         lambda x, w, g, b: ag.grouped_matmul_v4([x], [w], [b], group_list=g, split_item=3, group_type=0), with_bias),
    Form("auto_generate.grouped_matmul_v4(list)", lambda x, y, v, w: ag.grouped_matmul_v4([x, y], [v, w]), pairs),
    Form("auto_generate.grouped_matmul_v4(scale)",
         lambda x, w, g, b: ag.grouped_matmul_v4([x], [w], scale=[b], group_list=g, split_item=3, group_type=0), with_bias,
         OpRuleError),
    Form("auto_generate.gmm_op", lambda x, w: ag.gmm_op([x], [w], None, (3, 3, 10)), products),
    Form("auto_generate.gmm_op(group_list_type=1)", lambda x, w: ag.gmm_op([x], [w], None, (3, 0, 7), 0, 1), products),
    Form("auto_generate.gmm_v2_op", lambda x, w, g: ag.gmm_v2_op([x], [w], None, g), (ends, padded)),
    Form("auto_generate.gmm_v2_op(group_list_type=1)", lambda x, w, g: ag.gmm_v2_op([x], [w], None, g, 0, 1), sizes),
    Form("auto_generate.gmm_v2_op(group_type=2)", lambda x, w, g: ag.gmm_v2_op([x], [w], None, g, 2),
         lambda r: (normal(r, 6, 10), normal(r, 10, 4), ENDS), OpRuleError),
    Form("auto_generate.moe_gating_top_k_softmax_op", lambda x: ag.moe_gating_top_k_softmax_op(x, None, K),
         (lambda r: (normal(r, TOKENS, EXPERTS),), lambda r: (normal(r, 5, 8),))),
    Form("auto_generate.moe_gating_top_k_softmax_op(k=1)", lambda x: ag.moe_gating_top_k_softmax_op(x),
         lambda r: (normal(r, 7, EXPERTS),)),
    Form("auto_generate.moe_gating_top_k_softmax_op(finished)", lambda x, f: ag.moe_gating_top_k_softmax_op(x, f, K),
         lambda r: (normal(r, TOKENS, EXPERTS), r.random(TOKENS) > 0.5), OpRuleError),
    Form("auto_generate.moe_init_routing", lambda x, e, n: ag.moe_init_routing(x, n, e, TOKENS), numbered),
    Form("auto_generate.moe_init_routing(active_num)", lambda x, e, n: ag.moe_init_routing(x, n, e, 4), numbered),
    Form("ops.moe_init_routing_v2", init_v2(0, 0, EXPERTS, 0, 0, False), permuted),
    Form("ops.moe_init_routing_v2(active_num)", init_v2(7, 0, EXPERTS, 0, 2, False), permuted),
    Form("ops.moe_init_routing_v2(cumsum)", init_v2(0, 0, EXPERTS, 0, 1, False), permuted),
    Form("ops.moe_init_routing_v2(capacity)", init_v2(0, 3, EXPERTS, 1, 0, False), permuted),
    Form("ops.moe_init_routing_v2(capacity, counts before)", init_v2(0, 3, EXPERTS, 1, 0, True), permuted),
    Form("auto_generate.moe_finalize_routing",
         lambda x, x1, b, s, r, e: ag.moe_finalize_routing(x, x1, None, b, s, r, e), (final, lambda r: final(r, 3))),
    Form("auto_generate.moe_finalize_routing(x2)",
         lambda x, x1, b, s, r, e: ag.moe_finalize_routing(x, x1, x1 * 2, b, s, r, e), final),
    Form("auto_generate.moe_finalize_routing(no bias)",
         lambda x, x1, b, s, r, e: ag.moe_finalize_routing(x, x1, None, None, s, r, e), final),
    Form("auto_generate.moe_compute_expert_tokens", lambda e: ag.moe_compute_expert_tokens(e, EXPERTS + 1),
         lambda r: (np.sort(experts(r).reshape(-1)),)),
]
