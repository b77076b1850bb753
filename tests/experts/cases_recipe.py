# SPDX-License-Identifier: Apache-2.0
"""The recipe's Mixtral with its experts over ranks: loss, norm and weights after three steps are those of one device."""
from __future__ import annotations

import numpy as np

from model_zoo.llama.config import Config, ExpertsConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from model_zoo.llama.data import Text
from model_zoo.llama.parallelize import make_mesh
from model_zoo.llama.trainer import Trainer
from ms_dtensor import Shard
from tests.cases import case
from tests.dist.support import array, each_once
from tests.tiers import sampled

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 40, "vocab_size": 37}
MIXTURES = {"dropless": ExpertsConfig(4, 2, balance=0.1), "with a capacity": ExpertsConfig(5, 2, capacity=0.8, balance=0.1)}
EP2 = {"ep": 2, "loss_parallel": False}
LAYOUTS = {
    "ep2 x dp2": (ParallelConfig(4, **EP2), {}),
    "ep2 x dp2, each token once to a rank": (ParallelConfig(4, expert_dedup=True, **EP2), {"recompute": True}),
    "ep2 x dp2, fsdp": (ParallelConfig(4, fsdp=True, **EP2), {"recompute": True}),
    "ep2 x dp2, zero1": (ParallelConfig(4, zero1=True, **EP2), {}),
    "ep2 x tp2": (ParallelConfig(2, 2, **EP2), {}),
    "ep2 x tp2, fsdp, sequence parallel": (ParallelConfig(2, 2, sequence_parallel=True, fsdp=True, **EP2), {}),
    "ep2 x tp2, whole widths": (ParallelConfig(2, 2, expert_tp=False, **EP2), {}),
    "ep4": (ParallelConfig(4, ep=4, loss_parallel=False), {}),
}


TEXT = Text(*(np.random.default_rng(n).integers(0, 2, 400).cumsum().astype(np.uint8) % 37 for n in (1, 2)))


def trainer_of(experts, parallel, steps=3, **how):
    """On a mesh, or with `parallel` None on one device."""
    cfg = Config(model=ModelConfig(experts=experts, **SIZES), parallel=parallel or ParallelConfig(),
                 optim=OptimConfig(lr=0.02, warmup=1),
                 train=TrainConfig(**{"steps": steps, "batch": 8, "seq": 6, "seed": 3} | how))
    return Trainer(cfg, TEXT, None if parallel is None else make_mesh("cpu", parallel))


@case(world_size=4, timeout=400)
def the_recipes_mixtral_trains_as_on_one_device(world):
    def steps(experts, parallel, **how):
        trainer = trainer_of(experts, parallel, **how)
        return [(r.loss, r.grad_norm) for r in (trainer.step(i) for i in range(3))], trainer.params

    def of_one(experts):
        numbers, params = steps(experts, None)
        return numbers, list(map(array, params))
    for name, experts in sampled(MIXTURES.items(), len(MIXTURES), 1):
        (want, params), = each_once(lambda experts=experts: of_one(experts))
        assert want[-1][0] < want[0][0] - 0.05
        for layout, (parallel, how) in sampled(LAYOUTS.items(), 8, 2 if experts.capacity else 5):
            got, cut = steps(experts, parallel, **how)
            assert np.allclose(got, want, rtol=1e-5), (name, layout, got, want)
            for p, w in zip(cut, params, strict=True):
                far = np.linalg.norm(array(p) - w) / np.linalg.norm(w)
                assert far <= 1e-4, (name, layout, p.name, far)  # AdamW divides by roots of small second moments
            w2 = next(p for p in cut if p.name.endswith("experts.w2"))
            assert w2.placements[w2.device_mesh.mesh_dim_names.index("ep")] == Shard(0), (layout, w2)
