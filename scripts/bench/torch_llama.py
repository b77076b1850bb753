# SPDX-License-Identifier: Apache-2.0
"""The same Llama in PyTorch, in turns with ours: one rank, tensor parallel (DTensor styles), data parallel (DDP).

Not a comparison of kernels to the last percent: PyTorch uses its fused attention and RMSNorm is spelled out in both.
"""
from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  PyTorch's habit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Attention(nn.Module):
    def __init__(self, dim, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.attention_norm, self.attention = Norm(m.dim), Attention(m.dim, m.head_dim)
        self.ffn_norm, self.feed_forward = Norm(m.dim), FeedForward(m.dim, m.ffn_dim)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.tok_embeddings = nn.Embedding(m.vocab_size, m.dim)
        self.layers = nn.ModuleList(Block(m) for _ in range(m.n_layers))
        self.norm, self.output = Norm(m.dim), nn.Linear(m.dim, m.vocab_size, bias=False)

    def forward(self, ids, cos, sin):
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))


def tensor_parallel(model, mesh):
    whole, cut = Replicate(), Shard(1)
    parallelize_module(model, mesh, {
        "tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=cut), "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=cut, output_layouts=Shard(-1), use_local_output=False)})
    for layer in model.layers:
        parallelize_module(layer, mesh, {
            "attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(cut, None, None), desired_input_layouts=(whole, None, None)),
            "feed_forward": PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(whole,)),
            "attention.wq": ColwiseParallel(), "attention.wk": ColwiseParallel(), "attention.wv": ColwiseParallel(),
            "feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=cut), "feed_forward.w2": RowwiseParallel(output_layouts=cut)})
    return model


def worker(rank, cfg, batch, turns, store):
    """One rank: waits for its turn, steps every variant once, reports seconds."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    m, t = cfg.model, cfg.train
    angle = torch.outer(torch.arange(t.seq), m.rope_theta ** (-torch.arange(0, m.head_dim, 2) / m.head_dim)).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    ids, labels = (torch.from_numpy(a).long() for a in batch)
    models = {"single": Llama(m) if rank == 0 else None, "tp": tensor_parallel(Llama(m), mesh),
              "dp": nn.parallel.DistributedDataParallel(Llama(m))}
    optimizers = {k: torch.optim.AdamW(v.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
                  for k, v in models.items() if v is not None}

    def step(kind):
        rows = slice(rank * len(ids) // 2, (rank + 1) * len(ids) // 2) if kind == "dp" else slice(None)
        x, y = ids[rows], labels[rows]
        if kind == "tp":
            with loss_parallel():
                F.cross_entropy(models[kind](x, cos, sin).flatten(0, 1), y.flatten()).backward()
        else:
            F.cross_entropy(models[kind](x, cos, sin).flatten(0, 1), y.flatten()).backward()
        optimizers[kind].step()
        optimizers[kind].zero_grad()

    while turns.wait("torch"):
        seconds = {}
        for kind in models:
            dist.barrier()
            if kind == "single" and rank:
                continue
            start = time.perf_counter()
            step(kind)
            seconds[f"torch {kind}"] = time.perf_counter() - start
        dist.barrier()
        if rank == 0:
            turns.done(seconds)
    dist.destroy_process_group()
