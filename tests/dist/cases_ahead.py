# SPDX-License-Identifier: Apache-2.0
"""Real ranks: multi-token prediction trains as on one device, of a dense model and of DeepSeek's."""
from __future__ import annotations

import numpy as np

from model_zoo.llama.ahead import AheadLlama, ahead_loss
from model_zoo.llama.config import ModelConfig
from model_zoo.llama.parallelize import make_mesh, parallelize
from tests.cases import case
from tests.dist.cases_llama import DEEPSEEK, LAYOUTS, SIZES, drawn, is_one_devices, loss_and_gradients
from tests.dist.operands import S
from tests.dist.support import each_once
from tests.tiers import sampled

MODELS = {"dense": (ModelConfig(**SIZES), 2), "deepseek": (DEEPSEEK, 1)}


def made(cfg: ModelConfig, depth: int) -> AheadLlama:
    return drawn(AheadLlama(cfg, depth))


def loss_of(net: AheadLlama):
    def loss(ids, labels):
        out = net(ids)
        if isinstance(out, list):
            return ahead_loss(out, labels, 0.5)
        return ahead_loss(out[0], labels, 0.5) + 0.3 * out[1]
    return loss


def batch() -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(1).integers(0, 37, (4, 13)).astype(np.int32)
    return tuple(np.ascontiguousarray(a) for a in (ids[:, :-1], ids[:, 1:]))


@case(world_size=4, timeout=180)
def multi_token_prediction_trains_as_on_one_device(world):
    x, y = batch()
    references = each_once(*(lambda of=of: loss_and_gradients(loss_of, made(*of), x, y) for of in MODELS.values()))
    for shift, (name, (cfg, depth)) in enumerate(MODELS.items()):
        of_one = references[shift]
        for layout, parallel in sampled(LAYOUTS.items(), 5, 2 - shift):
            mesh, net = make_mesh("cpu", parallel), made(cfg, depth)
            names = [p.name for p in net.trainable_params()]
            assert all(np.abs(w).max() > 0 for w, n in zip(of_one[1], names, strict=True) if "bias" not in n)
            parallelize(net, mesh, parallel)
            weight = net.ahead[0].block.attention.wo.weight
            assert weight.placements[mesh.axis_index("tp")] == S(1), weight
            is_one_devices(loss_of, net, mesh, (x, y), of_one, f"{name} {layout}")
