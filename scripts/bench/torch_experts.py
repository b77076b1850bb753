# SPDX-License-Identifier: Apache-2.0
"""What `experts.py` compares with, in PyTorch over gloo: seconds of each step on the slower rank, as JSON.

    python torch_experts.py RANKS STEPS TOKENS DIM WIDTH EXPERTS K LAYERS

Tokens are sorted by expert, numbers of rows and then rows travel by all-to-all, whose gradient is an all-to-all; each expert
is three products. It is what PyTorch's own expert parallelism does, without kernels of devices, and tuned neither way.
"""
from __future__ import annotations

import json
import os
import socket
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd


class Block(nn.Module):
    def __init__(self, dim, width, experts, k, ranks):
        super().__init__()
        self.k, self.experts, self.ranks, mine = k, experts, ranks, experts // ranks
        self.gate = nn.Linear(dim, experts, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.randn(mine, width, dim) * 0.05) for _ in "13")
        self.w2 = nn.Parameter(torch.randn(mine, dim, width) * 0.05)

    def forward(self, x):
        weights, chosen = torch.topk(torch.softmax(self.gate(x), -1), self.k)
        weights = weights / weights.sum(-1, keepdim=True)
        order = torch.argsort(chosen.reshape(-1), stable=True)
        counts = torch.bincount(chosen.reshape(-1), minlength=self.experts)
        rows = x[order // self.k]
        if self.ranks > 1:
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts)
            table = theirs.view(self.ranks, -1)
            send, recv = counts.view(self.ranks, -1).sum(1).tolist(), table.sum(1).tolist()
            rows = all_to_all_single_autograd(rows, recv, send, dist.group.WORLD)
            by = torch.argsort(torch.repeat_interleave(torch.arange(table.shape[1]).repeat(self.ranks), table.reshape(-1)),
                               stable=True)
            rows, counts = rows[by], table.sum(0)
        parts = [self._one(part, i) for i, part in enumerate(torch.split(rows, counts.tolist())) if len(part)]
        y = torch.cat(parts) if parts else rows
        if self.ranks > 1:
            y = all_to_all_single_autograd(torch.empty_like(y).index_copy(0, by, y), send, recv, dist.group.WORLD)
        back = torch.empty_like(y).index_copy(0, order, y).view(len(x), self.k, -1)
        return x + (back * weights[..., None]).sum(1)

    def _one(self, rows, i):
        return (nn.functional.silu(rows @ self.w1[i].T) * (rows @ self.w3[i].T)) @ self.w2[i].T


def run(rank, ranks, steps, tokens, sizes, port, out):
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"tcp://127.0.0.1:{port}")
    torch.manual_seed(rank)
    dim, width, experts, k, layers = sizes
    net = nn.Sequential(*(Block(dim, width, experts, k, ranks) for _ in range(layers)))
    x = torch.randn(tokens // ranks, dim)
    times = []
    for _ in range(steps + 2):
        net.zero_grad()
        start = time.perf_counter()
        loss = (net(x) ** 2).mean() / ranks
        loss.backward()
        if ranks > 1:
            for block in net:
                dist.all_reduce(block.gate.weight.grad)
        value = loss.item()
        times.append(time.perf_counter() - start)
    out[rank] = (times[2:], value)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    ranks, steps, tokens, *sizes = map(int, sys.argv[1:])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = mp.get_context("spawn").Manager().dict()
    mp.spawn(run, (ranks, steps, tokens, sizes, port, out), nprocs=ranks)
    print(json.dumps({"seconds": [max(pair) for pair in zip(*(times for times, _ in out.values()))],
                      "loss": sum(value for _, value in out.values())}))
