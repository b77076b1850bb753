# SPDX-License-Identifier: Apache-2.0
"""How many kernels `fully_shard` asks of a device for a block and a step, all of them counted, on a machine without one.

    python scripts/bench/fsdp_kernels.py [--ranks 8 64 128] [--out FILE]

Blocks of nine weights, as a Llama's: nine parameters or, as the recipe's on devices (`train.qkv_concat`), six, of which q, k
and v are one, w1 and w3 another, cut by parts. They run forward and backward as rank 0 of a fake world over the emulator of
`tests/rehearsal`. MindSpore's profiler names every kernel that ran, autograd's own too: casts, fills, additions. The
emulator adds the copies that it makes in NumPy in a kernel's place. What a block more costs, less what it costs on one rank
that has the parameters whole and in the dtype of the computation, is what `fully_shard` asks; collectives are named apart.
Each sort of kernel is counted by itself: fewer of one make up for none of another. `mfu.py` prices what is counted here.
That a copy of MindSpore's is several kernels of CANN, where it casts, or where what it reads or writes is strided, is
counted beside, by CANN's public sources.
"""
from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, mint, nn  # noqa: E402
from mindspore.profiler import ProfilerActivity, profile, tensorboard_trace_handler  # noqa: E402

import ms_dtensor as md  # noqa: E402
from ms_dtensor import comm  # noqa: E402
from tests.rehearsal.session import rehearsed  # noqa: E402

DIM = 128
SHAPES = {"wq": (256, DIM), "wk": (DIM, DIM), "wv": (DIM, DIM), "wo": (DIM, 256), "w1": (512, DIM), "w3": (512, DIM),
          "w2": (DIM, 512)}
WEIGHTS = len(SHAPES) + 2
JOINED = {"wqkv": ("wq", "wk", "wv"), "wo": ("wo",), "w13": ("w1", "w3"), "w2": ("w2",)}
PARTS = {name: tuple(SHAPES[part][0] for part in parts) for name, parts in JOINED.items() if parts[1:]}
POLICIES = {
    "float32": None,
    "bfloat16, gradients added up in float32": md.MixedPrecisionPolicy(ms.bfloat16, ms.float32),
    "bfloat16, gradients added up in it": md.MixedPrecisionPolicy(ms.bfloat16),
}


class Block(nn.Cell):
    """Seven matrices and two scales, in a Llama block's proportions and in its order; `joined`: some are one."""

    def __init__(self, seed: int, dtype=ms.float32, joined: bool = False):
        super().__init__()
        draw, self.joined = np.random.default_rng(seed), joined

        def drawn(*shape: int) -> Tensor:
            return Tensor(draw.normal(0, 0.1, shape).astype(np.float32)).astype(dtype)
        self.norm1 = Parameter(drawn(DIM), name="norm1")
        for name, parts in (JOINED if joined else {name: (name,) for name in SHAPES}).items():
            n, m = sum(SHAPES[part][0] for part in parts), SHAPES[parts[0]][1]
            setattr(self, name, nn.Dense(m, n, weight_init=drawn(n, m), has_bias=False, dtype=dtype))
        self.norm2 = Parameter(drawn(DIM), name="norm2")

    def construct(self, x):
        h = x * self.norm1
        q, k, v = mint.split(self.wqkv(h), [SHAPES[name][0] for name in JOINED["wqkv"]], 1) if self.joined else \
            (self.wq(h), self.wk(h), self.wv(h))
        x = x + self.wo(mint.tanh(q)) + k + v
        h = x * self.norm2
        gate, up = mint.split(self.w13(h), 2 * [SHAPES["w1"][0]], 1) if self.joined else (self.w1(h), self.w3(h))
        return x + self.w2(gate * up)


def by_parts(p: Parameter) -> md.FusedShard | None:
    """How a joined parameter is cut."""
    return next((md.FusedShard(0, parts) for parts in PARTS.values() if p.shape == (sum(parts), DIM)), None)


def kernels(step: Callable[[], object], device) -> tuple[Counter, Counter]:
    """Those of one call, by name, as MindSpore calls them and as CANN launches them."""
    with tempfile.TemporaryDirectory() as folder:
        device.counts.clear()
        device.cann.clear()
        with profile(activities=[ProfilerActivity.CPU], on_trace_ready=tensorboard_trace_handler(folder)) as seen:
            step()
            ms.runtime.synchronize()
            seen.step()
        file, = Path(folder).rglob("cpu_op_type_info_*.csv")
        with file.open() as lines:
            found = Counter({row["op_type"]: int(row["type_occurrences"]) for row in csv.DictReader(lines)})
    del found["InplaceCopy"]  # the emulator's, beside what it wrote in NumPy
    return found + Counter(copy=device.counts["written"]), found + device.cann


def asked(ranks: int, policy, blocks: int, fsdp: bool, joined: bool, reshard: bool = True) -> tuple[Counter, ...]:
    """Kernels, as MindSpore calls them and as CANN launches them, and collectives of a step of so many blocks, after a
    first one; `reshard`: after the forward."""
    with comm.fake_world(ranks, 0), rehearsed(clock=False) as device:
        mesh = md.init_device_mesh("npu", (ranks,), mesh_dim_names=("dp",))
        kind = ms.float32 if policy is None else policy.param_dtype
        net = nn.SequentialCell([Block(i, ms.float32 if fsdp else kind, joined) for i in range(blocks)])
        if fsdp:
            for block in net:
                md.fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard,
                               shard_placement_fn=by_parts if joined else None)
            md.fully_shard(net, mesh=mesh)  # has no parameters of its own
        else:
            md.distribute_module(net, mesh)
        step = md.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())
        x = md.DTensor.from_local(Tensor(np.ones((2, DIM), np.float32)).astype(kind), mesh, [md.Shard(0)])
        step(x)
        with comm.record() as events:
            step(x)
        return *kernels(lambda: step(x), device), Counter(f"{e.op} {e.phase}" for e in events)


@cache
def whole(policy, joined: bool) -> list[Counter]:
    """What the block itself asks."""
    return [b - a for a, b in zip(*(asked(1, policy, blocks, False, joined)[:2] for blocks in (1, 2)))]


def of_a_block(ranks: int, policy, joined: bool, reshard: bool = True) -> dict:
    """What `fully_shard` asks for one block."""
    (*one, few), (*two, more) = (asked(ranks, policy, blocks, True, joined, reshard) for blocks in (1, 2))
    added, by_cann = ({name: n for name in sorted(b) if (n := b[name] - a[name] - w[name]) > 0}
                      for a, b, w in zip(one, two, whole(policy, joined)))
    total, parameters = sum(added.values()), len(JOINED) + 2 if joined else WEIGHTS
    return {"ranks": ranks, "kernels": added, "by_cann": by_cann, "total": total, "total_by_cann": sum(by_cann.values()),
            "per_weight": round(total / WEIGHTS, 2), "parameters": parameters,
            "per_parameter": round(total / parameters, 2), "collectives": dict(sorted((more - few).items()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 128])
    parser.add_argument("--blocks", nargs="+", choices=["single", "joined"], default=["single", "joined"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    results = {}
    for kind in args.blocks:
        joined = kind == "joined"
        for name, policy in POLICIES.items():
            results[f"{kind}, {name}"] = [of_a_block(ranks, policy, joined) for ranks in args.ranks]
    text = json.dumps({"weights": WEIGHTS, "steps": results}, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
