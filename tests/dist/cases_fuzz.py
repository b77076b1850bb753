# SPDX-License-Identifier: Apache-2.0
"""A slice of `tests/long/fuzz.py`: random programs on four ranks, the same ones every time."""
from __future__ import annotations

import numpy as np

from tests.cases import case
from tests.fuzz.check import check_seed
from tests.fuzz.ranks import references
from tests.tiers import sampled


@case(world_size=4, timeout=240)
def random_programs_are_one_devices(world):
    past = (25, 41, 84, 138, 148, 1095, 1141, 1173, 1206, 1208, 1211, 2010)  # each failed once
    seeds = [*sampled(range(24), 12), *sampled(past, 4)]
    with np.errstate(all="ignore"):
        for k in range(0, len(seeds), world.size):
            for reference in references(world, seeds[k:k + world.size]):
                said = check_seed(world, reference)
                assert not said["wrong"], f"{said['why']}\n{said['program']}"
