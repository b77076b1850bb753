# SPDX-License-Identifier: Apache-2.0
"""The Llama of the model zoo on one device: against a NumPy reference, against itself by its properties, made as shards."""
import re
from dataclasses import replace
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from model_zoo.llama import at_once, cpu
from model_zoo.llama.at_once import compile_products
from model_zoo.llama.config import Config, ModelConfig, ParallelConfig, RopeScaling, TrainConfig
from model_zoo.llama.cpu import compile_attention
from model_zoo.llama.layers import FeedForward
from model_zoo.llama.model import Llama, cross_entropy, init_weights
from model_zoo.llama.parallelize import make_mesh
from model_zoo.llama.rope import rope_frequencies
from model_zoo.llama.trainer import Trainer
from ms_dtensor import ColwiseParallel, distribute_module, init_device_mesh, parallelize_module
from ms_dtensor.comm import fake_world
from ms_dtensor.dispatch.recording import HeldRecording, Recording
from ms_dtensor.errors import OpRuleError
from ms_dtensor.pipeline import PipelineStage
from tests.zoo import reference_llama

F32 = 2e-5  # float32 against float64 through two layers, values of order 1

SIZES = {"dim": 32, "n_layers": 2, "ffn_dim": 40, "vocab_size": 37}
MODELS = {
    "multi-head": ModelConfig(n_heads=4, n_kv_heads=4, **SIZES),
    "grouped-query": ModelConfig(n_heads=4, n_kv_heads=2, **SIZES),
    "multi-query, tied head": ModelConfig(n_heads=4, n_kv_heads=1, tied_head=True, **SIZES),
    "scaled rotary": ModelConfig(n_heads=4, n_kv_heads=2, rope_theta=100.0,
                                 rope_scaling=RopeScaling(original_max_seq_len=16), **SIZES),
    "biases, linear scaling": ModelConfig(n_heads=4, n_kv_heads=2, qkv_bias=True, out_bias=True,
                                          rope_scaling=RopeScaling("linear", 3.0), **SIZES),
    "normed wide heads": ModelConfig(n_heads=4, n_kv_heads=2, qk_norm=True, head_width=12, **SIZES),
    "sliding window": ModelConfig(n_heads=4, n_kv_heads=2, sliding_window=5, **SIZES),
}


def build(cfg: ModelConfig, seq: int, seed: int = 3):
    model = Llama(cfg)
    init_weights(model, seed, std=0.3)  # large, so that attention is far from uniform
    draw = np.random.default_rng(seed)
    for name, p in model.parameters_and_names():
        if name.endswith((".bias", "q_norm.weight", "k_norm.weight")):  # neither zeros nor ones
            p.asnumpy()[...] = draw.normal(1.0, 0.5, p.shape)
    return model


def ids_of(cfg: ModelConfig, batch: int, seq: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, cfg.vocab_size, (batch, seq)).astype(np.int32)


def weights_of(model) -> dict[str, np.ndarray]:
    return {name: param.asnumpy().astype(np.float64) for name, param in model.parameters_and_names()}


@pytest.mark.parametrize("name", MODELS)
def test_forward_equals_the_reference(name):
    cfg = MODELS[name]
    model, ids = build(cfg, 12), ids_of(cfg, 2, 12)
    frequencies = rope_frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
    want = np.stack([reference_llama.logits(row, weights_of(model), cfg, frequencies) for row in ids])
    got = model(Tensor(ids)).asnumpy()
    assert got.shape == (24, cfg.vocab_size)
    assert np.abs(got - want.reshape(got.shape)).max() <= F32 * np.abs(want).max()


@pytest.mark.parametrize("name", ["grouped-query", "multi-query, tied head"])
def test_the_compiled_core_gives_the_same_loss_and_gradients(name):
    cfg, results = MODELS[name], []
    ids = ids_of(cfg, 2, 13)
    for compiled in (False, True):
        model = build(cfg, 12)
        if compiled:
            compile_attention(model, cfg)
            compile_products(model)
        run = ms.value_and_grad(lambda x, y, m=model: cross_entropy(m(x), y), None, model.trainable_params())
        loss, grads = run(Tensor(ids[:, :-1].copy()), Tensor(ids[:, 1:].copy()))
        results.append([loss.asnumpy(), *(g.asnumpy() for g in grads)])
    for one, other in zip(*results, strict=True):
        assert np.allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(one).max())  # sums in another order


def test_products_at_once_are_those_one_by_one_at_once_and_in_two_parts():
    rng, cell = np.random.default_rng(5), FeedForward(6, 10)
    for p in cell.trainable_params():
        p.set_data(Tensor(rng.normal(size=p.shape).astype(np.float32)))
    x, dy = (Tensor(rng.normal(size=(7, 6)).astype(np.float32)) for _ in "xy")
    stage, calls, held, results = PipelineStage(cell, 1, 2, None), [], [], []
    for core in (None, lambda *xs: calls.append(1) or at_once.gated(*xs)):
        cell.core = core
        for record in (Recording.of, HeldRecording.of, lambda cell, x: stage.record((x,), {}, None, in_parts=True)):
            made = record(cell, x)
            value, params = made.outputs.asnumpy(), cell.trainable_params()
            if isinstance(made, HeldRecording):
                of_inputs = made.backward_inputs([dy], params)
                held.append(len(made._store.products))
                parts = of_inputs, made.backward_weights(params)
            else:
                parts = made.backward([dy], params)
            results.append([value, *(g.asnumpy() for part in parts for g in part)])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert np.allclose(one, two, rtol=1e-5, atol=1e-5 * np.abs(one).max())
    for one, two in zip(results[3], results[5], strict=True):  # in two parts the same bits
        assert np.array_equal(one, two)
    assert len(calls) == 3 and held == [0, 3, 0, 1]  # parameters that no gate stands for are not held back
    none, cell.core = Tensor(np.zeros((0, 6), np.float32)), at_once.gated  # a rank without rows
    (of_rows,), of_weights = Recording.of(cell, none).backward([none], cell.trainable_params())
    assert of_rows.shape == (0, 6) and not any(g.asnumpy().any() for g in of_weights)
    weights = [Tensor(rng.normal(size=(4, 6)).astype(np.float32)) for _ in range(3)]
    want, got = ([*f(x, *weights), *ms.grad(lambda *xs, f=f: sum((y * y).sum() for y in f(*xs)), (0, 1, 2, 3))(x, *weights)]
                 for f in (lambda x, *ws: tuple(x @ w.T for w in ws), at_once.products))
    for a, b in zip(want, got, strict=True):
        assert np.allclose(a.asnumpy(), b.asnumpy(), rtol=1e-5, atol=1e-5)
    with pytest.raises(OpRuleError, match="a second derivative is asked for"):
        ms.grad(lambda x: ms.grad(lambda x: at_once.products(x, weights[0]).sum())(x).sum())(x)


def test_products_at_once_do_not_pass_over_functions_of_the_users():
    mesh, x = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), Tensor(np.arange(8, dtype=np.float32).reshape(2, 4))
    styled, given = (nn.Dense(4, 4, has_bias=False) for _ in "ab")
    parallelize_module(styled, mesh, ColwiseParallel())
    distribute_module(given, mesh, output_fn=lambda cell, out, mesh: out * 3)
    assert [at_once.fits(x, cell) for cell in (styled, given)] == [True, False]


def test_products_at_once_leave_cells_alone_that_are_hooked_or_replaced():
    """A hook on a layer is called, and another cell in its place, or one that is cast, computes what it computes."""
    cfg = MODELS["grouped-query"]
    ids = Tensor(ids_of(cfg, 2, 5))

    class Doubled(nn.Dense):
        def construct(self, x):
            return super().construct(x) * 2

    def doubled(cell):
        other = Doubled(cell.in_channels, cell.out_channels, has_bias=False)
        other.weight = cell.weight
        return other

    def replaced(model):
        model.layers[0].feed_forward.w3 = doubled(model.layers[0].feed_forward.w3)
        model.layers[1].attention.wk = doubled(model.layers[1].attention.wk)

    def hooked(model):
        for cell in (model.layers[0].feed_forward.w2, model.layers[1].attention.wo, model.output):
            cell.register_forward_hook(lambda cell, inputs, output: output * 3)

    def constructed(model):
        cell = model.layers[0].attention.wq
        cell.construct = lambda x: x @ cell.weight.T * 2
    def cast(model):
        model.output.to_float(ms.float16)
    for change in (replaced, hooked, constructed, cast):
        results = []
        for compiled in (False, True):
            model = build(cfg, 12)
            if compiled:
                compile_products(model)
            change(model)
            run = ms.value_and_grad(lambda x, m=model: (m(x) ** 2).mean(), None, model.trainable_params())
            loss, grads = run(ids)
            results.append([loss.asnumpy(), *(g.asnumpy() for g in grads)])
        for one, other in zip(*results, strict=True):
            assert np.allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(one).max()), change.__name__


@pytest.mark.parametrize("window", [None, 3])
def test_attention_at_once_sees_documents_and_windows(window):
    cfg, rng = replace(MODELS["grouped-query"], sliding_window=window), np.random.default_rng(4)
    places = np.array([[0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 2, 3, 0]], np.int32)
    *qkv, dout = (Tensor(rng.normal(size=(2, 7, heads, cfg.head_dim)).astype(np.float32))
                  for heads in (cfg.n_heads, cfg.n_kv_heads, cfg.n_kv_heads, cfg.n_heads))
    for of in (None, places):
        forms = (lambda *x, of=of: cpu.attend(cfg, *x, *(() if of is None else (Tensor(of),))),
                 lambda *x, of=of: cpu.AtOnce.apply(cfg, None if of is None else of.tobytes(), *x))
        want, got = ([f(*qkv), *ms.grad(lambda *x, f=f: (f(*x) * dout).sum(), (0, 1, 2))(*qkv)] for f in forms)
        for a, b in zip(want, got, strict=True):
            assert np.allclose(a.asnumpy(), b.asnumpy(), rtol=1e-5, atol=1e-5)
    none = [Tensor(np.zeros((0, 7, heads, cfg.head_dim), np.float32)) for heads in (cfg.n_heads, *[cfg.n_kv_heads] * 2)]
    grads = ms.grad(lambda *x: cpu.AtOnce.apply(cfg, None, *x).sum(), (0, 1, 2))(*none)  # of a rank without a row
    assert [g.shape for g in grads] == [x.shape for x in none]


def test_a_short_input_uses_the_head_of_the_tables():
    cfg = MODELS["grouped-query"]
    ids = ids_of(cfg, 1, 12)
    model = build(cfg, 12)
    whole, short = model(Tensor(ids)).asnumpy(), model(Tensor(ids[:, :5])).asnumpy()
    assert np.abs(whole[:5] - short).max() <= F32 * np.abs(whole).max()


def test_parameter_names_are_metas():
    names = [name for name, _ in build(MODELS["grouped-query"], 4).parameters_and_names()]
    layer = ["attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w2",
             "feed_forward.w3", "attention_norm", "ffn_norm"]
    want = {"tok_embeddings.weight", "norm.weight", "output.weight"}
    want |= {f"layers.{i}.{cell}.weight" for i in range(2) for cell in layer}
    assert set(names) == want and len(names) == len(want)
    assert {p.name for p in build(MODELS["grouped-query"], 4).trainable_params()} == want


def test_tied_head_is_one_parameter_with_both_gradients():
    cfg = MODELS["multi-query, tied head"]
    model, ids = build(cfg, 6), Tensor(ids_of(cfg, 2, 6))
    assert model.output.weight is model.tok_embeddings.weight
    names = [p.name for p in model.trainable_params()]
    assert names.count("tok_embeddings.weight") == 1 and "output.weight" not in names
    weight = model.tok_embeddings.weight
    run = ms.value_and_grad(lambda: cross_entropy(model(ids), ids), None, [weight])
    loss, (grad,) = run()
    step, value = 1e-2, weight.asnumpy().copy()
    direction = np.random.default_rng(1).standard_normal(value.shape).astype(np.float32)
    direction /= np.linalg.norm(direction)
    ends = []
    for sign in (1, -1):
        weight.set_data(Tensor(value + sign * step * direction))
        ends.append(float(cross_entropy(model(ids), ids)))
    slope = (ends[0] - ends[1]) / (2 * step)
    assert slope == pytest.approx(float((grad.asnumpy() * direction).sum()), rel=2e-2, abs=1e-3)


def test_initial_weights_depend_on_seed_and_name_only():
    cfg = MODELS["grouped-query"]
    first, again, other = build(cfg, 4), build(cfg, 9), build(cfg, 4, seed=4)
    a, b, c = weights_of(first), weights_of(again), weights_of(other)
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not np.array_equal(a["layers.0.attention.wq.weight"], c["layers.0.attention.wq.weight"])
    assert not np.array_equal(a["layers.0.attention.wq.weight"], a["layers.1.attention.wq.weight"])


def test_rope_scaling_is_llama3s():
    """Against the three published branches, written out; all three occur."""
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
    plain = rope_frequencies(128, 500000.0, None)
    assert np.allclose(plain, 1.0 / 500000.0 ** (np.arange(0, 128, 2) / 128), rtol=1e-12)
    want, branches = [], set()
    for freq in plain:
        wave = 2 * np.pi / freq
        if wave < 8192 / 4.0:
            want.append(freq)
            branches.add("kept")
        elif wave > 8192 / 1.0:
            want.append(freq / 8.0)
            branches.add("stretched")
        else:
            smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
            want.append((1 - smooth) * freq / 8.0 + smooth * freq)
            branches.add("between")
    assert branches == {"kept", "stretched", "between"}
    assert np.allclose(rope_frequencies(128, 500000.0, scaling), want, rtol=1e-12)


@pytest.mark.parametrize("ignored", [0, 3])
def test_cross_entropy_equals_numpy(ignored):
    draw = np.random.default_rng(5)
    logits = draw.standard_normal((8, 11)).astype(np.float32) * 3
    labels = draw.integers(0, 11, (2, 4)).astype(np.int32)
    labels.reshape(-1)[:ignored] = -100
    flat, keep = logits.astype(np.float64), labels.reshape(-1) != -100
    log_prob = np.log(reference_llama.softmax(flat))
    want = -log_prob[np.arange(8)[keep], labels.reshape(-1)[keep]].mean()
    assert float(cross_entropy(Tensor(logits), Tensor(labels))) == pytest.approx(want, rel=1e-6)


LAYOUTS = {"fsdp": ParallelConfig(8, 1, fsdp=True), "hsdp": ParallelConfig(8, 1, fsdp=True, hsdp=2),
           "fsdp x tp": ParallelConfig(4, 2, True, fsdp=True), "zero1": ParallelConfig(8, 1, zero1=True),
           "dp x tp": ParallelConfig(2, 4)}


def trainer(model: ModelConfig, parallel: ParallelConfig, rank: int):
    """As `train.py` makes it, on one rank of eight."""
    return Trainer(Config(model=model, parallel=parallel, train=TrainConfig(seed=5)), None, make_mesh("cpu", parallel))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_those_of_the_eager_model(layout):
    # 37 rows and 40 columns: uneven shards, and empty ones
    cfg = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=40, vocab_size=37, qkv_bias=True)
    eager = Llama(cfg)
    init_weights(eager, 5)
    want = {p.name: p.asnumpy() for p in eager.get_parameters()}
    for rank in (0, 5, 7):
        with fake_world(8, rank):
            made = trainer(cfg, LAYOUTS[layout], rank)
            for p in made.model.get_parameters():
                box = tuple(slice(at, at + n) for at, n in zip(p.layout.local_offset(), p.layout.local_shape()))
                assert np.array_equal(p.to_local().asnumpy(), want[p.name][box]), (rank, p)
            assert len(made.params) == len(want)


@pytest.mark.parametrize("parallel", [LAYOUTS["fsdp"], ParallelConfig(pp=8)], ids=["fsdp", "pp"])
def test_no_rank_ever_holds_the_model(parallel):
    def most() -> int:
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

    sizes = {"dim": 384, "n_heads": 6, "n_kv_heads": 6, "ffn_dim": 1024, "vocab_size": 256}
    with fake_world(8, 3):
        trainer(ModelConfig(n_layers=1 if parallel.fsdp else 6, **sizes), parallel, 3)  # code and pools
        Path("/proc/self/clear_refs").write_text("5")  # the most is what there is now
        before = most()
        made = trainer(ModelConfig(n_layers=16, **sizes), parallel, 3)
        grown = most() - before
    whole = 4 * made.sizes[0]
    assert whole > 100e6 and grown < whole / 2, f"{grown / 1e6:.0f} MB more for a share of {whole / 8e6:.0f} MB"
