# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning: LoRA and SFT runs lower their held-out loss; `transformers` computes what is exported. Generation: with a
cache as without, as `transformers` does it, and as its options say. On ranks: `cases_llama.py`.
"""
import json
import re
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor, nn

from model_zoo.llama import evaluate, export, generate, hf, lora
from model_zoo.llama.config import ExpertsConfig, LoraConfig, ModelConfig
from model_zoo.llama.model import Llama
from model_zoo.llama.restore import restore
from model_zoo.llama.train import run
from ms_dtensor.errors import ConfigError
from tests.jobs import metrics
from tests.zoo.cases_llama import SIZES, greedy_without_cache, model

DEBUG = ["--config", str(Path(__file__).resolve().parents[2] / "model_zoo/llama/configs/debug.yaml")]


def held_out(folder: Path) -> list[float]:
    return [line["held_out_loss"] for line in metrics(folder) if "held_out_loss" in line]


def conversations(file: Path) -> Path:
    talks = [[{"role": "user", "content": f"say {'abc'[i % 3]}"}, {"role": "assistant", "content": 3 * f"{'abc'[i % 3]}!"}]
             for i in range(24)]
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return file


def test_adapters_change_nothing_before_training_and_are_named_after_their_matrices(cpu):
    cfg = ModelConfig(**SIZES)
    ids = Tensor(np.arange(12, dtype=np.int32).reshape(2, 6))
    net = model(cfg)
    want = net(ids).asnumpy()
    names = [name for name, _ in net.parameters_and_names()]
    lora.add(net, LoraConfig(rank=2), 0)
    assert np.array_equal(net(ids).asnumpy(), want)
    assert [p.name for p in net.trainable_params()][:2] == ["layers.0.attention.wq.lora_a.weight",
                                                           "layers.0.attention.wq.lora_b.weight"]
    assert len(net.trainable_params()) == 2 * 4 * 2
    with lora.without_adapters(net):
        assert [name for name, _ in net.parameters_and_names()] == names
    assert len(list(net.get_parameters())) == len(names) + 16


def test_an_adapted_matrix_adds_alpha_by_rank_of_its_adapters(cpu):
    draw = np.random.default_rng(4).normal
    x, w, a, b = (draw(size=size).astype(np.float32) for size in ((3, 6), (5, 6), (2, 6), (5, 2)))
    cell = lora.Adapted(nn.Dense(6, 5, has_bias=False), LoraConfig(rank=2, alpha=12.0))
    for part, value in ((cell, w), (cell.lora_a, a), (cell.lora_b, b)):
        part.weight.set_data(Tensor(value))
    assert np.allclose(cell(Tensor(x)).asnumpy(), x @ (w + 6 * b @ a).T, atol=1e-4)


def test_full_and_lora_tuning_of_a_published_model_lower_the_held_out_loss(tmp_path, cpu, capsys):
    """Trained on text, exported; then on conversations, all weights and adapters only; merged; `transformers` reads it."""
    run([*DEBUG, "--train.steps", "20", "--train.log_dir", str(tmp_path / "text"), "--checkpoint.interval", "20"])
    export.run(["--from", str(tmp_path / "text"), "--out", str(tmp_path / "base"), "--max_positions", "777"])
    talk = ["--train.init_hf", str(tmp_path / "base"), "--data.path", str(conversations(tmp_path / "chat.jsonl")),
            "--data.format", "chat", "--data.held_out_every", "4", "--train.seq", "64", "--train.steps", "12",
            "--train.batch", "6", "--train.eval_batches", "1", "--checkpoint.interval", "12", "--optim.lr", "0.01"]
    run([*talk, "--train.log_dir", str(tmp_path / "sft")])
    assert "\n0.03 M parameters on 1 rank" in "\n" + capsys.readouterr().out
    run([*talk, "--train.log_dir", str(tmp_path / "lora"), "--lora.rank", "8", "--lora.where", "all", "--lora.alpha", "32",
         "--train.steps", "120"])
    assert re.search(r"^0\.04 M parameters, \d{1,2},\d{3} of them trained, on 1 rank", capsys.readouterr().out, re.M)
    for name, factor in (("sft", 0.6), ("lora", 0.9)):
        losses = held_out(tmp_path / name)
        assert losses[-1] < factor * losses[0], (name, losses)
    evaluate.run(["--from", str(tmp_path / "sft"), "--batch", "4", "--json", str(tmp_path / "out.json")])
    said = json.loads((tmp_path / "out.json").read_text())
    assert said["tokens"] == 6 * len("a!a!a!<|end|>\n"), "of the answers, all that are held out"
    assert np.isclose(said["loss"], held_out(tmp_path / "sft")[-1], rtol=1e-4), "that of training"
    with pytest.raises(ConfigError, match="are those of the run"):
        evaluate.run(["--from", str(tmp_path / "sft"), "--seq", "32"])
    with pytest.raises(ConfigError, match="has a model already"):
        export.run(["--from", str(tmp_path / "text"), "--out", str(tmp_path / "base")])
    ids = np.arange(40, dtype=np.int32).reshape(2, 20)
    tuned = restore(tmp_path / "lora", "cpu", 1)
    logits = tuned.model(Tensor(ids)).asnumpy()
    export.run(["--from", str(tmp_path / "lora"), "--out", str(tmp_path / "merged")])
    assert hf.read_positions(tmp_path / "merged") == 777, "as the published model says, and not train.seq"
    with pytest.raises(ConfigError, match="max_positions = 0"):
        export.run(["--from", str(tmp_path / "lora"), "--out", str(tmp_path / "none"), "--max_positions", "0"])
    plain = Llama(hf.read_config(tmp_path / "merged"))
    hf.load(plain, tmp_path / "merged")
    assert np.abs(plain(Tensor(ids)).asnumpy() - logits).max() < 1e-4
    base = Llama(hf.read_config(tmp_path / "base"))
    hf.load(base, tmp_path / "base")
    assert np.array_equal(base.tok_embeddings.weight.asnumpy(), plain.tok_embeddings.weight.asnumpy()), "frozen"
    assert np.abs(base(Tensor(ids)).asnumpy() - logits).max() > 0.01
    (tmp_path / "base/tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="For the tokenizer '.*base/tokenizer.json'"):  # of conversations the default
        run([*talk, "--train.log_dir", str(tmp_path / "more")])
    transformers = pytest.importorskip("transformers", reason="an extra: pip install '.[hf]'")
    torch = pytest.importorskip("torch", reason="an extra: pip install '.[hf]'")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        got = theirs(torch.from_numpy(ids).long()).logits.numpy().reshape(logits.shape)
    assert np.abs(got - logits).max() < 1e-4


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
    run(["--config", "model_zoo/llama/configs/debug.yaml", "--train.steps", "3", "--train.log_dir", str(tmp_path / "run"),
         "--checkpoint.interval", "3"])
    capsys.readouterr()
    generate.run(["--from", str(tmp_path / "run"), "--prompt", "def ", "--tokens", "5", "--samples", "2"])
    text = capsys.readouterr().out
    assert text.startswith("def ") and text.count("def ") == 2
    evaluate.run(["--from", str(tmp_path / "run"), "--max_tokens", "3000", "--json", str(tmp_path / "out.json")])
    said = json.loads((tmp_path / "out.json").read_text())
    assert said["tokens"] == 3000 and abs(said["loss"] - held_out(tmp_path / "run")[-1]) < 0.5
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
