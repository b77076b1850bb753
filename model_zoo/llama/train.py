# SPDX-License-Identifier: Apache-2.0
"""Trains a Llama: one process, or many ranks under msrun.

    python model_zoo/llama/train.py --config model_zoo/llama/configs/tiny.yaml
    msrun --worker_num=8 --local_worker_num=8 --join=True model_zoo/llama/train.py \
        --config model_zoo/llama/configs/quickstart.yaml --train.steps 20

`launch.py` beside it wraps the second form. Rank 0 prints one line a step and writes `metrics.jsonl` and the resolved
`config.yaml` to `train.log_dir`. A bad configuration is refused before MindSpore starts, alike on every rank.
"""
from __future__ import annotations

import json
import sys
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a script: make the repository root importable, and not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from model_zoo.llama.ranks import guarded, start_device, world_size


class Reporter:
    """Rank 0's lines on the terminal and in `metrics.jsonl`; silent elsewhere."""

    def __init__(self, log_dir: Path, steps: int, speaks: bool):
        self.steps, self.speaks = steps, speaks
        if speaks:
            log_dir.mkdir(parents=True, exist_ok=True)
            self.file = open(log_dir / "metrics.jsonl", "w", encoding="utf-8")

    def say(self, line: str) -> None:
        if self.speaks:
            print(line, flush=True)

    def record(self, **values) -> None:
        if self.speaks:
            self.file.write(json.dumps(values) + "\n")
            self.file.flush()

    def heading(self) -> None:
        self.say(f"{'step':>9}  {'loss':>8}  {'grad norm':>9}  {'lr':>9}  {'ms':>7}  {'tokens/s':>9}")

    def step(self, step: int, result, seconds: float, tokens: int) -> None:
        self.say(f"{step + 1:>4}/{self.steps:<4}  {result.loss:8.4f}  {result.grad_norm:9.4f}  {result.lr:9.2e}  "
                 f"{seconds * 1e3:7.0f}  {tokens / seconds:9.0f}")
        self.record(step=step + 1, loss=result.loss, grad_norm=result.grad_norm, lr=result.lr,
                    ms=seconds * 1e3, tokens_per_s=tokens / seconds)

    def held_out(self, step: int, loss: float) -> None:
        self.say(f"held-out loss at step {step}: {loss:.4f}")
        self.record(step=step, held_out_loss=loss)


def run(argv: list[str]) -> None:
    from model_zoo.llama.configio import dump, load
    from model_zoo.llama.data import load_text

    world = world_size()
    cfg, show = load(argv, world)
    if show:
        print(dump(cfg), end="")
        return
    text = load_text(cfg.data, cfg.model.vocab_size, cfg.train.seq)

    device = start_device()  # MindSpore is imported from here on

    from model_zoo.llama.parallelize import make_mesh
    from model_zoo.llama.trainer import Trainer

    p, t = cfg.parallel, cfg.train
    mesh = make_mesh(device, p) if world > 1 or t.dtype != "float32" else None
    log_dir = Path(t.log_dir)
    report = Reporter(log_dir, t.steps, mesh is None or mesh.get_rank() == 0)
    if report.speaks:
        (log_dir / "config.yaml").write_text(dump(cfg), encoding="utf-8")
    trainer = Trainer(cfg, text, mesh)
    weights = sum(int(x.size) for x in trainer.model.trainable_params())
    report.say(f"{weights / 1e6:.2f} M parameters on {world} {'ranks' if world > 1 else 'rank'}: dp={p.dp} tp={p.tp}"
               f"{' sequence-parallel' if p.sequence_parallel and p.tp > 1 else ''}"
               f"{' fsdp' if p.fsdp else ' zero1' if p.zero1 else ''}{f' hsdp={p.hsdp}' if p.hsdp > 1 else ''}; "
               f"{t.batch} x {t.seq} tokens a step; log in {log_dir}")
    report.held_out(0, trainer.held_out_loss())
    report.heading()
    for step in range(t.steps):
        start = time.perf_counter()
        result = trainer.step(step)
        report.step(step, result, time.perf_counter() - start, t.batch * t.seq)
        if t.eval_every and (step + 1) % t.eval_every == 0 and step + 1 < t.steps:
            report.held_out(step + 1, trainer.held_out_loss())
    report.held_out(t.steps, trainer.held_out_loss())


if __name__ == "__main__":
    sys.exit(guarded(lambda: run(sys.argv[1:])))
