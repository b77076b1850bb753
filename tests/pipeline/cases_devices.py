# SPDX-License-Identifier: Apache-2.0
"""The device's branch of pipelines over the strict emulator, whose sends end only with their receives."""
from __future__ import annotations

import numpy as np
from mindspore import Tensor

import ms_dtensor as md
from ms_dtensor.pipeline import Recv, Send, pipeline
from tests.cases import case
from tests.dist.support import array
from tests.pipeline.cases_run import KINDS, Net, T, X, loss_fn, style_of
from tests.rehearsal.session import rehearsed
from tests.sharding.support import collected, filled, none_of
from tests.tiers import sampled


def steps(world, name: str, m: int, kind: str, device=None) -> list[np.ndarray]:
    """Losses and gradients of two steps; on the emulator, what the second one costs."""
    mesh = md.init_device_mesh(kind, (world.size,), mesh_dim_names=("pp",))
    order, v = KINDS[name]
    schedule = order(pipeline(filled(Net()), mesh, n_stages=v * world.size, style=style_of(name)), m, loss_fn)
    out = []
    for step in range(2):
        if step and device is not None:
            device.syncs.clear()
            device.counts.clear()
        loss, grads = schedule.step(Tensor(X), target=Tensor(T))
        if step and device is not None:
            events = schedule._lowered.ranks[world.rank]
            messages = sum(isinstance(event, Send | Recv) for event in events)
            assert messages > 0 and device.counts["launches"] <= messages + 1, (device.counts, messages)  # 1: the loss
            assert len(device.syncs) <= 2, device.syncs
        out += [array(loss), *map(array, grads)]
    return out


def as_on_the_cpu(world, names, m: int) -> None:
    faults: list[str] = []
    for name in names:
        def both(name=name):
            want = steps(world, name, m, "cpu")
            with rehearsed(rendezvous=True) as device:
                got = steps(world, name, m, "npu", device)
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                assert np.abs(a - b).max() <= 2e-6 * max(np.abs(b).max(), 1e-3), (name, i)
        collected(faults, name, both)
    none_of(faults)


@case(2)
def pipelines_on_emulated_devices(world):
    as_on_the_cpu(world, sampled(KINDS, 3), 4)


@case(4, timeout=120)
def pipelines_of_four_on_emulated_devices(world):
    as_on_the_cpu(world, sampled(reversed(KINDS), 5), 8)
