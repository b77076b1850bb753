# SPDX-License-Identifier: Apache-2.0
"""One small Llama on many meshes against one device: twenty losses, the first step's gradients, the last parameters.

    python scripts/compare_losses.py [--worlds 1,2,4,8] [--table docs/parity.md]

The truth is the same model on plain MindSpore tensors in this process. One msrun launch per number of ranks covers all
meshes of that size. Writes the table (only when all sizes ran) and exits non-zero if a mesh is out of bounds.
"""
from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from model_zoo.llama.config import Config, ParallelConfig  # noqa: E402
from model_zoo.llama.configio import load  # noqa: E402
from model_zoo.llama.data import load_text  # noqa: E402
from model_zoo.llama.launch import Run, first_failure  # noqa: E402
from model_zoo.llama.ranks import guarded, rank, start_device, world_size  # noqa: E402

CONFIG = ROOT / "model_zoo/llama/configs/tiny.yaml"
LOSS_TOLERANCE = 1e-5  # relative; float32 sums taken in another order, over ten steps
GRAD_TOLERANCE = 2e-5  # norm of the difference over norm of the one-device gradient
PARAM_TOLERANCE = 1e-4  # the same of the parameters after all steps: AdamW divides by roots of small second moments


@dataclass(frozen=True, slots=True)
class Case:
    """A mesh and what runs on it; `vocab` 259 is divisible by no tp degree, 256 by all."""

    dp: int
    tp: int
    sequence_parallel: bool = False
    loss_parallel: bool = True
    vocab: int = 259
    tied: bool = False
    fsdp: bool = False
    hsdp: int = 1
    zero1: bool = False
    micro_batches: int = 1
    recompute: bool = False

    @property
    def name(self) -> str:
        marks = [("sequence parallel", self.sequence_parallel), ("whole logits", not self.loss_parallel),
                 ("tied head", self.tied), ("fsdp", self.fsdp), (f"{self.hsdp} copies", self.hsdp > 1),
                 ("zero1", self.zero1),
                 (f"{self.micro_batches} micro-batches", self.micro_batches > 1), ("recompute", self.recompute)]
        return f"dp={self.dp} tp={self.tp}" + "".join(f", {text}" for text, on in marks if on)

    @property
    def model(self) -> tuple[int, bool]:
        """What decides the one-device answer."""
        return self.vocab, self.tied

    def config(self) -> Config:
        cfg, _ = load(["--config", str(CONFIG)], world=1)
        parallel = ParallelConfig(self.dp, self.tp, self.sequence_parallel, self.loss_parallel, self.fsdp, self.hsdp,
                                  self.zero1)
        return replace(cfg, parallel=parallel, model=replace(cfg.model, vocab_size=self.vocab, tied_head=self.tied),
                       data=replace(cfg.data, max_bytes=300_000),
                       train=replace(cfg.train, steps=20, batch=16, micro_batches=self.micro_batches,
                                     recompute=self.recompute))


CASES = (
    Case(1, 1),
    Case(2, 1), Case(1, 2), Case(1, 2, True), Case(1, 2, True, loss_parallel=False), Case(1, 2, True, tied=True),
    Case(1, 4), Case(1, 4, True), Case(2, 2), Case(2, 2, True), Case(2, 2, True, vocab=256),
    Case(1, 8), Case(1, 8, True), Case(2, 4), Case(2, 4, True), Case(2, 4, True, vocab=256),
    *(replace(case, micro_batches=micro, recompute=again) for case in (
        Case(4, 1), Case(2, 1, fsdp=True), Case(4, 1, fsdp=True), Case(4, 1, zero1=True), Case(2, 2, True, fsdp=True),
        Case(8, 1, fsdp=True), Case(8, 1, fsdp=True, hsdp=2), Case(4, 2, True, fsdp=True))
      for micro, again in ((1, False), (2, False), (1, True))),
)


def train(case: Case, device: str, on_mesh: bool) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of all steps; by parameter name the whole gradients of the first, and after "end of" the last values."""
    from model_zoo.llama.parallelize import make_mesh
    from model_zoo.llama.trainer import Trainer

    cfg = case.config()
    mesh = make_mesh(device, cfg.parallel) if on_mesh else None
    trainer = Trainer(cfg, load_text(cfg.data, cfg.model.vocab_size, cfg.train.seq), mesh)
    losses, whole = [], {}
    for step in range(cfg.train.steps):
        loss, grads = trainer.gradients(*trainer.batch(step))
        if step == 0:
            for param, grad in zip(trainer.params, grads, strict=True):
                whole[param.name] = np.array((grad.full_tensor() if on_mesh else grad).asnumpy())
        trainer.update(grads, step)
        losses.append(float(loss))
    for param in trainer.params:
        whole[f"end of {param.name}"] = np.array((param.full_tensor() if on_mesh else param).asnumpy())
    return losses, whole


def rank_side(folder: Path) -> None:
    """On a rank: all cases of this world size; rank 0 leaves the answers in `folder`."""
    device = start_device()
    for number, case in enumerate(CASES):
        if case.dp * case.tp != world_size():
            continue
        losses, grads = train(case, device, on_mesh=True)
        if rank() == 0:
            np.savez(folder / f"{number}.npz", **grads)
            (folder / f"{number}.json").write_text(json.dumps(losses))
            print(f"{case.name}: {losses[0]:.6f} .. {losses[-1]:.6f}", flush=True)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """|a - b| / |b| in double precision; infinite for what is not finite."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
    return float(error) if np.isfinite(error) else float("inf")


def judge(case: Case, folder: Path, number: int, truth) -> dict:
    losses, grads = json.loads((folder / f"{number}.json").read_text()), dict(np.load(folder / f"{number}.npz"))
    want_losses, want_grads = truth
    if grads.keys() != want_grads.keys():
        raise SystemExit(f"{case.name}: other parameters than one device: {grads.keys() ^ want_grads.keys()}")
    loss = max((relative(a, b) for a, b in zip(losses, want_losses, strict=True)))
    errors = {name: relative(grads[name], want) if grads[name].shape == want.shape else float("inf")
              for name, want in want_grads.items()}
    end = max(error for name, error in errors.items() if name.startswith("end of "))
    worst = max((name for name in errors if not name.startswith("end of ")), key=errors.__getitem__)
    return {"case": case, "loss": loss, "grad": errors[worst], "worst": worst, "end": end, "first": losses[0],
            "last": losses[-1],
            "ok": loss <= LOSS_TOLERANCE and errors[worst] <= GRAD_TOLERANCE and end <= PARAM_TOLERANCE}


def table(rows: list[dict]) -> str:
    import mindspore as ms

    cfg = CASES[0].config()
    m, t = cfg.model, cfg.train
    head = f"""# Parity with one device

Written by `python scripts/compare_losses.py`. One small Llama is trained on one device with plain MindSpore tensors,
and on each mesh below: {t.steps} steps of {t.batch} x {t.seq} tokens, dim {m.dim}, {m.n_layers} layers, {m.n_heads} \
query and {m.n_kv_heads} key heads, float32, AdamW with
warm-up, cosine decay and clipping. A vocabulary of 259 is divisible by no tp degree.

Bounds: loss within {LOSS_TOLERANCE:g} relative at each step; each parameter's gradient at the first step within \
{GRAD_TOLERANCE:g} of
the one-device gradient, in relative norm; each parameter after the last step within {PARAM_TOLERANCE:g}. MindSpore \
{ms.__version__}, CPU.

| ranks | mesh | vocabulary | first loss | last loss | max loss difference | max gradient difference | of | max parameter \
difference | within |
|--:|---|--:|--:|--:|--:|--:|---|--:|---|
"""
    lines = []
    for row in rows:
        case, within = row["case"], "yes" if row["ok"] else "**no**"
        lines.append(f"| {case.dp * case.tp} | {case.name} | {case.vocab} | {row['first']:.6f} | {row['last']:.6f} | "
                     f"{row['loss']:.1e} | {row['grad']:.1e} | `{row['worst']}` | {row['end']:.1e} | {within} |")
    return head + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="1,2,4,8", help="numbers of ranks to run")
    parser.add_argument("--table", type=Path, default=ROOT / "docs/parity.md")
    parser.add_argument("--answers", type=Path, help=argparse.SUPPRESS)  # given to the ranks
    options = parser.parse_args()
    if options.answers:
        return guarded(lambda: rank_side(options.answers))
    worlds = [int(w) for w in options.worlds.split(",")]
    device = start_device()
    cases = [(number, case) for number, case in enumerate(CASES) if case.dp * case.tp in worlds]
    truth = {case.model: None for _, case in cases}
    for _, case in cases:
        truth[case.model] = truth[case.model] or train(case, device, on_mesh=False)
    rows = []
    with tempfile.TemporaryDirectory(prefix="ms_dtensor_losses_") as name:
        folder = Path(name)
        for world in worlds:
            start = time.perf_counter()
            if Run(Path(__file__).resolve(), world, folder, ["--answers", name], show=False).wait():
                raise SystemExit(f"{world} ranks: {first_failure(folder)}")
            print(f"{world} ranks: {time.perf_counter() - start:.0f} s")
            for number, case in cases:
                if case.dp * case.tp == world:
                    row = judge(case, folder, number, truth[case.model])
                    rows.append(row)
                    print(f"  {'ok  ' if row['ok'] else 'FAIL'} {case.name:<36} vocabulary {case.vocab}  "
                          f"loss {row['loss']:.1e}  gradient {row['grad']:.1e} ({row['worst']})  "
                          f"parameters {row['end']:.1e}", flush=True)
    if {case.dp * case.tp for case in CASES} <= set(worlds):
        options.table.parent.mkdir(exist_ok=True)
        options.table.write_text(table(rows), encoding="utf-8")
        print(f"table written to {options.table}")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
