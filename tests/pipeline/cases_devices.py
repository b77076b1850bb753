# SPDX-License-Identifier: Apache-2.0
"""The device's branch of pipelines over the strict emulator, whose sends end only with their receives."""
import numpy as np
from mindspore import Tensor

import ms_dtensor as md
from ms_dtensor.pipeline import Recv, Send, pipeline
from tests.cases import cases
from tests.operands import filled
from tests.pipeline.cases_run import KINDS, Net, T, X, loss_fn, style_of
from tests.rehearsal.session import rehearsed
from tests.support import array, each, equal_each
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


@cases(2, {"pipelines_on_emulated_devices": ([*KINDS], 3, 4)})
@cases(4, {"pipelines_of_four_on_emulated_devices": ([*reversed(KINDS)], 5, 8)}, timeout=120)
def as_on_the_cpu(world, names, one_of: int, m: int) -> None:
    @each(sampled(names, one_of))
    def both(name):
        want = steps(world, name, m, "cpu")
        with rehearsed(rendezvous=True) as device:
            got = steps(world, name, m, "npu", device)
        equal_each(got, want, range(len(want)), rtol=2e-6)
