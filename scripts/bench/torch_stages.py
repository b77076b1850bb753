# SPDX-License-Identifier: Apache-2.0
"""torch_llama.py's model in stages of `torch.distributed.pipelining`: 1F1B, beside tensor parallelism or FSDP2, and ZBV.

The stages have the cells that ours have, and each microbatch is one row of a rank's, as ours. PyTorch's pipelines hand on
plain tensors, so beside tensor parallelism these are a rank's part of the sequence.
"""
from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  PyTorch's habit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch_llama import Llama, adamw, begin, tensor_parallel


class Part(Llama):
    """A stage: the cells of these paths."""

    def __init__(self, m, seed, cells, cos, sin):
        super().__init__(m, seed)
        self.layers = nn.ModuleList(layer for i, layer in enumerate(self.layers) if f"layers.{i}" in cells)
        for name in ("tok_embeddings", "norm", "output"):
            if name not in cells:
                setattr(self, name, nn.Identity())
        self.cos, self.sin = cos, sin

    def forward(self, x):
        return super().forward(x, self.cos, self.sin)


def prepare(parallel, rank, ranks, cfg, batch, store, cells):
    """One rank: a step, after which every rank has the loss, as ours have, and a barrier.

    Args:
        parallel: of ours, with pp and one of dp (FSDP2) and tp.
        rank: this one's number.
        ranks: how many there are.
        cfg: of ours.
        batch: ids and labels.
        store: a file by which the ranks meet.
        cells: the paths of each stage.
    """
    cos, sin = begin(rank, ranks, cfg, store)
    mesh = init_device_mesh("cpu", (parallel.pp, parallel.dp, parallel.tp), mesh_dim_names=("pp", "dp", "tp"))
    at, line, vee = mesh["pp"].get_local_rank(), mesh["pp"].get_group(), parallel.pp_schedule == "zbv"
    each, data = len(batch[0]) // parallel.dp, mesh["dp"].get_local_rank()
    ids, labels = (torch.from_numpy(a).long()[data * each:(data + 1) * each] for a in batch)
    stages, parts = [], []
    for s in (at, len(cells) - 1 - at) if vee else (at,):
        part = Part(cfg.model, cfg.train.seed, cells[s], cos, sin)
        if parallel.tp > 1:
            tensor_parallel(part, mesh["tp"])
        if parallel.fsdp:
            for layer in part.layers:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(part, mesh=mesh["dp"])
        parts.append(part)
        stages.append(PipelineStage(part, s, len(cells), torch.device("cpu"), group=line))
    optimizer = adamw([p for part in parts for p in part.parameters()])

    def loss_fn(y, t):
        return F.cross_entropy(y.flatten(0, 1), t.flatten())
    schedule = ScheduleZBVZeroBubble(stages, len(ids), loss_fn) if vee else Schedule1F1B(stages[0], len(ids), loss_fn)
    first, last = at == 0, any(stage.is_last for stage in stages)
    speaker = 0 if vee else parallel.pp - 1

    def step():
        losses = []
        with loss_parallel() if parallel.tp > 1 else contextlib.nullcontext():
            schedule.step(*([ids] if first else []), **({"target": labels, "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        losses = [x.full_tensor() if isinstance(x, DTensor) else x for x in losses]
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, group=line, group_src=speaker)
        if parallel.dp > 1:
            dist.all_reduce(loss, group=mesh["dp"].get_group())
            loss /= parallel.dp
        return float(loss)
    return step, dist.barrier
