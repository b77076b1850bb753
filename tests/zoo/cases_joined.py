# SPDX-License-Identifier: Apache-2.0
"""Real ranks: q, k and v as one weight, and w1 and w3: numbers and files are those of single ones, on any mesh."""
import numpy as np

from model_zoo.llama import hf
from model_zoo.llama.config import Config, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from model_zoo.llama.joined import parts_of
from model_zoo.llama.model import Llama, init_weights
from model_zoo.llama.parallelize import make_mesh, own_rows, parallelize
from model_zoo.llama.trainer import Trainer
from ms_dtensor import FusedShard, Replicate, value_and_grad
from ms_dtensor.checkpoint import load, save
from ms_dtensor.checkpoint.weights import Weights
from tests.cases import case
from tests.support import array, counted, each_once, shared_folder
from tests.tiers import sampled
from tests.zoo.cases_llama import DEEPSEEK, MODELS, SIZES, loss_and_gradients, loss_of, plain_loss_of
from tests.zoo.recipe import TEXT

CLOSE = 5e-6  # relative, in norm: one product's sums are taken in another order than those of several
PLAIN = ModelConfig(**SIZES)
ONE = ParallelConfig()
LAYOUTS = {"dp2 x tp2": ParallelConfig(2, 2, loss_parallel=False),
           "sequence": ParallelConfig(2, 2, True, loss_parallel=False),
           "fsdp2 x tp2": ParallelConfig(2, 2, fsdp=True, loss_parallel=False), "fsdp4": ParallelConfig(4, 1, fsdp=True),
           "overlapped": ParallelConfig(2, 2, True, loss_parallel=False, tp_overlap=2, fsdp=True),
           "zero1": ParallelConfig(4, 1, zero1=True), "hsdp": ParallelConfig(4, 1, fsdp=True, hsdp=2)}


def made(cfg: ModelConfig, on: bool) -> Llama:
    """A model with its weights, norms and biases drawn, by the names of single ones."""
    net = Llama(cfg, on)
    parts = parts_of(net)
    init_weights(net, 3, std=0.3)
    for p in net.get_parameters():
        if p.ndim == 1:
            p.asnumpy()[...] = np.concatenate([np.random.default_rng(len(name)).normal(1.0, 0.5, n)
                                               for name, n in parts.get(p.name, {p.name: len(p)}).items()])
    return net


def by_part(names, values, parts) -> dict[str, np.ndarray]:
    """Whole values by name, those of joined parameters by the names of their parts."""
    out = {}
    for name, value in zip(names, map(array, values), strict=True):
        rows = parts.get(name, {name: len(value)})
        out |= dict(zip(rows, map(np.copy, np.split(value, np.cumsum([*rows.values()])[:-1]))))
    return out


def near(got: dict[str, np.ndarray], want: dict[str, np.ndarray], what: str) -> None:
    assert got.keys() == want.keys()
    for name in want:
        off = np.linalg.norm(got[name] - want[name]) / max(np.linalg.norm(want[name]), 1e-6)
        assert off <= CLOSE, (what, name, off)


def gradients(cfg: ModelConfig, parallel: ParallelConfig, on: bool, x, y):
    """Of a mesh: loss, gradients by part, and how often it communicates."""
    mesh, net = make_mesh("cpu", parallel), made(cfg, on)
    parts = parts_of(net)
    parallelize(net, mesh, parallel)
    of = loss_of if cfg.experts is not None else plain_loss_of
    run = value_and_grad(of(net), None, net.trainable_params())
    with counted() as count:
        loss, grads = run(*(own_rows(v, mesh) for v in (x, y)))
    return net, array(loss), by_part([p.name for p in net.trainable_params()], grads, parts), count


def gradients_are_those_of_single_weights_on_one_device(world):
    """With biases, tied heads, norms of q and k, latent attention and shared experts; and no mesh communicates more."""
    ids = np.random.default_rng(1).integers(0, 37, (4, 13)).astype(np.int32)
    x, y = (np.ascontiguousarray(a) for a in (ids[:, :-1], ids[:, 1:]))
    models = {"plain": PLAIN, "qwen2": MODELS["qwen2"], "qwen3": MODELS["qwen3"], "deepseek": DEEPSEEK}

    def of_one(cfg: ModelConfig):
        plain = made(cfg, False)
        loss, grads = loss_and_gradients(loss_of if cfg.experts is not None else plain_loss_of, plain, x, y)
        return loss, by_part([p.name for p in plain.trainable_params()], grads, {})
    references = each_once(*(lambda cfg=cfg: of_one(cfg) for cfg in models.values()))
    for shift, (name, cfg) in enumerate(models.items()):
        want, wanted = references[shift]
        for layout, parallel in sampled(LAYOUTS.items(), 7, 2 * shift):
            if cfg.experts is not None and parallel.tp_overlap != 1:
                continue
            net, loss, grads, count = gradients(cfg, parallel, True, x, y)
            _, _, _, single = gradients(cfg, parallel, False, x, y)
            w13 = (net.layers[0].feed_forward.shared if net.layers[0].mixed else net.layers[0].feed_forward).w13.weight
            assert w13.placements[-1] == FusedShard(0, (w13.shape[0] // 2,) * 2)
            assert w13.placements[-2] == (w13.placements[-1] if parallel.fsdp or parallel.zero1 else Replicate())
            assert abs(loss / want - 1) <= CLOSE, (name, layout, loss, want)
            near(grads, wanted, f"{name} {layout}")
            more = {key: (count[key], single[key]) for key in count | single if count[key] > single[key]}
            biased = cfg.qkv_bias and (parallel.fsdp or parallel.zero1)  # whole on every rank, so all-reduced
            assert not more or biased and {op for op, _ in more} == {"all_reduce"}, (name, layout, more)


def trainer(on: bool, parallel: ParallelConfig = ONE, on_mesh: bool = True, model: ModelConfig = PLAIN,
            **how) -> Trainer:
    cfg = Config(model=model, parallel=parallel, optim=OptimConfig(lr=0.02, warmup=1),
                 train=TrainConfig(**{"steps": 4, "batch": 8, "seq": 6, "seed": 3, "qkv_concat": on} | how))
    return Trainer(cfg, TEXT, make_mesh("cpu", parallel) if on_mesh else None)


def weights(one: Trainer) -> dict[str, np.ndarray]:
    return by_part([p.name for p in one.params], one.params, one.joined)


def a_seed_gives_the_losses_of_single_weights(world):
    """Weights made as shards, stages, recompute with and without a budget, micro-batches, 16 bits, clipped logits."""
    steps = len(sampled(range(4), 2))

    def of_one():
        single = trainer(False, on_mesh=False)
        return weights(single), [single.step(i).loss for i in range(steps)]
    (begun, want), = each_once(of_one)
    for parallel, how in sampled((
            (ParallelConfig(2, 2, fsdp=True), {"recompute": True}), (ParallelConfig(1, 2, True, pp=2), {"micro_batches": 2}),
            (ParallelConfig(4, 1, zero1=True), {}), (ParallelConfig(2, 1, fsdp=True, pp=2), {"micro_batches": 4}),
            (ParallelConfig(2, 2, True, fsdp=True), {"recompute": True, "recompute_gib": 1e-5, "micro_batches": 2})), 5, 1):
        one = trainer(True, parallel, **how)
        mine = weights(one)
        assert one.joined and all(mine[name].tobytes() == begun[name].tobytes() for name in mine), "other initial numbers"
        got = [one.step(i).loss for i in range(steps)]
        assert np.allclose(got, want, rtol=1e-5, atol=0), (parallel, got, want)
    low = [[one.step(i).loss for i in range(2)] for one in (trainer(on, ParallelConfig(2, 2, fsdp=True), dtype="bfloat16")
                                                           for on in (True, False))]
    assert np.allclose(*low, rtol=2e-3), low


@case(world_size=4, timeout=300)
def a_run_goes_on_with_weights_joined_or_single_on_another_mesh(world):
    """The names in a checkpoint are the same, and all bits of weights and moments, whichever way it is written and read."""
    root = shared_folder()
    meshes = {"fsdp2 x tp2": ParallelConfig(2, 2, fsdp=True), "fsdp4": ParallelConfig(4, 1, fsdp=True),
              "pp2 x tp2": ParallelConfig(1, 2, pp=2), "zero1": ParallelConfig(4, 1, zero1=True)}

    def state(one: Trainer) -> dict[str, np.ndarray]:
        kept = one.optimizer.state_dict()
        kinds = {kind: by_part(kept, [x[kind] for x in kept.values()], one.joined) for kind in ("exp_avg", "exp_avg_sq")}
        return weights(one) | {f"{name} {kind}": x for kind, those in kinds.items() for name, x in those.items()}
    names = list(meshes)
    for i, source in enumerate(sampled(names, 4)):
        for on in sampled((True, False), 2):
            first = trainer(on, meshes[source], micro_batches=2, model=MODELS["qwen2"])
            for step in range(2):
                first.step(step)
            path = root / f"{i}{on}"
            save(first.state(), path, over=first.over)
            want = state(first)
            for target in sampled((source, names[(i + 2) % 4]), 2, 1):
                again = trainer(not on, meshes[target], micro_batches=2, model=MODELS["qwen2"])
                load(again.state(), path, over=again.over)
                got = state(again)
                mine = got.keys() & want.keys() if again.over or first.over else want.keys()
                assert mine and all(got[key].tobytes() == want[key].tobytes() for key in mine), (source, target, on)
                assert again.optimizer.step == 2
                following = [one.step(2).loss for one in (first, again)] if target != source else [1, 1]
                assert np.isclose(*following, rtol=1e-5), (source, target, on, following)


def published_weights_are_read_and_written_bit_for_bit(world):
    """Files of joined weights have the names and the bits of single ones, and are read by either."""
    root, cfg = shared_folder(), MODELS["qwen2"]
    layouts = {"fsdp2 x tp2": ParallelConfig(2, 2, fsdp=True, loss_parallel=False), "fsdp4": ParallelConfig(4, 1, fsdp=True)}
    for name, parallel in sampled(layouts.items(), 2):
        mesh, nets = make_mesh("cpu", parallel), {on: made(cfg, on) for on in (True, False)}
        for on, net in nets.items():
            parallelize(net, mesh, parallel)
            hf.save(net, cfg, root / f"{name}{on}", max_positions=12)
        one, other = (Weights(root / f"{name}{on}") for on in (True, False))
        assert one.tensors.keys() == other.tensors.keys()
        for on in (True, False):
            fresh = Llama(cfg, on)
            parts, order = parts_of(fresh), [p.name for p in fresh.get_parameters()]
            parallelize(fresh, mesh, parallel)
            hf.load(fresh, root / f"{name}{not on}")
            assert parts_of(fresh) == parts and [p.name for p in fresh.get_parameters()] == order
            got, want = (by_part([p.name for p in n.get_parameters()], n.get_parameters(), parts_of(n))
                         for n in (fresh, nets[not on]))
            assert got.keys() == want.keys() and all(got[key].tobytes() == want[key].tobytes() for key in want)
