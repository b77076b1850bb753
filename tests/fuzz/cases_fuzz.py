# SPDX-License-Identifier: Apache-2.0
"""Slices of `tests/long/fuzz.py` and `fuzz_sharding.py`, the same programs every time; the judge of the latter sees faults."""
from unittest import mock

import numpy as np
from mindspore import Tensor

from tests.cases import case
from tests.fuzz import check, programs, reference
from tests.fuzz.judged import all_right
from tests.fuzz.sharding import play
from tests.fuzz.sharding.cells import Part
from tests.fuzz.sharding.judge import Judge, refer, verdict
from tests.fuzz.sharding.programs import Pass, Program, Step, Wrap, generate
from tests.support import same_on_all_ranks
from tests.tiers import sampled


@case(world_size=2, timeout=240)
def random_data_parallel_programs_are_one_devices(world):
    seeds = [seed for k in sampled(range(0, 40, 2), 7) for seed in (k, k + 1)]
    all_right(world, [generate(seed, 2) for seed in seeds], refer, Judge)


def small(*wraps: Wrap) -> Program:
    """Two blocks alike, three steps, a write between them."""
    step = Step("train", [[Pass(5, 1)]], then="sgd")
    return Program(0, {"dp": 2}, 4, Part("group", [Part("dense"), Part("dense")]), False, False, True,
                   list(wraps), [step, Step("write", which=0), step])


def swapped(given, *args):
    value, (weight, bias, other, *rest), inputs = given(*args)
    return value, [other, bias, weight, *rest], inputs


def not_reduced(given, *args):
    """As if each rank kept its own summand: half of the sum, where the summands are alike."""
    value, (first, *rest), inputs = given(*args)
    return value, [first * 0.5, *rest], inputs


def late(given, step):
    """The write reaches the shards one step too late, as a prefetch from before it would see it."""
    return {} if step.kind == "write" else given(step)


def refusing(given, step):
    if step.kind == "write":
        raise ValueError("no")
    return given(step)


def unlike(given, step):
    """The same call, which a backward makes on one rank only."""
    with play.comm.annotate(phase="backward" if play.comm.current_world().rank == 1 else "forward"):
        play.comm.group((0, 1)).all_reduce(Tensor(np.ones(1)), "sum")
    return given(step)


@case(world_size=2, timeout=120)
def the_judge_sees_planted_faults(world):
    units = small(Wrap("fsdp", "body.parts.0"), Wrap("fsdp", "body.parts.1"), Wrap("fsdp", ""))
    others = [small(Wrap(kind, "")) for kind in ("replicate", "zero1")]
    for program in (units, *others):
        assert verdict(world, refer(program)) == ""
    for program, name, fault, said in (
            *((program, "gradient", swapped, "wrong: gradient of body.parts") for program in (units, *others)),
            *((program, "gradient", not_reduced, "wrong: gradient of") for program in (units, *others)),
            (units, "do", late, "wrong: body.parts.0.lin.weight"), (units, "do", refusing, "refused: ValueError: no"),
            (units, "do", unlike, "unlike communication")):
        given, reference = getattr(play.Player, name), refer(program)

        def planted(self, *args, given=given, fault=fault):
            return given(self, *args) if self.rank is None else fault(lambda *args: given(self, *args), *args)
        with mock.patch.object(play.Player, name, planted):
            assert said in same_on_all_ranks(world, verdict(world, reference)), fault


def random_programs_are_one_devices(world):
    past = (25, 41, 84, 138, 148, 1095, 1141, 1173, 1206, 1208, 1211, 2010)  # each failed once
    seeds = *sampled(range(24), 12), *sampled(past, 4)
    all_right(world, [programs.generate(seed) for seed in seeds], reference.refer, check.Judge)
