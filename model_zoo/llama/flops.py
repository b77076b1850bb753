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
    attention = m.dim * m.head_dim * (2 * m.n_heads + 2 * m.n_kv_heads)
    one = 3 * m.dim * m.ffn_dim
    experts = m.experts
    ffn = one if experts is None else experts.per_token * one + m.dim * experts.count  # the router asks for all
    return m.n_layers * (attention + ffn) + m.dim * m.vocab_size


def seen(m: ModelConfig, seq: int) -> float:
    """How many tokens one sees on the average, itself among them."""
    width = min(m.sliding_window or seq, seq)
    return width - width * (width - 1) / (2 * seq)


def flops_per_token(m: ModelConfig, seq: int, frozen: bool = False) -> float:
    """Operations of a training step, per token of it."""
    return (4 if frozen else 6) * weights_in_products(m) + 12 * m.n_layers * m.n_heads * m.head_dim * seen(m, seq)
