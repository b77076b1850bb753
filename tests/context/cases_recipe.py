# SPDX-License-Identifier: Apache-2.0
"""Real ranks: the recipe with its tokens cut over cp trains as on one device, beside everything else that it can do."""
from dataclasses import dataclass

import numpy as np

from model_zoo.llama import config
from model_zoo.llama.config import Config, ExpertsConfig, LoraConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from model_zoo.llama.data import places
from model_zoo.llama.generate import generate
from model_zoo.llama.parallelize import make_mesh
from model_zoo.llama.trainer import Trainer
from ms_dtensor import comm
from ms_dtensor.errors import ConfigError
from tests.cases import case
from tests.support import refusal
from tests.tiers import sampled
from tests.zoo.recipe import SIZES, as_one_device, goes_on


@dataclass(frozen=True)
class Drawn:
    """Batches of any numbers; with documents rows hold several, which the token 0 ends."""

    documents: bool

    def batch(self, seed, step, batch, seq):
        rng = np.random.default_rng(1000 * seed + step)
        both = rng.integers(0, 7, (batch, seq + 1)).cumsum(1).astype(np.int32) % 37
        ids, labels = (np.ascontiguousarray(x) for x in (both[:, :-1], both[:, 1:]))
        return (ids, labels, places(ids, 0)) if self.documents else (ids, labels)

    def held_out_batch(self, index, count, batch, seq):
        return self.batch(77, index, batch, seq)

    def identity(self):
        return {}


def same(parallel: ParallelConfig, documents: bool = True, window=None, lora=None, experts=None, **how):
    """Compares with one device; the events that fetched keys. Three rows a rank: the cuts are within rows."""
    cfg = Config(model=ModelConfig(sliding_window=window, experts=experts, **SIZES), parallel=parallel, lora=lora,
                 optim=OptimConfig(lr=0.01, warmup=1, eps=1e-3),
                 train=TrainConfig(steps=3, batch=3 * parallel.dp * how.get("micro_batches", 1), seq=12, seed=3,
                                   eval_batches=2, **how))
    with comm.record() as events:
        as_one_device(cfg, Drawn(documents), 3, loss=1e-6, far=1e-6, small=1.0)
    return [e for e in events if e.src == "keys and values"]


def two_ranks_share_the_tokens_of_all_rows(world):
    for order in sampled(("balanced", "head_tail", "in_order"), 3):
        fetched = same(ParallelConfig(cp=2, cp_order=order), documents=False)
        assert {e.axes for e in fetched} == {("cp",)} and len(fetched) == 5 * 2  # of two layers, in five forwards
        same(ParallelConfig(cp=2, cp_order=order))
    for more, how in sampled((
            ({"cp_algorithm": "ring"}, {"window": 5}), ({"ulysses": 2}, {}), ({"fsdp": True}, {"recompute": True}),
            ({"zero1": True}, {"micro_batches": 2}), ({}, {"lora": LoraConfig(rank=2)})), 3):
        same(ParallelConfig(cp=2, **more), **how)


@case(world_size=4, timeout=200)
def four_ranks_beside_data_tensor_and_sequence_parallelism(world):
    for parallel, how in sampled((
            (ParallelConfig(tp=2, cp=2, sequence_parallel=True, fsdp=True), {"window": 5, "recompute": True}),
            (ParallelConfig(dp=2, cp=2, cp_algorithm="ring"), {}),
            (ParallelConfig(tp=2, cp=2, fsdp=True), {}),
            (ParallelConfig(dp=2, cp=2, fsdp=True), {"micro_batches": 2, "recompute": True}),
            (ParallelConfig(tp=2, cp=2, sequence_parallel=True, loss_parallel=False, cp_algorithm="ring"), {}),
            (ParallelConfig(cp=4, ulysses=2, fsdp=True), {}),
            (ParallelConfig(cp=4, ulysses=2, cp_algorithm="ring", cp_order="head_tail"), {})), 3):
        same(parallel, **how)


MIXTURES = {"dropless": ExpertsConfig(4, 2, balance=0.1), "capacity": ExpertsConfig(5, 2, capacity=0.8, balance=0.1)}


@case(world_size=4, timeout=300)
def experts_beside_it_and_over_its_ranks(world):
    """ep as a part of dp, as all of cp, as both; each chooses, drops and balances as one device does."""
    whole = {"loss_parallel": False}
    for name, parallel, how in sampled((
            ("capacity", ParallelConfig(dp=2, cp=2, ep=2, **whole), {}),
            ("dropless", ParallelConfig(dp=2, cp=2, ep=4, fsdp=True, **whole), {"recompute": True}),
            ("dropless", ParallelConfig(dp=2, cp=2, ep=2, fsdp=True, expert_dedup=True, **whole), {"window": 5}),
            ("capacity", ParallelConfig(cp=4, ep=4, ulysses=2, **whole), {}),
            ("dropless", ParallelConfig(cp=2, tp=2, ep=2, sequence_parallel=True, fsdp=True, **whole), {}),
            ("capacity", ParallelConfig(cp=2, tp=2, **whole), {}),
            ("dropless", ParallelConfig(dp=2, cp=2, zero1=True, ep=2, cp_algorithm="ring", **whole), {}),
            ("capacity", ParallelConfig(dp=2, cp=2, fsdp=True, **whole), {"recompute": True})), 8, 4):
        same(parallel, experts=MIXTURES[name], **how)


@case(world_size=4, timeout=300)
def stages_of_a_pipeline_each_get_the_order_of_their_micro_batch(world):
    for parallel, how in sampled((
            (ParallelConfig(pp=2, cp=2), {"micro_batches": 2}),
            (ParallelConfig(pp=2, cp=2, fsdp=True, pp_schedule="zbv", pp_stages_per_rank=2, cp_algorithm="ring"),
             {"micro_batches": 4, "recompute": True}),
            (ParallelConfig(pp=2, ulysses=2, cp=2, fsdp=True, cp_order="head_tail"), {"micro_batches": 4, "window": 5})), 3):
        same(parallel, **how)


def made(parallel: ParallelConfig) -> Trainer:
    cfg = Config(model=ModelConfig(**SIZES), parallel=parallel, optim=OptimConfig(lr=0.01, warmup=1, eps=1e-3),
                 train=TrainConfig(steps=4, batch=8, seq=12, seed=3, micro_batches=2))
    return Trainer(cfg, Drawn(documents=True), make_mesh("cpu", parallel))


@case(world_size=4, timeout=300)
def a_run_goes_on_with_other_ranks_sharing_its_tokens(world):
    """On others, without cp too, within 1e-6: an order is no part of a checkpoint."""
    layouts = [ParallelConfig(dp=2, cp=2, fsdp=True), ParallelConfig(cp=4, ulysses=2), ParallelConfig(dp=4, fsdp=True),
               ParallelConfig(tp=2, cp=2, sequence_parallel=True, cp_algorithm="ring"), ParallelConfig(pp=2, cp=2)]
    for source in sampled((layouts[0], layouts[2]), 2):
        goes_on(made, source, sampled(layouts[1:], 2), at=2, steps=4, loss=1e-6)


def what_the_recipe_cannot_do_with_it_is_refused(world):
    sizes = ModelConfig(**SIZES)
    for parallel, model, train, said in (
            (ParallelConfig(dp=2, cp=2, ep=3), ModelConfig(experts=ExpertsConfig(4, 2), **SIZES), {}, "[1, 2, 4]"),
            (ParallelConfig(cp=2, ulysses=3), sizes, {}, "parallel.ulysses with one of [1, 2]"),
            (ParallelConfig(cp=4, ulysses=4), sizes, {}, "parallel.ulysses with one of [1, 2]"),
            (ParallelConfig(dp=2, cp=2, fsdp=True, hsdp=2), sizes, {}, "parallel.hsdp does not go with"),
            (ParallelConfig(cp=2), sizes, {"compile": True}, "train.compile does not go with"),
            (ParallelConfig(cp=2, tp=2), sizes, {"world": 2}, "parallel.cp = 2")):
        made = parallel.dp * parallel.cp * parallel.tp * parallel.pp
        ranks, batch = train.pop("world", made), {"batch": 8} | train
        cfg = Config(model=model, parallel=parallel, train=TrainConfig(**batch))
        text = refusal(lambda c=cfg, n=ranks: config.check(c, n), ConfigError)
        assert said in text and "fix:" in text, text


@case(world_size=4, timeout=120)
def a_model_that_trains_on_lists_continues_texts(world):
    """As one device does, also after a step; ranks along cp compute the same, and send each other nothing."""
    prompt = np.random.default_rng(3).integers(0, 37, (2, 5)).astype(np.int32)

    def told(parallel: ParallelConfig | None):
        cfg = Config(model=ModelConfig(**SIZES), parallel=parallel or ParallelConfig(), optim=OptimConfig(lr=0.05, warmup=1),
                     train=TrainConfig(steps=3, batch=4, seq=12, seed=3))
        mesh = None if parallel is None else make_mesh("cpu", parallel)
        trainer = Trainer(cfg, Drawn(documents=True), mesh)
        trainer.step(0)
        with comm.record() as events:
            out = generate(trainer.model, cfg.model, mesh, prompt, 6)
        return out, [e for e in events if set(e.axes) & {"cp", "ulysses"}]
    want, _ = told(None)
    for parallel in sampled((ParallelConfig(tp=2, cp=2), ParallelConfig(dp=2, cp=2, fsdp=True),
                             ParallelConfig(cp=4, ulysses=2)), 3):
        got, sent = told(parallel)
        assert np.array_equal(got, want), parallel
        assert not sent or parallel.fsdp, sent
