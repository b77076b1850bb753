# SPDX-License-Identifier: Apache-2.0
"""The configuration tree: what it accepts, and what it says when it refuses. Pure: MindSpore is not imported."""
import sys
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml

from model_zoo.llama.config import RANGES, Config
from model_zoo.llama.configio import dump, load
from model_zoo.llama.data import load_text
from ms_dtensor.core.divisors import divisors
from ms_dtensor.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "model_zoo/llama/configs"
WORLD = {"quickstart": 8, "tiny": 1, "debug": 1}  # the others say themselves: test_llama_layouts.py


def refusal(args: str, world: int = 1) -> str:
    with pytest.raises(ConfigError) as error:
        load(args.split(), world)
    return str(error.value)


@pytest.mark.parametrize("name", WORLD)
def test_shipped_configurations_load(name):
    cfg, _ = load(["--config", str(CONFIGS / f"{name}.yaml")], WORLD[name])
    assert isinstance(cfg, Config)


def test_defaults_then_file_then_command_line(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("model: {dim: 64}\noptim: {lr: 1e-4}\n")
    cfg, show = load(["--config", str(file), "--model.n_heads", "4", "--model.n_kv_heads=2", "--optim.eps", "1e-6",
                      "--optim.betas", "[0.8, 0.9]", "--train.steps=3", "--print-config"], 1)
    assert (cfg.model.dim, cfg.model.n_heads, cfg.model.n_kv_heads, cfg.model.n_layers) == (64, 4, 2, 4)
    assert (cfg.optim.lr, cfg.optim.eps, cfg.optim.betas, cfg.train.steps, show) == (1e-4, 1e-6, (0.8, 0.9), 3, True)
    assert load(["--train.steps=5", "--config", str(file)], 1)[0].train.steps == 5, "the command line wins in any order"


def test_printed_configuration_reads_back(tmp_path):
    cfg, _ = load(["--model.rope_scaling.factor", "32", "--data.path", "a b"], 1)
    file = tmp_path / "resolved.yaml"
    file.write_text(dump(cfg))
    assert load(["--config", str(file)], 1)[0] == cfg
    assert yaml.safe_load(dump(cfg))["model"]["rope_scaling"]["factor"] == 32.0


@pytest.mark.parametrize(("args", "needed"), [
    ("--model.n_layer 2", ["'model.n_layer' is not a key", "'model.n_layers' is the closest match"]),
    ("--modle.dim 64", ["'modle'", "'model' is the closest match"]),
    ("--train.lr 0.1", ["'train.lr'", "'optim.lr' exists"]),
    ("--model.dim big", ["model.dim cannot be 'big'", "a whole number"]),
    ("--model.dim 64.0", ["model.dim cannot be 64.0", "fix:  --model.dim 64"]),
    ("--train.steps 1e1", ["train.steps cannot be 10.0", "fix:  --train.steps 10"]),
    *((f"--train.seed {number}", [f"cannot be '{number}'", "written plainly"]) for number in ("010", "1_0", "1:30", "0x10")),
    ("--optim.lr 1_0e-1", ["optim.lr cannot be '1_0e-1'"]),
    ("--train.init_hf=", ["train.init_hf cannot be ''", "one character at least"]),
    ("--data.path=", ["data.path cannot be ''"]),
    ("--model.tied_head 1", ["true or false"]),
    ("--optim.schedule linear", ["'cosine', 'constant'"]),
    ("--optim.betas [0.9]", ["a list of 2"]),
    ("--model 3", ["a section with keys dim"]),
    ("--config nowhere.yaml", ["no file 'nowhere.yaml'"]),
    ("train.steps 3", ["'train.steps' is not an option"]),
    ("--train.steps", ["no value"]),
    ("--train.log_dir --train.steps 3", ["'--train.log_dir' has no value"]),
    ("--model.dim 33 --model.n_heads 4 --model.n_kv_heads 4", ["does not make model.n_heads = 4", "fix:  --model.dim 40"]),
    ("--model.head_width 7", ["model.head_width = 7 is odd", "--model.head_width 8"]),
    ("--train.batch 0", ["train.batch = 0 is out of range"]),
    ("--model.n_heads 7 --model.n_kv_heads 7", ["does not make model.n_heads = 7 heads"]),
    ("--model.experts.count 2 --model.experts.per_token 3", ["more than there are", "model.experts.count = 2"]),
    ("--model.experts.count 8 --model.experts.groups 3", ["8 experts do not make model.experts.groups = 3", "[1, 2, 4, 8]"]),
    ("--model.experts.count 8 --model.experts.groups 4 --model.experts.group_limit 1 --model.experts.per_token 3",
     ["per_token = 3, groups = 4, group_limit = 1", "as many experts as it needs"]),
    ("--model.experts.score sigmoid --model.experts.count 8 --model.experts.groups 8",
     ["of sigmoids of two at least", "[1, 2, 4]"]),
    ("--model.experts.dense_layers 4", ["dense_layers = 4 leaves no layer", "with at most 3"]),
    ("--model.latent.turned 7", ["model.latent.turned = 7 is odd", "--model.latent.turned 8"]),
    ("--model.latent.value 200", ["model.latent.value = 200 is above", "with at most 192"]),
    ("--model.latent.turned 8 --model.qk_norm true", ["model.latent does not go with", "without model.qk_norm"]),
    ("--model.latent.turned 8 --lora.rank 4", ["lora does not go with latent attention"]),
    ("--model.n_heads 8 --model.n_kv_heads 3", ["model.n_kv_heads = 3 does not divide", "[1, 2, 4, 8]"]),
])
def test_a_wrong_key_or_value_is_explained(args, needed):
    message = refusal(args)
    assert all(words in message for words in needed), message


def test_plain_numbers_are_numbers_and_others_text(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("data: {path: 010, tokenizer: '1e5'}\noptim: {lr: 1e-3, eps: .5, betas: [0., 0.9]}\ntrain: {seed: +7}\n")
    cfg, _ = load(["--config", str(file)], 1)
    assert (cfg.data.path, cfg.data.tokenizer) == ("010", "1e5") and cfg.train.seed == 7
    assert (cfg.optim.lr, cfg.optim.eps, cfg.optim.betas) == (1e-3, 0.5, (0.0, 0.9))


def test_an_unknown_key_in_a_file_names_the_closest_match(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("train: {stesp: 3}\n")
    message = refusal(f"--config {file}")
    assert "'train.stesp'" in message and "'train.steps' is the closest match" in message


@pytest.mark.parametrize("text", ['"\\e[2J\\u202e": 1', 'train: {"st\\e[31meps": 3}', '"\\e[2Jtrain": {steps: 3}',
                                  'train: {"\\e]0;x\\astesp": 3}', 'train: {dtype: "\\e[31m"}'])
def test_what_steers_a_terminal_is_written_out(tmp_path, text):
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"\\x1b") as caught:
        load(["--config", str(file)], 1)
    assert str(caught.value).replace("\n", "").isprintable()


@pytest.mark.parametrize(("args", "world", "needed"), [
    ("--parallel.pp 2", 8, ["parallel.dp = 1 x parallel.tp = 1 x parallel.pp = 2 = 2, world size = 8", "dp=2 tp=2 pp=2"]),
    ("--parallel.pp 3", 8, ["parallel.pp = 3 = 3, world size = 8", "--workers 3"]),
    ("--parallel.pp_stages_per_rank 2", 1, ["there is none", "--parallel.pp 2"]),
    ("--parallel.pp_split [layers.1]", 1, ["there is none"]),
    ("--parallel.pp 2 --parallel.pp_schedule zb", 2, ["cannot be 'zb'", "'1f1b', 'interleaved', 'zbh1', 'zbv'"]),
    ("--parallel.pp 2 --parallel.pp_schedule zbv", 2, ["not for so many stages", "--parallel.pp_stages_per_rank 2"]),
    ("--parallel.pp 1 --parallel.pp_stages_per_rank 2 --parallel.pp_schedule zbv", 1, ["there is none"]),
    ("--parallel.pp 2 --parallel.pp_schedule interleaved", 2, ["not for so many stages", "pp_stages_per_rank 2"]),
    ("--parallel.pp 2 --parallel.pp_stages_per_rank 2", 2, ["not for so many stages", "--parallel.pp_stages_per_rank 1"]),
    ("--parallel.pp 2 --parallel.pp_schedule interleaved --parallel.pp_stages_per_rank 2 --train.micro_batches 3 "
     "--train.batch 12", 2, ["3 micro-batches do not go through 2 ranks", "--train.micro_batches 4"]),
    ("--parallel.pp 8", 8, ["8 stages are more", "--parallel.pp with at most 6"]),
    *((f"--parallel.pp 2 --parallel.pp_split {split}", 2, ["does not say where stages begin", "names 1 different cells"])
      for split in ("[layers.1,layers.2]", "[layers.9]", "[tok_embeddings]", "[]", "layers")),
    ("--parallel.pp 3 --parallel.pp_split [layers.2,layers.1]", 3, ["does not say where stages begin"]),
    ("--parallel.dp 4 --parallel.ep 3 --model.experts.count 4", 4, ["experts cannot be cut", "with one of [1, 2, 4]"]),
    ("--parallel.dp 4 --parallel.ep 4 --model.experts.count 2", 4, ["--parallel.ep with one of [1, 2]"]),
    ("--parallel.dp 2 --parallel.ep 2", 2, ["experts cannot be cut", "0 experts"]),
    ("--parallel.dp 2 --parallel.tp 2", 8, ["parallel.dp = 2 x parallel.tp = 2 = 4, world size = 8", "--worker_num=4",
                                            "dp=8 tp=1, dp=4 tp=2, dp=2 tp=4, dp=1 tp=8"]),
    ("--parallel.tp 8 --model.n_kv_heads 4", 8, ["model.n_kv_heads = 4 cannot be divided over parallel.tp = 8",
                                                 "one of [1, 2, 4]", "dp=2 tp=4"]),
    ("--parallel.dp 8 --train.batch 12", 8, ["--train.batch 16"]),
])
def test_layouts_that_cannot_be_are_refused_by_the_configuration(args, world, needed):
    message = refusal(args, world)
    assert all(words in message for words in needed), message


def test_pipelines_that_can_be():
    cfg, _ = load("--parallel.pp 2 --parallel.pp_split [layers.1,layers.2,output] --parallel.pp_schedule interleaved "
                  "--parallel.pp_stages_per_rank 2 --train.micro_batches 4".split())
    assert cfg.parallel.stages == 4 and cfg.parallel.pp_split == ("layers.1", "layers.2", "output")
    load("--parallel.pp 6 --parallel.dp 2 --parallel.pp_schedule gpipe".split(), 12)


def test_a_missing_data_path_and_a_small_vocabulary_are_refused(tmp_path):
    cfg, _ = load(["--data.path", str(tmp_path / "none")], 1)
    with pytest.raises(ConfigError, match="holds no text"):
        load_text(cfg.data, 256, 8)
    with pytest.raises(ConfigError, match="Tokens are bytes"):
        load_text(cfg.data, 128, 8)


# -- hostile files and values ----------------------------------------------------------------------------------------
def parts_of(call) -> ConfigError:
    """The refusal, which has four parts, is short and comes at once: the worst one after 32,000 calls of functions."""
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        with pytest.raises(ConfigError) as caught:
            call()
    finally:
        sys.setprofile(None)
    error = caught.value
    assert calls < 200_000 and len(str(error)) < 2000
    assert error.attempt.startswith("For ") and error.operands and error.rule and error.fix, error
    return error


BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi"))


@pytest.mark.parametrize("text", [
    b"model: {dim: !!int abc}", b"model: {tied_head: !!bool maybe}", b"data: {path: !!timestamp x}", BOMB.encode(),
    b"model: " + b"[" * 3000, b"model: " + b"{a: " * 900, b"\xff\xfe\xfa", b"model: {dim: \xe9}", b"a: \x00",
    b"model: {dim: " + b"9" * 400 + b"}", b"model: {dim: " + b"9" * 5000 + b"}", b"optim: {lr: " + b"9" * 400 + b"}",
    b"model: {dim: 0x" + b"f" * 5000 + b"}", b"model: {dim: 0b_}", b"train: {steps: 1}\ntrain: {steps: 2}",
    b"train: {steps: 1, steps: 2}", b"? [a]\n: 1", b"train: {log_dir: 2020-99-99, steps: x}", b"- 1", b"3",
    b"!!python/object:os.x {}",
    b"train: {steps: 2020-01-01}", b"#" * (1 << 20) + b"\nmodel: {dim: 3}",
], ids=lambda t: repr(t[:30]))
def test_a_hostile_file_is_refused_at_once(tmp_path, text):
    file = tmp_path / "a.yaml"
    file.write_bytes(text)
    parts_of(lambda: load(["--config", str(file)], 1))


@pytest.mark.parametrize("args", [
    ["--config", "x" * 300], ["--config", "x/" * 3000], ["--config", "a\0b"], ["--config", str(CONFIGS)],
    ["--model.dim", "9" * 5000],
    ["--model.dim", str(2 ** 40), "--model.n_heads", "7"], ["--model.dim", "[" * 3000], ["--model.dim", "!!int abc"],
    ["--train.log_dir", "x" * 5000], ["--train.log_dir", "x" * 300], ["--data.path", "y" * 300], ["--model.n_heads.x", "1"],
    *([f"--optim.{key}", value] for key, value in (
        ("lr", ".nan"), ("lr", "-1.0"), ("lr", ".inf"), ("lr", "1e999"), ("lr", "9" * 400), ("betas", "[2, -1]"),
        ("betas", "[0.9, 1.0]"), ("betas", "[.nan, 0.9]"), ("eps", ".nan"), ("eps", "0"), ("eps", "-1e-8"),
        ("clip_norm", ".nan"),
        ("clip_norm", ".inf"), ("weight_decay", "-0.1"), ("weight_decay", ".inf"), ("min_lr_ratio", "2"), ("warmup", "-1"))),
    *([f"--model.{key}", value] for key, value in (
        ("rope_theta", "0"), ("rope_theta", "-5.0"), ("rope_theta", ".nan"), ("norm_eps", "-1"), ("norm_eps", ".nan"),
        ("dim", "0"),
        ("rope_scaling.factor", "0"), ("rope_scaling.low_freq_factor", "-1"), ("rope_scaling.high_freq_factor", "1"),
        ("rope_scaling.original_max_seq_len", "0"))),
    ["--train.seed", "-1"], ["--train.seed", str(2 ** 70)], ["--train.steps", "-1"], ["--train.batch", str(10 ** 30)],
    ["--data.max_bytes", "0"], ["--parallel.tp", "0"], ["--nosuch.key", "1"], ["plain"], ["--train.steps"],
], ids=lambda a: " ".join(a)[:40])
def test_every_field_has_a_range(args):
    parts_of(lambda: load(args, 1))


def test_every_number_of_the_tree_is_in_the_table_of_ranges():
    def numbers(kind, where=""):
        for f in fields(kind):
            hint = typing.get_type_hints(kind)[f.name]
            if type(None) in typing.get_args(hint):
                hint = typing.get_args(hint)[0]
            if is_dataclass(hint):
                yield from numbers(hint, f"{where}{f.name}.")
            elif hint in (int, float) or typing.get_args(hint)[:1] == (float,):
                yield f"{where}{f.name}"
    assert set(RANGES) == set(numbers(Config))


@pytest.mark.parametrize("n", [1, 2, 12, 49, 97, 704, 2 ** 20, 2 ** 20 * 15])
def test_divisors(n):
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]
