# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Llama, Qwen2, Qwen3, Mistral, and the mixtures Mixtral, Qwen3-MoE, OLMoE and DeepSeek-V3: their configs as
ours, and what they call the parameters.

Files are read and written by `ms_dtensor.checkpoint`; neither PyTorch nor `transformers` is needed. The one invariant: a
config that this recipe's model would not compute exactly is refused. No import of MindSpore before weights are asked for.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ms_dtensor.errors import ConfigError

from .config import ExpertsConfig, LatentConfig, ModelConfig, RopeScaling

if TYPE_CHECKING:
    from ms_dtensor import DeviceMesh

T = TypeVar("T")
ATTENTION = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.*": "model.layers.*.self_attn.q_proj.*",
    "layers.*.attention.wk.*": "model.layers.*.self_attn.k_proj.*",
    "layers.*.attention.wv.*": "model.layers.*.self_attn.v_proj.*",
    "layers.*.attention.wo.*": "model.layers.*.self_attn.o_proj.*",
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
NAMES = {
    **ATTENTION,
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
}
"""Llama, Qwen2, Qwen3, Mistral."""
MIXTRAL = {
    **ATTENTION,
    "layers.*.feed_forward.gate.weight": "model.layers.*.block_sparse_moe.gate.weight",
    "layers.*.feed_forward.experts.w1": "model.layers.*.block_sparse_moe.experts.*.w1.weight",
    "layers.*.feed_forward.experts.w2": "model.layers.*.block_sparse_moe.experts.*.w2.weight",
    "layers.*.feed_forward.experts.w3": "model.layers.*.block_sparse_moe.experts.*.w3.weight",
}
"""The experts of a layer are one parameter [experts, out, in]."""
MIXTURES = {
    **NAMES,
    "layers.*.feed_forward.gate.weight": "model.layers.*.mlp.gate.weight",
    "layers.*.feed_forward.experts.w1": "model.layers.*.mlp.experts.*.gate_proj.weight",
    "layers.*.feed_forward.experts.w2": "model.layers.*.mlp.experts.*.down_proj.weight",
    "layers.*.feed_forward.experts.w3": "model.layers.*.mlp.experts.*.up_proj.weight",
}
"""Qwen3-MoE, OLMoE; layers without experts as in `NAMES`."""
DEEPSEEK = {
    **MIXTURES,
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_a_layernorm.weight",
    "layers.*.attention.wq_a.weight": "model.layers.*.self_attn.q_a_proj.weight",
    "layers.*.attention.wq_b.weight": "model.layers.*.self_attn.q_b_proj.weight",
    "layers.*.attention.wkv_a.weight": "model.layers.*.self_attn.kv_a_proj_with_mqa.weight",
    "layers.*.attention.kv_norm.weight": "model.layers.*.self_attn.kv_a_layernorm.weight",
    "layers.*.attention.wkv_b.weight": "model.layers.*.self_attn.kv_b_proj.weight",
    "layers.*.feed_forward.expert_bias": "model.layers.*.mlp.gate.e_score_correction_bias",
    "layers.*.feed_forward.shared.w1.weight": "model.layers.*.mlp.shared_experts.gate_proj.weight",
    "layers.*.feed_forward.shared.w2.weight": "model.layers.*.mlp.shared_experts.down_proj.weight",
    "layers.*.feed_forward.shared.w3.weight": "model.layers.*.mlp.shared_experts.up_proj.weight",
}
"""DeepSeek-V3."""
MINDFORMERS = {
    "tok_embeddings.weight": "model.tok_embeddings.embedding_weight",
    "layers.*.attention.*.*": "model.layers.*.attention.*.*",
    "layers.*.feed_forward.*.weight": "model.layers.*.feed_forward.*.weight",
    "layers.*.attention_norm.weight": "model.layers.*.attention_norm.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.ffn_norm.weight",
    "norm.weight": "model.norm_out.weight",
    "output.weight": "lm_head.weight",
}
"""MindFormers' Llama, with q, k and v as three matrices (`qkv_concat: False`)."""
NOT_WEIGHTS = ("model.layers.*.self_attn.rotary_emb.inv_freq",)  # a table that old files have


def kind_of(cfg: ModelConfig) -> str:
    """The kind of model, in Hugging Face's word, that has just these options."""
    if cfg.latent is not None:
        return "deepseek_v3"
    if cfg.experts is not None:
        return "mixtral" if not cfg.qk_norm else "olmoe" if cfg.qk_norm_over == "all" else "qwen3_moe"
    if cfg.qk_norm:
        return "qwen3"
    if cfg.qkv_bias and not cfg.out_bias:
        return "qwen2"
    return "llama" if cfg.sliding_window is None else "mistral"


def names_of(model) -> dict[str, str]:
    """What Hugging Face calls the parameters of a Llama, or of stages of one."""
    return {"mixtral": MIXTRAL, "qwen3_moe": MIXTURES, "olmoe": MIXTURES, "deepseek_v3": DEEPSEEK}.get(
        kind_of(config_of(model)), NAMES)


def config_of(model) -> ModelConfig:
    """That of a Llama, or of stages of one."""
    return cells_of(model)[0].cfg


def cells_of(model) -> list:
    """A Llama, or those of its stages."""
    return [stage.module for stage in model] if isinstance(model, list) else [model]


def not_weights(cfg: ModelConfig) -> tuple[str, ...]:
    """Patterns of what files have and the model has not: old tables, and DeepSeek-V3's layer for one more token."""
    more = [f"model.layers.{cfg.n_layers}" + ".*" * parts for parts in range(1, 6)] if cfg.latent is not None else []
    return (*NOT_WEIGHTS, *more)


def load(model, path: str | Path, over: DeviceMesh | None = None) -> None:
    """Fills a Llama, laid out or not, with published weights: Hugging Face's, MindFormers', or this recipe's own names.

    Of a pipeline `model` is the list of this rank's stages, and `over` its axis.
    """
    from ms_dtensor.checkpoint import load_hf
    from ms_dtensor.checkpoint.weights import Weights

    from .joined import apart

    weights = Weights(path)
    names = next((n for n in (names_of(model), MINDFORMERS) if n["tok_embeddings.weight"] in weights.tensors), None)
    with apart(*cells_of(model)):
        load_hf(model, weights, names, ignore=not_weights(config_of(model)), over=over)


def save(model, cfg: ModelConfig, path: str | Path, *, max_positions: int, dtype: str | None = None,
         max_shard_size: int = 5 * 10 ** 9, over: DeviceMesh | None = None) -> None:
    """Writes a Llama as a folder that `transformers` loads; `max_positions` is the longest sequence it is meant for.

    Stages of a pipeline as for `load`.
    """
    from ms_dtensor.checkpoint import save_hf

    from .joined import apart

    with apart(*cells_of(model)):
        save_hf(model, path, names_of(model), config=to_hf(cfg, max_positions, dtype or "float32"), dtype=dtype,
                max_shard_size=max_shard_size, over=over)


def read_config(path: str | Path) -> ModelConfig:
    """The sizes that a folder's `config.json` tells."""
    return _read(path, from_hf)


def read_positions(path: str | Path) -> int:
    """The longest text that a published model is meant for, as its `config.json` or its kind in `transformers` says."""
    return _read(path, lambda config: config.get("max_position_embeddings") or _POSITIONS[config["model_type"]])


def _read(path: str | Path, told: Callable[[dict[str, Any]], T]) -> T:
    from ms_dtensor.checkpoint.strict_json import strict_json

    def refuse(why: str):
        raise ConfigError(f"For '{file}', this is no config: {why}")

    file = Path(path) / "config.json"
    try:
        data = file.read_bytes()
    except OSError as e:
        raise ConfigError(f"For '{file}', the config cannot be read: {e.strerror or e}.", "",
                          "A Hugging Face folder has its model's sizes there.", "pass such a folder") from e
    try:
        return told(strict_json(data, refuse, fractions=True))
    except (KeyError, TypeError, ValueError, AttributeError) as e:  # a text where a number is to be, say
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(f"For '{file}', this is no config: {type(e).__name__}: {e}") from e


# -- configs -----------------------------------------------------------------------------------------------------------
_SIZES = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
          "ffn_dim": "intermediate_size", "vocab_size": "vocab_size"}
# what else tells what is computed, and the values with which it is what `model.py` computes
_FIXED: dict[str, tuple] = {"hidden_act": ("silu",), "mlp_bias": (False,), "pretraining_tp": (1,), "attention_dropout": (0,),
                            "partial_rotary_factor": (1,), "router_jitter_noise": (0,),
                            "decoder_sparse_step": (1,), "clip_qkv": (None,), "rope_interleave": (True,),
                            "moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768, "mistral": 131072, "mixtral": 131072,  # where none are told
              "qwen3_moe": 32768, "olmoe": 4096, "deepseek_v3": 4096}
_NORMED = {"qwen3": "head", "qwen3_moe": "head", "olmoe": "all"}  # what one norm of q or k takes
_FAMILIES = tuple(_POSITIONS)


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """A `config.json` as the recipe's sizes.

    Raises:
        ConfigError: another kind of model, a key that is missing, or an option that the recipe's model does not have.

    Example:
        >>> from model_zoo.llama.hf import from_hf
        >>> cfg = from_hf({"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        ...                "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "rms_norm_eps": 1e-6})
        >>> cfg.head_dim, cfg.n_kv_heads, cfg.qkv_bias
        (64, 2, True)
    """
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        raise _refused("model_type", kind, f"It is one of {', '.join(_FAMILIES)}.")
    missing = [name for name in (*_SIZES.values(), "rms_norm_eps") if config.get(name) is None]
    if missing:
        how = "null" if missing[0] in config else "missing"
        raise ConfigError(f"For the config of a {kind}, '{missing[0]}' is {how}.", "", "Its sizes are numbers.",
                          "the config.json that was published with the weights")
    for name, values in _FIXED.items():
        if config.get(name, values[0]) not in values:
            raise _refused(name, config[name], f"The model computes with {values[0]!r}.")
    sizes = {ours: config[name] for ours, name in _SIZES.items()}
    for name in (*_SIZES.values(), "num_key_value_heads", "head_dim", "max_position_embeddings"):
        value = config.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise _refused(name, value, "It is a positive whole number.")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # of transformers 5, and before
    bias = bool(config.get("attention_bias"))
    width = config.get("head_dim", 128 if kind == "qwen3" else None)
    latent = _latent(config) if kind == "deepseek_v3" else None
    if latent is not None:
        width = None  # `transformers` writes that of what is turned
        if bias:
            raise _refused("attention_bias", True, "Latent attention has none.")
    return ModelConfig(
        **sizes, n_kv_heads=config.get("num_key_value_heads") or sizes["n_heads"], norm_eps=float(config["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0), rope_scaling=_scaling(rope, kind),
        tied_head=bool(config.get("tie_word_embeddings")),
        head_width=None if width is None or width * sizes["n_heads"] == sizes["dim"] else width,
        qkv_bias=bias or kind == "qwen2", out_bias=bias and kind != "qwen2", qk_norm=kind in _NORMED,
        qk_norm_over=_NORMED.get(kind, "head"),
        sliding_window=_window(config, kind, sizes["n_layers"]), latent=latent, experts=_experts(config, kind))


def _experts(config: dict[str, Any], kind: str) -> ExpertsConfig | None:
    get = config.get
    if kind == "mixtral":
        return ExpertsConfig(int(get("num_local_experts", 8)), int(get("num_experts_per_tok", 2)),
                             balance=float(get("router_aux_loss_coef", 0.001)))
    if kind == "olmoe":
        return ExpertsConfig(int(get("num_experts", 64)), int(get("num_experts_per_tok", 8)),
                             normalise=bool(get("norm_topk_prob", False)), balance=float(get("router_aux_loss_coef", 0.01)))
    if kind == "qwen3_moe":
        count = get("num_experts", get("num_local_experts", 128))  # transformers 5 writes the latter
        dense = list(get("mlp_only_layers") or [])
        if sorted(dense) != list(range(len(dense))):
            raise _refused("mlp_only_layers", dense, "Layers without experts are the first ones.")
        return ExpertsConfig(int(count), int(get("num_experts_per_tok", 8)),
                             width=int(get("moe_intermediate_size", 768)), dense_layers=len(dense),
                             normalise=bool(get("norm_topk_prob", False)), balance=float(get("router_aux_loss_coef", 0.001)))
    if kind == "deepseek_v3":
        shared = get("n_shared_experts", 1)
        if not shared:
            raise _refused("n_shared_experts", shared, "There is one at least.")
        return ExpertsConfig(int(get("n_routed_experts", 256)), int(get("num_experts_per_tok", 8)),
                             width=int(get("moe_intermediate_size", 2048)),
                             dense_layers=int(get("first_k_dense_replace", 3)), shared=int(shared), score="sigmoid",
                             groups=int(get("n_group", 8)),
                             group_limit=int(get("topk_group", 4)), normalise=bool(get("norm_topk_prob", True)),
                             scale=float(get("routed_scaling_factor", 2.5)), bias_rate=0.001)
    return None


def _latent(config: dict[str, Any]) -> LatentConfig:
    rank = config.get("q_lora_rank", 1536)
    return LatentConfig(int(config.get("kv_lora_rank", 512)), None if rank is None else int(rank),
                        int(config.get("qk_nope_head_dim", 128)), int(config.get("qk_rope_head_dim", 64)),
                        int(config.get("v_head_dim", 128)))


def _scaling(rope: dict[str, Any], family: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "yarn" and family == "deepseek_v3" and rope.get("mscale", 0) == rope.get("mscale_all_dim", 0) and \
            not rope.get("attention_factor") and rope.get("truncate", True) and rope.get("original_max_position_embeddings"):
        if rope.get("mscale"):  # the tables are as they are, scores are scaled
            return RopeScaling("yarn", float(rope["factor"]), beta_fast=float(rope.get("beta_fast") or 32),
                               beta_slow=float(rope.get("beta_slow") or 1), mscale=float(rope["mscale"]),
                               original_max_seq_len=int(rope["original_max_position_embeddings"]))
    if kind != "llama3":
        raise _refused("rope_scaling", rope, "It is 'llama3', 'linear', or not there; of DeepSeek-V3 'yarn', with equal "
                       "mscale and mscale_all_dim.")
    return RopeScaling("llama3", float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"]),
                       int(rope["original_max_position_embeddings"]))


def _window(config: dict[str, Any], kind: str, layers: int) -> int | None:
    """The sliding window, which all layers have or none."""
    always = kind in ("mistral", "mixtral")
    if kind in ("llama", "olmoe", "deepseek_v3") or not always and not config.get("use_sliding_window"):
        return None
    always = always or kind == "qwen3_moe"  # which looks at no layer's number
    window = config.get("sliding_window", None if kind == "mixtral" else 4096)  # published files say null for none
    types = config.get("layer_types") or ["full_attention" if not always and i < config.get("max_window_layers", 28)
                                          else "sliding_attention" for i in range(layers)]
    if window is None or "sliding_attention" not in types:
        return None
    if set(types) != {"sliding_attention"}:
        raise _refused("layer_types", types, "All layers have a sliding window, or none.")
    return int(window)


def to_hf(cfg: ModelConfig, max_positions: int, dtype: str = "float32") -> dict[str, Any]:
    """The recipe's sizes as a `config.json`, of the kind of model that has just these options."""
    kind = kind_of(cfg)
    name = {"qwen3_moe": "Qwen3Moe", "deepseek_v3": "DeepseekV3"}.get(kind, kind.capitalize())
    config: dict[str, Any] = {
        "architectures": [f"{name}ForCausalLM"], "model_type": kind,
        **{theirs: getattr(cfg, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": cfg.n_kv_heads, "head_dim": cfg.head_dim, "hidden_act": "silu", "rms_norm_eps": cfg.norm_eps,
        "max_position_embeddings": max_positions, "rope_theta": cfg.rope_theta, "tie_word_embeddings": cfg.tied_head,
        "torch_dtype": dtype}
    if cfg.rope_scaling is not None:
        s = cfg.rope_scaling
        config["rope_scaling"] = {"rope_type": s.kind, "factor": s.factor} | {
            "linear": {}, "llama3": {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor},
            "yarn": {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow, "mscale": s.mscale, "mscale_all_dim": s.mscale},
        }[s.kind] | ({} if s.kind == "linear" else {"original_max_position_embeddings": s.original_max_seq_len})
    if kind in ("llama", "qwen3", "qwen3_moe", "olmoe", "deepseek_v3"):
        config["attention_bias"] = cfg.qkv_bias
    config |= _told_of_experts(cfg, kind)
    if kind in ("olmoe", "deepseek_v3"):
        del config["head_dim"]
    if kind in ("mistral", "mixtral"):
        config["sliding_window"] = cfg.sliding_window
    elif kind in ("qwen2", "qwen3", "qwen3_moe") and cfg.sliding_window is not None:
        config |= {"use_sliding_window": True, "sliding_window": cfg.sliding_window, "max_window_layers": 0}
    if _computed(from_hf(config)) != _computed(cfg):
        raise ConfigError("For 'save', no kind of model in Hugging Face's files has just these options.", str(cfg),
                          f"{', '.join(_FAMILIES)} are known; experts of no capacity.",
                          "save the weights by ms_dtensor.checkpoint.save")
    return config


def _told_of_experts(cfg: ModelConfig, kind: str) -> dict[str, Any]:
    e, latent = cfg.experts, cfg.latent
    if e is None:
        return {}
    if kind == "mixtral":
        return {"num_local_experts": e.count, "num_experts_per_tok": e.per_token, "router_aux_loss_coef": e.balance}
    if latent is None:
        told = {"num_experts": e.count, "num_experts_per_tok": e.per_token, "norm_topk_prob": e.normalise,
                "router_aux_loss_coef": e.balance}
        return told if kind == "olmoe" else told | {
            "moe_intermediate_size": e.width or cfg.ffn_dim, "mlp_only_layers": list(range(e.dense_layers)),
            "decoder_sparse_step": 1}
    return {"n_routed_experts": e.count, "num_experts_per_tok": e.per_token, "moe_intermediate_size": e.width or cfg.ffn_dim,
            "first_k_dense_replace": e.dense_layers, "n_shared_experts": e.shared, "n_group": e.groups,
            "topk_group": e.group_limit, "norm_topk_prob": e.normalise, "routed_scaling_factor": e.scale,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
            "kv_lora_rank": latent.kv_rank, "q_lora_rank": latent.q_rank, "qk_nope_head_dim": latent.plain,
            "qk_rope_head_dim": latent.turned, "v_head_dim": latent.value, "rope_interleave": True}


def _computed(cfg: ModelConfig) -> ModelConfig:
    """What tells apart what two models compute, and not how their experts are kept busy."""
    e = cfg.experts
    if e is None:
        return cfg
    width, rate = e.width or cfg.ffn_dim, None if e.bias_rate is None else 0.0
    return replace(cfg, experts=replace(e, width=width, balance=0.0, balance_over="micro_batch", bias_rate=rate))


def _refused(name: str, value: Any, rule: str) -> ConfigError:
    return ConfigError(f"For the config of a Hugging Face model, '{name}' is {value!r:.100}.", "", rule,
                       "use a model that this recipe computes")
