# SPDX-License-Identifier: Apache-2.0
"""The section `model` of a configuration: global sizes, and what a family does in its own way.

Not here: how a model is laid out, or trained. Reading is in `configio.py`; `config.py` has the other sections.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ms_dtensor.core.divisors import divisors
from ms_dtensor.errors import ConfigError

from .config_watch import COUNT


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A stretch of the rotary wave lengths: of the long ones, as Llama-3 does it or YaRN, or of all (linear)."""

    kind: Literal["llama3", "linear", "yarn"] = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    beta_fast: float = 32.0
    """Of YaRN: pairs that turn so often in the old context keep their wave length."""
    beta_slow: float = 1.0
    """Those that turn so often are stretched in full."""
    mscale: float = 1.0
    """Scores are scaled by (0.1 mscale ln factor + 1) squared, as DeepSeek does it."""


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """DeepSeek's attention in the place of grouped queries: keys and values are made of one short vector of a token."""

    kv_rank: int = 512
    """Numbers of that vector."""
    q_rank: int | None = 1536
    """Queries are made of one as well, of so many numbers; null: of the token itself."""
    plain: int = 128
    """Numbers of a head of q and of k that tell no position."""
    turned: int = 64
    """Those that are turned by it; of k all heads have the same."""
    value: int = 128
    """Numbers of a head of v."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in the place of feed-forwards. Every token goes through `per_token` of them."""

    count: int = 8
    per_token: int = 2
    width: int | None = None
    """Of an expert; null: model.ffn_dim."""
    dense_layers: int = 0
    """So many layers, the first ones, keep a feed-forward of model.ffn_dim."""
    shared: int = 0
    """Experts that every token goes through besides: one feed-forward, so many times the width."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Of the router: over all experts, or of each by itself."""
    groups: int = 1
    """Experts are in so many groups, and a token chooses from its best."""
    group_limit: int = 1
    """From so many of them."""
    normalise: bool = True
    """Weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Factor of the weights, after that."""
    bias_rate: float | None = None
    """Scores have a bias where experts are chosen, which moves by so much a step against each one's load; null: none."""
    capacity: float | None = None
    """What an expert takes of a sequence: so many times its even share, the first tokens; null: all that choose it."""
    balance: float = 0.0
    """Weight of the auxiliary loss, which is least when the experts are chosen equally often."""
    balance_over: Literal["micro_batch", "sequence"] = "micro_batch"
    """Of what it is a mean. Of a micro-batch, as `transformers` has it: with train.micro_batches above 1 the mean of
    those, which is not that of the whole batch. Of sequences: the same for any number of them."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Global sizes; `n_kv_heads` below `n_heads` is grouped-query attention."""

    dim: int = 256
    n_layers: int = 4
    n_heads: int = 8
    n_kv_heads: int = 8
    ffn_dim: int = 704
    vocab_size: int = 256
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    tied_head: bool = False
    head_width: int | None = None
    """Of q, k and v; null: dim / n_heads."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Of attention's output."""
    qk_norm: bool = False
    """q and k are normed before they are turned."""
    qk_norm_over: Literal["head", "all"] = "head"
    """Each head by itself, or all heads as one row (OLMoE)."""
    sliding_window: int | None = None
    """A token sees so many, itself the last of them; null: all before it."""
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None

    @property
    def cells(self) -> list[str]:
        """The paths of the model's cells, in the order in which they run: what stages of a pipeline are cut from."""
        return ["tok_embeddings", *(f"layers.{i}" for i in range(self.n_layers)), "norm", "output"]

    @property
    def head_dim(self) -> int:
        """Of q and k; with `latent` values have a width of their own."""
        if self.latent is not None:
            return self.latent.plain + self.latent.turned
        return self.head_width or self.dim // self.n_heads


MODEL_RANGES: dict[str, tuple[float, float]] = {
    "model.dim": (1, 2 ** 24), "model.n_layers": (1, 2 ** 16), "model.n_heads": (1, 2 ** 20),
    "model.n_kv_heads": (1, 2 ** 20), "model.ffn_dim": (1, 2 ** 24), "model.vocab_size": (1, 2 ** 28),
    "model.head_width": (2, 2 ** 16), "model.sliding_window": COUNT,
    "model.experts.count": (1, 2 ** 16), "model.experts.per_token": (1, 2 ** 16), "model.experts.capacity": (1e-3, 1e6),
    "model.experts.balance": (0, 1e6), "model.experts.width": (1, 2 ** 24), "model.experts.dense_layers": (0, 2 ** 16),
    "model.experts.shared": (0, 2 ** 10), "model.experts.groups": (1, 2 ** 16), "model.experts.group_limit": (1, 2 ** 16),
    "model.experts.scale": (1e-6, 1e6), "model.experts.bias_rate": (0, 1),
    "model.latent.kv_rank": (1, 2 ** 24), "model.latent.q_rank": (1, 2 ** 24), "model.latent.plain": (1, 2 ** 16),
    "model.latent.turned": (2, 2 ** 16), "model.latent.value": (1, 2 ** 16),
    "model.norm_eps": (0, 1), "model.rope_theta": (1, 1e12), "model.rope_scaling.factor": (1, 1e6),
    "model.rope_scaling.low_freq_factor": (1e-3, 1e6),
    "model.rope_scaling.high_freq_factor": (1e-3, 1e6), "model.rope_scaling.original_max_seq_len": COUNT,
    "model.rope_scaling.beta_fast": (1e-3, 1e6), "model.rope_scaling.beta_slow": (1e-3, 1e6),
    "model.rope_scaling.mscale": (0, 1e3),
}


def check_model(m: ModelConfig) -> None:
    """Raises `ConfigError` for the first sizes that do not fit each other."""
    scaling = m.rope_scaling
    if scaling is not None and scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ConfigError("For the configuration, the bounds of model.rope_scaling are not in order.", str(scaling),
                          "high_freq_factor is above low_freq_factor.",
                          "--model.rope_scaling.high_freq_factor with a larger number")
    if m.head_width is not None and m.head_width % 2:
        raise ConfigError(f"For the configuration, model.head_width = {m.head_width} is odd.", f"{m.n_heads} heads",
                          "Rotary embeddings turn pairs.", f"--model.head_width {m.head_width + 1}")
    if m.latent is not None:
        _check_latent(m, m.latent)
    elif m.head_width is None and (m.dim % m.n_heads or m.head_dim % 2):
        fits = [h for h in divisors(m.dim) if m.dim // h % 2 == 0]
        raise ConfigError(f"For the configuration, model.dim = {m.dim} does not make model.n_heads = {m.n_heads} "
                          "heads.",
                          f"model.dim / model.n_heads = {m.dim / m.n_heads:g}",
                          "The head width is a whole, even number (rotary embeddings turn pairs).",
                          f"--model.n_heads with one of {fits}" if fits else
                          f"--model.dim {-(-m.dim // (2 * m.n_heads)) * 2 * m.n_heads}")
    if m.experts is not None:
        _check_experts(m, m.experts)
    if m.n_heads % m.n_kv_heads:
        raise ConfigError(f"For the configuration, model.n_kv_heads = {m.n_kv_heads} does not divide "
                          f"model.n_heads = {m.n_heads}.", f"{m.n_heads} query heads, {m.n_kv_heads} key heads",
                          "Each key head serves the same number of query heads.",
                          f"--model.n_kv_heads with one of {divisors(m.n_heads)}")


def _check_latent(m: ModelConfig, latent: LatentConfig) -> None:
    if latent.turned % 2:
        raise ConfigError(f"For the configuration, model.latent.turned = {latent.turned} is odd.", f"{m.n_heads} heads",
                          "Rotary embeddings turn pairs.", f"--model.latent.turned {latent.turned + 1}")
    if latent.value > m.head_dim:
        raise ConfigError(f"For the configuration, model.latent.value = {latent.value} is above the width of queries.",
                          f"{latent.plain} plain + {latent.turned} turned = {m.head_dim}",
                          "The fused kernel pads values to the width of queries.",
                          f"--model.latent.value with at most {m.head_dim}")
    given = [f"model.{key}" for key, is_set in (
        ("head_width", m.head_width), ("qkv_bias", m.qkv_bias), ("out_bias", m.out_bias), ("qk_norm", m.qk_norm),
        ("sliding_window", m.sliding_window)) if is_set]
    if given or m.n_kv_heads != m.n_heads:
        raise ConfigError("For the configuration, model.latent does not go with other kinds of attention.",
                          f"{', '.join(given) or 'none of their keys'}, {m.n_heads} query heads, {m.n_kv_heads} key heads",
                          "Every head has keys of its own, made of the latent vector.",
                          [f"without {given[0]}" if given else f"--model.n_kv_heads {m.n_heads}", "without model.latent"])


def _check_experts(m: ModelConfig, e: ExpertsConfig) -> None:
    if e.per_token > e.count:
        raise ConfigError(f"For the configuration, model.experts.per_token = {e.per_token} is more than there are.",
                          f"model.experts.count = {e.count}", "A token goes through different experts.",
                          f"--model.experts.per_token with at most {e.count}")
    most = e.count // e.groups * e.group_limit
    least = 2 if e.score == "sigmoid" and e.groups > 1 else 1
    if e.count % e.groups or e.group_limit > e.groups or e.count // e.groups < least or e.per_token > most:
        fits = [n for n in divisors(e.count) if e.count // n >= least]
        raise ConfigError(f"For the configuration, {e.count} experts do not make model.experts.groups = {e.groups}.",
                          f"per_token = {e.per_token}, groups = {e.groups}, group_limit = {e.group_limit}",
                          "Groups are equal, of sigmoids of two at least, and those that a token may choose from have as "
                          "many experts as it needs.",
                          f"--model.experts.groups with one of {fits}, --model.experts.group_limit with at most that")
    if e.dense_layers >= m.n_layers:
        raise ConfigError(f"For the configuration, model.experts.dense_layers = {e.dense_layers} leaves no layer.",
                          f"model.n_layers = {m.n_layers}", "The layers behind them have experts.",
                          f"--model.experts.dense_layers with at most {m.n_layers - 1}")
