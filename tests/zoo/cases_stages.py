# SPDX-License-Identifier: Apache-2.0
"""Real ranks: what else the recipe does in stages: experts, adapters, published weights, texts; each against one device."""
from dataclasses import replace

import numpy as np

from model_zoo.llama import evaluate, hf, lora
from model_zoo.llama.config import Config, ExpertsConfig, LoraConfig, ParallelConfig, check
from model_zoo.llama.generate import generate
from model_zoo.llama.model import Llama, init_weights
from model_zoo.llama.parallelize import make_mesh, parallelize, stage_mesh
from model_zoo.llama.trainer import Trainer
from ms_dtensor.pipeline import ScheduleGPipe, pipeline
from tests.cases import case
from tests.support import array, each, shared_folder
from tests.tiers import sampled
from tests.zoo.cases_pipeline import INTERLEAVED, ZBV, config
from tests.zoo.recipe import as_one_device, goes_on, run, trainer

KINDS = {"experts": {"experts": ExpertsConfig(4, 2, balance=0.5)},
         "with a capacity": {"experts": ExpertsConfig(4, 2, capacity=0.9, balance=0.5)},
         "biases": {"experts": ExpertsConfig(4, 2, balance=0.5, bias_rate=0.1)},
         "adapters": {"lora": LoraConfig(rank=3, where="all", alpha=40.0)},
         "adapters and experts": {"experts": ExpertsConfig(4, 2, balance=0.5), "lora": LoraConfig(rank=3, alpha=40.0)}}
def configured(kind: str, parallel: ParallelConfig, tied: bool = False, **train) -> Config:
    cfg, how = config(ParallelConfig(), tied, **train), KINDS[kind]
    cfg = replace(cfg, parallel=parallel, model=replace(cfg.model, experts=how.get("experts")), lora=how.get("lora"),
                  optim=replace(cfg.optim, lr=0.01 if "lora" in how else cfg.optim.lr))
    check(cfg, parallel.pp * parallel.dp * parallel.tp * parallel.cp)
    return cfg


def trains_alike(kind: str, parallel: ParallelConfig, recompute: bool = False) -> None:
    as_one_device(configured(kind, parallel, micro_batches=2, recompute=recompute), steps=3)


@case(2, timeout=200)
def experts_and_adapters_in_two_stages(world):
    """The auxiliary loss is of all layers together; a stage without an adapter has nothing to train, and hands on."""
    each(sampled((
        ("experts", ParallelConfig(pp=2)), ("with a capacity", ParallelConfig(pp=2, **ZBV)),
        ("adapters", ParallelConfig(pp=2)), ("adapters", ParallelConfig(pp=2, pp_split=("norm",))),  # one stage has none
        ("adapters", ParallelConfig(pp=2, pp_schedule="zbh1")), ("experts", ParallelConfig(pp=2, **INTERLEAVED), True),
        ("adapters and experts", ParallelConfig(pp=2, pp_split=("layers.0",)))), 6))(trains_alike)


@case(4, timeout=300)
def experts_and_adapters_in_stages_beside_other_axes(world):
    each(sampled((
        ("experts", ParallelConfig(2, 1, ep=2, pp=2)), ("experts", ParallelConfig(2, 1, ep=2, fsdp=True, pp=2), True),
        ("with a capacity", ParallelConfig(1, 2, expert_tp=True, pp=2)),
        ("experts", ParallelConfig(1, 2, True, pp=2, **ZBV)),
        ("adapters", ParallelConfig(2, 1, fsdp=True, pp=2, pp_split=("norm",))), ("adapters", ParallelConfig(1, 2, pp=2)),
        ("experts", ParallelConfig(cp=2, pp=2)), ("biases", ParallelConfig(2, 1, fsdp=True, pp=2)),
        ("adapters", ParallelConfig(pp=4))), 5))(trains_alike)


@case(2, timeout=120)
def a_run_with_adapters_goes_on_though_a_stage_has_none(world):
    """The rank without parameters has no optimizer."""
    def made(parallel: ParallelConfig):
        one = trainer(configured("adapters", parallel, micro_batches=2))
        assert (one.optimizer is None) == (world.rank == 1)
        return one
    goes_on(made, ParallelConfig(pp=2, pp_split=("norm",)), (), at=2, steps=4)


def in_stages(model: Llama, parallel: ParallelConfig, **how):
    """Its stages on this rank, laid out, and their mesh."""
    mesh = make_mesh("cpu", parallel)
    stages = pipeline(model, mesh["pp"], **how)
    for stage in stages:
        parallelize(stage.module, stage_mesh(mesh), parallel)
    return stages, mesh


def plain(cfg: Config, seed: int = 1) -> Llama:
    model = Llama(cfg.model)
    init_weights(model, seed, std=0.3)
    return model


def published(parallel: ParallelConfig, kind: str, tied: bool, how: dict) -> None:
    """Written by stages, read by one device, and the other way round: bit for bit."""
    cfg = config(ParallelConfig(), tied)
    cfg = replace(cfg, model=replace(cfg.model, experts=KINDS[kind]["experts"] if kind else None))
    want = {p.name: p.asnumpy() for p in plain(cfg).get_parameters()}
    stages, mesh = in_stages(plain(cfg), parallel, **how)
    root = shared_folder()
    hf.save(stages, cfg.model, root / "stages", max_positions=64, max_shard_size=20_000, over=mesh["pp"])
    other = plain(cfg, 2)
    hf.load(other, root / "stages")
    assert not tied or not any("lm_head" in str(f.read_bytes()) for f in (root / "stages").glob("*.index.json")), "once"
    hf.save(other, cfg.model, root / "one", max_positions=64)
    stages, mesh = in_stages(plain(cfg, 3), parallel, **how)
    hf.load(stages, root / "one", mesh["pp"])
    made = Trainer(replace(cfg, parallel=parallel, train=replace(cfg.train, init_hf=str(root / "one"))), None,
                   make_mesh("cpu", parallel))
    for p in (*other.get_parameters(), *(p for stage in stages for p in stage.module.get_parameters()), *made.params):
        assert array(p).tobytes() == want[p.name].tobytes(), p.name


@case(2, timeout=120)
def published_weights_in_two_stages(world):
    two = ParallelConfig(pp=2)
    each(sampled(((two, "", False, {}), (two, "", True, {"style": "v"}), (two, "", True, {}),
                  (two, "experts", False, {})), 2))(published)


def published_weights_in_stages_beside_other_axes(world):
    each([(ParallelConfig(1, 2, pp=2), "", True, {}), (ParallelConfig(2, 1, fsdp=True, pp=2), "experts", False, {}),
          (ParallelConfig(2, 1, ep=2, pp=2), "experts", False, {})])(published)


def texts(parallel: ParallelConfig, kind: str) -> None:
    """The same tokens, and the same loss, as one device."""
    cfg = config(ParallelConfig(), True)
    cfg = replace(cfg, model=replace(cfg.model, experts=KINDS[kind]["experts"] if kind else None))
    prompt = np.random.default_rng(5).integers(1, cfg.model.vocab_size, (4, 5)).astype(np.int32)
    windows = evaluate.windows(np.random.default_rng(6).integers(0, cfg.model.vocab_size, 60), 6, 4)
    want = [generate(plain(cfg), cfg.model, None, prompt, 6, temperature=t, seed=3) for t in (0.0, 0.8)]
    loss = evaluate.loss_of(plain(cfg), None, windows)
    stages, mesh = in_stages(plain(cfg), parallel)
    schedule = ScheduleGPipe(stages, 1)
    got = evaluate.loss_of(schedule, stage_mesh(mesh), windows, parallel.loss_parallel and parallel.tp > 1)
    assert abs(got / loss - 1) < 1e-6, (got, loss)
    for t, tokens in zip((0.0, 0.8), want):
        made = generate(schedule, cfg.model, stage_mesh(mesh), prompt, 6, temperature=t, seed=3)
        assert np.array_equal(made, tokens), (t, made, tokens)


@case(2, timeout=120)
def texts_of_two_stages(world):
    each([(ParallelConfig(pp=2), ""), (ParallelConfig(pp=2), "experts")])(texts)


def texts_of_stages_beside_other_axes(world):
    each(sampled(((ParallelConfig(1, 2, pp=2), ""), (ParallelConfig(2, 1, pp=2), ""),
                  (ParallelConfig(pp=4, loss_parallel=False), "experts")), 2))(texts)


@case(2, timeout=120)
def exported_adapters_of_stages_are_merged(world):
    cfg = configured("adapters", ParallelConfig(pp=2), micro_batches=2)
    one = trainer(cfg)
    run(one, 2)
    models = [stage.module for stage in one.stages.stages.values()]
    for model in models:
        lora.merge(model)
    root = shared_folder() / "merged"
    with lora.without_adapters(*models):
        hf.save(list(one.stages.stages.values()), cfg.model, root, max_positions=64, over=one.over)
    whole = Llama(cfg.model)
    hf.load(whole, root)
    there = dict(whole.parameters_and_names())
    for model in models:
        with lora.without_adapters(model):
            for name, p in model.parameters_and_names():
                assert array(p).tobytes() == there[name].asnumpy().tobytes(), name
