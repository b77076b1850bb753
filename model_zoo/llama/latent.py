# SPDX-License-Identifier: Apache-2.0
"""DeepSeek's attention: keys and values of all heads are made of one short vector of each token, the latent one.

Not here: anything parallel, nor a cache of latent vectors. What is left when keys and values are made is ordinary attention,
with two kinds of numbers in a head of q and k: those that tell no position, and those that are turned by it. Of k the latter
are the same for all heads.
"""
from __future__ import annotations

from collections.abc import Callable

from mindspore import Tensor, mint, nn, ops

from .config import ModelConfig
from .layers import RMSNorm, linear

EPS = 1e-6  # of the norms of the short vectors, whatever that of the others is


class LatentAttention(nn.Cell):
    """Multi-head latent attention of a list x [n, d].

    Args:
        cfg: the sizes; `cfg.latent` is not None.
        attend: attention of q, key and value [b, t, h, e], with `places` behind them.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.
    """

    def __init__(self, cfg: ModelConfig, attend: Callable[..., Tensor]):
        super().__init__()
        assert cfg.latent is not None
        self.sizes, self.heads, self.head_dim = cfg.latent, cfg.n_heads, cfg.head_dim
        s, width = self.sizes, cfg.n_heads * cfg.head_dim
        if s.q_rank is None:
            self.wq = linear(cfg.dim, width)
        else:
            self.wq_a, self.wq_b = linear(cfg.dim, s.q_rank), linear(s.q_rank, width)
            self.q_norm = RMSNorm(s.q_rank, EPS)
        self.wkv_a = linear(cfg.dim, s.kv_rank + s.turned)
        self.kv_norm = RMSNorm(s.kv_rank, EPS)
        self.wkv_b = linear(s.kv_rank, cfg.n_heads * (s.plain + s.value))
        self.wo = linear(cfg.n_heads * s.value, cfg.dim)
        # of q, of what keys and values are made of by head, and of what all heads share: on a mesh `parallelize.py` maps it
        self.core = Latent(cfg, attend)

    def construct(self, x, t):
        t, *places = (t.length, t.places) if hasattr(t, "places") else (t,)
        b, s = x.shape[0] // t, self.sizes
        q = self.wq(x) if s.q_rank is None else self.wq_b(self.q_norm(self.wq_a(x)))
        latent, shared = ops.split(self.wkv_a(x), [s.kv_rank, s.turned], 1)
        made = self.wkv_b(self.kv_norm(latent))
        out = self.core(q.reshape(b, t, self.heads, self.head_dim), made.reshape(b, t, self.heads, s.plain + s.value),
                        shared.reshape(b, t, 1, s.turned), *places)
        return self.wo(out.reshape(b * t, self.heads * s.value))


class Latent:
    """Attention of q [b, t, h, e] over keys and values `made` [b, t, h, plain + value] and `shared` [b, t, 1, turned].

    Args:
        cfg: the sizes.
        attend: attention of q, key and value.
    """

    def __init__(self, cfg: ModelConfig, attend: Callable[..., Tensor]):
        self.cfg, self.attend = cfg, attend

    def __call__(self, q: Tensor, made: Tensor, shared: Tensor, *places: Tensor) -> Tensor:
        sizes, shape = self.cfg.latent, made.shape
        assert sizes is not None
        # not `mint.split`, whose gradient on CPU reads the views that the gradient of `cat` gives as if they were contiguous
        plain, value = ops.split(made, [sizes.plain, sizes.value], 3)
        of_all = mint.broadcast_to(shared, (*shape[:3], sizes.turned))
        return self.attend(q, mint.cat((plain, of_all), 3), value, *places)
