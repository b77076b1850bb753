# SPDX-License-Identifier: Apache-2.0
"""The recipe watches attention's logits and clips them: the same numbers on one device and on a mesh, and by hand."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model_zoo.llama.config import Config, ModelConfig, OptimConfig, TrainConfig
from model_zoo.llama.data import Text
from model_zoo.llama.model import init_weights
from model_zoo.llama.rope import angles
from model_zoo.llama.trainer import Trainer

pytestmark = pytest.mark.usefixtures("cpu")
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
