# SPDX-License-Identifier: Apache-2.0
"""Which backends there are: a name and a class each, and the name that serves each kind of device.

To add one, write a class that keeps `protocol.Backend` and register it. Invariant: a class is loaded when a world starts on
it, not before, so that importing comm imports no MindSpore. Classes from elsewhere get the check of `owner.py` here.
"""
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .owner import Owned, owned

if TYPE_CHECKING:
    from .protocol import Backend

_classes: dict[str, str | type[Backend]] = {"shm": ".shm.backend:ShmBackend", "mccl": ".mccl:McclBackend",
                                            "hccl": ".hccl:HcclBackend", "nccl": ".nccl:NcclBackend"}
serving = {"CPU": "shm", "Ascend": "hccl", "GPU": "nccl"}  # by MindSpore's name of the device


def register_backend(name: str, backend: str | type[Backend]) -> None:
    """Makes a backend known; on CPU `set_cpu_backend(name)` then chooses it. A known name gets the new class.

    Args:
        name: what it is called.
        backend: the class, or "module:Class", which is imported when a world starts on it.

    Example:
        >>> import ms_dtensor as md
        >>> from ms_dtensor.comm.shm.backend import ShmBackend
        >>> class Logged(ShmBackend):  # every rank: register, choose, then make the first mesh
        ...     def all_reduce(self, x, op, group, async_op=False):
        ...         print("all_reduce", op, x.shape, group)
        ...         return super().all_reduce(x, op, group, async_op)
        >>> md.comm.register_backend("logged", Logged)
        >>> md.comm.set_cpu_backend("logged")
        >>> md.comm.set_cpu_backend("shm")
    """
    _classes[name] = backend


def cpu_backends() -> list[str]:
    """The names to choose from on CPU."""
    return [name for name in _classes if name not in (serving["Ascend"], serving["GPU"])]


def load(name: str) -> type[Backend]:
    """The class of a registered name."""
    found = _classes[name]
    if isinstance(found, str):
        module, _, cls = found.partition(":")
        found = getattr(import_module(module, __package__), cls)
    if not found.__module__.startswith(f"{__package__}.") and not issubclass(found, Owned):
        found = owned(found)
    _classes[name] = found
    return found
