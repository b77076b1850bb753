# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: behind the model, modules that each predict one token further ahead, for a better-trained model.

Module k makes of a token's vector and of the embedding of the k-th token after it what predicts the token behind that; the
embedding and the output are the model's own. Not here: anything parallel, a cache, or speculative decoding. The one
invariant: what module k says of a token knows the k tokens after it and no more.

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2.
"""
from __future__ import annotations

from mindspore import Tensor, mint, nn, ops

from .config import ModelConfig
from .experts import balance_loss
from .layers import RMSNorm, linear
from .model import Block, Llama, cross_entropy

IGNORED = -100  # a label that `cross_entropy` leaves out


class Ahead(nn.Cell):
    """One module: vectors x [n, d] of the tokens and embeddings e [n, d] of later ones -> vectors [n, d].

    Args:
        cfg: the sizes; its block is like the model's last one.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.token_norm, self.state_norm = RMSNorm(cfg.dim, cfg.norm_eps), RMSNorm(cfg.dim, cfg.norm_eps)
        self.join = linear(2 * cfg.dim, cfg.dim)
        self.block = Block(cfg, cfg.n_layers)
        self.norm = RMSNorm(cfg.dim, cfg.norm_eps)

    def construct(self, x, e, t):
        return self.block(self.join(mint.cat((self.token_norm(e), self.state_norm(x)), 1)), t)


class AheadLlama(Llama):
    """Token ids i32[b, t] -> a list of logits [b*t, vocab]: the model's, then those of each module ahead.

    Of a mixture of experts also the auxiliary loss and the loads, of the modules' layers too. Rows hold one document each.

    Args:
        cfg: the sizes.
        depth: how many modules.
    """

    def __init__(self, cfg: ModelConfig, depth: int = 1):
        super().__init__(cfg)
        self.ahead = nn.CellList([Ahead(cfg) for _ in range(depth)])
        for name, param in self.ahead.parameters_and_names():
            param.name = f"ahead.{name}"

    def construct(self, ids):
        t, said = ids.shape[1], []
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = _vectors(layer(x, t), said)
        logits = [self.output(self.norm(x))]
        for k, module in enumerate(self.ahead, 1):
            later = mint.cat((ids[:, k:], ids[:, :k]), 1)  # the last k of a row see its first ones, and have no labels
            x = _vectors(module(x, self.tok_embeddings(later), t), said)
            logits.append(self.output(module.norm(x)))
        if not said:
            return logits
        shares, loads = zip(*said)
        return logits, balance_loss(sum(shares[1:], shares[0]), len(shares)), ops.cat(loads)


def _vectors(out, said: list) -> Tensor:
    """What a block hands on; what it says of its experts goes into `said`."""
    if not isinstance(out, tuple):
        return out
    x, share, load = out
    said.append((share, load.reshape(1, -1)))
    return x


def ahead_loss(logits: list[Tensor], labels: Tensor, weight: float = 0.3) -> Tensor:
    """The model's cross entropy and `weight` times the mean of the modules'.

    Args:
        logits: of `AheadLlama`.
        labels: i32[b, t], of each token the next one; module k is asked for the one k further on.
        weight: 0.3 first and 0.1 later, in DeepSeek-V3's training.
    """
    loss, more = cross_entropy(logits[0], labels), []
    for k, further in enumerate(logits[1:], 1):
        none = ops.zeros_like(labels[:, :k]) + IGNORED
        more.append(cross_entropy(further, mint.cat((labels[:, k:], none), 1), IGNORED))
    return loss + sum(more[1:], more[0]) * (weight / len(more)) if more else loss
