# SPDX-License-Identifier: Apache-2.0
"""Real ranks: the recipe in stages, with its own configuration `tiny`: one device's losses, resumed on any mesh."""
from dataclasses import replace
from pathlib import Path

import numpy as np

from model_zoo.llama.config import Config, ParallelConfig, check
from model_zoo.llama.configio import load
from model_zoo.llama.data import places
from ms_dtensor.tools.guard import Verdict
from tests.cases import case
from tests.support import array, each
from tests.tiers import sampled
from tests.zoo.recipe import LOSS, as_one_device, goes_on, of_one_device, run, trainer, weights

TINY = Path(__file__).resolve().parents[2] / "model_zoo/llama/configs/tiny.yaml"
INTERLEAVED = {"pp_schedule": "interleaved", "pp_stages_per_rank": 2}


def config(parallel: ParallelConfig, tied: bool = False, **train) -> Config:
    cfg, _ = load(["--config", str(TINY), "--data.max_bytes", "200000"])
    cfg = replace(cfg, parallel=parallel, model=replace(cfg.model, tied_head=tied),
                  train=replace(cfg.train, batch=8, **train))
    check(cfg, parallel.pp * parallel.dp * parallel.tp)
    return cfg


def trains_alike(parallel: ParallelConfig, micro_batches: int, tied: bool = False, option: str = "") -> None:
    """`option`: of training, that is on."""
    cfg = config(parallel, tied, micro_batches=micro_batches, **dict.fromkeys(option.split(), True))
    as_one_device(cfg)
    losses = of_one_device(cfg)[0][0]
    assert losses[-1] < losses[0] - 0.5


ZBV = {"pp_schedule": "zbv", "pp_stages_per_rank": 2}


@case(2, timeout=200)
def two_stages_train_as_one_device(world):
    each(sampled((
        (ParallelConfig(pp=2), 4), (ParallelConfig(pp=2, pp_schedule="gpipe"), 1), (ParallelConfig(pp=2, **INTERLEAVED), 4),
        (ParallelConfig(pp=2, pp_schedule="zbh1"), 4), (ParallelConfig(pp=2, **ZBV), 4, True),
        (ParallelConfig(pp=2, pp_schedule="dualpipev", pp_stages_per_rank=2), 4),
        (ParallelConfig(pp=2), 2, False, "recompute"), (ParallelConfig(pp=2, pp_split=("norm",)), 2),
        (ParallelConfig(pp=2, pp_split=("output",)), 2, True, "compile"), (ParallelConfig(pp=2), 2, True),
        (ParallelConfig(pp=2), 4, False, "compile"),
        (ParallelConfig(pp=2, pp_split=("output",), pp_schedule="zbh1"), 4, False, "compile"),
        (ParallelConfig(pp=2, pp_schedule="zbh1"), 4, True, "compile")), 8))(trains_alike)


@case(4, timeout=300)
def stages_beside_other_axes_train_as_one_device(world):
    each(sampled((
        (ParallelConfig(pp=4), 8), (ParallelConfig(1, 2, pp=2), 4), (ParallelConfig(1, 2, True, pp=2), 2, True),
        (ParallelConfig(2, 1, fsdp=True, pp=2), 4),
        (ParallelConfig(2, 1, fsdp=True, pp=2, **INTERLEAVED), 2, True, "recompute"),
        (ParallelConfig(2, 1, fsdp=True, pp=2, **ZBV), 4, False, "recompute"), (ParallelConfig(2, 1, pp=2), 4),
        (ParallelConfig(2, 1, zero1=True, pp=2), 2)), 8))(trains_alike)


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
    wide = of_one_device(config(ParallelConfig()))[0][0][:4]
    assert np.allclose(*low, rtol=1e-3) and not np.allclose(low[0], wide, rtol=1e-6), low


@case(4, timeout=300)
def a_run_goes_on_with_other_stages_and_with_none(world):
    """A single device's checkpoint goes on in stages, too."""
    stages = [ParallelConfig(2, 1, fsdp=True, pp=2), ParallelConfig(pp=4), ParallelConfig(1, 2, pp=2),
              ParallelConfig(4, 1, fsdp=True)]
    for source in sampled((stages[0], stages[-1]), 2):
        goes_on(lambda parallel: trainer(config(parallel, tied=True, micro_batches=2)), source,
                [one for one in stages if one is not source], at=5, steps=10)


def a_step_of_stages_is_left_out_on_all_ranks_or_on_none(world):
    """Where one stage alone has a gradient that is no number; and by rank 0's word."""
    cfg = config(ParallelConfig(2, 1, fsdp=True, pp=2), micro_batches=2)
    one = trainer(replace(cfg, guard=replace(cfg.guard, nan="skip")))
    one.step(0)
    before, whole = weights(one), one.stages.step

    def broken(*args, **kwargs):
        loss, grads = whole(*args, **kwargs)
        if world.rank == 3:
            grads[0].to_local().asnumpy()[...] = np.nan
        return loss, grads
    one.stages.step = broken
    assert one.step(1).verdict.action == "skip"
    one.stages.step = whole
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before.values(), weights(one).values(), strict=True))
    one.guard.judge = lambda *numbers: Verdict("skip" if world.rank else "go")
    assert one.step(2).verdict.action == "go" and one.optimizer.step == 2
