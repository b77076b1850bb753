# SPDX-License-Identifier: Apache-2.0
"""A slice of `tests/long/fuzz_sharding.py`, the same programs every time; and that its judge sees faults that are planted."""
from __future__ import annotations

from contextlib import contextmanager

import numpy as np
from mindspore import Tensor

from tests.cases import case
from tests.fuzz.judged import agreed, all_right
from tests.fuzz.sharding import play
from tests.fuzz.sharding.cells import Part
from tests.fuzz.sharding.judge import Judge, refer, verdict
from tests.fuzz.sharding.programs import Pass, Program, Step, Wrap, generate
from tests.tiers import sampled


@case(world_size=2, timeout=240)
def random_data_parallel_programs_are_one_devices(world):
    seeds = [seed for k in sampled(range(0, 40, 2), 7) for seed in (k, k + 1)]
    all_right(world, [generate(seed, 2) for seed in seeds], refer, Judge)


def small(*wraps: Wrap, **options) -> Program:
    """Two blocks alike, three steps, a write between them."""
    step = Step("train", [[Pass(5, 1)]], then="sgd")
    return Program(0, {"dp": 2}, 4, Part("group", [Part("dense"), Part("dense")]), False, False, True,
                   list(wraps), [step, Step("write", which=0), step], **options)


@contextmanager
def planted(owner, name, make):
    """A method of the judged side behaves otherwise for the block."""
    given = getattr(owner, name)
    setattr(owner, name, make(given))
    try:
        yield
    finally:
        setattr(owner, name, given)


def _on_ranks(change):
    """Changes what a player's method returns, where it is not the one device."""
    def make(given):
        def method(self, *args, **kwargs):
            out = given(self, *args, **kwargs)
            return out if self.rank is None else change(self, out)
        return method
    return make


def _swapped(player, out):
    value, grads, inputs = out
    a, b = (next(i for i, p in enumerate(player.net.trainable_params()) if p.name == f"body.parts.{k}.lin.weight") for k in (0, 1))
    grads[a], grads[b] = grads[b], grads[a]
    return value, grads, inputs


def _not_reduced(player, out):
    """As if each rank kept its own summand: half of the sum, where the summands are alike."""
    value, grads, inputs = out
    return value, [grads[0] * 0.5, *grads[1:]], inputs


@case(world_size=2, timeout=120)
def the_judge_sees_planted_faults(world):
    units = [Wrap("fsdp", f"body.parts.{i}") for i in (0, 1)] + [Wrap("fsdp", "")]

    def judged(program):
        return verdict(world, refer(program))

    for wraps in (units, [Wrap("replicate", "")], [Wrap("zero1", "")]):
        program = small(*wraps)
        assert judged(program) == ""
        for change, what in ((_swapped, "gradient of body.parts"), (_not_reduced, "gradient of")):
            with planted(play.Player, "gradient", _on_ranks(change)):
                why = judged(program)
            assert "wrong" in why and what in why, why

    def late(given):  # the write reaches the shards one step too late, as a prefetch from before it would see it
        def do(self, step):
            return {} if self.rank is not None and step.kind == "write" else given(self, step)
        return do
    with planted(play.Player, "do", late):
        assert "wrong: body.parts.0.lin.weight" in judged(small(*units))

    def refusing(given):
        def do(self, step):
            if self.rank is not None and step.kind == "write":
                raise ValueError("no")
            return given(self, step)
        return do
    with planted(play.Player, "do", refusing):
        assert "refused: ValueError: no" in judged(small(*units))

    def unlike(given):  # the same call, which a backward makes on one rank only
        def do(self, step):
            with play.comm.annotate(phase="backward" if self.rank == 1 else "forward"):
                if self.rank is not None:
                    play.comm.group((0, 1)).all_reduce(Tensor(np.ones(1)), "sum")
            return given(self, step)
        return do
    with planted(play.Player, "do", unlike):
        why = judged(small(*units))
    texts = agreed(world, why)
    assert len(set(texts)) == 1 and "unlike communication" in why, texts
