# SPDX-License-Identifier: Apache-2.0
"""Llama-3 as plain MindSpore cells, written as for one device; by its config also Llama-2, Qwen2, Qwen3,
Mistral, and the mixtures of experts Mixtral, Qwen3-MoE, OLMoE and DeepSeek-V3.

Not here: anything parallel. Every size in the code is a *global* size taken from the config, never from a local
width, so the same lines run on plain Tensors and on DTensors (whose `.shape` is the global shape).

Where a device has a fused op it is named: `embedding`, `rms_norm`, `rotary_position_embedding`, `flash_attention_score`,
`swiglu`. A CPU has none of them; `cpu.py` holds a twin of each, equal in values and gradients, and is not needed to
understand the model.

Between attentions a batch is one list of n = b*t tokens [n, d]. A linear layer then reads its input as it is, with
no reshape in between: on a mesh, q, k and v share one gradient reduction because they read the very same tensor, and
sequence parallelism is a cut of the token list, whose pieces are contiguous in memory. Read next: `parallelize.py`.

Shapes: b sequences of t tokens, n = b*t, d dim, h query heads, k key heads that h/k query heads share, e head dim.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from ms_dtensor import DTensor, Tokens
from ms_dtensor.internals.target import on_cpu
from ms_dtensor.pipeline import Absent

from . import at_once, cpu
from .config import ModelConfig
from .experts import Experts, balance_loss
from .initial import initial
from .joined import parts_of
from .latent import LatentAttention
from .layers import Embedding, FeedForward, Joined, RMSNorm, linear
from .rope import angles, score_scale

F = mint.nn.functional


@lru_cache(maxsize=8)
def rotary_tables(cfg: ModelConfig, t: int, dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, [1, t, 1, e]."""
    angle = angles(cfg, t)[None, :, None]
    return tuple(Tensor(table.astype(np.float32)).astype(dtype) for table in (np.cos(angle), np.sin(angle)))


@lru_cache(maxsize=1)
def causal_mask() -> Tensor:
    """Which keys a query must not see, as the kernel wants it for sequences of any length."""
    return Tensor(np.triu(np.ones((2048, 2048), np.uint8), 1))


def attend(cfg: ModelConfig, q: Tensor, key: Tensor, value: Tensor, places: Tensor | None = None) -> Tensor:
    """Causal grouped-query attention of q [b, t, h, e] over key and value [b, t, k, e] -> [b, t, h, e].

    With `places`, i32[b, t], a token sees as many before it as its place says, and is turned by it.
    """
    if on_cpu():
        return cpu.attend(cfg, q, key, value, places)
    cos, sin = rotary_tables(cfg, q.shape[1], q.dtype)
    if places is not None:
        cos, sin = (ops.gather(table[0], places, 0) for table in (cos, sin))
    q, key = (turned(cfg, x, cos, sin) for x in (q, key))
    seen = {"sparse_mode": 2}  # what is before a token, or a band of it
    if cfg.sliding_window is not None:
        seen = {"sparse_mode": 4, "pre_tokens": cfg.sliding_window - 1, "next_tokens": 0}
    mask = causal_mask()
    if places is not None:
        at = ops.arange(q.shape[1]).astype(ms.int32)
        least = at - (places if cfg.sliding_window is None else ops.minimum(places, cfg.sliding_window - 1))
        mask = ops.logical_or(at > at.expand_dims(-1), at < least.expand_dims(-1)).expand_dims(1).astype(ms.uint8)
        seen = {"sparse_mode": 0}  # by the mask alone, [b, 1, t, t]
    width = value.shape[3]
    if width < cfg.head_dim:  # the kernel has one width for all; what is added weighs nothing
        value = mint.cat((value, ops.zeros_like(q[..., width:])), 3)
    out = ops.flash_attention_score(q, key, value, q.shape[2], attn_mask=mask, scalar_value=score_scale(cfg),
                                    input_layout="BSND", **seen)
    return out if width == cfg.head_dim else out[..., :width]


def turned(cfg: ModelConfig, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, t, heads, e] turned by its position; of latent attention a head's last numbers are, by neighbours."""
    if cfg.latent is None:
        return ops.rotary_position_embedding(x, cos, sin, 0)
    plain = cfg.latent.plain
    last = ops.rotary_position_embedding(x[..., plain:], cos[..., plain:], sin[..., plain:], 1)
    return mint.cat((x[..., :plain], last), 3)


@dataclass(frozen=True)
class Packed:
    """In the place of the length of sequences, where rows hold several documents: the length, and each token's place.

    No tuple: MindSpore recomputes no cell that is given tensors in one.
    """

    length: int
    places: Tensor


@dataclass(frozen=True)
class Listed:
    """In the same place, where a batch is a list that ranks share: its order, the place of each token, and the length."""

    tokens: Tokens
    places: Tensor
    length: int


def rotate(cfg: ModelConfig, x: Tensor, places: Tensor, length: int) -> Tensor:
    """Each token of a list [n, heads, e] turned by its place, i32[n], below `length`."""
    if on_cpu():
        return cpu.rotate(x, cfg, places, length)
    cos, sin = (ops.gather(table[0], places, 0).expand_dims(0) for table in rotary_tables(cfg, length, x.dtype))
    return ops.rotary_position_embedding(x.expand_dims(0), cos, sin, 0)[0]


class Attention(nn.Cell):
    """Causal grouped-query attention. Head h = (k, g) with k outermost: cutting h or k over an axis is the same cut."""

    def __init__(self, cfg: ModelConfig, joined: bool = False):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim
        self.parts = {"wq": cfg.n_heads * cfg.head_dim} | dict.fromkeys(("wk", "wv"), cfg.n_kv_heads * cfg.head_dim)
        self.joined = joined
        if joined:
            self.wqkv = Joined(cfg.dim, self.parts, cfg.qkv_bias, cfg.n_kv_heads)
        else:
            self.wq, self.wk, self.wv = (linear(cfg.dim, width, cfg.qkv_bias) for width in self.parts.values())
        self.wo = linear(cfg.n_heads * cfg.head_dim, cfg.dim, cfg.out_bias)
        self.norms_all = cfg.qk_norm_over == "all"
        self.q_norm, self.k_norm = (
            RMSNorm(cfg.head_dim * (heads if self.norms_all else 1), cfg.norm_eps) if cfg.qk_norm else nn.Identity()
            for heads in (cfg.n_heads, cfg.n_kv_heads))
        self.core = partial(attend, cfg)  # of q, key and value alone: on a mesh `parallelize.py` sets what runs there
        self.products = None  # stands for linear layers of one input, of it and their weights (`at_once.py`)

    def construct(self, x, t):
        if isinstance(t, Listed):
            n, h, k, e = x.shape[0], self.heads, self.kv_heads, self.head_dim
            q, key, value = self._projected(x, (n, h, e), (n, k, e))
            return self._linear(self.core(q, key, value, t).reshape(n, h * e), self.wo)
        t, *places = (t.length, t.places) if isinstance(t, Packed) else (t,)
        b, h, k, e = x.shape[0] // t, self.heads, self.kv_heads, self.head_dim
        q, key, value = self._projected(x, (b, t, h, e), (b, t, k, e))
        return self._linear(self.core(q, key, value, *places).reshape(b * t, h * e), self.wo)

    def _linear(self, x, *cells):
        """What linear layers make of x: of one its result, of several a tuple."""
        if self.products is not None and at_once.fits(x, *cells):
            return self.products(x, *(cell.weight for cell in cells))
        made = tuple(cell(x) for cell in cells)
        return made if len(made) > 1 else made[0]

    def _projected(self, x, heads, kv_heads):
        """q, key and value of these shapes, q and key normed."""
        if self.joined:
            all_three, widths = self.wqkv(x), list(self.parts.values())
            q, key, value = cpu.split(all_three, widths) if on_cpu() else mint.split(all_three, widths, 1)
        else:
            q, key, value = self._linear(x, self.wq, self.wk, self.wv)
        if self.norms_all:
            q, key = self.q_norm(q), self.k_norm(key)
        q, key, value = q.reshape(heads), key.reshape(kv_heads), value.reshape(kv_heads)
        return (q, key, value) if self.norms_all else (self.q_norm(q), self.k_norm(key), value)


class Block(nn.Cell):
    """One transformer layer, pre-norm. With a mixture of experts also what `balance_loss` needs, and the experts' loads."""

    def __init__(self, cfg: ModelConfig, number: int, joined: bool = False):
        super().__init__()
        self.attention_norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.attention = Attention(cfg, joined) if cfg.latent is None else LatentAttention(cfg, partial(attend, cfg))
        self.ffn_norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.mixed = cfg.experts is not None and number >= cfg.experts.dense_layers
        self.feed_forward = Experts(cfg, joined) if self.mixed else FeedForward(cfg.dim, cfg.ffn_dim, joined)

    def construct(self, x, t):
        x = x + self.attention(self.attention_norm(x), t)
        if not self.mixed:
            return x + self.feed_forward(self.ffn_norm(x))
        y, shares, loads = self.feed_forward(self.ffn_norm(x), t.length if isinstance(t, Packed) else t)
        return x + y, shares, loads


class Llama(nn.Cell):
    """Token ids i32[b, t] -> logits [b*t, vocab]; of a mixture of experts these, the auxiliary loss and the loads.

    Loads are i64[layers, experts], of the layers that have experts: how many choices each expert computes.

    With `places`, i32[b, t], rows hold several documents: each token's place in its own, beyond which it sees nothing.
    Of a list of tokens that ranks share, ids are i32[n], and `places` is a `Listed`.
    A later stage of a pipeline takes tokens [n, d] in the place of ids, and is told the `length` of sequences; of a
    mixture, behind the first layer that has experts, `[tokens, sum of what the layers say of their shares, loads]`.

    Args:
        cfg: the sizes.
        joined: weights that read the same input are one: `wqkv`, `w13`. It computes the same; see `joined.py`.
    """

    def __init__(self, cfg: ModelConfig, joined: bool = False):
        super().__init__()
        self.cfg, self.mixed = cfg, cfg.experts is not None
        self.tok_embeddings = Embedding(cfg.vocab_size, cfg.dim)
        self.layers = nn.CellList([Block(cfg, i, joined) for i in range(cfg.n_layers)])
        self.norm = RMSNorm(cfg.dim, cfg.norm_eps)
        self.output = linear(cfg.dim, cfg.vocab_size)
        if cfg.tied_head:
            self.output.weight = self.tok_embeddings.weight
        for name, param in self.parameters_and_names():
            param.name = name

    def construct(self, ids, places=None, length=None):
        ids, *handed = ids if isinstance(ids, list) else [ids]
        x = self.tok_embeddings(ids)
        if isinstance(places, Listed):
            t = places
        else:
            length = length or ids.shape[1]
            t = length if places is None else Packed(length, places)
        shares, loads = handed[:1], handed[1:]  # of the layers in the stages before
        for layer in self.layers:
            x = layer(x, t)
            if isinstance(x, tuple):  # of a mixture, and not in another stage
                x, share, load = x
                shares = [shares[0] + share if shares else share]
                loads.append(load.reshape(1, -1))
        x = self.norm(x)
        logits = self.output(x)
        if not shares:
            return logits
        rows = ops.cat(loads) if len(loads) > 1 else loads[0]
        if isinstance(self.output, Absent):
            return [logits, *shares, rows]
        return logits, balance_loss(shares[0], self.cfg.n_layers - self.cfg.experts.dense_layers), rows


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean of -log softmax(logits)[label] over the tokens whose label is not `ignore_index`; NaN if there is none.

    Args:
        logits: [n, vocab], taken in float32.
        labels: i32 of n elements, in any shape.
        ignore_index: label of tokens that do not count.
    """
    logits, labels = logits.astype(ms.float32), labels.reshape(-1)
    return (cpu if on_cpu() else F).cross_entropy(logits, labels, ignore_index=ignore_index)


def init_weights(model: Llama, seed: int, std: float = 0.02) -> None:
    """Each parameter gets what `initial` draws for its name, which depends neither on the order of creation nor on ranks.

    Before `parallelize` or after it, when each rank keeps its shards of one at a time.
    """
    parts = parts_of(model)
    for param in model.get_parameters():
        own = parts.get(param.name, {param.name: param.shape[0]})
        drawn = [initial(name, (n, *param.shape[1:]), len(model.layers), seed, std)  # of a tied one in two stages the same
                 for name, n in own.items()]
        value = np.concatenate(drawn) if len(drawn) > 1 else drawn[0]
        if isinstance(param, DTensor):
            for dim, runs in enumerate(param.layout.pieces()):
                held = [value[(slice(None),) * dim + (slice(*run),)] for run in runs]
                value = np.concatenate(held, dim) if len(held) > 1 else held[0]
        param.set_data(Tensor(np.ascontiguousarray(value)))
