# SPDX-License-Identifier: Apache-2.0
"""Dropless experts in PyTorch over gloo, as torchtitan has them (tokens sorted by expert, two all-to-alls): for a benchmark.

torchtitan's own wants GPUs. Kept from it: sorting by expert, sizes by one all-to-all and one wait, rows there and back by
`all_to_all_single`, one product of each expert, a weighted sum at home. Its kernels for permuting are indexing here.
"""
from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  PyTorch's habit
from torch import nn


class Rows(torch.autograd.Function):
    """Rows by sizes to all ranks; the gradient by the same sizes back."""

    @staticmethod
    def forward(ctx, x, send, recv):
        ctx.sizes = send, recv
        out = x.new_empty(sum(recv), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), recv, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        send, recv = ctx.sizes
        out = grad.new_empty(sum(send), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), send, recv)
        return out, None, None


class Experts(nn.Module):
    """In the place of a feed-forward: x [b, t, d]; `ranks` share the experts."""

    def __init__(self, m):
        super().__init__()
        self.count, self.k, self.ranks = m.experts.count, m.experts.per_token, 1
        width = m.experts.width or m.ffn_dim
        self.gate = nn.Linear(m.dim, self.count, bias=False)
        for name, shape in (("w1", (width, m.dim)), ("w2", (m.dim, width)), ("w3", (width, m.dim))):
            setattr(self, name, nn.Parameter(torch.randn(self.count, *shape) * 0.02))

    def cut(self, rank: int, ranks: int) -> list[nn.Parameter]:
        """Keeps this rank's; their gradients are sums over all ranks' tokens, of losses that are means of a part each."""
        self.ranks, each = ranks, self.count // ranks
        for name in ("w1", "w2", "w3"):
            mine = nn.Parameter(getattr(self, name).detach()[rank * each:(rank + 1) * each].clone())
            mine.register_hook(lambda grad: grad / ranks)
            setattr(self, name, mine)
        return [self.w1, self.w2, self.w3]

    def forward(self, x):
        shape, x = x.shape, x.flatten(0, -2)
        weights, chosen = torch.topk(F.softmax(self.gate(x), -1, dtype=torch.float32), self.k)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = chosen.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=self.count)
        rows = x[order // self.k]
        y = self.far(rows, counts) if self.ranks > 1 else self.products(rows, counts.tolist())
        back = torch.zeros_like(y).index_copy(0, order, y)
        return (back.unflatten(0, (-1, self.k)) * weights.unsqueeze(-1)).sum(1).view(shape)

    def far(self, rows, counts):
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        theirs, mine = theirs.view(self.ranks, -1), counts.view(self.ranks, -1).sum(1).tolist()
        recv = theirs.sum(1).tolist()
        rows = Rows.apply(rows, mine, recv)
        by = torch.argsort(torch.arange(theirs.shape[1]).repeat(self.ranks).repeat_interleave(theirs.flatten()), stable=True)
        y = self.products(rows[by], theirs.sum(0).tolist())
        return Rows.apply(torch.zeros_like(y).index_copy(0, by, y), recv, mine)

    def products(self, rows, sizes):
        parts = [F.linear(F.silu(F.linear(part, w1)) * F.linear(part, w3), w2)
                 for part, w1, w2, w3 in zip(rows.split(sizes), self.w1.unbind(), self.w2.unbind(), self.w3.unbind())]
        return torch.cat(parts)
