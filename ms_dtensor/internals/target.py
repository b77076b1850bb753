# SPDX-License-Identifier: Apache-2.0
"""Which device: one place asks MindSpore, so that a rehearsal can walk a device's branch on a machine without one."""

from collections.abc import Iterator
from contextlib import contextmanager

from .names import context, context_keys

_rehearsed: str | None = None  # of the process, as MindSpore's own target is: a backward runs on MindSpore's thread


def target() -> str:
    """The device the library works for: ``"CPU"``, ``"Ascend"`` or ``"GPU"``; a rehearsal's, where one is under way."""
    return _rehearsed or context.get_param(context_keys.device_target)


def on_cpu() -> bool:
    """Whether the library takes the branch for CPUs: shared memory, arrays as views, kernels mended."""
    return target() == "CPU"


def cpu_kernels() -> bool:
    """Whether the kernels that run are MindSpore's CPU kernels, with their gaps and faults: true in a rehearsal too."""
    return context.get_param(context_keys.device_target) == "CPU"


def ascend_kernels() -> bool:
    """Whether the primitives that only Ascend has kernels for can run."""
    return context.get_param(context_keys.device_target) == "Ascend"


@contextmanager
def rehearsal(device: str) -> Iterator[None]:
    """Inside, the library takes the branch of ``device``; who enters has put kernels and communication there."""
    global _rehearsed
    before, _rehearsed = _rehearsed, device
    try:
        yield
    finally:
        _rehearsed = before
