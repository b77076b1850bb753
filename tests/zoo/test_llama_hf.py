# SPDX-License-Identifier: Apache-2.0
"""Published configs as the recipe's, and back; whose weights a run begins with. Logits: `test_jobs.py`."""
import json

import mindspore as ms
import numpy as np
import pytest

from model_zoo.llama import hf
from model_zoo.llama.config import ExpertsConfig, LatentConfig, ModelConfig, RopeScaling
from model_zoo.llama.configio import dump, load
from model_zoo.llama.data import load_text
from model_zoo.llama.model import Llama, init_weights
from model_zoo.llama.trainer import Trainer
from ms_dtensor.checkpoint.key_map import translate
from ms_dtensor.errors import ConfigError

BASE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 40, "vocab_size": 256, "rms_norm_eps": 1e-6}
SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 40, "vocab_size": 256, "norm_eps": 1e-6,
         "rope_theta": 10000.0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CONFIGS = {
    "llama": ({"model_type": "llama"}, {}),
    "llama 3.1": ({"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
                  {"rope_theta": 5e5, "rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)}),
    "as transformers 5 writes it": ({"model_type": "llama", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
                                    {"rope_theta": 5e5}),
    "linear": ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
               {"rope_scaling": RopeScaling("linear", 2.0)}),
    "all biases": ({"model_type": "llama", "attention_bias": True}, {"qkv_bias": True, "out_bias": True}),
    "one key head each": ({"model_type": "llama", "num_key_value_heads": None}, {"n_kv_heads": 4}),
    "qwen2": ({"model_type": "qwen2", "tie_word_embeddings": True, "sliding_window": 7, "use_sliding_window": False},
              {"qkv_bias": True, "tied_head": True}),
    "qwen2 with windows": ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0},
                           {"qkv_bias": True, "sliding_window": 7}),
    "qwen2 with late windows": ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True,
                                 "max_window_layers": 2}, {"qkv_bias": True}),
    "qwen3": ({"model_type": "qwen3"}, {"qk_norm": True, "head_width": 128}),
    "qwen3 with a width": ({"model_type": "qwen3", "head_dim": 8}, {"qk_norm": True}),
    "mistral": ({"model_type": "mistral", "head_dim": None, "sliding_window": 4096}, {"sliding_window": 4096}),
    "qwen3_moe": ({"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 6, "moe_intermediate_size": 12,
                   "norm_topk_prob": True, "num_experts_per_tok": 3, "mlp_only_layers": [0]},
                  {"qk_norm": True, "experts": ExpertsConfig(6, 3, width=12, dense_layers=1, balance=0.001)}),
    "qwen3_moe as transformers 5 writes it": ({"model_type": "qwen3_moe", "head_dim": 8, "num_local_experts": 9,
                                               "mlp_only_layers": []},
                                              {"qk_norm": True, "experts": ExpertsConfig(9, 8, width=768, normalise=False,
                                                                                         balance=0.001)}),
    "olmoe": ({"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3, "clip_qkv": None},
              {"qk_norm": True, "qk_norm_over": "all", "experts": ExpertsConfig(6, 3, normalise=False, balance=0.01)}),
    "deepseek_v3": ({"model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 4,
                     "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "first_k_dense_replace": 1,
                     "kv_lora_rank": 10, "q_lora_rank": None, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8,
                     "head_dim": 4,
                     "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32,
                                      "beta_slow": 1, "original_max_position_embeddings": 4096}},
                    {"n_kv_heads": 4, "latent": LatentConfig(10, None, 6, 4, 8), "experts": ExpertsConfig(
                        8, 3, width=12, dense_layers=1, shared=1, score="sigmoid", groups=4, group_limit=2, scale=2.5,
                        bias_rate=0.001), "rope_scaling": RopeScaling("yarn", 40.0, original_max_seq_len=4096)}),
    "mistral without a window": ({"model_type": "mistral", "sliding_window": None}, {}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_ours(name):
    theirs, ours = CONFIGS[name]
    cfg = hf.from_hf(BASE | theirs)
    assert cfg == ModelConfig(**{**SIZES, **ours})
    assert hf.from_hf(json.loads(json.dumps(hf.to_hf(cfg, 4096)))) == cfg


@pytest.mark.parametrize("change, says", [
    ({"model_type": "gpt2"}, "'model_type' is 'gpt2'"), ({"model_type": None}, "'model_type'"),
    ({"hidden_size": "32"}, "'hidden_size'"), ({"hidden_size": None}, "'hidden_size' is null"),
    ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
    ({"mlp_bias": True}, "'mlp_bias'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'rope_scaling'"),
    ({"rope_scaling": {"type": "linear"}}, "factor"),
    ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4}, "'layer_types'"),
    ({"model_type": "deepseek_v3", "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}}, "mscale_all_dim"),
    ({"model_type": "deepseek_v3", "attention_bias": True}, "'attention_bias'"),
    ({"model_type": "deepseek_v3", "n_shared_experts": None}, "'n_shared_experts'"),
    ({"model_type": "deepseek_v3", "topk_method": "greedy"}, "'topk_method'"),
    ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "'mlp_only_layers'"),
    ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "'decoder_sparse_step'"),
    ({"model_type": "olmoe", "clip_qkv": 8.0}, "'clip_qkv'"),
    ({"rms_norm_eps": None}, "'rms_norm_eps' is null"), ({"hidden_size": None}, "'hidden_size' is null"),
    ({"num_hidden_layers": None}, "'num_hidden_layers' is null"), ({"vocab_size": None}, "'vocab_size' is null"),
    ({"num_key_value_heads": 0}, "'num_key_value_heads'"),
])
def test_what_the_model_would_not_compute_is_refused(tmp_path, change, says):
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"model_type": "llama"} | change))
    with pytest.raises(ConfigError, match=says):
        hf.read_config(tmp_path)


def test_a_config_is_read_strictly(tmp_path):
    for text, says in (("{", "no JSON"), ('{"a": 1, "a": 2}', "'a' twice"), ("[]", "does not begin"), ("{}", "model_type")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=says):
            hf.read_config(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        hf.read_config(tmp_path / "none")


def test_options_that_no_published_kind_has_together_are_refused():
    with pytest.raises(ConfigError, match="just these options"):
        hf.to_hf(ModelConfig(out_bias=True), 64)


def test_a_run_begins_with_published_weights(tmp_path, cpu):
    """Saved by one run's trainer, loaded by another's: its sizes come from the folder, and its first loss is the same."""
    options = ["--train.seq", "16", "--train.batch", "2", "--data.max_bytes", "20000"]
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 40, "qk_norm": True, "tied_head": True}
    cfg, _ = load([*options, *(w for key, value in sizes.items() for w in (f"--model.{key}", str(value)))], 1)
    text = load_text(cfg.data, cfg.model.vocab_size, cfg.train.seq)
    first = Trainer(cfg, text, None)
    hf.save(first.model, cfg.model, tmp_path / "out", max_positions=64)
    again, _ = load([*options, "--train.seed", "5", "--train.init_hf", str(tmp_path / "out")], 1)
    assert again.model == cfg.model
    second = Trainer(again, text, None)
    batch = first.batch(0)
    assert float(first.gradients(*batch)[0]) == float(second.gradients(*batch)[0])
    (tmp_path / "cfg.yaml").write_text(dump(again))
    assert load(["--config", str(tmp_path / "cfg.yaml")], 1)[0] == again
    with pytest.raises(ConfigError, match="model.dim is not that of train.init_hf"):
        load([*options, "--train.init_hf", str(tmp_path / "out"), "--model.dim", "64"], 1)


def test_mindformers_names_are_known(tmp_path, cpu):
    cfg = ModelConfig(**SIZES)
    model, other, third = Llama(cfg), Llama(cfg), Llama(cfg)
    init_weights(model, 4)
    ms.save_checkpoint([{"name": translate(n, hf.MINDFORMERS, p.shape).names[0], "data": p}
                        for n, p in model.parameters_and_names()], str(tmp_path / "a.ckpt"))
    assert "model.layers.1.attention.wo.weight" in ms.load_checkpoint(str(tmp_path / "a.ckpt"))
    hf.load(other, tmp_path / "a.ckpt")
    ms.save_checkpoint(model, str(tmp_path / "b.ckpt"))  # under the recipe's own names
    hf.load(third, tmp_path / "b.ckpt")
    for a, b, c in zip(*(m.get_parameters() for m in (model, other, third)), strict=True):
        assert np.array_equal(a.asnumpy(), b.asnumpy()) and np.array_equal(a.asnumpy(), c.asnumpy())
