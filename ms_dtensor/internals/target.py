# SPDX-License-Identifier: Apache-2.0
"""Which device: one place asks MindSpore, so that a rehearsal can walk a device's branch on a machine without one."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import mindspore as ms

from .names import context, context_keys, device_stack

F = TypeVar("F", bound=Callable)
META = "meta"  # the device whose tensors have shape and dtype, and no values
_rehearsed: str | None = None  # of the process, as MindSpore's own target is: a backward runs on MindSpore's thread


def target() -> str:
    """The device the library works for: ``"CPU"``, ``"Ascend"`` or ``"GPU"``; a rehearsal's, where one is under way."""
    return _rehearsed or _real()


def _real() -> str:
    """MindSpore's device; inside of the user's `DeviceCtx("meta")` the one around it."""
    now = context.get_param(context_keys.device_target)
    if now == META:
        now = next((d.device_target for d in reversed(device_stack()) if d.device_target != META), now)
    return now


def is_meta(x: Any) -> bool:
    """Whether a tensor has no values: it was made inside of `DeviceCtx("meta")`."""
    return x.device == META


@contextmanager
def outside_meta() -> Iterator[None]:
    """Inside, the user's `DeviceCtx("meta")` does not hold: what the library asks and sends has values."""
    if context.get_param(context_keys.device_target) != META or _real() == META:
        yield
        return
    with ms.DeviceCtx(_real()):
        yield


def with_values(function: F) -> F:
    """A function that runs outside of the user's `DeviceCtx("meta")`."""
    @functools.wraps(function)
    def run(*args, **kwargs):
        with outside_meta():
            return function(*args, **kwargs)
    return run  # type: ignore[return-value]


def on_cpu() -> bool:
    """Whether the library takes the branch for CPUs: shared memory, arrays as views, kernels mended."""
    return target() == "CPU"


def cpu_kernels() -> bool:
    """Whether the kernels that run are MindSpore's CPU kernels, with their gaps and faults: true in a rehearsal too."""
    return _real() == "CPU"


def ascend_kernels() -> bool:
    """Whether the primitives that only Ascend has kernels for can run."""
    return _real() == "Ascend"


def card_memory() -> int:
    """Bytes of this process's Ascend card, as its driver says; 0 until MindSpore has initialised it, and in a rehearsal."""
    if _real() != "Ascend":
        return 0
    return ms.hal.get_device_properties(context.get_param(context_keys.device_id), "Ascend").total_memory


@contextmanager
def rehearsal(device: str) -> Iterator[None]:
    """Inside, the library takes the branch of ``device``; who enters has put kernels and communication there."""
    global _rehearsed
    before, _rehearsed = _rehearsed, device
    try:
        yield
    finally:
        _rehearsed = before
