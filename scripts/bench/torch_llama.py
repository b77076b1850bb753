# SPDX-License-Identifier: Apache-2.0
"""The same Llama in PyTorch, in turns with ours: one rank, tensor parallel (DTensor styles), data parallel (DDP, FSDP2),
context parallel (its ring, balanced by heads and tails); in stages: torch_stages.py. It begins with the same weights and
makes the same steps, so losses agree.

Not a comparison of kernels to the last percent: PyTorch uses its fused attention and RMSNorm is spelled out in both.
"""
from __future__ import annotations

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  PyTorch's habit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as rings
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch_experts import Experts

from model_zoo.llama.initial import initial

aten = torch.ops.aten


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
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True) if Ring.group is None else Ring.apply(q, k, v)
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
        self.ffn_norm = Norm(m.dim)
        self.feed_forward = FeedForward(m.dim, m.ffn_dim) if m.experts is None else Experts(m)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Begins with our weights: with others a mixture's tokens would choose other experts, and ranks' loads would differ."""

    def __init__(self, m, seed):
        super().__init__()
        self.tok_embeddings = nn.Embedding(m.vocab_size, m.dim)
        self.layers = nn.ModuleList(Block(m) for _ in range(m.n_layers))
        self.norm, self.output = Norm(m.dim), nn.Linear(m.dim, m.vocab_size, bias=False)
        for name, p in self.named_parameters():
            ours = name.replace("feed_forward.w", "feed_forward.experts.w") if p.ndim == 3 else name
            p.data = torch.from_numpy(initial(ours, tuple(p.shape), m.n_layers, seed))

    def forward(self, ids, cos, sin):
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))


class Ring(torch.autograd.Function):
    """The ring of PyTorch's `context_parallel` over its fused attention for CPUs.

    PyTorch 2.13 registers its ring for the kernels of GPUs alone: on a CPU its block ends in "does not have a sharding
    strategy registered". The loop is the same one, called directly.
    """

    group = None

    @staticmethod
    def forward(ctx, q, k, v):
        out, log_total, *_ = rings._templated_ring_attention(
            Ring.group, 2, aten._scaled_dot_product_flash_attention_for_cpu.default, query=q, key=k, value=v, is_causal=True,
            dropout_p=0.0)
        ctx.save_for_backward(q, k, v, out, log_total)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, log_total = ctx.saved_tensors
        dq, dk, dv, *_ = rings._templated_ring_attention_backward(
            Ring.group, 2, aten._scaled_dot_product_flash_attention_for_cpu_backward.default, grad_out=dout,
            grad_out_name="grad_out", query=q, key=k, value=v, out=out, logsumexp=log_total, is_causal=True, dropout_p=0.0)
        return dq, dk, dv


def tensor_parallel(model, mesh):
    """Of a stage, what it has."""
    whole, cut = Replicate(), Shard(1)
    outer = {"tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=cut), "norm": SequenceParallel(),
             "output": ColwiseParallel(input_layouts=cut, output_layouts=Shard(-1), use_local_output=False)}
    parallelize_module(model, mesh, {k: v for k, v in outer.items() if not isinstance(getattr(model, k), nn.Identity)})
    for layer in model.layers:
        parallelize_module(layer, mesh, {
            "attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(cut, None, None), desired_input_layouts=(whole, None, None)),
            "feed_forward": PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(whole,)),
            "attention.wq": ColwiseParallel(), "attention.wk": ColwiseParallel(), "attention.wv": ColwiseParallel(),
            "feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=cut), "feed_forward.w2": RowwiseParallel(output_layouts=cut)})
    return model


def begin(rank, ranks, cfg, store):
    """One thread, the group of all ranks, and the cosines and sines of the places."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    m = cfg.model
    exponents = -torch.arange(0, m.head_dim, 2) / m.head_dim
    angle = torch.outer(torch.arange(cfg.train.seq), m.rope_theta ** exponents).repeat(1, 2)
    return angle.cos(), angle.sin()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def prepare(way, rank, ranks, cfg, batch, store):
    """One rank of "single", "tp", "dp" (DDP), "fsdp" (FSDP2 of blocks), "cp", "ep": a step, and a barrier."""
    cos, sin = begin(rank, ranks, cfg, store)
    m, t = cfg.model, cfg.train
    cut_rows = way in ("dp", "fsdp", "ep")
    rows = slice(rank * t.batch // 2, (rank + 1) * t.batch // 2) if cut_rows else slice(None)
    ids, labels = (torch.from_numpy(a).long()[rows] for a in batch)
    model = Llama(m, t.seed)
    if way == "cp":  # the first and the last of each rank's two pieces of every row
        Ring.group, pieces = dist.group.WORLD, torch.arange(t.seq).chunk(2 * ranks)
        here = torch.cat((pieces[rank], pieces[-1 - rank]))
        ids, labels, cos, sin = ids[:, here], labels[:, here], cos[here], sin[here]
        model = nn.parallel.DistributedDataParallel(model)
    if way == "tp":
        tensor_parallel(model, init_device_mesh("cpu", (ranks,)))
    elif way == "ep":
        of_experts = {id(p) for layer in model.layers for p in layer.feed_forward.cut(rank, ranks)}
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, [name for name, p in model.named_parameters() if id(p) in of_experts])
        model = nn.parallel.DistributedDataParallel(model)
    elif way == "dp":
        model = nn.parallel.DistributedDataParallel(model)
    elif way == "fsdp":
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters())

    def step():
        with loss_parallel() if way == "tp" else contextlib.nullcontext():
            loss = F.cross_entropy(model(ids, cos, sin).flatten(0, 1), labels.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if cut_rows or way == "cp":  # every rank is told the mean of all rows, as ours are
            dist.all_reduce(loss)
            loss /= ranks
        return float(loss)
    return step, dist.barrier
