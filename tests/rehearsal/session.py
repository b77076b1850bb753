# SPDX-License-Identifier: Apache-2.0
"""A rehearsal: the world that runs, real or fake, as one of devices."""
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ms_dtensor import comm
from ms_dtensor.comm import world as worlds
from ms_dtensor.internals import target
from tests.rehearsal.emulator import RATES, Device, emulated
from tests.rehearsal.kernels import stood_in
from tests.rehearsal.tables import Rates
from tests.rehearsal.watch import watched

_DEVICES = {"hccl": "Ascend", "nccl": "GPU"}


@contextmanager
def rehearsed(kind: str = "hccl", rates: Rates = RATES, clock: bool = True, rendezvous: bool = False) -> Iterator[Device]:
    """Inside, `init_device_mesh("npu", ...)` (of "nccl": "gpu") makes meshes of emulated devices.

    Args:
        kind: "hccl" or "nccl".
        rates: of the clocks.
        clock: let the compute clock go; see `kernels.py`.
        rendezvous: of "hccl", a message leaves only when it is received.

    Yields:
        The rank's device. At the end all its collectives must have been waited for.
    """
    real = comm.current_world()
    backend = emulated(kind, real.backend, rates)
    backend.double.rendezvous = rendezvous
    pretended = replace(real, backend=backend, device_type=_DEVICES[kind])
    fake = worlds.pretended.get() is not None
    token = worlds.pretended.set(pretended) if fake else None
    if not fake:
        worlds._started = pretended
    try:
        with target.rehearsal(_DEVICES[kind]), watched(backend.double), stood_in(backend.double, clock):
            yield backend.double
            backend.double.close()
    finally:
        if fake:
            worlds.pretended.reset(token)
        else:
            worlds._started = real
