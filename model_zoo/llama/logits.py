# SPDX-License-Identifier: Apache-2.0
"""The largest attention logit of each head, noted as attention computes, and weights made smaller where it is too large.

Not here: the arithmetic, which is `ms_dtensor.optim.max_logits` and `qk_clip_`. It costs the products of queries and keys
once more, and a small message a layer.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mindspore import Tensor, mint

from ms_dtensor import implicit_replication
from ms_dtensor.internals.names import no_grad
from ms_dtensor.internals.target import on_cpu
from ms_dtensor.optim import max_logits, qk_clip_

from .config import ModelConfig
from .joined import apart
from .model import Llama, rotary_tables, turned
from .rope import score_scale, turn


class Watched:
    """Attention of q, key and value [b, t, h, e] that notes what logits it met.

    Args:
        cfg: the sizes.
        core: attention itself.

    Attributes:
        largest: float64[heads] since `largest` was set to None; equal on all ranks.
    """

    def __init__(self, cfg: ModelConfig, core: Callable[..., Tensor]):
        self.cfg, self.core, self.largest = cfg, core, None

    def __call__(self, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
        now = largest(self.cfg, q, key)
        self.largest = now if self.largest is None else np.maximum(self.largest, now)
        return self.core(q, key, value)


def largest(cfg: ModelConfig, q: Tensor, key: Tensor) -> np.ndarray:
    """float64[heads]: of q [b, t, h, e] and key [b, t, k, e], turned by their positions."""
    cos, sin = rotary_tables(cfg, q.shape[1], q.dtype)
    with no_grad(), implicit_replication():
        if on_cpu():
            pairs = Tensor(turn(cfg)).astype(q.dtype)
            q, key = (x * cos + mint.matmul(x, pairs) * sin for x in (q, key))
        else:
            q, key = (turned(cfg, x, cos, sin) for x in (q, key))
        return max_logits(*(mint.permute(x, (0, 2, 1, 3)) for x in (q, key)), scale=score_scale(cfg))


def watch(model: Llama) -> list[Watched]:
    """From here on each layer's attention is watched; after `parallelize`, which sets what computes it."""
    for layer in model.layers:
        layer.attention.core = Watched(model.cfg, layer.attention.core)
    return [layer.attention.core for layer in model.layers]


def clip(model: Llama, threshold: float) -> None:
    """Makes queries and keys smaller of heads whose noted logits are above the threshold."""
    with apart(model):
        for layer in model.layers:
            attention = layer.attention
            qk_clip_(attention.wq.weight, attention.wk.weight, attention.core.largest, threshold)
