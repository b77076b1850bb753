# SPDX-License-Identifier: Apache-2.0
"""Real ranks: the recipe in stages, with its own configuration `tiny`: one device's losses, resumed on any mesh."""
from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from model_zoo.llama.config import Config, ParallelConfig, check
from model_zoo.llama.configio import load
from model_zoo.llama.data import load_text, places
from model_zoo.llama.parallelize import make_mesh
from model_zoo.llama.trainer import Trainer
from ms_dtensor import comm
from ms_dtensor.checkpoint import Checkpointer
from ms_dtensor.tools.guard import Verdict
from tests.cases import case
from tests.dist.support import array, each, each_once
from tests.tiers import sampled

TINY = Path(__file__).resolve().parents[2] / "model_zoo/llama/configs/tiny.yaml"
LOSS, PARAMETERS = 1e-5, 1e-4  # relative; AdamW divides by roots of small second moments
INTERLEAVED = {"pp_schedule": "interleaved", "pp_stages_per_rank": 2}


def config(parallel: ParallelConfig, tied: bool = False, **train) -> Config:
    cfg, _ = load(["--config", str(TINY), "--data.max_bytes", "200000"])
    cfg = replace(cfg, parallel=parallel, model=replace(cfg.model, tied_head=tied),
                  train=replace(cfg.train, batch=8, **train))
    check(cfg, parallel.pp * parallel.dp * parallel.tp)
    return cfg


def trainer(cfg: Config, on_mesh: bool = True) -> Trainer:
    return Trainer(cfg, load_text(cfg.data, cfg.model.vocab_size, cfg.train.seq),
                   make_mesh("cpu", cfg.parallel) if on_mesh else None)


def run(one: Trainer, steps: int = 10, begin: int = 0) -> list[list[float]]:
    """Loss and gradient norm of each step, and the held-out loss at the end."""
    results = [one.step(step) for step in range(begin, steps)]
    return [[r.loss for r in results], [r.grad_norm for r in results], [one.held_out_loss()]]


@lru_cache
def one_device() -> list[tuple[list[list[float]], dict[str, np.ndarray]]]:
    """Of weights that are not tied, and of such that are."""
    def ran(tied: bool):
        one = trainer(config(ParallelConfig(), tied), on_mesh=False)
        numbers = run(one)
        assert numbers[0][-1] < numbers[0][0] - 0.5
        return numbers, {p.name: array(p) for p in one.params}
    return each_once(lambda: ran(False), lambda: ran(True))


def as_one_device(parallel: ParallelConfig, micro_batches: int, tied: bool = False, option: str = "") -> None:
    """`option`: of training, that is on."""
    made = trainer(config(parallel, tied, micro_batches=micro_batches, **dict.fromkeys(option.split(), True)))
    want, params = one_device()[tied]
    for got, wanted in zip(run(made), want, strict=True):
        assert np.allclose(got, wanted, rtol=LOSS, atol=0), (got, wanted)
    names = {p.name for p in made.params}
    assert names < set(params), "a rank has its stages' parameters"
    for p in made.params:
        assert np.linalg.norm(array(p) - params[p.name]) <= PARAMETERS * np.linalg.norm(params[p.name]), p.name


ZBV = {"pp_schedule": "zbv", "pp_stages_per_rank": 2}


@case(2, timeout=200)
def two_stages_train_as_one_device(world):
    each(sampled((
        (ParallelConfig(pp=2), 4), (ParallelConfig(pp=2, pp_schedule="gpipe"), 1), (ParallelConfig(pp=2, **INTERLEAVED), 4),
        (ParallelConfig(pp=2, pp_schedule="zbh1"), 4), (ParallelConfig(pp=2, **ZBV), 4, True),
        (ParallelConfig(pp=2, pp_schedule="dualpipev", pp_stages_per_rank=2), 4),
        (ParallelConfig(pp=2), 2, False, "recompute"), (ParallelConfig(pp=2, pp_split=("norm",)), 2),
        (ParallelConfig(pp=2), 2, True), (ParallelConfig(pp=2), 4, False, "compile"),
        (ParallelConfig(pp=2, pp_schedule="zbh1"), 4, True, "compile")), 8))(as_one_device)


@case(4, timeout=300)
def stages_beside_other_axes_train_as_one_device(world):
    each(sampled((
        (ParallelConfig(pp=4), 8), (ParallelConfig(1, 2, pp=2), 4), (ParallelConfig(1, 2, True, pp=2), 2, True),
        (ParallelConfig(2, 1, fsdp=True, pp=2), 4),
        (ParallelConfig(2, 1, fsdp=True, pp=2, **INTERLEAVED), 2, True, "recompute"),
        (ParallelConfig(2, 1, fsdp=True, pp=2, **ZBV), 4, False, "recompute"), (ParallelConfig(2, 1, pp=2), 4),
        (ParallelConfig(2, 1, zero1=True, pp=2), 2)), 8))(as_one_device)


@case(4, timeout=200)
def packed_documents_and_16_bits_go_through_stages(world):
    """Places are cut as ids are; hidden states travel in 16 bits."""
    ids = np.random.default_rng(3).integers(1, 250, (8, 33)).astype(np.int32)
    for row, at in ((0, 4), (2, 9), (3, 17), (7, 30)):
        ids[row, at] = 0
    batch = np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]), places(ids[:, :-1], 0)
    plain = trainer(config(ParallelConfig()), on_mesh=False)
    loss, grads = plain.gradients(*batch)
    want = {p.name: array(g) for p, g in zip(plain.params, grads)}
    assert abs(float(loss) - float(plain.gradients(*batch[:2])[0])) > 1e-4, "places matter"
    hsdp = ParallelConfig(2, 1, fsdp=True, hsdp=2, pp=2)
    for parallel in sampled((hsdp, ParallelConfig(1, 2, True, pp=2), ParallelConfig(2, 1, fsdp=True, pp=2)), 2):
        one = trainer(config(parallel, micro_batches=2))
        got, grads = one.gradients(*batch)
        assert abs(float(got) / float(loss) - 1) < LOSS, parallel
        for p, g in zip(one.params, grads, strict=True):
            assert np.linalg.norm(array(g) - want[p.name]) <= 2e-5 * np.linalg.norm(want[p.name]), (parallel, p.name)
    low = [run(trainer(config(parallel, micro_batches=2, dtype="bfloat16")), 4)[0] for parallel in (
        ParallelConfig(4, 1), ParallelConfig(2, 1, fsdp=True, pp=2))]
    assert np.allclose(*low, rtol=1e-3) and not np.allclose(low[0], one_device()[False][0][0][:4], rtol=1e-6), low


def values(one: Trainer) -> dict[str, np.ndarray]:
    return {p.name: array(p) for p in one.params}


@case(4, timeout=300)
def a_run_goes_on_with_other_stages_and_with_none(world):
    """Bit for bit on its own mesh; a single device's checkpoint goes on in stages, too."""
    stages = {"pp2 x fsdp2": ParallelConfig(2, 1, fsdp=True, pp=2), "pp4": ParallelConfig(pp=4),
              "pp2 x tp2": ParallelConfig(1, 2, pp=2), "fsdp4": ParallelConfig(4, 1, fsdp=True)}
    root = Path(comm.group(tuple(range(4))).broadcast_object(os.path.join(os.getcwd(), "pipeline_resume"), 0))
    for source in sampled(("pp2 x fsdp2", "fsdp4"), 2):
        straight = trainer(config(stages[source], tied=True, micro_batches=2))
        want = run(straight)[0]
        first = trainer(config(stages[source], tied=True, micro_batches=2))
        saver = Checkpointer(first.state(), root / source.replace(" ", ""), interval=5, over=first.over)
        saver.begin()
        losses = run(first, 5)[0]
        saver.after(5)
        saver.finish()
        for name, parallel in stages.items():
            again = trainer(config(parallel, tied=True, micro_batches=2))
            done = Checkpointer(again.state(), root / "none", over=again.over).begin(saver.path / "step-00000005")
            got = losses + run(again, begin=done)[0]
            assert np.allclose(got, want, rtol=LOSS, atol=0), (source, name, got, want)
            if name == source:
                mine, theirs = values(again), values(straight)
                assert got == want and all(mine[key].tobytes() == theirs[key].tobytes() for key in theirs)


@case(4, timeout=120)
def a_step_of_stages_is_left_out_on_all_ranks_or_on_none(world):
    """Where one stage alone has a gradient that is no number; and by rank 0's word."""
    cfg = config(ParallelConfig(2, 1, fsdp=True, pp=2), micro_batches=2)
    one = trainer(replace(cfg, guard=replace(cfg.guard, nan="skip")))
    one.step(0)
    before, whole = values(one), one.stages.step

    def broken(*args, **kwargs):
        loss, grads = whole(*args, **kwargs)
        if world.rank == 3:
            grads[0].to_local().asnumpy()[...] = np.nan
        return loss, grads
    one.stages.step = broken
    assert one.step(1).verdict.action == "skip"
    one.stages.step = whole
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before.values(), values(one).values(), strict=True))
    one.guard.judge = lambda *numbers: Verdict("skip" if world.rank else "go")
    assert one.step(2).verdict.action == "go" and one.optimizer.step == 2
