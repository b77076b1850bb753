# SPDX-License-Identifier: Apache-2.0
"""The forward of Llama-3, Qwen and Mistral in float64 NumPy, written from the papers' formulas and not from our model.

The tests' oracle. Not fast, not reusable: loops over heads, repeats keys, complex numbers for rotary embeddings.
"""
import numpy as np


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rope(x, frequencies):
    """x [t, e]: pair (x[i], x[i + e/2]) turned by position * frequency[i]."""
    half = x.shape[-1] // 2
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * np.outer(np.arange(len(x)), frequencies))
    return np.concatenate((turned.real, turned.imag), -1)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(x, w, prefix, cfg, frequencies):
    e, group = cfg.head_width or cfg.dim // cfg.n_heads, cfg.n_heads // cfg.n_kv_heads
    q, k, v = (x @ w[f"{prefix}.{name}.weight"].T + w.get(f"{prefix}.{name}.bias", 0) for name in ("wq", "wk", "wv"))
    behind = np.arange(len(x))[:, None] - np.arange(len(x))[None, :]
    hidden = (behind < 0) | (behind >= (cfg.sliding_window or len(x)))
    heads = []
    for head in range(cfg.n_heads):
        mine, shared = slice(head * e, (head + 1) * e), slice(head // group * e, (head // group + 1) * e)
        query, key = q[:, mine], k[:, shared]
        if cfg.qk_norm:
            query = rms_norm(query, w[f"{prefix}.q_norm.weight"], cfg.norm_eps)
            key = rms_norm(key, w[f"{prefix}.k_norm.weight"], cfg.norm_eps)
        scores = rope(query, frequencies) @ rope(key, frequencies).T / np.sqrt(e)
        heads.append(softmax(np.where(hidden, -np.inf, scores)) @ v[:, shared])
    return np.concatenate(heads, -1) @ w[f"{prefix}.wo.weight"].T + w.get(f"{prefix}.wo.bias", 0)


def feed_forward(x, w, prefix):
    gate, up = x @ w[f"{prefix}.w1.weight"].T, x @ w[f"{prefix}.w3.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ w[f"{prefix}.w2.weight"].T


def logits(ids, w, cfg, frequencies):
    """ids [t] -> [t, vocab]."""
    x = w["tok_embeddings.weight"][ids]
    for layer in range(cfg.n_layers):
        at = f"layers.{layer}"
        normed = rms_norm(x, w[f"{at}.attention_norm.weight"], cfg.norm_eps)
        x = x + attention(normed, w, f"{at}.attention", cfg, frequencies)
        x = x + feed_forward(rms_norm(x, w[f"{at}.ffn_norm.weight"], cfg.norm_eps), w, f"{at}.feed_forward")
    head = w["tok_embeddings.weight" if cfg.tied_head else "output.weight"]
    return rms_norm(x, w["norm.weight"], cfg.norm_eps) @ head.T
