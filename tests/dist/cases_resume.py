# SPDX-License-Identifier: Apache-2.0
"""Real ranks: ten steps, a new trainer from the checkpoint, ten more; on the same mesh bit for bit, on others within 1e-5."""
from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np

from model_zoo.llama.config import ParallelConfig
from model_zoo.llama.configio import load
from model_zoo.llama.data import load_text
from model_zoo.llama.parallelize import make_mesh
from model_zoo.llama.trainer import Trainer
from ms_dtensor import comm
from ms_dtensor.checkpoint import Checkpointer, latest
from ms_dtensor.optim import AdamW
from ms_dtensor.tools.guard import Verdict
from tests.cases import case
from tests.dist.support import array
from tests.tiers import sampled

ROOT = Path(__file__).resolve().parents[2]
SAME, OTHERS = ParallelConfig(2, 2), {"tp=4": ParallelConfig(1, 4), "fsdp=4": ParallelConfig(4, 1, fsdp=True),
                                      "zero1=4, sequence": ParallelConfig(4, 1, zero1=True),
                                      "hsdp 2 x 2": ParallelConfig(4, 1, fsdp=True, hsdp=2)}
LOSS = 1e-5  # relative: sums in another order over ten steps


def config(parallel: ParallelConfig, seed: int = 1):
    cfg, _ = load(["--config", str(ROOT / "model_zoo/llama/configs/tiny.yaml"), "--data.max_bytes", "200000",
                   "--train.steps", "20"])
    return replace(cfg, parallel=parallel, train=replace(cfg.train, seed=seed))


def trainer(parallel: ParallelConfig) -> Trainer:
    cfg = config(parallel)
    return Trainer(cfg, load_text(cfg.data, cfg.model.vocab_size, cfg.train.seq), make_mesh("cpu", parallel))


def ran(one: Trainer, saver: Checkpointer | None = None, to: int = 20, resume=None) -> list[float]:
    losses = []
    for step in range(0 if saver is None else saver.begin(resume), to):
        losses.append(one.step(step).loss)
        if saver is not None and saver.after(step + 1):
            break
    if saver is not None:
        saver.finish()
    return losses


def held(one: Trainer) -> list[np.ndarray]:
    """All parameters and moments, whole."""
    assert isinstance(one.optimizer, AdamW)
    def walk(node):
        if isinstance(node, dict | list | tuple):
            for child in node.values() if isinstance(node, dict) else node:
                yield from walk(child)
        elif node is not None and not isinstance(node, int):
            yield array(node)
    found = list(walk([one.params, one.optimizer.state_dict()]))
    assert len(found) == 3 * len(one.params)
    return found


def folder(world, name: str) -> str:
    return comm.group(range(world.size)).broadcast_object(os.path.join(os.getcwd(), f"resume_{name}"), 0)


@case(world_size=4, timeout=170)
def twenty_steps_are_ten_and_ten(world):
    root = folder(world, "same")
    straight = trainer(SAME)
    want = ran(straight)
    first = trainer(SAME)
    losses = ran(first, Checkpointer(first.state(), root, interval=10, async_save=True), to=10)
    assert latest(root).name == "step-00000010"
    kept, end = latest(root), {}
    for parallel in (SAME, *sampled(OTHERS.values(), 4)):
        again = trainer(parallel)
        ran_on = ran(again, Checkpointer(again.state(), root + "_unused"), resume=kept)
        if parallel is SAME:
            assert losses + ran_on == want
            assert all(np.array_equal(a, b) for a, b in zip(held(again), held(straight), strict=True))
            assert again.optimizer.step == 20
        end[str(parallel)] = float(np.abs(np.divide(ran_on, want[10:]) - 1).max())
    assert max(end.values()) <= LOSS, end


@case(world_size=4, timeout=120)
def a_signal_to_one_rank_stops_all_at_one_step(world):
    root, one = folder(world, "signal"), trainer(SAME)
    saver, losses = Checkpointer(one.state(), root, interval=100, on_sigterm=True), []
    for step in range(saver.begin(), 20):
        losses.append(one.step(step).loss)
        if world.rank == 2 and step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        if saver.after(step + 1):
            break
    saver.finish()
    assert len(losses) == 4 and latest(root).name == "step-00000004"


@case(world_size=4, timeout=120)
def a_step_is_left_out_on_all_ranks_or_on_none(world):
    """Rank 0 says so, whatever the others think of the last bit of a sum."""
    for parallel in sampled((SAME, OTHERS["zero1=4, sequence"]), 2):
        cfg = config(parallel)
        one = Trainer(replace(cfg, guard=replace(cfg.guard, nan="skip")),
                      load_text(cfg.data, cfg.model.vocab_size, cfg.train.seq), make_mesh("cpu", parallel))
        one.step(0)
        before = [a.copy() for a in held(one)]
        one.guard.judge = lambda *numbers: Verdict("go" if world.rank else "skip", "rank 0's")
        left_out = one.step(1)
        assert left_out.verdict == Verdict("skip", "rank 0's") and left_out.lr == 0 and np.isfinite(left_out.loss)
        assert all(np.array_equal(a, b) for a, b in zip(before, held(one), strict=True)) and one.optimizer.step == 1
        one.guard.judge = lambda *numbers: Verdict("skip" if world.rank else "go")
        assert one.step(2).verdict.action == "go" and not np.array_equal(before[0], held(one)[0])
