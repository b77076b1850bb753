# SPDX-License-Identifier: Apache-2.0
"""Real ranks: attention's logits are watched and clipped as on one device."""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from model_zoo.llama.config import ParallelConfig
from model_zoo.llama.parallelize import make_mesh
from tests.cases import case
from tests.dist.support import array, each_once, equal, same_on_all_ranks
from tests.tiers import sampled
from tests.zoo.test_llama_logits import CFG, made

LAYOUTS = {"dp x tp": ParallelConfig(2, 2), "sequence parallel, fsdp": ParallelConfig(2, 2, sequence_parallel=True, fsdp=True)}


@case(world_size=4, timeout=120)
def logits_are_clipped_as_on_one_device(world):
    def of_one():
        plain = made(CFG)
        steps = [plain.step(i) for i in range(2)]
        return [(step.logits, step.loss) for step in steps], list(map(array, plain.params))
    (wanted, weights), = each_once(of_one)
    for name, parallel in sampled(LAYOUTS.items(), 2, 1):
        trainer = made(replace(CFG, parallel=parallel), make_mesh("cpu", parallel))
        for i, (logits, loss) in enumerate(wanted):
            got = trainer.step(i)
            same_on_all_ranks(world, str(got.logits.tolist()))
            assert np.allclose(got.logits, logits, rtol=1e-4), (name, i, got.logits, logits)
            assert np.isclose(got.loss, loss, rtol=1e-5), (name, i, got.loss, loss)
        equal(trainer.params, weights, name, 1e-3)
