# SPDX-License-Identifier: Apache-2.0
"""One small Llama on many meshes against one device: twenty losses, the first step's gradients, the last parameters.

    python model_zoo/llama/tools/compare_losses.py [--worlds 1,2,4,8] [--only REGEX] [--table docs/parity.md]
        [--keep FOLDER] [--rehearse]

The reference is the same model on plain MindSpore tensors in this process (in bfloat16, which a CPU does not know on these,
on a mesh of one rank). One msrun launch per number of ranks covers all meshes of that size. Exits non-zero if a mesh is out
of bounds. Writes the table when all meshes ran; `--keep` collects the rows of several shorter runs for that.
`--rehearse` runs the same meshes on the library's Ascend branch over the emulator of `tests/rehearsal`, and writes no table.
"""
from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(ROOT)

from model_zoo.llama.config import Config, ParallelConfig  # noqa: E402
from model_zoo.llama.configio import load  # noqa: E402
from model_zoo.llama.data import load_text  # noqa: E402
from model_zoo.llama.launch import Run, first_failure  # noqa: E402
from ms_dtensor.tools.ranks import guarded, rank, start_device, world_size  # noqa: E402

CONFIG = ROOT / "model_zoo/llama/configs/tiny.yaml"
LOSS_TOLERANCE = 1e-5  # relative; float32 sums taken in another order, over ten steps
GRAD_TOLERANCE = 2e-5  # norm of the difference over norm of the one-device gradient
PARAM_TOLERANCE = 1e-4  # the same of the parameters after all steps: AdamW divides by roots of small second moments
# bfloat16 has 8 bits: where a sum is cut differently each number may round the other way, by 4e-3 of itself
BF16_TOLERANCES = 1e-3, 1e-2, 2e-2


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
    bfloat16: bool = False
    pp: int = 1
    schedule: str = "1f1b"
    joined: bool = False

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def name(self) -> str:
        marks = [("sequence parallel", self.sequence_parallel), ("whole logits", not self.loss_parallel),
                 ("tied head", self.tied), ("fsdp", self.fsdp), (f"{self.hsdp} copies", self.hsdp > 1),
                 ("zero1", self.zero1),
                 (f"{self.micro_batches} micro-batches", self.micro_batches > 1), ("recompute", self.recompute),
                 ("bfloat16", self.bfloat16), ("joined", self.joined)]
        stages = f"pp={self.pp} {self.schedule} " if self.pp > 1 else ""
        return f"{stages}dp={self.dp} tp={self.tp}" + "".join(f", {text}" for text, on in marks if on)

    @property
    def model(self) -> tuple[int, bool, bool]:
        """What decides the one-device answer."""
        return self.vocab, self.tied, self.bfloat16

    @property
    def bounds(self) -> tuple[float, float, float]:
        """Of losses, of the first gradients, of the last parameters."""
        return BF16_TOLERANCES if self.bfloat16 else (LOSS_TOLERANCE, GRAD_TOLERANCE, PARAM_TOLERANCE)

    def config(self) -> Config:
        cfg, _ = load(["--config", str(CONFIG)], world=1)
        parallel = ParallelConfig(dp=self.dp, tp=self.tp, sequence_parallel=self.sequence_parallel,
                                  loss_parallel=self.loss_parallel, fsdp=self.fsdp, hsdp=self.hsdp, zero1=self.zero1,
                                  pp=self.pp, pp_schedule=self.schedule,
                                  pp_stages_per_rank=1 + (self.schedule == "interleaved"))
        return replace(cfg, parallel=parallel, model=replace(cfg.model, vocab_size=self.vocab, tied_head=self.tied),
                       data=replace(cfg.data, max_bytes=300_000),
                       train=replace(cfg.train, steps=20, batch=16, micro_batches=self.micro_batches, qkv_concat=self.joined,
                                     recompute=self.recompute, dtype="bfloat16" if self.bfloat16 else "float32"))


CASES = (
    Case(1, 1),
    Case(2, 1), Case(1, 2), Case(1, 2, True), Case(1, 2, True, loss_parallel=False), Case(1, 2, True, tied=True),
    Case(1, 4), Case(1, 4, True), Case(2, 2), Case(2, 2, True), Case(2, 2, True, vocab=256),
    Case(1, 8), Case(1, 8, True), Case(2, 4), Case(2, 4, True), Case(2, 4, True, vocab=256),
    *(replace(case, micro_batches=micro, recompute=again) for case in (
        Case(4, 1), Case(2, 1, fsdp=True), Case(4, 1, fsdp=True), Case(4, 1, zero1=True), Case(2, 2, True, fsdp=True),
        Case(8, 1, fsdp=True), Case(8, 1, fsdp=True, hsdp=2), Case(4, 2, True, fsdp=True))
      for micro, again in ((1, False), (2, False), (1, True))),
    Case(1, 1, pp=2, micro_batches=4), Case(1, 1, pp=2, micro_batches=4, schedule="gpipe", tied=True),
    Case(1, 1, pp=2, micro_batches=4, schedule="interleaved"), Case(1, 1, pp=4, micro_batches=8),
    Case(1, 2, True, pp=2, micro_batches=4), Case(2, 1, fsdp=True, pp=2, micro_batches=4, recompute=True),
    *(replace(case, bfloat16=True) for case in (
        Case(2, 1), Case(2, 1, fsdp=True), Case(4, 1), Case(4, 1, fsdp=True), Case(4, 1, fsdp=True, micro_batches=2),
        Case(4, 1, zero1=True), Case(2, 2, True, fsdp=True))),
    *(replace(case, joined=True) for case in (
        Case(1, 2, True), Case(2, 1, fsdp=True), Case(2, 1, zero1=True), Case(1, 1, pp=2, micro_batches=4),
        Case(4, 1, fsdp=True), Case(4, 1, zero1=True), Case(2, 2, True, fsdp=True, micro_batches=2, recompute=True),
        Case(4, 1, fsdp=True, bfloat16=True))),
)


def train(case: Case, device: str, on_mesh: bool) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of all steps; by parameter name the whole gradients of the first, and after "end of" the last values."""
    from model_zoo.llama.parallelize import make_mesh
    from model_zoo.llama.trainer import Trainer

    cfg = case.config()
    if not on_mesh:
        cfg = replace(cfg, parallel=ParallelConfig(),
                      train=replace(cfg.train, micro_batches=1, recompute=False, qkv_concat=False))
    mesh = make_mesh(device, cfg.parallel) if on_mesh or case.bfloat16 else None
    trainer = Trainer(cfg, load_text(cfg.data, cfg.model.vocab_size, cfg.train.seq), mesh)

    def by_name(values) -> dict[str, np.ndarray]:
        """Whole values, those of joined weights by the names of single ones."""
        out: dict[str, np.ndarray] = {}
        for param, value in zip(trainer.params, values, strict=True):
            array = np.array((value.full_tensor() if mesh is not None else value).asnumpy())
            rows = trainer.joined.get(param.name, {param.name: len(array)})
            out |= zip(rows, np.split(array, np.cumsum([*rows.values()])[:-1]))
        return out
    losses, whole = [], {}
    for step in range(cfg.train.steps):
        loss, grads = trainer.gradients(*trainer.batch(step))
        if step == 0:
            whole |= by_name(grads)
        trainer.update(grads, step)
        losses.append(float(loss))
    return losses, whole | {f"end of {name}": value for name, value in by_name(trainer.params).items()}


@contextmanager
def as_device(rehearse: bool):
    """The device's name. A rehearsal's model keeps its float32 form for CPU, as fused attention takes 16 bits only."""
    device = start_device()
    if not rehearse:
        yield device
        return
    from model_zoo.llama import model, parallelize, trainer
    from ms_dtensor import comm
    from tests.rehearsal.session import rehearsed
    comm.start(device)
    for module in (model, parallelize, trainer):
        module.on_cpu = lambda: True
    with rehearsed(clock=False):
        yield "npu"


def rank_side(folder: Path, only: str, rehearse: bool) -> None:
    """On a rank: all cases of this world size; rank 0 leaves the answers in `folder`."""
    with as_device(rehearse) as device:
        _run_cases(folder, only, device)


def chosen(world: int, only: str) -> list[tuple[int, Case]]:
    """The cases of a number of ranks, each with its own number."""
    return [(i, case) for i, case in enumerate(CASES) if case.ranks == world and re.search(only, case.name)]


def _run_cases(folder: Path, only: str, device: str) -> None:
    for number, case in chosen(world_size(), only):
        losses, grads = train(case, device, on_mesh=True)
        if rank() % (case.dp * case.tp) == 0:  # of each stage one
            np.savez(folder / f"{number}.{rank()}.npz", **grads)
        if rank() == 0:
            (folder / f"{number}.json").write_text(json.dumps(losses))
            print(f"{case.name}: {losses[0]:.6f} .. {losses[-1]:.6f}", flush=True)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """|a - b| / |b| in double precision; infinite for what is not finite."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
    return float(error) if np.isfinite(error) else float("inf")


def judge(case: Case, folder: Path, number: int, truth) -> dict:
    losses, grads = json.loads((folder / f"{number}.json").read_text()), {}
    for stage in range(case.pp):
        grads |= np.load(folder / f"{number}.{stage * case.dp * case.tp}.npz")
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
            "ok": all(error <= bound for error, bound in zip((loss, errors[worst], end), case.bounds))}


def table(rows: list[dict]) -> str:
    import mindspore as ms

    cfg = CASES[0].config()
    m, t, bf16 = cfg.model, cfg.train, "{:g}, {:g} and {:g}".format(*BF16_TOLERANCES)
    head = f"""# Parity with one device

Written by `python model_zoo/llama/tools/compare_losses.py`. One small Llama is trained on one device with plain MindSpore
tensors, and on each mesh below: {t.steps} steps of {t.batch} x {t.seq} tokens, dim {m.dim}, {m.n_layers} layers, \
{m.n_heads} query and {m.n_kv_heads} key heads, AdamW with
warm-up, cosine decay and clipping. A vocabulary of 259 is divisible by no tp degree.

Bounds: loss within {LOSS_TOLERANCE:g} relative at each step; each parameter's gradient at the first step within \
{GRAD_TOLERANCE:g} of
the one-device gradient, in relative norm; each parameter after the last step within {PARAM_TOLERANCE:g}. Rows in bfloat16 \
(float32 parameters,
gradients added up in float32) are compared with one device in bfloat16, within {bf16}. MindSpore \
{ms.__version__}, CPU.

| ranks | mesh | vocabulary | first loss | last loss | max loss difference | max gradient difference | of | max parameter \
difference | within |
|--:|---|--:|--:|--:|--:|--:|---|--:|---|
"""
    lines = []
    for row in rows:
        case, within = row["case"], "yes" if row["ok"] else "**no**"
        lines.append(f"| {case.ranks} | {case.name} | {case.vocab} | {row['first']:.6f} | {row['last']:.6f} | "
                     f"{row['loss']:.1e} | {row['grad']:.1e} | `{row['worst']}` | {row['end']:.1e} | {within} |")
    return head + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="1,2,4,8", help="numbers of ranks to run")
    parser.add_argument("--only", default="", help="of the cases those whose name this regular expression finds")
    parser.add_argument("--keep", type=Path, help="leave the answers there, and judge those of earlier runs as well")
    parser.add_argument("--table", type=Path, default=ROOT / "docs/parity.md")
    parser.add_argument("--rehearse", action="store_true", help="as on Ascend, over the emulator")
    parser.add_argument("--answers", type=Path, help=argparse.SUPPRESS)  # given to the ranks
    options = parser.parse_args()
    if options.answers:
        return guarded(lambda: rank_side(options.answers, options.only, options.rehearse))
    with tempfile.TemporaryDirectory(prefix="ms_dtensor_losses_") as name:
        folder = options.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        for world in map(int, options.worlds.split(",")):
            if not chosen(world, options.only):
                continue
            start = time.perf_counter()
            more = ["--only", options.only, *(["--rehearse"] if options.rehearse else [])]
            if Run(Path(__file__).resolve(), world, folder, ["--answers", str(folder), *more], show=False).wait():
                raise SystemExit(f"{world} ranks: {first_failure(folder)}")
            print(f"{world} ranks: {time.perf_counter() - start:.0f} s")
        rows = judged(folder)
    if not options.rehearse and len(rows) == len(CASES):
        options.table.parent.mkdir(exist_ok=True)
        options.table.write_text(table(rows), encoding="utf-8")
        print(f"table written to {options.table}")
    return 0 if all(row["ok"] for row in rows) else 1


def judged(folder: Path) -> list[dict]:
    """A row of each case that has left an answer."""
    device, reference, rows = start_device(), {}, []
    for number, case in enumerate(CASES):
        if (folder / f"{number}.json").exists():
            if case.model not in reference:
                reference[case.model] = train(case, device, on_mesh=False)
            row = judge(case, folder, number, reference[case.model])
            rows.append(row)
            print(f"  {'ok  ' if row['ok'] else 'FAIL'} {case.name:<48} vocabulary {case.vocab}  loss {row['loss']:.1e}  "
                  f"gradient {row['grad']:.1e} ({row['worst']})  parameters {row['end']:.1e}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
