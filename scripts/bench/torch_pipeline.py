# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.pipelining over gloo with sleeps as compute: wall time of a step of each schedule, as JSON.

    python torch_pipeline.py RANKS MICRO SLEEP_MS STEPS      what `pipeline.py torch` runs, in PyTorch's environment

Not a test of PyTorch: ranks, microbatches and sleeps are those of ours. ZB-H1 is not among its schedules.
"""
from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from datetime import timedelta

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

KINDS = {"gpipe": ("ScheduleGPipe", 1), "1f1b": ("Schedule1F1B", 1), "interleaved": ("ScheduleInterleaved1F1B", 2),
         "zbv": ("ScheduleZBVZeroBubble", 2), "dualpipev": ("ScheduleDualPipeV", 2)}


class Along(torch.autograd.Function):
    """Sleeps in the forward, and where the gradient of the input is made."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        time.sleep(ctx.seconds)
        return dy, None


class OfWeight(torch.autograd.Function):
    """Sleeps where the gradient of the weight is made."""

    @staticmethod
    def forward(ctx, w, seconds):
        ctx.seconds = seconds
        return w.clone()

    @staticmethod
    def backward(ctx, dw):
        time.sleep(ctx.seconds)
        return dw, None


class Block(nn.Module):
    def __init__(self, seconds: float):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.eye(4)), seconds

    def forward(self, x):
        return torch.tanh(Along.apply(x, self.seconds) @ OfWeight.apply(self.weight, self.seconds))


def run(rank: int, ranks: int, micro: int, sleep: float, steps: int, port: int, out: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks,
                            timeout=timedelta(seconds=120))  # where one rank refuses an order, the others do not wait long
    for name, (kind, v) in KINDS.items():
        mine = [rank] if v == 1 else [rank, 2 * ranks - 1 - rank] if name in ("zbv", "dualpipev") else [rank, rank + ranks]
        try:
            stages = [PipelineStage(Block(sleep / v), s, v * ranks, torch.device("cpu")) for s in mine]
            schedule = getattr(pipelining, kind, None) or getattr(pipelining.schedules, kind)
            schedule = schedule(stages if v > 1 else stages[0], micro, loss_fn=lambda y, t: ((y - t) ** 2).mean())
            x, walls = torch.ones(micro, 4), []
            for _ in range(steps + 1):
                dist.barrier()
                start = time.time()
                schedule.step(*([x] if 0 in mine else []), **({"target": x} if v * ranks - 1 in mine else {}))
                dist.barrier()
                walls.append(time.time() - start)
            result = {"wall": round(statistics.median(walls[1:]), 4), "least": round(min(walls[1:]), 4)}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:200]}
        if rank == 0:
            out.put((name, result))
    dist.destroy_process_group()


def main() -> None:
    ranks, micro, steps = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run, (ranks, micro, float(sys.argv[3]) / 1000, steps, port, out), ranks)
    print(json.dumps({"torch": torch.__version__, "orders": dict(out.get() for _ in KINDS)}))


if __name__ == "__main__":
    main()
