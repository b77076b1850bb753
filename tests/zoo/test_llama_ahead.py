# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: what each module knows and is asked for; on ranks as on one device."""
from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor

from model_zoo.llama.ahead import AheadLlama, ahead_loss
from model_zoo.llama.config import ModelConfig
from model_zoo.llama.model import Llama, init_weights

pytestmark = pytest.mark.usefixtures("cpu")
CFG = ModelConfig(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=24, vocab_size=11)


def test_a_module_knows_so_many_tokens_more():
    net = AheadLlama(CFG, 2)
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
    net, plain = AheadLlama(CFG, 1), Llama(CFG)
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
