# SPDX-License-Identifier: Apache-2.0
"""How many floating-point operations a token costs, for TFLOP/s and MFU.

Counted are the products of matrices, forward once and backward twice: 6 operations a weight, and attention over what a
token sees (causal: half the sequence on the average; a sliding window: that much; `data.documents` hides more, which depends
on the data and is not taken off). Recomputation is not counted: it is no
progress. Of frozen weights (LoRA) the backward computes one product, not two; their adapters are too small to count.
"""
from __future__ import annotations

from .config import ModelConfig


def weights_in_products(m: ModelConfig) -> int:
    """Weights that a token is multiplied with: of the blocks, of experts those it goes to, and of the head, tied or not."""
    dense, experts = 3 * m.dim * m.ffn_dim, m.experts
    ffn = m.n_layers * dense
    if experts is not None:
        one = 3 * m.dim * (experts.width or m.ffn_dim)
        mixed = (experts.per_token + experts.shared) * one + m.dim * experts.count  # the router asks for all
        ffn = experts.dense_layers * dense + (m.n_layers - experts.dense_layers) * mixed
    return m.n_layers * attention_weights(m) + ffn + m.dim * m.vocab_size


def attention_weights(m: ModelConfig, ranks: int = 1) -> int:
    """Weights of a block's attention in matrices, of one of so many ranks that share its heads."""
    heads, keys, latent = -(-m.n_heads // ranks), -(-m.n_kv_heads // ranks), m.latent
    if latent is None:
        return m.dim * m.head_dim * (2 * heads + 2 * keys)
    queries = heads * m.head_dim * (m.dim if latent.q_rank is None else latent.q_rank)
    short = m.dim * ((latent.q_rank or 0) + latent.kv_rank + latent.turned)
    return queries + short + heads * (latent.kv_rank * (latent.plain + latent.value) + latent.value * m.dim)


def seen(m: ModelConfig, seq: int) -> float:
    """How many tokens one sees on the average, itself among them."""
    width = min(m.sliding_window or seq, seq)
    return width - width * (width - 1) / (2 * seq)


def flops_per_token(m: ModelConfig, seq: int, frozen: bool = False) -> float:
    """Operations of a training step, per token of it."""
    return (4 if frozen else 6) * weights_in_products(m) + 6 * m.n_layers * m.n_heads * (
        m.head_dim + (m.head_dim if m.latent is None else m.latent.value)) * seen(m, seq)
