# SPDX-License-Identifier: Apache-2.0
"""Llama-3 as plain MindSpore cells, written as for one device.

Not here: anything parallel. Every size in the code is a *global* size taken from the config, never from a local
width, so the same lines run on plain Tensors and on DTensors (whose `.shape` is the global shape).

The core of attention (`attend`: rotary embedding, scores, softmax, mix) is a function of q, k and v alone. It works on
any number of sequences and heads, so a rank that holds some of them runs it as it is; its constants are made from the
shapes it sees. On a mesh `parallelize.py` maps it over the shards.

Between attentions a batch is one list of n = b*t tokens, f32[n, d]. A linear layer then reads its input as it is, with
no reshape in between: on a mesh, q, k and v share one gradient reduction because they read the very same tensor, and
sequence parallelism is a cut of the token list, whose pieces are contiguous in memory.

The matrix products are MindSpore's classic primitives (`nn.Dense`, `ops.BatchMatMul`), because on CPU they are two
to ten times faster, forward and backward, than their `mint` twins. Read next: `parallelize.py`.

Shapes: b sequences of t tokens, n = b*t, d dim, h query heads, k key heads, g = h/k heads that share a key, e head dim.
"""
from __future__ import annotations

import zlib
from functools import lru_cache, partial
from typing import NamedTuple

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


class Constants(NamedTuple):
    """What `attend` needs besides its operands; rows are numbered (b, t, heads) as the projections give them."""

    cos: Tensor
    """f32[b*t*heads, e]; of full size, as on CPU a product with broadcasting costs ten times one without"""
    sin: Tensor
    turn: Tensor
    """f32[e, e]: takes (x1, x2) to (-x2, x1); zeros and ones, so exact, and far cheaper than split + concat"""
    by_head: Tensor
    """i32[b*heads*t]: the rows in the order (b, heads, t)"""
    by_token: Tensor
    """i32[b*t*heads]: and back"""


@lru_cache(maxsize=8)
def constants(cfg: ModelConfig, b: int, t: int, heads: int) -> Constants:
    """For b sequences of t tokens and this many heads."""
    e = cfg.head_dim
    angle = np.arange(t, dtype=np.float64)[:, None] * rope_frequencies(e, cfg.rope_theta, cfg.rope_scaling)[None]
    angle = np.broadcast_to(np.concatenate((angle, angle), axis=1)[None, :, None], (b, t, heads, e)).reshape(-1, e)
    turn = np.zeros((e, e), np.float32)
    pair = np.arange(e // 2)
    turn[e // 2 + pair, pair], turn[pair, e // 2 + pair] = -1.0, 1.0
    by_head = np.arange(b * t * heads, dtype=np.int32).reshape(b, t, heads).transpose(0, 2, 1).reshape(-1)
    return Constants(*map(Tensor, (np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32), turn,
                                   by_head, np.argsort(by_head).astype(np.int32))))


@lru_cache(maxsize=8)
def causal_mask(t: int) -> Tensor:
    """f32[t*t], added to the scores."""
    return Tensor(np.triu(np.full((t, t), MASKED, np.float32), 1).reshape(-1))


def attention_core(q, key, value, mine: Constants, theirs: Constants, mask: Tensor) -> Tensor:
    """See `attend`: tensor ops only, so that it can be compiled."""
    (b, t, h, e), k = q.shape, key.shape[2]
    product, scores, mix = ops.MatMul(), ops.BatchMatMul(transpose_b=True), ops.BatchMatMul()

    cos, sin, turn, by_head, by_token = mine
    key_cos, key_sin, _, key_by_head, _ = theirs

    def turned(x, cos, sin):
        return x * cos + product(x, turn) * sin
    q = turned(q.reshape(-1, e), cos, sin) * e ** -0.5
    q = ops.gather(q, by_head, 0).reshape(b * k, h // k * t, e)
    key = ops.gather(turned(key.reshape(-1, e), key_cos, key_sin), key_by_head, 0).reshape(b * k, t, e)
    value = ops.gather(value.reshape(-1, e), key_by_head, 0).reshape(b * k, t, e)
    score = ops.bias_add(scores(q, key).reshape(b * h, t * t), mask)
    out = mix(mint.softmax(score.reshape(b * k, h // k * t, t), -1), value)
    return ops.gather(out.reshape(-1, e), by_token, 0).reshape(b, t, h, e)


def attend(cfg: ModelConfig, q: Tensor, key: Tensor, value: Tensor, core=attention_core) -> Tensor:
    """Causal grouped-query attention of q f32[b, t, h, e] over key and value f32[b, t, k, e] -> f32[b, t, h, e].

    Keys are never repeated: the g query heads that share a key head are folded into its query rows, so scores are one
    batched product [b*k, g*t, e] x [b*k, t, e].

    Heads come before tokens by a lookup of rows, and the mask is added as a bias to b*h rows of t*t scores: on CPU
    transposing the tensor and broadcasting the mask cost more than all products together.
    """
    b, t, h, _ = q.shape
    return core(q, key, value, tuple(constants(cfg, b, t, h)), tuple(constants(cfg, b, t, key.shape[2])), causal_mask(t))


def compile_attention(model: Llama) -> None:
    """Lets the core of every attention run as one compiled graph; before `parallelize`.

    On CPU it saves 6 % of a step at 21 M parameters, for a second of compiling per shape. A mesh maps the core over local
    tensors, which is what makes it compilable; other regions (norms, feed-forward) gain nothing.
    """
    core = ms.jit(attention_core)
    for layer in model.layers:
        layer.attention.core = partial(layer.attention.core, core=core)


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
    """x / rms(x) * weight over the last dim of x [n, d]."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = ms.Parameter(ops.ones((dim,), ms.float32), name="weight")
        self.dim, self.eps = dim, eps
        self.outer = ops.MatMul()

    def construct(self, x):
        # both factors in one outer product: on CPU a product with broadcasting costs ten times one without
        scale = mint.rsqrt((x * x).mean(-1, keep_dims=True) + self.eps)
        return x * self.outer(scale, self.weight.reshape(1, self.dim))


class Attention(nn.Cell):
    """Causal grouped-query attention. Head h = (k, g) with k outermost: cutting h or k over an axis is the same cut."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim
        self.wq = linear(cfg.dim, cfg.n_heads * cfg.head_dim)
        self.wk = linear(cfg.dim, cfg.n_kv_heads * cfg.head_dim)
        self.wv = linear(cfg.dim, cfg.n_kv_heads * cfg.head_dim)
        self.wo = linear(cfg.n_heads * cfg.head_dim, cfg.dim)
        self.core = partial(attend, cfg)

    def construct(self, x, t):
        b, h, k, e = x.shape[0] // t, self.heads, self.kv_heads, self.head_dim
        q, key, value = (w(x).reshape(b, t, n, e) for w, n in ((self.wq, h), (self.wk, k), (self.wv, k)))
        return self.wo(self.core(q, key, value).reshape(b * t, h * e))


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

    def construct(self, x, t):
        x = x + self.attention(self.attention_norm(x), t)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Cell):
    """Token ids i32[b, t] -> logits f32[b*t, vocab].

    Args:
        cfg: the sizes.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.tok_embeddings = Embedding(cfg.vocab_size, cfg.dim)
        self.layers = nn.CellList([Block(cfg) for _ in range(cfg.n_layers)])
        self.norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.output = linear(cfg.dim, cfg.vocab_size)
        if cfg.tied_head:
            self.output.weight = self.tok_embeddings.weight
        for name, param in self.parameters_and_names():
            param.name = name

    def construct(self, ids):
        x = self.tok_embeddings(ids.reshape(-1))
        for layer in self.layers:
            x = layer(x, ids.shape[1])
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
