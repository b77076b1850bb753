# SPDX-License-Identifier: Apache-2.0
"""Real ranks: multi-token prediction trains as on one device, of a dense model and of DeepSeek's."""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor

from model_zoo.llama.ahead import AheadLlama, ahead_loss
from model_zoo.llama.config import ModelConfig
from model_zoo.llama.model import init_weights
from model_zoo.llama.parallelize import make_mesh, parallelize
from ms_dtensor import DTensor, Shard, value_and_grad
from tests.cases import case
from tests.dist.cases_llama import DEEPSEEK, LAYOUTS, SIZES
from tests.dist.support import equal

MODELS = {"dense": (ModelConfig(**SIZES), 2), "deepseek": (DEEPSEEK, 1)}


def made(cfg: ModelConfig, depth: int) -> AheadLlama:
    net = AheadLlama(cfg, depth)
    init_weights(net, 3, std=0.3)
    for name, p in net.parameters_and_names():
        if p.ndim == 1:
            p.asnumpy()[...] = np.random.default_rng(len(name)).normal(1.0, 0.5, p.shape)
    return net


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
    for name, (cfg, depth) in MODELS.items():
        plain = made(cfg, depth)
        want, wanted = ms.value_and_grad(loss_of(plain), None, plain.trainable_params())(Tensor(x), Tensor(y))
        assert all(np.abs(w.asnumpy()).max() > 0 for w, p in zip(wanted, plain.trainable_params()) if "bias" not in p.name)
        for layout, parallel in LAYOUTS.items():
            mesh, net = make_mesh("cpu", parallel), made(cfg, depth)
            parallelize(net, mesh, parallel)
            weight = net.ahead[0].block.attention.wo.weight
            assert weight.placements[mesh.axis_index("tp")] == Shard(1), weight
            rows = slice(2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 2)
            a, b = (DTensor.from_local(Tensor(v[rows]), mesh, {"dp": Shard(0)}) for v in (x, y))
            got, grads = value_and_grad(loss_of(net), None, net.trainable_params())(a, b)
            equal(got, want, f"{name} {layout} loss")
            for p, g, w in zip(plain.trainable_params(), grads, wanted, strict=True):
                equal(g, w, f"{name} {layout} {p.name}", rtol=1e-4)
