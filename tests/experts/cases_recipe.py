# SPDX-License-Identifier: Apache-2.0
"""The recipe's Mixtral with its experts over ranks: loss, norm and weights after three steps are those of one device."""
from __future__ import annotations

from model_zoo.llama.config import Config, ExpertsConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from ms_dtensor import Shard
from tests.cases import case
from tests.tiers import sampled
from tests.zoo.recipe import SIZES, TEXT, as_one_device, of_one_device, trainer

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


def configured(experts, parallel, **how) -> Config:
    return Config(model=ModelConfig(experts=experts, **SIZES), parallel=parallel, optim=OptimConfig(lr=0.02, warmup=1),
                  train=TrainConfig(**{"steps": 3, "batch": 8, "seq": 6, "seed": 3} | how))


def trainer_of(experts, parallel, **how):
    """On a mesh, or with `parallel` None on one device."""
    return trainer(configured(experts, parallel or ParallelConfig(), **how), TEXT, parallel is not None)


@case(world_size=4, timeout=400)
def the_recipes_mixtral_trains_as_on_one_device(world):
    for name, experts in sampled(MIXTURES.items(), len(MIXTURES), 1):
        losses = of_one_device(configured(experts, ParallelConfig()), TEXT, 3)[0][0]
        assert losses[-1] < losses[0] - 0.05
        for layout, (parallel, how) in sampled(LAYOUTS.items(), 8, 2 if experts.capacity else 5):
            made = as_one_device(configured(experts, parallel, **how), TEXT, 3)
            w2 = next(p for p in made.params if p.name.endswith("experts.w2"))
            assert w2.placements[w2.device_mesh.mesh_dim_names.index("ep")] == Shard(0), (name, layout, w2)
