# SPDX-License-Identifier: Apache-2.0
"""Real ranks: the recipe's Llama with the options of Qwen and Mistral, watched logits and further tokens, trains as on one device."""
from dataclasses import replace

import mindspore as ms
import numpy as np
from mindspore import Tensor

from model_zoo.llama import evaluate, kept, lora
from model_zoo.llama.ahead import AheadLlama, ahead_loss
from model_zoo.llama.config import (
    Config,
    ExpertsConfig,
    LatentConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from model_zoo.llama.data import Text, places
from model_zoo.llama.generate import generate
from model_zoo.llama.model import Llama, cross_entropy, init_weights
from model_zoo.llama.parallelize import make_mesh, own_rows, parallelize
from model_zoo.llama.trainer import Trainer
from ms_dtensor import value_and_grad
from tests.operands import S
from tests.support import array, each_once, equal, same_on_all_ranks
from tests.tiers import sampled
from tests.zoo.test_llama_training import CFG, made

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 40, "vocab_size": 37}
MODELS = {"qwen2": ModelConfig(qkv_bias=True, tied_head=True, **SIZES),
          "qwen3": ModelConfig(qk_norm=True, head_width=12, **SIZES),
          "mistral, all biases": ModelConfig(sliding_window=5, qkv_bias=True, out_bias=True, **SIZES)}
MIXTURES = {"dropless": ModelConfig(experts=ExpertsConfig(4, 2), **SIZES),
            "with a capacity": ModelConfig(experts=ExpertsConfig(5, 2, capacity=0.8), **SIZES)}
DEEPSEEK = ModelConfig(**SIZES | {"n_kv_heads": 4}, latent=LatentConfig(10, 14, 6, 4, 7), experts=ExpertsConfig(
    8, 3, width=12, dense_layers=1, shared=2, score="sigmoid", groups=4, group_limit=2, scale=2.5, bias_rate=0.01, balance=0.1,
    balance_over="sequence"))
LAYOUTS = {"dp x tp": ParallelConfig(2, 2, loss_parallel=False),
           "sequence parallel": ParallelConfig(2, 2, sequence_parallel=True, loss_parallel=False),
           "fsdp x tp": ParallelConfig(2, 2, fsdp=True, loss_parallel=False)}
DENSE = LAYOUTS | {  # of blocks with nothing but matrices of their own
    "overlapped": ParallelConfig(2, 2, sequence_parallel=True, loss_parallel=False, tp_overlap=4, fsdp=True)}


def drawn(net):
    """A model with its weights, norms and biases drawn."""
    init_weights(net, 3, std=0.3)
    for name, p in net.parameters_and_names():
        if p.ndim == 1:
            p.asnumpy()[...] = np.random.default_rng(len(name)).normal(1.0, 0.5, p.shape)
    return net


def model(cfg: ModelConfig) -> Llama:
    return drawn(Llama(cfg))


def plain_loss_of(net):
    return lambda ids, labels: cross_entropy(net(ids), labels)


def loss_and_gradients(loss_of, net, *batch):
    """Of a model on one device, as arrays."""
    loss, grads = ms.value_and_grad(loss_of(net), None, net.trainable_params())(*map(Tensor, batch))
    return array(loss), list(map(array, grads))


def is_one_devices(loss_of, net, mesh, batch, of_one, what):
    """Loss and gradients of a parallelized model, of its rows of a batch, are `loss_and_gradients`."""
    want, wanted = of_one
    got, grads = value_and_grad(loss_of(net), None, net.trainable_params())(*(own_rows(v, mesh) for v in batch))
    equal(got, want, f"{what} loss")
    equal(grads, wanted, what, 1e-4)


def options_of_other_families_train_as_on_one_device(world):
    ids = np.random.default_rng(1).integers(0, 37, (4, 13)).astype(np.int32)
    x, y = (np.ascontiguousarray(a) for a in (ids[:, :-1], ids[:, 1:]))
    of_one = each_once(*(lambda cfg=cfg: loss_and_gradients(plain_loss_of, model(cfg), x, y) for cfg in MODELS.values()))
    for shift, (name, cfg) in enumerate(MODELS.items()):
        for layout, parallel in sampled(DENSE.items(), 5, shift):
            mesh, net = make_mesh("cpu", parallel), model(cfg)
            parallelize(net, mesh, parallel)
            is_one_devices(plain_loss_of, net, mesh, (x, y), of_one[shift], f"{name} {layout}")


def loss_of(net):
    """Cross entropy and, so that the router has a gradient of its own, the auxiliary loss."""
    def loss(ids, labels):
        logits, balance, _ = net(ids)
        return cross_entropy(logits, labels) + 0.3 * balance
    return loss


def mixtures_of_experts_train_as_on_one_device(world):
    """Their widths cut over tp, or whole on each rank; the same choices are dropped on every mesh."""
    ids = np.random.default_rng(1).integers(0, 37, (4, 13)).astype(np.int32)
    x, y = (np.ascontiguousarray(a) for a in (ids[:, :-1], ids[:, 1:]))
    copies = ParallelConfig(2, 2, sequence_parallel=True, loss_parallel=False, expert_tp=False)
    of_one = each_once(*(lambda cfg=cfg: loss_and_gradients(loss_of, model(cfg), x, y) for cfg in MIXTURES.values()))
    for shift, (name, cfg) in enumerate(MIXTURES.items()):
        for layout, parallel in sampled((LAYOUTS | {"whole experts": copies}).items(), 5, 2 * shift):
            mesh, net = make_mesh("cpu", parallel), model(cfg)
            parallelize(net, mesh, parallel)
            if layout == "dp x tp":
                assert net.layers[0].feed_forward.experts.w2.layout.placements[1] == S(2)
            is_one_devices(loss_of, net, mesh, (x, y), of_one[shift], f"{name} {layout}")


def latent_attention_shared_experts_and_groups_train_as_on_one_device(world):
    """DeepSeek's block: every gradient, with heads cut over tp and experts whole, cut by width, or over ep."""
    ids = np.random.default_rng(1).integers(0, 37, (4, 13)).astype(np.int32)
    x, y = (np.ascontiguousarray(a) for a in (ids[:, :-1], ids[:, 1:]))
    of_one, loads = each_once(lambda: loss_and_gradients(loss_of, model(DEEPSEEK), x, y),
                              lambda: array(model(DEEPSEEK)(Tensor(x))[2]))
    assert loads.shape == (1, 8) and loads.sum() == 48 * 3 and (loads != 18).any()
    over = {"ep2 x tp2": ParallelConfig(2, 2, ep=2, loss_parallel=False),
            "ep2 x tp2, fsdp, sequence parallel": ParallelConfig(2, 2, True, ep=2, fsdp=True, loss_parallel=False)}
    for layout, parallel in sampled((LAYOUTS | over).items(), 5, 1):
        mesh, net = make_mesh("cpu", parallel), model(DEEPSEEK)
        parallelize(net, mesh, parallel)
        is_one_devices(loss_of, net, mesh, (x, y), of_one, layout)
        equal(net(own_rows(x, mesh))[2], loads, f"{layout} loads")


def steps_of_the_recipe_are_those_of_one_device(world):
    """A slice of `model_zoo/llama/tools/compare_losses.py`: AdamW, accumulated gradients, recompute, and weights made as shards."""
    text = Text(*(np.random.default_rng(n).integers(0, 2, 400).cumsum().astype(np.uint8) % 37 for n in (1, 2)))

    def steps(parallel: ParallelConfig, on_mesh: bool = True, **how):
        cfg = Config(model=ModelConfig(**SIZES), parallel=parallel, optim=OptimConfig(lr=0.02, warmup=1),
                     train=TrainConfig(steps=4, batch=8, seq=6, seed=3, **how))
        trainer = Trainer(cfg, text, make_mesh("cpu", parallel) if on_mesh else None)
        return [trainer.step(i).loss for i in range(4)], list(map(array, trainer.params))
    (want, params), = each_once(lambda: steps(ParallelConfig(), on_mesh=False))
    assert want[-1] < want[0] - 0.1
    for parallel, how in sampled((
            (ParallelConfig(4, 1, fsdp=True), {"micro_batches": 2}),
            (ParallelConfig(4, 1, fsdp=True, hsdp=2), {"recompute": True}),
            (ParallelConfig(2, 2, True, fsdp=True), {"micro_batches": 2, "recompute": True}),
            (ParallelConfig(4, 1, zero1=True), {})), 4, 2):
        got, cut = steps(parallel, **how)
        assert np.allclose(got, want, rtol=1e-5), (parallel, got, want)
        for i, (p, w) in enumerate(zip(cut, params, strict=True)):
            # in norm: AdamW divides by roots of small second moments, so single elements are off by more
            assert np.linalg.norm(p - w) <= 1e-4 * np.linalg.norm(w), (parallel, i)


def any_budget_of_recomputed_blocks_gives_one_devices_gradients(world):
    """Nothing kept, some results in some layers, all of them: the choice is every rank's, the numbers are one device's."""
    rows = np.random.default_rng(1).integers(0, 37, (2, 8, 6)).astype(np.int32)

    def gradients(parallel: ParallelConfig, on_mesh: bool = True, **how):
        cfg = Config(model=ModelConfig(**SIZES), parallel=parallel, train=TrainConfig(batch=8, seq=6, seed=3, **how))
        trainer = Trainer(cfg, None, make_mesh("cpu", parallel) if on_mesh else None)
        chosen = kept.choose(trainer.cfg)
        same_on_all_ranks(world, str(chosen))
        loss, grads = trainer.gradients(*rows)
        return sum(chosen.layers.values()), [array(x) for x in (loss, *grads)]
    _, want = gradients(ParallelConfig(), on_mesh=False)
    for parallel, gib, counts in sampled((
            (ParallelConfig(4, 1, fsdp=True), 5000 / 2**30, range(1, 14)),
            (ParallelConfig(2, 2, True, fsdp=True), 1.0, [14]), (ParallelConfig(2, 2), 0.0, [0]),
            (ParallelConfig(4, 1, zero1=True), 1.0, [14]), (ParallelConfig(2, 2, fsdp=True), 2500 / 2**30, range(1, 14))), 3, 1):
        layers, got = gradients(parallel, recompute=True, recompute_gib=gib, micro_batches=1)
        assert layers in counts, (parallel, layers)
        for g, w in zip(got, want, strict=True):
            assert np.linalg.norm(g - w) <= 1e-5 * np.linalg.norm(w), (parallel, gib)


def packed_documents_know_nothing_of_each_other(world):
    """The logits and gradients of packed rows are those of the documents alone; recomputed blocks too."""
    cfg, ids = ModelConfig(sliding_window=4, **SIZES), np.random.default_rng(7).integers(1, 37, (4, 12)).astype(np.int32)
    for row, at in ((0, 4), (0, 9), (1, 6), (3, 1)):
        ids[row, at] = 0
    where, plain = places(ids, 0), model(cfg)
    alone = np.zeros((4, 12, 37), np.float32)
    for row in range(4):
        starts = [*np.flatnonzero(where[row] == 0), 12]
        for a, b in zip(starts, starts[1:]):
            alone[row, a:b] = plain(Tensor(ids[row:row + 1, a:b])).asnumpy()
    equal(plain(Tensor(ids), Tensor(where)), alone.reshape(48, 37), "plain")
    assert np.abs(plain(Tensor(ids)).asnumpy() - alone.reshape(48, 37)).max() > 0.1, "they would see each other"
    weight = Tensor(np.random.default_rng(8).normal(size=(48, 37)).astype(np.float32))
    run = ms.value_and_grad(lambda x, p: (plain(x, p) * weight).sum(), None, plain.trainable_params())
    want, wanted = run(Tensor(ids), Tensor(where))
    for layout, parallel in sampled(DENSE.items(), 2):
        mesh, net = make_mesh("cpu", parallel), model(cfg)
        parallelize(net, mesh, parallel)
        if layout == "dp x tp":
            for layer in net.layers:
                layer.recompute()
        mine = own_rows(weight.asnumpy().reshape(4, 12 * 37), mesh)
        loss = lambda x, p, m=net, w=mine: (m(x, p) * w.reshape(48, 37)).sum()  # noqa: E731
        got, grads = value_and_grad(loss, None, net.trainable_params())(own_rows(ids, mesh), own_rows(where, mesh))
        equal(got, want, f"{layout} loss", rtol=1e-4)
        equal(grads, wanted, str(layout), 1e-4)


def greedy_without_cache(net: Llama, prompt: np.ndarray, tokens: int) -> np.ndarray:
    """The likeliest tokens, the whole text through the model for each; plain tensors."""
    ids = prompt
    for _ in range(tokens):
        out = net(Tensor(ids))
        logits = (out[0] if isinstance(out, tuple) else out).asnumpy().reshape(*ids.shape, -1)
        ids = np.concatenate((ids, logits[:, -1].argmax(-1).astype(np.int32)[:, None]), 1)
    return ids


def generation_and_evaluation_are_those_of_one_device(world):
    """With a cache, heads cut over tp: the tokens; drawn alike on all ranks; and the loss of a text with an odd end."""
    prompt = np.array([[1, 5, 9], [30, 2, 2]], np.int32)
    text = np.random.default_rng(3).integers(0, 37, 30)
    for shift, (name, cfg) in enumerate(sampled({"qwen2": MODELS["qwen2"], "mixture": MIXTURES["dropless"]}.items(), 2)):
        length = len(sampled(range(6), 2))
        want = greedy_without_cache(model(cfg), prompt, length)
        loss = evaluate.loss_of(model(cfg), None, evaluate.windows(text, 7, 2))
        for parallel in sampled((ParallelConfig(2, 2), ParallelConfig(2, 2, loss_parallel=False)), 2, shift):
            mesh, net = make_mesh("cpu", parallel), model(cfg)
            parallelize(net, mesh, parallel)
            got = evaluate.loss_of(net, mesh, evaluate.windows(text, 7, 2), parallel.loss_parallel)
            assert abs(got - loss) < 1e-5 * loss, (name, got, loss)
            assert np.array_equal(generate(net, cfg, mesh, prompt, length), want), name
            drawn = generate(net, cfg, mesh, prompt, length, temperature=1.5, top_k=9, seed=4)
            same_on_all_ranks(world, str(drawn))


def adapters_train_as_on_one_device_and_are_merged_in_any_layout(world):
    """Their gradients, the frozen matrices without one, and the logits after `merge`."""
    ids = np.random.default_rng(1).integers(0, 37, (4, 13)).astype(np.int32)
    x, y = (np.ascontiguousarray(a) for a in (ids[:, :-1], ids[:, 1:]))

    def made() -> Llama:
        net = model(MODELS["qwen2"])
        lora.add(net, LoraConfig(rank=3, where="all"), 5)
        for name, cell in lora.adapted(net):
            b = cell.lora_b.weight
            b.set_data(Tensor(np.random.default_rng(len(name)).normal(0, 0.1, b.shape).astype(np.float32)))
        return net
    plain = made()
    run = ms.value_and_grad(lambda a, b: cross_entropy(plain(a), b), None, plain.trainable_params())
    want, wanted = run(Tensor(x), Tensor(y))
    logits = plain(Tensor(x))
    for layout, parallel in sampled(LAYOUTS.items(), 5, 2):
        mesh, net = make_mesh("cpu", parallel), made()
        parallelize(net, mesh, parallel)
        assert [p.name for p in net.trainable_params()] == [p.name for p in plain.trainable_params()]
        a, b = own_rows(x, mesh), own_rows(y, mesh)
        got, grads = value_and_grad(lambda a, b, m=net: cross_entropy(m(a), b), None, net.trainable_params())(a, b)
        equal(got, want, f"{layout} loss")
        equal(grads, wanted, str(layout), 1e-4)
        lora.merge(net)
        with lora.without_adapters(net):
            assert not lora.adapted(net)[0][1]._cells
        equal(net(a), logits, f"{layout} merged", rtol=1e-4)


WATCHED = {"dp x tp": ParallelConfig(2, 2), "sequence parallel, fsdp": ParallelConfig(2, 2, sequence_parallel=True, fsdp=True)}


def logits_are_clipped_as_on_one_device(world):
    def of_one():
        plain = made(CFG)
        steps = [plain.step(i) for i in range(2)]
        return [(step.logits, step.loss) for step in steps], list(map(array, plain.params))
    (wanted, weights), = each_once(of_one)
    for name, parallel in sampled(WATCHED.items(), 2, 1):
        trainer = made(replace(CFG, parallel=parallel), make_mesh("cpu", parallel))
        for i, (logits, loss) in enumerate(wanted):
            got = trainer.step(i)
            same_on_all_ranks(world, str(got.logits.tolist()))
            assert np.allclose(got.logits, logits, rtol=1e-4), (name, i, got.logits, logits)
            assert np.isclose(got.loss, loss, rtol=1e-5), (name, i, got.loss, loss)
        equal(trainer.params, weights, name, 1e-3)


AHEAD = {"dense": (ModelConfig(**SIZES), 2), "deepseek": (DEEPSEEK, 1)}


def made_ahead(cfg: ModelConfig, depth: int) -> AheadLlama:
    return drawn(AheadLlama(cfg, depth))


def loss_ahead(net: AheadLlama):
    def loss(ids, labels):
        out = net(ids)
        if isinstance(out, list):
            return ahead_loss(out, labels, 0.5)
        return ahead_loss(out[0], labels, 0.5) + 0.3 * out[1]
    return loss


def ahead_batch() -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(1).integers(0, 37, (4, 13)).astype(np.int32)
    return tuple(np.ascontiguousarray(a) for a in (ids[:, :-1], ids[:, 1:]))


def multi_token_prediction_trains_as_on_one_device(world):
    x, y = ahead_batch()
    references = each_once(*(lambda of=of: loss_and_gradients(loss_ahead, made_ahead(*of), x, y) for of in AHEAD.values()))
    for shift, (name, (cfg, depth)) in enumerate(AHEAD.items()):
        of_one = references[shift]
        for layout, parallel in sampled(LAYOUTS.items(), 5, 2 - shift):
            mesh, net = make_mesh("cpu", parallel), made_ahead(cfg, depth)
            names = [p.name for p in net.trainable_params()]
            assert all(np.abs(w).max() > 0 for w, n in zip(of_one[1], names, strict=True) if "bias" not in n)
            parallelize(net, mesh, parallel)
            weight = net.ahead[0].block.attention.wo.weight
            assert weight.placements[mesh.axis_index("tp")] == S(1), weight
            is_one_devices(loss_ahead, net, mesh, (x, y), of_one, f"{name} {layout}")
