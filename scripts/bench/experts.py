# SPDX-License-Identifier: Apache-2.0
"""Experts over ranks: tokens a second of a model of eight experts over two ranks, against one rank and against PyTorch.

    python scripts/bench/experts.py [--steps 7] [--tokens 2048] [--torch-python PYTHON] [--no-save]

A step is the forward and the backward of two blocks (router, eight experts of which a token takes two, residual), gradients
of the routers added up over the ranks. ours1: one rank has all experts. ours2: two ranks have four each, and half of the
tokens each. torch1, torch2: the same in PyTorch over gloo, by the all-to-all with a gradient that torchtitan's expert
parallelism is made of (`torch_experts.py`; torchtitan itself was not run). All are sampled in turns; a rank has one thread.
Cost of a layer, counted on a rank: collectives forward and backward, and reads of the host, each of which a device would be
waited for. Prints JSON; the ratios are those of one run.
"""
from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import finish, one_thread  # noqa: E402

one_thread()

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, nn  # noqa: E402

import ms_dtensor as md  # noqa: E402
from tests.long.forked import world  # noqa: E402

DIM, WIDTH, EXPERTS, K, LAYERS = 256, 512, 8, 2, 2


class Experts(nn.Cell):
    def __init__(self, rng):
        super().__init__()
        for name, shape in (("w1", (EXPERTS, WIDTH, DIM)), ("w2", (EXPERTS, DIM, WIDTH)), ("w3", (EXPERTS, WIDTH, DIM))):
            setattr(self, name, Parameter(Tensor(rng.normal(size=shape).astype(np.float32) * 0.05), name=name))

    def construct(self, x, weights, chosen):
        return md.moe(x, weights, chosen, self.w1, self.w2, self.w3)


class Block(nn.Cell):
    def __init__(self, number: int):
        super().__init__()
        rng = np.random.default_rng(number)
        self.gate = nn.Dense(DIM, EXPERTS, has_bias=False)
        self.gate.weight.set_data(Tensor(rng.normal(size=(EXPERTS, DIM)).astype(np.float32) * 0.1))
        self.router, self.experts = md.Router(K), Experts(rng)

    def construct(self, x):
        weights, chosen = self.router(self.gate(x))
        return x + self.experts(x, weights, chosen)


def rows(tokens: int) -> np.ndarray:
    return np.random.default_rng(9).normal(size=(tokens, DIM)).astype(np.float32)


def ours(ranks: int, steps: int, tokens: int) -> dict:
    """Seconds of each step on the slower rank, and what a layer costs."""
    def run(rank: int) -> dict:
        net = nn.SequentialCell(*(Block(i) for i in range(LAYERS)))
        x = Tensor(rows(tokens))
        if ranks > 1:
            mesh = md.init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
            for block in net:
                md.parallelize_module(block.experts, mesh, md.ExpertParallel())
            md.replicate(net, mesh=mesh, ignored_modules=[block.experts for block in net])
            part = rows(tokens)[rank * tokens // ranks:(rank + 1) * tokens // ranks]
            x = md.DTensor.from_local(Tensor(np.ascontiguousarray(part)), mesh, [md.Shard(0)])
        grad = (md if ranks > 1 else ms).value_and_grad(lambda x: (net(x) ** 2).mean(), None, net.trainable_params())

        def step() -> float:
            start = time.perf_counter()
            value, _ = grad(x)
            float(value.full_tensor() if ranks > 1 else value)
            return time.perf_counter() - start
        step()
        reads, asnumpy = Counter(), Tensor.asnumpy

        def counted(self):
            name = sys._getframe(1).f_code.co_filename
            reads["reads"] += "parallel" in name and "comm" not in name
            return asnumpy(self)
        Tensor.asnumpy = counted
        with md.CommDebugMode() as log:
            step()
        Tensor.asnumpy = asnumpy
        calls = Counter(f"{e.op} {e.phase}" for e in log.events)
        return {"seconds": [step() for _ in range(steps)], "calls": dict(calls), "reads_a_layer": reads["reads"] / LAYERS}
    out = [one["result"] for one in world(ranks, run, 300).values()]
    return {"seconds": [max(pair) for pair in zip(*(one["seconds"] for one in out))], **{
        key: out[0][key] for key in ("calls", "reads_a_layer")}}


def torchs(python: str, ranks: int, steps: int, tokens: int) -> dict | None:
    file = Path(__file__).with_name("torch_experts.py")
    sizes = (DIM, WIDTH, EXPERTS, K, LAYERS)
    done = subprocess.run([python, str(file), *map(str, (ranks, steps, tokens, *sizes))], capture_output=True, text=True,
                          timeout=300, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--no-save", action="store_true")
    o = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    layer: dict = {}
    for _ in range(o.rounds):
        for ranks in (1, 2):
            mine = ours(ranks, o.steps, o.tokens)
            seconds.setdefault(f"ours{ranks}", []).extend(mine["seconds"])
            if ranks > 1:
                layer |= {"collectives_of_a_step": mine["calls"], "reads_a_layer": mine["reads_a_layer"], "layers": LAYERS}
            theirs = torchs(o.torch_python, ranks, o.steps, o.tokens)
            if theirs is not None:
                seconds.setdefault(f"torch{ranks}", []).extend(theirs["seconds"])
                layer[f"torch_loss{ranks}"] = theirs["loss"]
    speed = {name: {"median": round(o.tokens / statistics.median(v)), "best": round(o.tokens / min(v))}
             for name, v in seconds.items()}
    ratios = {f"{a} over {b}": round(speed[a]["median"] / speed[b]["median"], 3)
              for a, b in (("ours2", "ours1"), ("ours1", "torch1"), ("ours2", "torch2")) if a in speed and b in speed}
    finish("experts", {"tokens_per_second": speed, "ratios": ratios, **layer},
           [("", "tokens/s, median", "best"), *((n, v["median"], v["best"]) for n, v in speed.items())], not o.no_save)


if __name__ == "__main__":
    main()
