# SPDX-License-Identifier: Apache-2.0
"""Real ranks: ten steps, a new trainer from the checkpoint, ten more; on the same mesh bit for bit, on others within 1e-5."""
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np

from model_zoo.llama.config import ParallelConfig
from model_zoo.llama.configio import load
from ms_dtensor.checkpoint import Checkpointer, latest
from ms_dtensor.tools.guard import Verdict
from tests.support import shared_folder
from tests.tiers import sampled
from tests.zoo.recipe import goes_on, held, trainer

ROOT = Path(__file__).resolve().parents[2]
SAME, OTHERS = ParallelConfig(2, 2), {"tp=4": ParallelConfig(1, 4), "fsdp=4": ParallelConfig(4, 1, fsdp=True),
                                      "zero1=4, sequence": ParallelConfig(4, 1, zero1=True),
                                      "hsdp 2 x 2": ParallelConfig(4, 1, fsdp=True, hsdp=2)}


def config(parallel: ParallelConfig, seed: int = 1):
    cfg, _ = load(["--config", str(ROOT / "model_zoo/llama/configs/tiny.yaml"), "--data.max_bytes", "200000",
                   "--train.steps", "20"])
    return replace(cfg, parallel=parallel, train=replace(cfg.train, seed=seed))


def twenty_steps_are_ten_and_ten(world):
    goes_on(lambda parallel: trainer(config(parallel)), SAME, sampled(OTHERS.values(), 4), at=10, steps=20)


def a_signal_to_one_rank_stops_all_at_one_step(world):
    root, one = shared_folder(), trainer(config(SAME))
    saver, losses = Checkpointer(one.state(), root, interval=100, on_sigterm=True), []
    for step in range(saver.begin(), 20):
        losses.append(one.step(step).loss)
        if world.rank == 2 and step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if saver.after(step + 1):
            break
    saver.finish()
    assert len(losses) == 4 and latest(root).name == "step-00000004"


def a_step_is_left_out_on_all_ranks_or_on_none(world):
    """Rank 0 says so, whatever the others think of the last bit of a sum."""
    for parallel in sampled((SAME, OTHERS["zero1=4, sequence"]), 2):
        cfg = config(parallel)
        one = trainer(replace(cfg, guard=replace(cfg.guard, nan="skip")))
        one.step(0)
        before = [a.copy() for a in held(one)]
        one.guard.judge = lambda *numbers: Verdict("go" if world.rank else "skip", "rank 0's")
        left_out = one.step(1)
        assert left_out.verdict == Verdict("skip", "rank 0's") and left_out.lr == 0 and np.isfinite(left_out.loss)
        assert all(np.array_equal(a, b) for a, b in zip(before, held(one), strict=True)) and one.optimizer.step == 1
        one.guard.judge = lambda *numbers: Verdict("skip" if world.rank else "go")
        assert one.step(2).verdict.action == "go" and not np.array_equal(before[0], held(one)[0])
