# SPDX-License-Identifier: Apache-2.0
"""Llama-3 as plain MindSpore cells, written as for one device.

Not here: anything parallel. Every size in the code is a *global* size taken from the config, never from a local
width, so the same lines run on plain Tensors and on DTensors (whose `.shape` is the global shape).

Constants (rotary tables, causal mask) are buffers of the root cell, not parameters: they carry no gradient, and
`replicate` / `distribute_module` put them on the mesh with everything else.

Between attentions a batch is one list of n = b*t tokens, f32[n, d]. A linear layer then reads its input as it is, with
no reshape in between: on a mesh, q, k and v share one gradient reduction because they read the very same tensor, and
sequence parallelism is a cut of the token list, whose pieces are contiguous in memory.

The matrix products are MindSpore's classic primitives (`nn.Dense`, `ops.BatchMatMul`), because on CPU they are two
to ten times faster, forward and backward, than their `mint` twins. Read next: `parallelize.py`.

Shapes: b sequences of t tokens, n = b*t, d dim, h query heads, k key heads, g = h/k heads that share a key, e head dim.
"""
from __future__ import annotations

import zlib

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from .config import ModelConfig, RopeScaling

MASKED = -1e9  # finite, so that a row of the mask never makes a NaN; exp(MASKED - max) is exactly 0 in float32


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """f64[e/2]: rotation per position of each pair, with Llama-3's frequency scaling when asked for.

    Wave lengths longer than the old context / low_freq_factor are stretched by `factor`, those shorter than the old
    context / high_freq_factor are kept, and a linear ramp joins the two.
    """
    half = head_dim // 2
    freq = theta ** (-np.arange(half, dtype=np.float64) / half)
    if scaling is None:
        return freq
    turns = scaling.original_max_seq_len * freq / (2 * np.pi)  # rotations within the old context
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(ramp, 0.0, 1.0)
    return keep * freq + (1.0 - keep) * freq / scaling.factor


def rope_tables(cfg: ModelConfig, seq: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """cos f32[t, 1, e], sin f32[t, 1, e] and the f32[e, e] matrix that takes (x1, x2) to (-x2, x1)."""
    e = cfg.head_dim
    angle = np.arange(seq, dtype=np.float64)[:, None] * rope_frequencies(e, cfg.rope_theta, cfg.rope_scaling)[None]
    angle = np.concatenate((angle, angle), axis=1)[:, None, :]
    turn = np.zeros((e, e), np.float32)
    pair = np.arange(e // 2)
    turn[e // 2 + pair, pair], turn[pair, e // 2 + pair] = -1.0, 1.0
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32), turn


def rotate(x: Tensor, rope: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Rotary embedding, half-split form, of x [b, t, heads, e].

    The quarter turn is a product with a constant of zeros and ones: exact, and far cheaper than split + concat.
    """
    cos, sin, turn = rope
    return x * cos + mint.matmul(x, turn) * sin


def linear(d_in: int, d_out: int) -> nn.Dense:
    """y = x @ weight.T with weight [d_out, d_in]; filled by `init_weights`."""
    return nn.Dense(d_in, d_out, weight_init="zeros", has_bias=False)


class Embedding(mint.nn.Embedding):
    """`mint.nn.Embedding` (parameter `weight` [vocab, d]) over Gather, which, unlike Embedding, exists on CPU."""

    def __init__(self, vocab: int, dim: int):
        super().__init__(vocab, dim, _weight=ops.zeros((vocab, dim), ms.float32))

    def construct(self, ids):
        return ops.gather(self.weight, ids, 0)


class RMSNorm(nn.Cell):
    """x / rms(x) * weight over the last dim."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = ms.Parameter(ops.ones((dim,), ms.float32), name="weight")
        self.eps = eps

    def construct(self, x):
        return x * mint.rsqrt((x * x).mean(-1, keep_dims=True) + self.eps) * self.weight


class Attention(nn.Cell):
    """Causal grouped-query attention.

    Keys are never repeated: the g query heads that share a key head are folded into its query rows, so scores are one
    batched product [b, k, g*t, e] x [b, k, t, e]. Head h = (k, g) with k outermost: cutting h or k over an axis is the
    same cut, and every reshape here is a plain view of a tensor sharded by heads.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim
        self.group = cfg.n_heads // cfg.n_kv_heads
        self.wq = linear(cfg.dim, cfg.n_heads * cfg.head_dim)
        self.wk = linear(cfg.dim, cfg.n_kv_heads * cfg.head_dim)
        self.wv = linear(cfg.dim, cfg.n_kv_heads * cfg.head_dim)
        self.wo = linear(cfg.n_heads * cfg.head_dim, cfg.dim)
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.mix = ops.BatchMatMul()

    def construct(self, x, rope, mask):
        t = mask.shape[0]
        b = x.shape[0] // t
        h, k, g, e = self.heads, self.kv_heads, self.group, self.head_dim
        q = rotate(self.wq(x).reshape(b, t, h, e), rope) * e ** -0.5
        key = rotate(self.wk(x).reshape(b, t, k, e), rope)
        value = self.wv(x).reshape(b, t, k, e).permute(0, 2, 1, 3)
        if g == 1:
            q = q.permute(0, 2, 1, 3)
        else:
            q = q.reshape(b, t, k, g, e).permute(0, 2, 3, 1, 4).reshape(b, k, g * t, e)
        score = self.scores(q, key.permute(0, 2, 1, 3))
        if g == 1:
            out = self.mix(mint.softmax(score + mask, -1), value).permute(0, 2, 1, 3)
        else:
            prob = mint.softmax(score.reshape(b, k, g, t, t) + mask, -1).reshape(b, k, g * t, t)
            out = self.mix(prob, value).reshape(b, k, g, t, e).permute(0, 3, 1, 2, 4)
        return self.wo(out.reshape(b * t, h * e))


class FeedForward(nn.Cell):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.w1 = linear(cfg.dim, cfg.ffn_dim)
        self.w2 = linear(cfg.ffn_dim, cfg.dim)
        self.w3 = linear(cfg.dim, cfg.ffn_dim)

    def construct(self, x):
        return self.w2(mint.nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Cell):
    """One transformer layer, pre-norm."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.attention_norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.attention = Attention(cfg)
        self.ffn_norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.feed_forward = FeedForward(cfg)

    def construct(self, x, rope, mask):
        x = x + self.attention(self.attention_norm(x), rope, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Cell):
    """Token ids i32[b, t] -> logits f32[b*t, vocab].

    Args:
        cfg: the sizes.
        max_seq: the longest sequence; rotary tables and the mask are made for it. A shorter input slices them.
    """

    def __init__(self, cfg: ModelConfig, max_seq: int):
        super().__init__()
        self.max_seq = max_seq
        self.tok_embeddings = Embedding(cfg.vocab_size, cfg.dim)
        self.layers = nn.CellList([Block(cfg) for _ in range(cfg.n_layers)])
        self.norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.output = linear(cfg.dim, cfg.vocab_size)
        if cfg.tied_head:
            self.output.weight = self.tok_embeddings.weight
        cos, sin, turn = rope_tables(cfg, max_seq)
        mask = np.triu(np.full((max_seq, max_seq), MASKED, np.float32), 1)
        for name, table in (("rope_cos", cos), ("rope_sin", sin), ("rope_turn", turn), ("causal_mask", mask)):
            self.register_buffer(name, Tensor(table), persistent=False)
        for name, param in self.parameters_and_names():
            param.name = name

    def construct(self, ids):
        t = ids.shape[1]
        cos, sin, mask = self.rope_cos, self.rope_sin, self.causal_mask
        if t != self.max_seq:
            cos, sin, mask = cos[:t], sin[:t], mask[:t, :t]
        rope = (cos, sin, self.rope_turn)
        x = self.tok_embeddings(ids.reshape(-1))
        for layer in self.layers:
            x = layer(x, rope, mask)
        return self.output(self.norm(x))


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean of -log softmax(logits)[label] over the tokens whose label is not `ignore_index`; NaN if there is none.

    Args:
        logits: f32[n, vocab].
        labels: i32 of n elements, in any shape.
        ignore_index: label of tokens that do not count.

    log_softmax + gather rather than `ops.cross_entropy`: the same number, fifteen times faster on CPU.
    """
    labels = labels.reshape(-1, 1)
    keep = labels != ignore_index
    picked = ops.gather_elements(ops.log_softmax(logits, -1), 1, labels * keep.astype(labels.dtype))
    keep = keep.astype(logits.dtype)
    return -(picked * keep).sum() / keep.sum()


def init_weights(model: Llama, seed: int, std: float = 0.02) -> None:
    """Normal(0, std) for every matrix, ones for the norms; residual outputs (wo, w2) scaled by 1/sqrt(2 * layers).

    Each parameter draws from its own Philox stream keyed by (seed, name): the values depend on neither the order of
    creation nor the number of ranks. Call it before `parallelize`.
    """
    residual = 1.0 / np.sqrt(2.0 * len(model.layers))
    for name, param in model.parameters_and_names():
        if param.ndim == 1:
            value = np.ones(param.shape, np.float32)
        else:
            stream = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))
            scale = std * (residual if name.endswith(("wo.weight", "w2.weight")) else 1.0)
            value = stream.standard_normal(param.shape, np.float32) * np.float32(scale)
        param.set_data(Tensor(value))
