# SPDX-License-Identifier: Apache-2.0
"""A slice of `tests/long/fuzz.py`: random programs on four ranks, the same ones every time."""
from __future__ import annotations

from tests.cases import case
from tests.fuzz.check import Judge
from tests.fuzz.judged import all_right
from tests.fuzz.programs import generate
from tests.fuzz.reference import refer
from tests.tiers import sampled


@case(world_size=4, timeout=240)
def random_programs_are_one_devices(world):
    past = (25, 41, 84, 138, 148, 1095, 1141, 1173, 1206, 1208, 1211, 2010)  # each failed once
    all_right(world, [generate(seed) for seed in (*sampled(range(24), 12), *sampled(past, 4))], refer, Judge)
