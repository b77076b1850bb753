# SPDX-License-Identifier: Apache-2.0
"""What share of an Ascend's peak a configuration would reach: a dry run's events on a machine's figures, beside the host's.

    python scripts/bench/mfu.py [--config FILE.yaml] [--machine 910b | FILE.yaml] [--slower 2.2]

Nothing is measured on a device. A layer's time there is that of four layers less that of two, of the recipe's own step in a
dry run, priced by the machine's file, which says where its figures are from; one of measured figures is written by
`scripts/ascend_first.sh` on a node, and is the only input then: `--machine FILE`. The host's time is what is counted in the
same runs, operations and collectives, forward and backward, times what one costs the processor by that file, or where it
does not say, measured here (`--host` prints it, for the file), and as operations the kernels by which `fully_shard` packs a
Llama's layer, as `fsdp_kernels.py` counts them; `slower`: the same on a core so many times slower. A step takes the longer
of the two. Not in it: that these kernels move what is gathered and reduced through the device's memory once more.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402

import ms_dtensor as md  # noqa: E402
from model_zoo.llama.config import Config, joins  # noqa: E402
from model_zoo.llama.configio import load  # noqa: E402
from model_zoo.llama.dry import dry_step  # noqa: E402
from model_zoo.llama.flops import flops_per_token  # noqa: E402
from model_zoo.llama.memory import per_rank  # noqa: E402
from ms_dtensor.debug.predict import Hardware, load_hardware, timeline  # noqa: E402
from ms_dtensor.debug.predict.timeline import WITHIN  # noqa: E402
from scripts.bench.fsdp_kernels import POLICIES, of_a_block  # noqa: E402

SEQ = ["--train.seq", "8192", "--train.micro_batches", "1"]
TP8 = ["--parallel.tp", "8", "--parallel.sequence_parallel", "true", *SEQ]
FSDP = ["--parallel.tp", "1", "--parallel.dp", "8", "--parallel.fsdp", "true", "--parallel.sequence_parallel", "false",
        "--train.batch", "8", *SEQ]
ROWS = {"tp8": (8, ["--parallel.dp", "1", "--train.batch", "1", *TP8]),
        "tp8, in 4 pieces": (8, ["--parallel.dp", "1", "--train.batch", "1", "--parallel.tp_overlap", "4", *TP8]),
        "tp8, in 8 pieces": (8, ["--parallel.dp", "1", "--train.batch", "1", "--parallel.tp_overlap", "8", *TP8]),
        "fsdp8, recomputed": (8, [*FSDP, "--train.recompute", "true"]),
        "fsdp8, recomputed but for 5 GiB": (8, [*FSDP, "--train.recompute", "true", "--train.recompute_gib", "5"]),
        "zero1 on 8, recomputed": (8, [*FSDP, "--parallel.fsdp", "false", "--parallel.zero1", "true", "--train.recompute",
                                       "true"]),
        "fsdp8": (8, [*FSDP, "--train.recompute", "false"]),
        "tp8 x fsdp64": (512, ["--parallel.dp", "64", "--parallel.fsdp", "true", "--train.batch", "64", *TP8])}


def host() -> dict[str, float]:
    """Microseconds of this processor for an operation on DTensors and for a collective, forward and backward each."""
    with md.comm.fake_world(8):
        mesh = md.init_device_mesh("cpu", (8,), mesh_dim_names=("x",))
        x = md.DTensor.from_local(ms.Tensor(np.ones((2, 8), np.float32)), mesh, [md.Shard(0)])

        def ops(n: int):
            return md.value_and_grad(lambda a: chain(a, n, ms.mint.tanh).sum())  # one kernel forward, and one backward

        def moves(n: int):
            return md.value_and_grad(lambda a: chain(a, n, there_and_back).sum())

        def took(run) -> float:  # of this thread alone: MindSpore's others spin now and then, other processes may be busy
            start = time.thread_time()
            run(x)
            return 1e6 * (time.thread_time() - start)

        def each(make, many: int) -> float:
            few, more = make(2), make(2 + many)
            return (min(took(more) for _ in range(30)) - min(took(few) for _ in range(30))) / many / 2
        return {"op": each(ops, 32), "collective": each(moves, 32)}


def there_and_back(x):
    """An all-gather, and backward its reduce-scatter; the way back is none of either."""
    return x.redistribute(placements=[md.Replicate()]).redistribute(placements=[md.Shard(0)])


def chain(x, n: int, step):
    for _ in range(n):
        x = step(x)
    return x


class Counted(NamedTuple):
    """What dry runs say of a layout: seconds of a layer, of what it sends, those in which it waits, of all else; and how
    much it asks for. `packed`: kernels of `fully_shard`, which a dry run does not see.
    """

    cfg: Config
    world: int
    layer: float
    sent: float
    still: float
    rest: float
    ops: float
    moves: float
    packed: int


def counted(config: Path, name: str, machine: Hardware) -> Counted:
    """Of a step of four layers and of two."""
    world, options = ROWS[name]
    cfg = load(["--config", str(config), *options], world)[0]
    steps = []
    for layers in (2, 4):
        with redirect_stdout(sys.stderr):
            kept = cfg.train.recompute_gib * layers / cfg.model.n_layers
            fewer = replace(cfg, model=replace(cfg.model, n_layers=layers), train=replace(cfg.train, recompute_gib=kept))
            run = dry_step(fewer, world, device="Ascend")
        line, moves = timeline(run.events, machine), sum(e.is_move for e in run.events)
        sent = sum(end - begin for e, begin, end in zip(run.events, line.begin, line.end) if e.is_move)
        ops = sum(not e.is_move and e.op not in WITHIN for e in run.events)
        steps.append((line.seconds, sent, sum(line.waits.values()), ops, moves))
    layer, sent, still, ops, moves = ((more - few) / 2 for few, more in zip(*steps))
    return Counted(cfg, world, layer, sent, max(0.0, still), steps[0][0] - 2 * layer, ops, moves, packing(cfg))


def packing(cfg: Config) -> int:
    """Kernels by which `fully_shard` packs a layer, of as many ranks of data parallelism; ZeRO-1 is it, too."""
    p = cfg.parallel
    if not (p.fsdp or p.zero1):
        return 0
    policy = POLICIES["bfloat16, gradients added up in float32" if cfg.train.dtype == "bfloat16" else "float32"]
    with redirect_stdout(sys.stderr):  # MindSpore's profiler talks
        return sum(of_a_block(p.dp // p.hsdp, policy, joins(cfg), reshard=p.fsdp)["kernels"].values())


def row(name: str, of: Counted, machine: Hardware, costs: dict[str, float], slower: float) -> dict:
    """A layout's line of the table."""
    cfg, needed = of.cfg, sum(per_rank(of.cfg).values())
    asked = ((of.ops + of.packed) * costs["op"] + of.moves * costs["collective"]) * 1e-6
    tokens = cfg.train.batch * cfg.train.seq / of.world
    made = {"layout": name, "operations a layer": of.ops + of.packed, "collectives a layer": of.moves,
            "device ms a layer": round(1e3 * of.layer, 1), "exposed ms": round(1e3 * of.still, 1),
            "hidden": round(1 - of.still / of.sent, 3),
            "GiB": round(needed / 2**30, 1), "fits": needed <= machine.capacity}
    for which, factor in (("here", 1.0), ("slower", slower)):
        step = of.rest + cfg.model.n_layers * max(of.layer, asked * factor)
        made |= {f"host ms a layer, {which}": round(1e3 * asked * factor, 1), f"tokens/s, {which}": round(tokens / step),
                 f"MFU, {which}": round(tokens / step * flops_per_token(cfg.model, cfg.train.seq) / machine.matrix.peak, 3)}
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, default=ROOT / "model_zoo/llama/configs/llama3_8b.yaml")
    parser.add_argument("--machine", default="910b")
    parser.add_argument("--slower", type=float, default=2.2)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--host", action="store_true", help="measures only what the host is asked")
    args = parser.parse_args()
    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    if args.host:
        print(json.dumps(host()))
        return
    machine = load_hardware(args.machine)
    costs = {what: 1e6 * seconds for what, seconds in machine.asking.items()} or host()
    print(json.dumps({"source": machine.source, "host us": {k: round(v, 1) for k, v in costs.items()}, "slower": args.slower,
                      "rows": [row(name, counted(args.config, name, machine), machine, costs, args.slower)
                               for name in args.rows]}, indent=1))


if __name__ == "__main__":
    main()
