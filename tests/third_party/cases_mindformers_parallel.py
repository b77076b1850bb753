# SPDX-License-Identifier: Apache-2.0
"""MindFormers 2.1.0's Trainer with its pipeline parallelism, against one device."""
import tempfile
from pathlib import Path

import numpy as np
from mindspore import Tensor

from tests.cases import case
from tests.dist.support import counted, equal
from tests.third_party.cases_mindformers import TOLERANCE, wheel
from tests.third_party.cases_mindformers_trainer import (
    ADAMW,
    DEEPSEEK,
    NORM,
    STEPS,
    batches,
    everyone,
    one_device,
    trained,
    written,
    written_yaml,
)

GROUP = "mindformers"


def pipeline_is_one_devices(world, **parallelism) -> None:
    """Every stage's weights, the last one's losses, all ranks' norms; weights begin with what each stage's rank made."""
    records = everyone(world, written(Path(tempfile.mkdtemp())) if world.rank == 0 else "")[0]
    config = written_yaml(Path(tempfile.mkdtemp()), records, DEEPSEEK, ADAMW, 2e-3, pipeline_parallel=2, **parallelism)
    with counted() as count:
        trainer, watch, own = trained(config)
    assert count["exchange", "forward"] >= STEPS, count
    start: dict = {}
    for stage in everyone(world, own):  # the embedding is on both: for tokens, and for those that are predicted ahead
        for name, value in stage.items():
            assert np.array_equal(start.setdefault(name, value), value), name
    losses, norms, wanted = one_device(trainer.config, start, batches(world, trainer))
    told = everyone(world, watch.losses)
    assert [len(of) for of in told] == [0, STEPS] and min(norms) > NORM
    assert np.allclose(told[1], losses, rtol=TOLERANCE, atol=0), (told[1], losses)
    assert np.allclose(watch.norms, norms, rtol=TOLERANCE, atol=0), (watch.norms, norms)
    names = [name for part in trainer.model for name, _ in part.parameters_and_names()]
    assert set().union(*everyone(world, names)) == set(wanted) != set(names)
    for part in trainer.model:
        for name, p in part.parameters_and_names():
            equal(p, Tensor(wanted[name]), name, TOLERANCE)


@case(2, timeout=400)
def its_pipeline_is_one_device(world):
    wheel()
    pipeline_is_one_devices(world)
    pipeline_is_one_devices(world, pipeline_parallel_schedule="gpipe")
