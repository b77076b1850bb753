# SPDX-License-Identifier: Apache-2.0
"""A slice of `tests/long/fuzz_tokens.py`, the same programs every time; its judge sees planted faults."""
from unittest import mock

import numpy as np

from ms_dtensor.custom_ops import rows
from ms_dtensor.parallel import ring
from tests.cases import case
from tests.fuzz.judged import all_right
from tests.fuzz.tokens import Layer, Pass, Program, Step, generate, refer
from tests.long.fuzz_tokens import Judge
from tests.tiers import sampled


def random_mixtures_over_tokens_are_one_devices(world):
    all_right(world, [generate(seed, 2) for seed in sampled(range(0, 40, 8), 2)], refer, Judge)


@case(4, timeout=200)
def random_mixtures_beside_other_axes_are_one_devices(world):
    all_right(world, [generate(seed, 4) for seed in sampled((0, 20), 2)], refer, Judge)


def planted_faults_are_seen(world):
    """Keys' gradients that stay where they are, and rows of experts that are not added up, are gradients alone."""
    steps = [Step("train", [[Pass([(9, 4)], 1)]], inputs=True)]
    for layer, where, name, fault in (
            (Layer("attention", ring=True), ring, "_sent_home", lambda grads, part, group, dkv: dkv),
            (Layer("experts", k=2, over=("cp",)), rows, "_sums", lambda x, index, shape: np.zeros(shape, x.dtype))):
        program = Program(0, {"cp": 2}, [layer], steps=steps)
        all_right(world, [program], refer, Judge)
        with mock.patch.object(where, name, fault):
            off = Judge(world, program, refer(program)).run()
        assert any("gradient of" in one or "input" in one for one in off), (name, off)
