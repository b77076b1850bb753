# SPDX-License-Identifier: Apache-2.0
"""Every configuration of a published model: its parameters counted, each layout that its file names laid out; that it fits.

Nothing of these sizes is made: a small twin of the same structure is laid out over a fake world of the real size, and
the shapes of its parameters are then read as the real ones.
"""
import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

import ms_dtensor as md
from model_zoo.llama import memory
from model_zoo.llama.config import LatentConfig, ModelConfig, mesh_axes
from model_zoo.llama.configio import load
from model_zoo.llama.hf import names_of, to_hf
from model_zoo.llama.model import Llama
from model_zoo.llama.parallelize import make_mesh, parallelize, stage_mesh
from model_zoo.llama.tools import compare_losses
from ms_dtensor.checkpoint.key_map import translate
from ms_dtensor.comm import fake_world
from ms_dtensor.core.layout import Layout
from ms_dtensor.pipeline import pipeline

CONFIGS = Path(__file__).resolve().parents[2] / "model_zoo/llama/configs"
# Half the `total_size` of each one's model.safetensors.index.json (bfloat16); of models in one file, its header's count,
# tied heads once.
PUBLISHED = {
    "llama_160m": 162_417_408, "llama3_1b": 1_235_814_400, "llama3_8b": 8_030_261_248, "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800, "qwen2_0.5b": 494_032_768, "qwen2_7b": 7_615_616_512, "qwen2_72b": 72_706_203_648,
    "qwen3_0.6b": 596_049_920, "qwen3_8b": 8_190_735_360, "qwen3_32b": 32_762_123_264, "mistral_7b": 7_248_023_552,
    "mixtral_8x7b": 46_702_792_704, "mixtral_8x22b": 140_620_634_112,
    # as `transformers` counts them on its device "meta"; DeepSeek's with its biases, without the layer for one more token
    "qwen3_30b_a3b": 30_532_122_624, "qwen3_235b_a22b": 235_093_634_560, "olmoe_1b_7b": 6_919_161_856,
    "deepseek_v3": 671_026_419_200,
}
KINDS = {"llama": "llama", "llama3": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "mistral": "llama", "mixtral": "mixtral",
         "qwen3_30b_a3b": "qwen3_moe", "qwen3_235b_a22b": "qwen3_moe", "olmoe": "olmoe", "deepseek": "deepseek_v3"}


def twin(m: ModelConfig) -> tuple[ModelConfig, dict[int, int]]:
    """One layer of each kind, of small sizes, no two alike, and which of the real ones each stands for."""
    width = 2 if m.n_heads < 64 else 4
    small = replace(m, n_layers=1, head_width=width, dim=2 * 8 * 11, ffn_dim=8 * 37, vocab_size=8 * 53,
                    n_heads=m.n_heads, n_kv_heads=m.n_kv_heads)
    pairs = [(small.dim, m.dim), (small.ffn_dim, m.ffn_dim), (small.vocab_size, m.vocab_size)]
    if m.latent is None:
        pairs += [(width, m.head_dim), (m.n_heads * width, m.n_heads * m.head_dim),
                  (m.n_kv_heads * width, m.n_kv_heads * m.head_dim)]
    else:
        small = replace(small, head_width=None, latent=LatentConfig(kv_rank=17, q_rank=23, plain=2, turned=2, value=3))
        pairs += [(of(small), of(m)) for of in (
            lambda c: c.latent.kv_rank, lambda c: c.latent.q_rank, lambda c: c.latent.kv_rank + c.latent.turned,
            lambda c: c.n_heads * c.head_dim, lambda c: c.n_heads * (c.latent.plain + c.latent.value),
            lambda c: c.n_heads * c.latent.value)]
    if m.experts is not None:
        e = small.experts
        dense, own = min(e.dense_layers, 1), 8 * 41 if e.width else None
        small = replace(small, n_layers=1 + dense, experts=replace(e, dense_layers=dense, width=own))
        pairs += [(e.count, e.count)] + [(own, e.width)] * (own is not None)
    assert len({key for key, _ in pairs}) == len(set(pairs)), "no two other sizes are alike"
    return small, dict(pairs)


def layers_of(m: ModelConfig) -> list[int]:
    """How many layers each of the twin's stands for."""
    dense = 0 if m.experts is None else m.experts.dense_layers
    return [dense] * (dense > 0) + [m.n_layers - dense]


LAYOUTS = [pytest.param(name, *row, id=f"{name} {row[0]} {' '.join(row[1])}")
           for name in PUBLISHED for row in memory.documented(CONFIGS / f"{name}.yaml")]


def test_every_configuration_of_a_published_model_is_in_the_table():
    assert {file.stem for file in CONFIGS.glob("*.yaml")} == {*PUBLISHED, "quickstart", "tiny", "debug"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_were_published(name):
    """By the formula, and by the shapes of the cells; the family's names and config know all of them."""
    file = CONFIGS / f"{name}.yaml"
    m = load(["--config", str(file)])[0].model
    small, real = twin(m)
    model, count = Llama(small), 0
    for p_name, p in model.parameters_and_names():
        count += prod(real[n] for n in p.shape) * times(p_name, layers_of(m))
        assert translate(p_name, names_of(model), p.shape).names
    assert count == PUBLISHED[name]
    assert f"{PUBLISHED[name]:,}" in file.read_text()
    assert to_hf(m, 4096)["model_type"] == KINDS.get(name) or KINDS[name.split("_")[0]]
    worlds = [npus for npus, *_ in memory.documented(file)]
    assert max(worlds) >= 512 and (8 in worlds or 64 in worlds or "Fewer than 256" in file.read_text())


@pytest.mark.parametrize("name, npus, options, gib", LAYOUTS)
def test_a_documented_layout_is_one_and_fits(name, npus, options, gib):
    cfg, _ = load(["--config", str(CONFIGS / f"{name}.yaml"), *options], npus)
    rows = memory.per_rank(cfg)
    total = sum(rows.values())
    assert total < 0.9 * memory.USABLE and abs(total / 2**30 - gib) <= 0.05, memory.report(cfg)
    small, real = twin(cfg.model)
    with fake_world(npus):
        mesh = make_mesh("cpu", cfg.parallel)
        if cfg.parallel.pp == 1:
            held = cells_of(Llama(small), mesh, cfg, real, layers_of(cfg.model))
        else:  # rank 0's; the formula is of the rank that needs most
            whole = Llama(replace(small, n_layers=cfg.model.n_layers))
            stages = pipeline(whole, mesh["pp"], n_stages=cfg.parallel.stages,
                              cost=lambda _, cell: sum(prod(real[n] for n in p.shape)
                                                       for p in cell.get_parameters() if p.ndim > 1))
            held = sum(cells_of(stage.module, mesh, cfg, real, [1] * cfg.model.n_layers) for stage in stages)
            rows = memory.of_share(cfg, memory.shares(cfg)[0])
    formula = rows["parameters, float32"]  # chunks of few rows are uneven, and the first rank has the larger ones
    assert -0.001 * formula <= 4 * held - formula <= max(0.02 * formula, 8 * memory.MIB)


def times(p_name: str, layers: list[int]) -> int:
    """How many parameters this one stands for."""
    return layers[int(p_name.split(".")[1])] if p_name.startswith("layers.") else 1


def cells_of(model, mesh, cfg, real, layers):
    """How many elements of parameters this rank has, each layer counted so many times."""
    held, over = 0, stage_mesh(mesh)
    for p_name, p in parallelize(model, over, cfg.parallel).parameters_and_names():
        assert isinstance(p, md.DTensor) and p.device_mesh == over, p_name
        lies = p.layout
        mine = Layout(over, lies.placements, [real[n] for n in p.shape], lies.dtype, order=lies.order).local_shape()
        held += prod(mine) * times(p_name, layers)
    return held


def test_the_pages_table_has_the_files_figures():
    text = Path("docs/recipes_models.md").read_text("utf-8")
    for name in PUBLISHED:
        rows = list(memory.documented(CONFIGS / f"{name}.yaml"))
        small, many = (next(row for row in rows if row[0] == npus) for npus in (min(row[0] for row in rows), 512))
        (said,) = re.findall(rf"^\| `{re.escape(name)}` \| .*$", text, re.M)
        assert said.endswith(f"| {small[0]} NPUs: {small[2]} | {many[2]} |"), name


ALONE = ["--parallel.tp", "1", "--parallel.dp", "8", "--parallel.sequence_parallel", "false", "--train.micro_batches", "1"]
FSDP = [*ALONE, "--parallel.fsdp", "true"]
LONG, AGAIN = ["--train.seq", "8192"], ["--train.recompute", "true"]
STAGES = {"70b": ["--parallel.dp", "8", "--parallel.pp", "4", "--train.batch", "64", "--train.micro_batches", "8", *LONG],
          "405b": ["--parallel.dp", "8", "--parallel.pp", "16", "--train.batch", "256", "--train.micro_batches", "32"]}
SAID = [  # words of a page, whose numbers are GiB by formula: of each the file, the ranks and the options
    ("recipes_models", r"and (\S+) GiB are needed in place of (\S+) \((\S+) without", [
        ("8b", 8, [*FSDP, *LONG, *AGAIN, "--train.recompute_gib", "5"]), ("8b", 8, [*FSDP, *LONG, *AGAIN]),
        ("8b", 8, [*FSDP, *LONG])]),
    ("recipes_models", r"no product and no attention runs again, in (\S+)\. ", [
        ("8b", 8, [*FSDP, *LONG, *AGAIN, "--train.recompute_gib", "24"])]),
    ("recipes_models", r"`--optim.offload true` makes (\S+) GiB (\S+)\. ", [
        ("8b", 8, [*FSDP, *LONG]), ("8b", 8, [*FSDP, *LONG, "--optim.offload", "true"])]),
    ("recipes_models", r"`dp=8` needs (\S+) GiB and\ngets `\S+ true  needs (\S+) GiB`; 70B on eight needs (\S+)", [
        ("8b", 8, ALONE), ("8b", 8, FSDP), ("70b", 8, ["--parallel.dp", "1"])]),
    ("recipes_models", r"70B on 256 NPUs in four stages (\S+), 405B on 1024 in sixteen (\S+) \(", [
        ("70b", 256, STAGES["70b"]), ("405b", 1024, STAGES["405b"])]),
    ("howto/long_contexts", r"8B on 64 NPUs (\S+) GiB, 70B on 256 (\S+), 405B on 2,048 (\S+);", [
        ("8b", 64, None), ("70b", 256, None), ("405b", 2048, None)])]


@pytest.mark.parametrize(("page", "words", "rows"), SAID, ids=lambda x: x[-30:] if isinstance(x, str) else None)
def test_what_a_page_says_of_memory_is_the_formulas(page, words, rows):
    """Of long contexts the first row of a file with 128K tokens."""
    (said,) = re.findall(words, Path(f"docs/{page}.md").read_text("utf-8"))
    for number, (name, npus, options) in zip([said] if isinstance(said, str) else said, rows, strict=True):
        file = CONFIGS / f"llama3_{name}.yaml"
        if options is None:
            options = next(o for n, o, _ in memory.documented(file) if n == npus and "131072" in o)
        total = sum(memory.per_rank(load(["--config", str(file), *options], npus)[0]).values())
        assert number == f"{total / 2**30:.1f}", (name, npus, options)


@pytest.mark.parametrize("case", compare_losses.CASES, ids=lambda case: case.name)
def test_a_mesh_that_losses_are_compared_on_is_what_its_name_says(case):
    """A flag in another one's place would compare another mesh, or stop the tool."""
    given = case.config().parallel
    assert prod(mesh_axes(given).values()) == case.ranks
    same = ("dp", "tp", "pp", "sequence_parallel", "loss_parallel", "fsdp", "hsdp", "zero1")
    assert [getattr(given, name) for name in same] == [getattr(case, name) for name in same] and given.tp_overlap == 1
