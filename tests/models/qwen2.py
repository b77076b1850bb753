# SPDX-License-Identifier: Apache-2.0
"""Qwen2, written as for one device: rotary positions, grouped queries, biases on q, k, v only, RMSNorm, tied head."""
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops


class RMSNorm(nn.Cell):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight = Parameter(ops.ones((dim,)), name="weight")
        self.eps = eps

    def construct(self, x):
        return self.weight * (x * ops.rsqrt(mint.mean(x.pow(2), -1, keepdim=True) + self.eps))


def rotate_half(x):
    half = x.shape[-1] // 2
    return mint.cat((-x[..., half:], x[..., :half]), dim=-1)


def repeat_kv(x, n: int):
    b, heads, t, e = x.shape
    return x[:, :, None, :, :].broadcast_to((b, heads, n, t, e)).reshape(b, heads * n, t, e)


class Attention(nn.Cell):
    def __init__(self, dim: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, self.e = heads, kv_heads, dim // heads
        self.q_proj = mint.nn.Linear(dim, heads * self.e, bias=True)
        self.k_proj = mint.nn.Linear(dim, kv_heads * self.e, bias=True)
        self.v_proj = mint.nn.Linear(dim, kv_heads * self.e, bias=True)
        self.o_proj = mint.nn.Linear(heads * self.e, dim, bias=False)

    def construct(self, x, cos, sin, mask):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.e).transpose(0, 2, 1, 3)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.e).transpose(0, 2, 1, 3)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.e).transpose(0, 2, 1, 3)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        k, v = (repeat_kv(a, self.heads // self.kv_heads) for a in (k, v))
        score = mint.matmul(q, mint.transpose(k, 2, 3)) * self.e ** -0.5 + mask
        out = mint.matmul(mint.softmax(score, dim=-1), v)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(b, t, -1))


class MLP(nn.Cell):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_proj = mint.nn.Linear(dim, hidden, bias=False)
        self.up_proj = mint.nn.Linear(dim, hidden, bias=False)
        self.down_proj = mint.nn.Linear(hidden, dim, bias=False)

    def construct(self, x):
        return self.down_proj(mint.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Cell):
    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(dim), RMSNorm(dim)
        self.self_attn, self.mlp = Attention(dim, heads, kv_heads), MLP(dim, hidden)

    def construct(self, x, cos, sin, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen2(nn.Cell):
    """ids i32[b, t], labels i32[b, t] (-100: not counted) -> mean cross entropy."""

    def __init__(self, vocab: int = 19, dim: int = 16, heads: int = 4, kv_heads: int = 2, hidden: int = 22, layers: int = 2):
        super().__init__()
        self.e = dim // heads
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.CellList([DecoderLayer(dim, heads, kv_heads, hidden) for _ in range(layers)])
        self.norm = RMSNorm(dim)
        self.lm_head = mint.nn.Linear(dim, vocab, bias=False)
        self.lm_head.weight = self.embed_tokens.embedding_table

    def construct(self, ids, labels):
        t = ids.shape[1]
        # made anew in each call, as plain tensors
        angle = np.outer(np.arange(t), 1e4 ** (-np.arange(0, self.e, 2) / self.e))
        angle = np.concatenate((angle, angle), -1).astype(np.float32)
        cos, sin = ops.cos(Tensor(angle)), ops.sin(Tensor(angle))
        mask = ops.triu(ops.full((t, t), -1e9), 1)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        logits = self.lm_head(self.norm(x))
        return ops.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)
