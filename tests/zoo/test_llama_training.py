# SPDX-License-Identifier: Apache-2.0
"""How the recipe's options train: bfloat16 against float32 and PyTorch, micro-batches, recompute, clipped logits, more."""
import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor

from model_zoo.llama.ahead import AheadLlama, ahead_loss
from model_zoo.llama.config import Config, ModelConfig, OptimConfig, TrainConfig
from model_zoo.llama.configio import load
from model_zoo.llama.data import Text, check_same_data, load_text, stream_values
from model_zoo.llama.model import Llama, init_weights
from model_zoo.llama.rope import angles
from model_zoo.llama.trainer import Trainer
from ms_dtensor import init_device_mesh
from ms_dtensor.errors import ConfigError
from ms_dtensor.internals.target import rehearsal

ROOT = Path(__file__).resolve().parents[2]
F32 = 2e-6  # sums over micro-batches in another order
spec = importlib.util.spec_from_file_location("bf16_losses", ROOT / "model_zoo/llama/tools/bf16_losses.py")
bf16_losses = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bf16_losses)


def tiny(**options):
    cfg, _ = load(["--config", str(ROOT / "model_zoo/llama/configs/tiny.yaml")], 1)
    return replace(cfg, data=replace(cfg.data, max_bytes=300_000), train=replace(cfg.train, **options))


def trained(cfg, on_mesh: bool):
    """Losses of three steps, the first one's gradients, and the held-out loss."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")) if on_mesh else None
    trainer = Trainer(cfg, load_text(cfg.data, cfg.model.vocab_size, cfg.train.seq), mesh)
    _, grads = trainer.gradients(*trainer.batch(0))
    grads = [(g.full_tensor() if on_mesh else g).asnumpy() for g in grads]
    return [*(trainer.step(step).loss for step in range(3)), trainer.held_out_loss()], grads


@pytest.mark.parametrize("on_mesh", [False, True], ids=["plain", "mesh"])
@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"recompute": True}, {"micro_batches": 4, "recompute": True}],
                         ids=str)
def test_micro_batches_and_recompute_change_no_number(options, on_mesh):
    want, grads = trained(tiny(), False)
    got, theirs = trained(tiny(**options), on_mesh)
    assert np.allclose(got, want, rtol=F32)
    for a, b in zip(theirs, grads, strict=True):
        assert np.linalg.norm(a - b) <= 5 * F32 * np.linalg.norm(b)


@pytest.mark.parametrize("on_mesh", [False, True], ids=["plain", "mesh"])
def test_a_batch_that_grows_is_as_large_as_it_says(on_mesh):
    """Each step's loss and gradients are those of a whole batch of that size."""
    def made(**options):
        cfg = tiny(batch=8, **options)
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")) if on_mesh else None
        return Trainer(cfg, load_text(cfg.data, cfg.model.vocab_size, cfg.train.seq), mesh)

    def of(trainer, batch):
        loss, grads = trainer.gradients(*batch)
        return float(loss), [(g.full_tensor() if on_mesh else g).asnumpy() for g in grads]
    grows, whole = made(micro_batches=4, batch_ramp=3), made()
    for step, rows in enumerate((2, 4, 6, 8, 8)):
        batch = grows.batch(step)
        assert batch[0].shape[0] == rows == grows.cfg.train.rows_at(step)
        same = whole.text.batch(whole.cfg.train.seed, step, rows, whole.cfg.train.seq)
        assert all(np.array_equal(a, b) for a, b in zip(batch, same, strict=True))
        (loss, got), (want, theirs) = of(grows, batch), of(whole, same)
        assert loss == pytest.approx(want, rel=F32)
        for a, b in zip(got, theirs, strict=True):
            assert np.linalg.norm(a - b) <= 5 * F32 * np.linalg.norm(b)
    assert grows.held_out_loss() == pytest.approx(whole.held_out_loss(), rel=F32)


def test_a_run_whose_batch_grows_goes_on_as_it_grew():
    cfg = tiny(micro_batches=2, batch_ramp=3)
    text = load_text(cfg.data, cfg.model.vocab_size, cfg.train.seq)
    held = stream_values(cfg.train, text)
    check_same_data(cfg.train, text, held)
    for other in (tiny(micro_batches=2, batch_ramp=4), tiny(micro_batches=4, batch_ramp=3), tiny(micro_batches=2)):
        with pytest.raises(ConfigError, match="batch_ramp"):
            check_same_data(other.train, text, held)
    check_same_data(tiny(micro_batches=4).train, text, stream_values(tiny(micro_batches=2).train, text))
    for wrong, fix in ((["--train.micro_batches", "1"], "--train.micro_batches 4"),
                       (["--train.micro_batches", "4", "--parallel.pp", "2"], "--parallel.pp 1")):
        with pytest.raises(ConfigError, match=f"nothing to grow by(.|\n)*fix:  {fix}"):
            load(["--train.batch", "8", "--train.batch_ramp", "5", *wrong], 2 if "--parallel.pp" in wrong else 1)


def test_bfloat16_recomputed_in_parts_is_bfloat16():
    want, grads = trained(tiny(dtype="bfloat16"), True)
    got, theirs = trained(tiny(dtype="bfloat16", micro_batches=2, recompute=True), True)
    assert np.allclose(got, want, rtol=1e-4)
    for a, b in zip(theirs, grads, strict=True):
        assert a.dtype == np.float32 and np.linalg.norm(a - b) <= 5e-3 * np.linalg.norm(b)


def test_the_quickstart_in_bfloat16_follows_float32_and_pytorchs():
    """Its first steps; 200 of them are the script's business."""
    low, full = (bf16_losses.config(4, dtype) for dtype in ("bfloat16", "float32"))
    text = load_text(low.data, low.model.vocab_size, low.train.seq)
    losses = bf16_losses.ours(low, text)
    assert losses[-1] < 0.95 * losses[0]
    others = [bf16_losses.ours(full, text)]
    if importlib.util.find_spec("torch"):
        others.append(bf16_losses.theirs(low, text))
    for other in others:
        assert np.allclose(losses, other, rtol=bf16_losses.BOUND), (losses, other)


def test_what_a_device_cannot_run_is_refused_before_anything_is_made():
    with pytest.raises(ConfigError, match="plain tensors of bfloat16"):
        Trainer(tiny(dtype="bfloat16"), None, None)
    with rehearsal("Ascend"):
        for cfg in (tiny(dtype="float32"), tiny(dtype="bfloat16")):
            with pytest.raises(ConfigError, match="fused attention cannot run"):
                Trainer(cfg, None, None)


def test_micro_batches_share_the_batch_with_dp():
    with pytest.raises(ConfigError, match="dp = 2 and 3 micro-batches") as error:
        load(["--parallel.dp", "2", "--train.batch", "8", "--train.micro_batches", "3"], 2)
    assert "--train.batch 12" in str(error.value)


# -- attention's logits are watched and clipped; on ranks: `tests/zoo/cases_llama.py` ---------------------------------
CFG = Config(model=ModelConfig(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=24, vocab_size=64),
             optim=OptimConfig(lr=0.02, warmup=0, qk_clip=1.0), train=TrainConfig(steps=4, batch=4, seq=8, micro_batches=2))
TOKENS = np.random.default_rng(0).integers(0, 64, 6000).astype(np.uint8)
TEXT = Text(TOKENS[300:], TOKENS[:300])


def made(cfg: Config, mesh=None) -> Trainer:
    return Trainer(cfg, TEXT, mesh, initialize=lambda net: init_weights(net, 3, std=0.6))


def by_hand(weights: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """The largest logit of each head of the first layer."""
    m = CFG.model
    rows = weights["tok_embeddings.weight"][ids]
    x = rows / np.sqrt((rows ** 2).mean(-1, keepdims=True) + m.norm_eps) * weights["layers.0.attention_norm.weight"]
    angle = angles(m, ids.shape[1])[None, :, None]

    def heads(weight):
        y = (x @ weight.T).reshape(*ids.shape, -1, m.head_dim)
        a, b = np.split(y, 2, -1)
        return y * np.cos(angle) + np.concatenate((-b, a), -1) * np.sin(angle)
    q, k = heads(weights["layers.0.attention.wq.weight"]), heads(weights["layers.0.attention.wk.weight"])
    scores = np.einsum("bqhe,bkhe->bhqk", q, np.repeat(k, 2, 2)) / np.sqrt(m.head_dim)
    return np.where(np.tril(np.ones(scores.shape[2:], bool)), scores, -np.inf).max((0, 2, 3))


def test_logits_are_those_of_attention_and_weights_get_smaller():
    trainer = made(CFG)
    before = {p.name: p.asnumpy().copy() for p in trainer.params}
    wanted = by_hand(before, trainer.batch(0)[0])
    without = made(replace(CFG, optim=replace(CFG.optim, qk_clip=0.0)))
    result = trainer.step(0)
    assert without.step(0).logits is None and np.allclose(result.logits[0], wanted, rtol=1e-5), (result.logits, wanted)
    assert (result.logits > 1).any()
    plain, clipped = ({p.name: p.asnumpy() for p in t.params} for t in (without, trainer))
    factors = np.minimum(1, 1 / result.logits[0])
    q, k = (clipped[f"layers.0.attention.{n}.weight"].reshape(-1, 4, 16) / plain[f"layers.0.attention.{n}.weight"].reshape(
        -1, 4, 16) for n in ("wq", "wk"))
    assert np.allclose(q * np.repeat(k, 2, 0), factors[:, None, None], rtol=1e-4)
    assert all(np.array_equal(plain[n], clipped[n]) for n in plain if "wq" not in n and "wk" not in n)


def test_what_is_watched_is_of_a_step():
    trainer = made(CFG)
    first = trainer.step(0).logits
    trainer.held_out_loss()
    after = trainer.step(1).logits
    assert after.max() < first.max()


# -- multi-token prediction: what each module knows and is asked for ---------------------------------------------------
SMALL = ModelConfig(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=24, vocab_size=11)


def test_a_module_knows_so_many_tokens_more():
    net = AheadLlama(SMALL, 2)
    init_weights(net, 1, std=0.5)
    ids = np.random.default_rng(0).integers(0, 11, (2, 8)).astype(np.int32)
    before = [y.asnumpy().reshape(2, 8, -1) for y in net(Tensor(ids))]
    for at in range(3, 8):
        other = ids.copy()
        other[0, at] = (other[0, at] + 1) % 11
        for k, (old, new) in enumerate(zip(before, net(Tensor(other)))):
            changed = np.abs(new.asnumpy().reshape(2, 8, -1) - old).max(-1) > 1e-6
            known = 8 - k  # places behind have no token so far on
            assert not changed[1].any() and not changed[0, :min(at - k, known)].any() and changed[0, at - k:known].all(), k


def test_the_first_logits_are_the_models_own():
    net, plain = AheadLlama(SMALL, 1), Llama(SMALL)
    for model in (net, plain):
        init_weights(model, 1, std=0.5)
    ids = Tensor(np.random.default_rng(0).integers(0, 11, (2, 8)).astype(np.int32))
    assert np.array_equal(net(ids)[0].asnumpy(), plain(ids).asnumpy())
    assert len({p.name for p in net.get_parameters()}) == len(list(net.get_parameters()))


def test_the_loss_asks_each_module_for_its_token():
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 11, (2, 8)).astype(np.int32)
    logits = [rng.normal(size=(16, 11)).astype(np.float32) for _ in range(3)]

    def mean(y, k):  # places, of each row, whose k-th further label there is
        log = y - np.log(np.exp(y).sum(-1, keepdims=True))
        log = log.reshape(2, 8, 11)
        return -np.mean([log[b, i, labels[b, i + k]] for b in range(2) for i in range(8 - k)])
    want = mean(logits[0], 0) + 0.3 * (mean(logits[1], 1) + mean(logits[2], 2)) / 2
    got = ahead_loss([Tensor(y) for y in logits], Tensor(labels), 0.3)
    assert np.isclose(float(got), want, rtol=1e-6), (got, want)
    assert float(ahead_loss([Tensor(logits[0])], Tensor(labels))) == pytest.approx(mean(logits[0], 0), rel=1e-6)
