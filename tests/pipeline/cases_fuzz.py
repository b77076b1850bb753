# SPDX-License-Identifier: Apache-2.0
"""A slice of `tests/long/fuzz_pipeline.py`, the same programs every time; its judge sees a planted fault."""
from unittest import mock

from ms_dtensor.pipeline.schedule import Schedule
from tests.cases import case
from tests.fuzz.judged import all_right
from tests.fuzz.pipelines import Program, Step, generate, refer
from tests.long.fuzz_pipeline import Judge
from tests.tiers import sampled


def random_pipelines_are_one_devices(world):
    all_right(world, [generate(seed, 2) for seed in sampled(range(40), 8)], refer, Judge)


@case(4, timeout=120)
def random_pipelines_beside_other_axes_are_one_devices(world):
    all_right(world, [generate(seed, 4) for seed in sampled(range(40), 20)], refer, Judge)


def a_planted_fault_is_seen(world):
    program = Program(0, ["dense", "dense"], ties=[(0, 1)], split=[["layers.0"], ["layers.1", "head"]],
                      steps=[Step("train", 2, 4, 1)])
    all_right(world, [program], refer, Judge)
    with mock.patch.object(Schedule, "_add_tied"):
        off = Judge(world, program, refer(program)).run()
    assert len(off) == 1 and "gradient of layers.0.up.weight" in off[0], off
