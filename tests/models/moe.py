# SPDX-License-Identifier: Apache-2.0
"""A Mixtral-style mixture of experts, written as for one device: softmax router, top-2, every expert on every token.

Experts as separate cells (`Separate`) or as stacked weights (`Stacked`); the same numbers either way.
"""
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops


def route(logits, top_k: int):
    """Share of each expert in each token f32[n, e], and Switch's load-balance loss."""
    prob = ops.softmax(logits, -1)
    weight, chosen = ops.topk(prob, top_k)
    weight = weight / weight.sum(-1, keepdims=True)
    picked = nn.OneHot(depth=logits.shape[-1])(chosen)
    share = (picked * weight.expand_dims(-1)).sum(1)
    balance = (picked.sum(1).mean(0) * prob.mean(0)).sum() * logits.shape[-1]
    return share, balance


class Expert(nn.Cell):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1, self.w2, self.w3 = (mint.nn.Linear(*s, bias=False) for s in ((dim, hidden), (hidden, dim), (dim, hidden)))

    def construct(self, x):
        return self.w2(mint.nn.functional.silu(self.w1(x)) * self.w3(x))


class Separate(nn.Cell):
    def __init__(self, dim: int, hidden: int, experts: int, top_k: int):
        super().__init__()
        self.gate = nn.Dense(dim, experts, has_bias=False)
        self.experts = nn.CellList([Expert(dim, hidden) for _ in range(experts)])
        self.top_k = top_k

    def construct(self, x):
        share, balance = route(self.gate(x), self.top_k)
        out = ops.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + expert(x) * share[:, i:i + 1]
        return out, balance


class Stacked(nn.Cell):
    def __init__(self, dim: int, hidden: int, experts: int, top_k: int):
        super().__init__()
        self.gate = nn.Dense(dim, experts, has_bias=False)
        self.w1 = Parameter(Tensor(np.zeros((experts, dim, hidden), np.float32)), name="w1")
        self.w2 = Parameter(Tensor(np.zeros((experts, hidden, dim), np.float32)), name="w2")
        self.w3 = Parameter(Tensor(np.zeros((experts, dim, hidden), np.float32)), name="w3")
        self.top_k = top_k

    def construct(self, x):
        share, balance = route(self.gate(x), self.top_k)
        rows = x.expand_dims(0)
        hidden = ops.silu(mint.matmul(rows, self.w1)) * mint.matmul(rows, self.w3)
        out = mint.matmul(hidden, self.w2)
        return (out * share.T.expand_dims(-1)).sum(0), balance


class MoE(nn.Cell):
    """x f32[b, t, dim], target of the same shape -> mean squared error plus the router's balance loss."""

    def __init__(self, kind=Separate, dim: int = 8, hidden: int = 10, experts: int = 5, top_k: int = 2, layers: int = 2):
        super().__init__()
        self.norms = nn.CellList([nn.LayerNorm((dim,)) for _ in range(layers)])
        self.blocks = nn.CellList([kind(dim, hidden, experts, top_k) for _ in range(layers)])

    def construct(self, x, target):
        b, t, d = x.shape
        total = 0
        for norm, block in zip(self.norms, self.blocks):
            out, balance = block(norm(x).reshape(b * t, d))
            x = x + out.reshape(b, t, d)
            total = total + balance
        return ops.mse_loss(x, target) + 0.01 * total
