# SPDX-License-Identifier: Apache-2.0
"""Mixtral's mixture of experts, as a plain cell for one device: a router, and each token through the experts it chose.

Not here: anything parallel. Dropless: every choice is computed, whatever the experts' shares are. With a capacity an expert
takes of each sequence the first tokens that chose it, so many times its even share; what is over gets nothing from it. A
sequence is never cut, so every mesh drops the same.
"""
from __future__ import annotations

import math
from functools import partial

import mindspore as ms
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import initializer
from mindspore.ops import auto_generate

from ms_dtensor.internals.target import on_cpu

from . import cpu
from .config import ExpertsConfig, ModelConfig


class Weights(nn.Cell):
    """SwiGLUs beside each other: w1 and w3 [experts, f, d], w2 [experts, d, f]."""

    def __init__(self, count: int, dim: int, width: int):
        super().__init__()
        for name, shape in (("w1", (count, width, dim)), ("w2", (count, dim, width)), ("w3", (count, width, dim))):
            self.insert_param_to_cell(name, Parameter(initializer("zeros", shape, ms.float32), name=name))

    def construct(self, core, x, weights, chosen, t):
        """A call of their own, so that their parameters can be gathered apart from those around them."""
        return core(x, weights, chosen, self.w1, self.w2, self.w3, t)


class Experts(nn.Cell):
    """x [n, d] of sequences of t tokens -> [n, d], and what `balance_loss` needs: f32[2, experts].

    Args:
        cfg: the sizes; `cfg.experts` is not None.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg, self.count, self.per_token = cfg.experts, cfg.experts.count, cfg.experts.per_token
        self.gate = nn.Dense(cfg.dim, self.count, weight_init="zeros", has_bias=False)
        self.experts = Weights(self.count, cfg.dim, cfg.ffn_dim)
        self.core = partial(mixture, cfg.experts)  # as attention's: on a mesh `parallelize.py` sets what runs there

    def construct(self, x, t):
        scores = mint.softmax(self.gate(x).astype(ms.float32), -1)
        weights, chosen = ops.topk(scores, self.per_token)
        weights = weights / weights.sum(-1, keepdims=True)
        shares = ops.stack((one_hot(chosen, self.count).sum(1).mean(0), scores.mean(0)))
        return self.experts(self.core, x, weights.astype(x.dtype), chosen, t), shares


def one_hot(chosen: Tensor, count: int) -> Tensor:
    """f32[..., experts]: 1 where an expert was chosen."""
    return ops.one_hot(chosen, count).astype(ms.float32)


def balance_loss(shares: Tensor, layers: int) -> Tensor:
    """Switch's auxiliary loss over all layers, as `transformers` takes it: experts x sum of share x mean score.

    Args:
        shares: f32[2, experts], the sum of what the layers gave.
        layers: how many these were.
    """
    chosen, score = shares / layers
    return (chosen * score).sum() * chosen.shape[0]


def kept(cfg: ExpertsConfig, chosen: Tensor, t: int) -> Tensor:
    """f32[n, k]: 1 where an expert has room for a choice, in the order of a sequence's tokens and their choices."""
    n, k = chosen.shape
    picked = one_hot(chosen, cfg.count).reshape(n // t, t * k, cfg.count)
    place = (ops.cumsum(picked, 1) * picked).sum(-1)  # from 1
    return (place <= math.ceil(cfg.capacity * t * k / cfg.count)).astype(ms.float32).reshape(n, k)


def mixture(cfg: ExpertsConfig, x: Tensor, weights: Tensor, chosen: Tensor, w1: Tensor, w2: Tensor, w3: Tensor,
            t: int) -> Tensor:
    """The weighted sum of each token's experts: x [n, d], weights and chosen [n, k] -> [n, d]."""
    if cfg.capacity is not None:
        weights = weights * kept(cfg, chosen, t).astype(weights.dtype)
    if on_cpu():
        return cpu.mixture(x, weights, chosen, w1, w2, w3)
    rows, where = ops.moe_token_permute(x, chosen)  # sorted by expert
    sizes = one_hot(chosen, cfg.count).sum((0, 1)).astype(ms.int64)

    def product(a, w):
        return auto_generate.grouped_matmul_v4([a], [mint.transpose(w, 1, 2)], group_list=sizes, split_item=3, group_type=0,
                                               group_list_type=1)[0]
    hidden = ops.swiglu(mint.stack((product(rows, w1), product(rows, w3)), 1), 1).reshape(-1, w1.shape[1])
    return ops.moe_token_unpermute(product(hidden, w2), where, weights)
