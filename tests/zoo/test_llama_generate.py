# SPDX-License-Identifier: Apache-2.0
"""Generation: with a cache as without, as `transformers` does it, and as its options say. On ranks: `cases_llama.py`."""
import json

import numpy as np
import pytest

from model_zoo.llama import evaluate, generate, hf
from model_zoo.llama.config import ExpertsConfig, ModelConfig
from ms_dtensor.errors import ConfigError
from tests.dist.cases_llama import SIZES, greedy_without_cache, model

PROMPT = np.array([[1, 5, 9], [30, 2, 2]], np.int32)


@pytest.mark.parametrize("cfg", [ModelConfig(sliding_window=4, qkv_bias=True, **SIZES),
                                 ModelConfig(qk_norm=True, head_width=12, experts=ExpertsConfig(4, 2), **SIZES)], ids=str)
def test_a_cache_changes_nothing(cfg, cpu):
    want = greedy_without_cache(model(cfg), PROMPT, 7)
    net = model(cfg)
    assert np.array_equal(generate.generate(net, cfg, None, PROMPT, 7), want)
    assert len(np.unique(want)) > 5, "not one token over and over"
    assert np.array_equal(generate.generate(net, cfg, None, PROMPT, 7), want), "a second text begins anew"


def test_the_likeliest_tokens_are_those_of_transformers(tmp_path, cpu):
    transformers = pytest.importorskip("transformers", reason="an extra: pip install '.[hf]'")
    torch = pytest.importorskip("torch", reason="an extra: pip install '.[hf]'")
    cfg = ModelConfig(qk_norm=True, head_width=12, tied_head=True, **SIZES)
    net = model(cfg)
    hf.save(net, cfg, tmp_path / "saved", max_positions=64)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    prompt = torch.from_numpy(PROMPT).long()
    want = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False,
                           eos_token_id=None, pad_token_id=0)
    assert np.array_equal(generate.generate(net, cfg, None, PROMPT, 9), want.numpy())


def test_draws_are_of_the_distribution_that_the_options_say():
    logits = np.tile(np.log([0.5, 0.3, 0.15, 0.05]), (4000, 1))

    def shares(**how):
        return np.bincount(generate.chosen(logits, np.random.default_rng(0), **how), minlength=4) / 4000
    assert np.abs(shares(temperature=1.0) - [0.5, 0.3, 0.15, 0.05]).max() < 0.03
    assert np.abs(shares(temperature=1.0, top_k=2) - [0.625, 0.375, 0, 0]).max() < 0.03
    assert np.abs(shares(temperature=1.0, top_p=0.9) - np.array([0.5, 0.3, 0.15, 0]) / 0.95).max() < 0.03
    squared = np.array([0.25, 0.09, 0.0225, 0.0025])
    assert np.abs(shares(temperature=0.5) - squared / squared.sum()).max() < 0.03
    assert shares(temperature=1.0, top_p=1e-9)[0] == shares()[0] == 1


def test_a_seed_says_which_tokens_are_drawn(cpu):
    cfg = ModelConfig(**SIZES)
    net = model(cfg)
    first, again, other = (generate.generate(net, cfg, None, PROMPT, 8, temperature=2.0, seed=s) for s in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    end = int(first[0, 3])
    assert generate.generate(net, cfg, None, PROMPT[:1], 8, temperature=2.0, seed=1, end=end).shape[1] <= 11


def test_a_saved_run_speaks_and_is_measured(tmp_path, cpu, capsys):
    """Trained, saved, continued and evaluated by the scripts themselves; what the model does not fit is refused."""
    from model_zoo.llama.train import run

    run(["--config", "model_zoo/llama/configs/debug.yaml", "--train.steps", "3", "--train.log_dir", str(tmp_path / "run"),
         "--checkpoint.interval", "3"])
    capsys.readouterr()
    generate.run(["--from", str(tmp_path / "run"), "--prompt", "def ", "--tokens", "5", "--samples", "2"])
    text = capsys.readouterr().out
    assert text.startswith("def ") and text.count("def ") == 2
    evaluate.run(["--from", str(tmp_path / "run"), "--max_tokens", "3000", "--json", str(tmp_path / "out.json")])
    said = json.loads((tmp_path / "out.json").read_text())
    last = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()][-1]
    assert said["tokens"] == 3000 and abs(said["loss"] - last["held_out_loss"]) < 0.5
    assert np.isclose(said["perplexity"], np.exp(said["loss"]))
    with pytest.raises(ConfigError, match="--json = '/dev/full' cannot be written: No space left"):
        evaluate.run(["--from", str(tmp_path / "run"), "--max_tokens", "100", "--json", "/dev/full"])
    with pytest.raises(ConfigError, match="there is no file(.|\n)*--tokenizer"):
        generate.run(["--from", str(tmp_path / "run"), "--tokenizer", str(tmp_path / "none")])
    edited = tmp_path / "run/config.yaml"
    edited.write_text(edited.read_text().replace("rope_theta: 500000.0", "rope_theta: 10000.0"))
    with pytest.raises(ConfigError, match="not that of the checkpoint: model.rope_theta"):
        generate.run(["--from", str(tmp_path / "run"), "--tokens", "5"])
    edited.write_text(edited.read_text().replace("rope_theta: 10000.0", "rope_theta: 500000.0"))
    with pytest.raises(ConfigError, match="there is no model"):
        generate.run(["--from", str(tmp_path)])
    with pytest.raises(ConfigError, match="out of range"):
        generate.run(["--from", str(tmp_path / "run"), "--top_p", "0"])
    with pytest.raises(ConfigError, match="msrun --worker_num=2"):
        generate.run(["--from", str(tmp_path / "run"), "--tp", "2"])


@pytest.mark.parametrize("option", [["--seq", "0"], ["--batch", "0"], ["--max_tokens", "-1"], ["--json", "/nonexistent/x"],
                                    ["--json", "."]], ids=" ".join)
def test_an_evaluation_that_cannot_be_is_refused_first(option):
    with pytest.raises(ConfigError, match=f"{option[0]} = '?{option[1]}"):
        evaluate.run(["--from", "no model is looked for", *option])
