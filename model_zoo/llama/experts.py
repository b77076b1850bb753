# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts, as a plain cell for one device: a router, and each token through the experts it chose.

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

from ms_dtensor import Router, expert_balance_loss, expert_counts
from ms_dtensor.internals.target import on_cpu

from . import cpu
from .config import ExpertsConfig, ModelConfig
from .layers import FeedForward


class Weights(nn.Cell):
    """SwiGLUs beside each other: w1 and w3 [experts, f, d], w2 [experts, d, f]."""

    def __init__(self, count: int, dim: int, width: int):
        super().__init__()
        for name, shape in (("w1", (count, width, dim)), ("w2", (count, dim, width)), ("w3", (count, width, dim))):
            self.insert_param_to_cell(name, Parameter(initializer("zeros", shape, ms.float32), name=name))

    def construct(self, core, x, weights, chosen):
        """A call of their own, so that their parameters can be gathered apart from those around them."""
        return core(x, weights, chosen, self.w1, self.w2, self.w3)


class Experts(nn.Cell):
    """x [n, d] of sequences of t tokens -> [n, d], what `balance_loss` needs of them, and i64[experts], the experts' loads.

    Args:
        cfg: the sizes; `cfg.experts` is not None.
        joined: of the shared experts, w1 and w3 are one.
    """

    def __init__(self, cfg: ModelConfig, joined: bool = False):
        super().__init__()
        c = self.cfg = cfg.experts
        width = c.width or cfg.ffn_dim
        self.gate = nn.Dense(cfg.dim, c.count, weight_init="zeros", has_bias=False)
        self.router = Router(c.per_token, score=c.score, groups=c.groups, group_limit=c.group_limit, normalise=c.normalise,
                             scale=c.scale)
        if c.bias_rate is not None:  # moved by `Trainer.update`, never by a forward
            self.expert_bias = Parameter(initializer("zeros", (c.count,), ms.float32), requires_grad=False)
        self.experts = Weights(c.count, cfg.dim, width)
        self.shared = FeedForward(cfg.dim, c.shared * width, joined) if c.shared else None
        # as attention's: on a mesh `parallelize.py` sets what runs there
        self.core, self.left, self.of_sequences = with_shared(partial(mixture, c)), partial(left, c), expert_balance_loss
        self.room = None  # of n tokens in sequences of t: how many choices of a rank an expert may have, with a capacity

    def construct(self, x, t):
        logits = self.gate(x)
        weights, chosen = self.router(logits, None if self.cfg.bias_rate is None else self.expert_bias)
        shares = self._shares(self.router.scores(logits), chosen, t)
        if self.cfg.capacity is not None:
            chosen = self.left(chosen, t)
        core = self.core if self.room is None else partial(self.core, room=self.room(x.shape[0], t))
        y = self.experts(partial(core, shared=self.shared), x, weights.astype(x.dtype), chosen)
        return y, shares, expert_counts(chosen, self.cfg.count)

    def _shares(self, scores, chosen, t):
        """f32[2, experts], each one's share of the choices and its mean score; or of sequences f32[1, 1], their loss."""
        if self.cfg.balance_over == "sequence":
            return self.of_sequences(scores, chosen, t).reshape(1, 1)
        if self.cfg.score == "sigmoid":
            scores = scores / scores.sum(-1, keepdims=True)
        return ops.stack((one_hot(chosen, self.cfg.count).sum(1).mean(0), scores.mean(0)))


def one_hot(chosen: Tensor, count: int) -> Tensor:
    """f32[..., experts]: 1 where an expert was chosen."""
    return ops.one_hot(chosen, count).astype(ms.float32)


def balance_loss(shares: Tensor, layers: int) -> Tensor:
    """Switch's auxiliary loss over all layers, as `transformers` takes it: experts x sum of share x mean score.

    Of sequences the mean over the layers of each one's.

    Args:
        shares: the sum of what the layers gave.
        layers: how many these were.
    """
    mean = shares / layers
    if len(mean) == 1:
        return mean.reshape(())
    chosen, score = mean
    return (chosen * score).sum() * chosen.shape[0]


def most(cfg: ExpertsConfig, t: int) -> int:
    """How many choices of a sequence an expert has room for."""
    return math.ceil(cfg.capacity * t * cfg.per_token / cfg.count)


def kept(cfg: ExpertsConfig, chosen: Tensor, t: int) -> Tensor:
    """f32[n, k]: 1 where an expert has room for a choice, in the order of a sequence's tokens and their choices."""
    n, k = chosen.shape
    picked = one_hot(chosen, cfg.count).reshape(n // t, t * k, cfg.count)
    place = (ops.cumsum(picked, 1) * picked).sum(-1)  # from 1
    return (place <= most(cfg, t)).astype(ms.float32).reshape(n, k)


def left(cfg: ExpertsConfig, chosen: Tensor, t: int) -> Tensor:
    """i32[n, k]: what was chosen and has room, and -1 for what is dropped."""
    return mint.where(kept(cfg, chosen, t) > 0, chosen, -1)


def with_shared(core):
    """`core`, to whose result that of the shared experts is added; where tokens travel, `moe` computes it meanwhile."""
    def run(x, *operands, shared=None):
        y = core(x, *operands)
        return y if shared is None else y + shared(x)
    return run


def mixture(cfg: ExpertsConfig, x: Tensor, weights: Tensor, chosen: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """The weighted sum of each token's experts: x [n, d], weights and chosen [n, k] -> [n, d]. What is dropped weighs 0."""
    if on_cpu():
        return cpu.mixture(x, weights, chosen, w1, w2, w3)
    if cfg.capacity is not None:
        weights = weights * (chosen >= 0).astype(weights.dtype)
        chosen = ops.maximum(chosen, 0)
    rows, where = ops.moe_token_permute(x, chosen)  # sorted by expert
    sizes = one_hot(chosen, cfg.count).sum((0, 1)).astype(ms.int64)

    def product(a, w):
        return auto_generate.grouped_matmul_v4([a], [mint.transpose(w, 1, 2)], group_list=sizes, split_item=3, group_type=0,
                                               group_list_type=1)[0]
    hidden = ops.swiglu(mint.stack((product(rows, w1), product(rows, w3)), 1), 1).reshape(-1, w1.shape[1])
    return ops.moe_token_unpermute(product(hidden, w2), where, weights)
