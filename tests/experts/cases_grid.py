# SPDX-License-Identifier: Apache-2.0
"""Experts beside every other axis on eight ranks, experts that idle, bytes, the recipe's Mixtral: against one device."""
import numpy as np
from mindspore import Parameter, Tensor

import ms_dtensor as md
from model_zoo.llama.config import Config, ExpertsConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from ms_dtensor import Replicate, Shard
from ms_dtensor.optim import AdamW, clip_grad_norm_
from tests.cases import case
from tests.experts.cases_experts import pieces
from tests.experts.reference import operands, random_choice
from tests.support import array, equal_each, mesh_1d
from tests.tiers import sampled
from tests.zoo.recipe import SIZES, TEXT, as_one_device, of_one_device, trainer

EP2 = {"ep": 2, "loss_parallel": False}
EIGHT = {
    "fsdp2 x ep2 x tp2": (ParallelConfig(4, 2, fsdp=True, **EP2), {"recompute": True}),
    "fsdp2 x ep2 x tp2, sequence parallel": (ParallelConfig(4, 2, sequence_parallel=True, fsdp=True, **EP2), {}),
    "fsdp2 x ep2 x tp2, whole widths": (ParallelConfig(4, 2, fsdp=True, expert_tp=False, expert_dedup=True, **EP2), {}),
    "ep2 x cp2 x dp2": (ParallelConfig(4, cp=2, **EP2), {}),
    "ep2 x cp2 x tp2, fsdp": (ParallelConfig(2, 2, cp=2, fsdp=True, **EP2), {"recompute": True}),
    "ep4 over dp and cp, tp2": (ParallelConfig(2, 2, cp=2, ep=4, loss_parallel=False), {}),
    "ep8": (ParallelConfig(8, ep=8, loss_parallel=False), {}),
}


@case(world_size=8, timeout=600)
def gradients_and_norm_of_the_recipe_are_those_of_one_device(world):
    experts = ExpertsConfig(9, 3, balance=0.1)

    def first(parallel, **how):
        trainer = trainer_of(experts, parallel, batch=16, **how)
        _, grads = trainer.gradients(*trainer.batch(0))
        named = {p.name: array(g) for p, g in zip(trainer.params, grads, strict=True)}
        return named, trainer.step(0).grad_norm
    want, norm = first(None)
    for layout, (parallel, how) in EIGHT.items():
        got, of_all = first(parallel, **how)
        far = {name: float(np.linalg.norm(got[name] - w) / np.linalg.norm(w)) for name, w in want.items()}
        assert max(far.values()) <= 1e-6, (layout, max(far.items(), key=lambda item: item[1]))
        assert abs(of_all - norm) <= 1e-6 * norm, (layout, of_all, norm)


@case(world_size=(2, 4, 8), timeout=240)
def an_expert_that_idles_for_three_steps_trains_as_on_one_device(world):
    """Its gradient is zeros on its rank, which takes part all the same; then tokens come to it again."""
    mesh, experts, k, n = mesh_1d(world.size, "ep"), 2 * world.size + 1, 2, 3 * world.size
    rng = np.random.default_rng(5)
    x, weights, dout, ws = operands(6, n, experts, k)
    chosen = [random_choice(rng, n, experts - 1, k) for _ in range(3)] + [random_choice(rng, n, experts, k)]
    assert (chosen[3] == experts - 1).any()

    def train(place, w, moe_of):
        params = [Parameter(p, name=f"w{i}") for i, p in enumerate(w)]
        optimizer, told = AdamW(params, lr=0.05, eps=1e-3), []
        tokens, scale, cot = (place(a) for a in (x, weights, dout))
        for picks in chosen:
            y = place(picks)
            step = md.value_and_grad(lambda y=y: (moe_of(tokens, scale, y, *params) * cot).sum(), None, params)
            _, grads = step()
            told.append([array(g) for g in grads])
            optimizer(grads)
        return told, [array(p) for p in params]
    want, after = train(Tensor, [Tensor(w) for w in ws], md.moe)
    for dedup in (False, True):
        def cut(a):
            return pieces(a, mesh, [Shard(0)])
        got, trained = train(cut, [cut(w) for w in ws], lambda *a, dedup=dedup: md.moe(*a, dedup=dedup))
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert all(not g[-1].any() for g in a) == (i < 3), i
            assert all(np.abs(g - w).max() <= 1e-10 * np.abs(w).max() for g, w in zip(a, b)), (i, dedup)
        assert all(np.abs(g - w).max() <= 1e-10 * np.abs(w).max() for g, w in zip(trained, after)), dedup


def norms_over_experts_and_the_rest_are_one_devices(world):
    """Automodel#3816: each square is counted once, whichever axes cut or copy a gradient."""
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    rng = np.random.default_rng(7)
    whole = [rng.normal(size=s) for s in ((5, 3, 2), (6, 4))]
    params = [Parameter(pieces(a, mesh, p), name=f"p{i}") for i, (a, p) in enumerate(zip(
        whole, ([Replicate(), Shard(0)], [Shard(0), Shard(0)])))]
    grads = [pieces(a, mesh, p.placements) for a, p in zip(whole, params)]
    norm = float(clip_grad_norm_(list(zip(params, grads)), 0.5))
    assert abs(norm - np.sqrt(sum((a ** 2).sum() for a in whole))) < 1e-12 * norm
    equal_each(grads, [a * 0.5 / norm for a in whole], params, rtol=1e-5)


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
