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

from model_zoo.llama.ranks import guarded, leave, start_device, world_size


class Reporter:
    """Rank 0's lines on the terminal and in `metrics.jsonl`; silent elsewhere."""

    def __init__(self, log_dir: Path, steps: int, speaks: bool):
        self.steps, self.speaks, self.path = steps, speaks, log_dir / "metrics.jsonl"
        if speaks:
            log_dir.mkdir(parents=True, exist_ok=True)

    def begin(self, step: int) -> None:
        """Begins the file; of an earlier run that is gone on with, the lines up to this step stay."""
        if self.speaks:
            kept = self.path.read_text("utf-8").splitlines(True) if step and self.path.exists() else []
            kept = [line for line in kept if line.endswith("}\n") and json.loads(line)["step"] <= step]
            self.path.write_text("".join(kept), "utf-8")

    def say(self, line: str) -> None:
        if self.speaks:
            print(line, flush=True)

    def record(self, **values) -> None:
        if self.speaks:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")

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
    saver, done = None, 0
    if cfg.checkpoint.interval or cfg.checkpoint.resume:
        saver, done = checkpoints(cfg, trainer, log_dir)
    report.begin(done)
    weights = sum(int(x.size) for x in trainer.model.trainable_params())
    report.say(f"{weights / 1e6:.2f} M parameters on {world} {'ranks' if world > 1 else 'rank'}: dp={p.dp} tp={p.tp}"
               f"{' sequence-parallel' if p.sequence_parallel and p.tp > 1 else ''}"
               f"{' fsdp' if p.fsdp else ' zero1' if p.zero1 else ''}{f' hsdp={p.hsdp}' if p.hsdp > 1 else ''}; "
               f"{t.batch} x {t.seq} tokens a step; log in {log_dir}")
    if done:
        report.say(f"going on after step {done}")
    report.held_out(done, trainer.held_out_loss())
    report.heading()
    for step in range(done, t.steps):
        start = time.perf_counter()
        result = trainer.step(step)
        report.step(step, result, time.perf_counter() - start, t.batch * t.seq)
        if t.eval_every and (step + 1) % t.eval_every == 0 and step + 1 < t.steps:
            report.held_out(step + 1, trainer.held_out_loss())
        if saver is not None and saver.after(step + 1):
            saver.finish()
            report.say(f"ended by SIGTERM after step {step + 1}, which is saved")
            return
    if saver is not None:
        saver.finish()
    report.held_out(t.steps, trainer.held_out_loss())


def checkpoints(cfg, trainer, log_dir: Path):
    """What saves the run, and how many steps of it have been done."""
    from ms_dtensor.checkpoint import Checkpointer
    from ms_dtensor.errors import ConfigError

    c, state = cfg.checkpoint, trainer.state()
    stream = dict(state["data"])
    saver = Checkpointer(state, c.dir or log_dir / "checkpoints", interval=c.interval or None, keep_last=c.keep_last,
                         async_save=c.async_save, on_sigterm=c.on_sigterm)
    done = saver.begin(c.resume)
    unlike = [key for key in stream if stream[key] != state["data"][key]]
    if unlike:
        raise ConfigError(f"For the configuration, the data are not those of the checkpoint: '{unlike[0]}' differs.",
                          f"{state['data']} there, {stream} here", "The stream of batches goes on where it stopped.",
                          ["the run's own settings", "--train.init_hf to begin a new run with its weights"])
    return saver, done


if __name__ == "__main__":
    leave(guarded(lambda: run(sys.argv[1:])))
