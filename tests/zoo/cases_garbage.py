# SPDX-License-Identifier: Apache-2.0
"""Real ranks: what a step of the recipe has used is free when it ends. What refers to itself waits for Python's collector of
garbage, which counts objects and not bytes: on a device, memory of several steps."""
import gc
from dataclasses import replace

import mindspore as ms
import numpy as np

from model_zoo.llama.config import Config, ExpertsConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from model_zoo.llama.parallelize import make_mesh
from model_zoo.llama.trainer import Trainer
from tests.cases import case
from tests.support import each
from tests.tiers import sampled

MODEL = ModelConfig(dim=16, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=16, vocab_size=24)
EXPERTS = replace(MODEL, n_layers=2, experts=ExpertsConfig(4, 2))
ZBV = {"pp": 2, "pp_schedule": "zbv", "pp_stages_per_rank": 2}
WAYS = {"fsdp": (MODEL, {"dp": 2, "fsdp": True}, {"micro_batches": 2}), "zbv": (MODEL, ZBV, {"micro_batches": 4}),
        "zbv, compiled": (MODEL, ZBV, {"micro_batches": 4, "compile": True}),
        "experts": (EXPERTS, {"dp": 2, "ep": 2, "fsdp": True}, {}), "zero1": (MODEL, {"dp": 2, "zero1": True}, {}),
        "recomputed": (MODEL, {"dp": 2, "fsdp": True}, {"recompute": True}),
        "1f1b": (MODEL, {"pp": 2}, {"micro_batches": 4}),
        "sp": (MODEL, {"tp": 2, "sequence_parallel": True}, {}),
        "ring": (MODEL, {"cp": 2, "cp_algorithm": "ring"}, {})}


@case(2, timeout=120)
def a_step_leaves_nothing_for_the_collector_of_garbage(world):
    @each(sampled(WAYS, 4, 2))
    def steps(way):
        model, axes, train = WAYS[way]
        cfg = Config(model=model, parallel=ParallelConfig(**axes), optim=OptimConfig(clip_norm=1.0),
                     train=TrainConfig(**{"batch": 8, "seq": 8, "compile": False, **train}))
        trainer, rng = Trainer(cfg, None, make_mesh("cpu", cfg.parallel)), np.random.default_rng(0)

        def step() -> None:
            ids, labels = (rng.integers(0, 24, (8, 8)).astype(np.int32) for _ in range(2))
            trainer.update(trainer.gradients(ids, labels)[1], 0)
        for _ in range(2):  # what is made once
            step()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            step()
            gc.collect()
            found = [type(one).__qualname__ for one in gc.garbage if not isinstance(one, ms.Tensor)]
            assert not gc.garbage, f"{len(gc.garbage)} objects: {sorted(set(found))}"
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
