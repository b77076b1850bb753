# SPDX-License-Identifier: Apache-2.0
"""What a training step of the 8B configuration would ask of an Ascend node, counted on one process without a card.

    python scripts/bench/rehearse_counts.py [--out FILE] [--layers N]

The step runs as rank 0 of `fake_world(8)` over the emulator of `tests/rehearsal`, with the configuration's layers, heads and
layout but small widths; in the last of three, `fully_shard` cuts it over 8. Counted: kernels that a collective launches,
those that take parameters out of what was gathered too; bytes that its packing writes; lines where the host waits or copies
values to the device (those of `ops/local/attention.py` are of the fused kernel's stand-in); and the share of the gradient
reduction that the logical clocks see behind computation. These clocks' ratio is not measured but stated: how long a step's
backward takes, over its reduction. No speed is predicted.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402

from model_zoo.llama.configio import load  # noqa: E402
from model_zoo.llama.trainer import Trainer  # noqa: E402
from ms_dtensor import comm, init_device_mesh  # noqa: E402
from ms_dtensor.parallel.sharding.reduce import Reduction  # noqa: E402
from ms_dtensor.tools.guard import Diverged  # noqa: E402
from tests.rehearsal.session import rehearsed  # noqa: E402
from tests.rehearsal.tables import Rates  # noqa: E402

CONFIG = ROOT / "model_zoo/llama/configs/llama3_8b.yaml"
BUCKET_MB = 25.0  # of `replicate`
RATIO = 1.5  # backward over reduction: 4 x params x 16384 tokens / 4 at 200 TFLOPS against 8 GB at 18 GB/s is 1.5


def small(dp: int, tp: int, layers: int | None, fsdp: bool):
    """The configuration with its heads and layout, and small widths; and how much smaller its layers' weights are."""
    cfg = load(["--config", str(CONFIG)], 8)[0]
    m = cfg.model
    model = replace(m, dim=16 * m.n_heads, ffn_dim=256, vocab_size=512, n_layers=layers or m.n_layers)
    micro = cfg.train.micro_batches if dp == 1 else 1  # each micro-batch reduces its gradients
    train = replace(cfg.train, batch=2 * dp * micro, micro_batches=micro, seq=16, dtype="bfloat16", steps=10)
    return replace(cfg, model=model, parallel=replace(cfg.parallel, dp=dp, tp=tp, fsdp=fsdp), train=train), \
        sizes(model) / sizes(replace(m, n_layers=model.n_layers))


def sizes(m) -> int:
    return m.n_layers * (2 * m.dim * m.dim + 2 * m.dim * m.dim * m.n_kv_heads // m.n_heads + 3 * m.dim * m.ffn_dim) \
        + 2 * m.vocab_size * m.dim


def by_line(sites: list[str]) -> dict[str, int]:
    """How often each line was met."""
    return dict(Counter(sorted(str(Path(s).relative_to(ROOT)) if s.startswith(str(ROOT)) else s for s in sites)))


def done(trainer: Trainer, number: int) -> None:
    """A step, whatever its numbers: a fake world's sums grow with each layer, for which the guard would stop it."""
    with suppress(Diverged):  # it is asked behind the update
        trainer.step(number)


def step(dp: int, tp: int, layers: int | None, rates: Rates, fsdp: bool = False):
    """The second step's counts, and the seconds of backward and of gradient reduction."""
    cfg, smaller = small(dp, tp, layers, fsdp)
    rows = np.random.default_rng(0).integers(0, cfg.model.vocab_size, (cfg.train.batch, 17)).astype(np.int32)
    make_buckets = Reduction._make_buckets

    def as_many(self):  # as the real sizes make
        self.unit.bucket_mb *= smaller
        make_buckets(self)
    Reduction._make_buckets = as_many
    try:
        with comm.fake_world(8), rehearsed(rates=rates) as device:
            trainer = Trainer(cfg, None, init_device_mesh("npu", (dp, tp), mesh_dim_names=("dp", "tp")))
            trainer.batch = lambda _: (rows[:, :-1], rows[:, 1:])
            done(trainer, 0)
            for kept in (device.counts, device.syncs, device.uploads, device.times, device.calls):
                kept.clear()
            before = device.compute
            done(trainer, 1)
            waits, uploads = list(device.syncs), list(device.uploads)
            ms.runtime.synchronize()
            names = Counter(c[0] for c in device.calls)
            dp_comm = next((name for name, ranks in device.comms.items() if len(ranks) == dp and name != "world"), "world")
            reductions = [t for t in device.times if t[0] == "all_reduce" and t[1] == dp_comm] if dp > 1 else []
    finally:
        Reduction._make_buckets = make_buckets
    still = sum(t[3] for t in device.times)
    launches, kernels = device.counts["launches"], device.counts["kernels"]
    return {
        "mesh": {"dp": dp, "tp": tp}, "fsdp": fsdp, "layers": cfg.model.n_layers, "collectives": dict(sorted(names.items())),
        "kernels_per_collective": round((launches + kernels) / launches, 2), "bytes_packed": device.counts["copied"],
        "host_waits": by_line(waits), "host_to_device": by_line(uploads),
        "gradient_reductions": len(reductions),
        "overlapped": round(1 - sum(t[3] for t in reductions) / sum(t[2] for t in reductions), 4) if reductions else None,
    }, device.compute - before - still, sum(t[2] for t in reductions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int)
    args = parser.parse_args()
    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    results = [step(1, 8, args.layers, Rates())[0]]
    base = Rates(latency=1e-9)
    _, computed, reduced = step(2, 4, args.layers, base)
    # a backward is about two thirds of a step's computation
    rates = replace(base, saved=base.saved * computed * (2 / 3) / (RATIO * reduced))
    results.append(step(2, 4, args.layers, rates)[0])
    results.append(step(8, 1, args.layers, Rates(), fsdp=True)[0])
    text = json.dumps({"config": CONFIG.name, "backward_over_reduction": RATIO, "steps": results}, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
