# SPDX-License-Identifier: Apache-2.0
"""How much of a block's tensor-parallel communication has computation to hide behind, on the emulator's two clocks.

    python scripts/bench/overlap.py [--config FILE.yaml] [--pieces 1 2 4 8] [--ranks 8] [--seq 8192] [--machine 910b]

The step runs as rank 0 of a fake world over the emulator of `tests/rehearsal`, with all sizes of the configuration divided
by `SCALE`, and clocks that are as much slower: so each product and each collective takes the seconds that the machine's file
says of the real size. A block's share is that of three layers less that of one. Nothing is predicted of a whole step.
"""
from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402

from model_zoo.llama.configio import load  # noqa: E402
from model_zoo.llama.trainer import Trainer  # noqa: E402
from ms_dtensor import comm, init_device_mesh  # noqa: E402
from ms_dtensor.debug.predict import Hardware, load_hardware  # noqa: E402
from tests.rehearsal.session import rehearsed  # noqa: E402
from tests.rehearsal.tables import Rates  # noqa: E402

CONFIGS = ROOT / "model_zoo/llama/configs"
SCALE = 8  # of widths and of tokens; more would make heads that the fused kernel has not
PRODUCT = 64e9  # operations of a product whose share of the peak is taken for all


def rates(machine: Hardware, ranks: int) -> Rates:
    """Clocks for sizes divided by `SCALE`."""
    link = machine.link(ranks)
    bytes_as = 1 / SCALE**2
    matrix, memory = PRODUCT / machine.matrix.seconds(PRODUCT), 1e8 / machine.memory.seconds(1e8)
    return Rates(wire=link.bandwidth * bytes_as, saved=memory * bytes_as, latency=link.latency, flops=matrix / SCALE**3)


def measured(config: Path, pieces: str, ranks: int, seq: int, machine: Hardware, layers: int) -> tuple[float, float, int]:
    """Seconds of the communication over tp in a step, those that computation stood still for it, and how many calls."""
    cfg = load(["--config", str(config), "--parallel.dp", "1", "--parallel.tp", str(ranks), "--parallel.sequence_parallel",
                "true", "--parallel.tp_overlap", pieces, "--parallel.fsdp", "false", "--train.recompute", "false",
                "--train.batch", "1", "--train.micro_batches", "1"], ranks)[0]
    m = cfg.model
    cfg = replace(cfg, model=replace(m, dim=m.dim // SCALE, ffn_dim=m.ffn_dim // SCALE, vocab_size=512, n_layers=layers),
                  train=replace(cfg.train, seq=seq // SCALE, dtype="bfloat16", steps=10))
    rows = np.random.default_rng(0).integers(0, 512, (1, cfg.train.seq + 1)).astype(np.int32)
    with comm.fake_world(ranks), rehearsed(rates=rates(machine, ranks)) as device:
        trainer = Trainer(cfg, None, init_device_mesh("npu", (1, ranks), mesh_dim_names=("dp", "tp")))
        trainer.batch = lambda _: (rows[:, :-1], rows[:, 1:])
        trainer.step(0)
        device.times.clear()
        trainer.step(1)
        ms.runtime.synchronize()
        moved = [t for t in device.times if len(device.comms[t[1]]) == ranks and t[0] != "all_reduce"]
    return sum(t[2] for t in moved), sum(t[3] for t in moved), len(moved)


def hidden(config: Path, pieces: str, ranks: int, seq: int, machine: Hardware) -> dict:
    """Of one block."""
    (a, still_a, calls_a), (b, still_b, calls_b) = (measured(config, pieces, ranks, seq, machine, n) for n in (1, 3))
    return {"config": config.name, "pieces": pieces, "collectives": (calls_b - calls_a) // 2,
            "ms": round(500 * (b - a), 2), "exposed ms": round(500 * (still_b - still_a), 2),
            "hidden": round(1 - (still_b - still_a) / (b - a), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, nargs="+", default=[CONFIGS / "llama3_8b.yaml", CONFIGS / "llama3_70b.yaml"])
    parser.add_argument("--pieces", nargs="+", default=["1", "2", "4", "8", "16"])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--machine", default="910b")
    args = parser.parse_args()
    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    machine = load_hardware(args.machine)
    print(json.dumps([hidden(config, pieces, args.ranks, args.seq, machine)
                      for config in args.config for pieces in args.pieces], indent=1))


if __name__ == "__main__":
    main()
