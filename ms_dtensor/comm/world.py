# SPDX-License-Identifier: Apache-2.0
"""The world: all ranks of the job, started once; or a pretended one.

Importing this does nothing. `start` reads msrun's environment, chooses a backend and connects; without msrun the
process is a world of one. The invariant: at most one real world per process, and inside `fake_world` only the fake one
is seen.
"""
from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.mesh import bind_world
from ..errors import CommError, ConfigError
from . import launcher, registry
from .pretended import pretended

if TYPE_CHECKING:
    from .group import Group
    from .protocol import Backend

_DEVICES = {"cpu": "CPU", "npu": "Ascend", "ascend": "Ascend", "gpu": "GPU", "cuda": "GPU"}


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of the job.

    Attributes:
        rank: this process.
        size: number of ranks.
        backend: what moves data between them.
        device_type: MindSpore's name of the device ("CPU", "Ascend", "GPU").
        blocking: MindSpore's ops have run when they return.
        executor: what makes results in the place of kernels, in a dry run; see `debug/dryrun`.
    """

    rank: int
    size: int
    backend: Backend
    device_type: str
    blocking: bool = False
    executor: Any = None


WORLD_NAMES = ("hccl_world_group", "nccl_world_group", "mccl_world_group")  # MindSpore's, of all ranks
_started: World | None = None
_log = logging.getLogger("ms_dtensor")


def set_cpu_backend(name: str) -> None:
    """Chooses the CPU backend before the world starts.

    Args:
        name: "shm" (one host, the default), "mccl" (MindSpore's), or one of `register_backend`.

    Example:
        >>> import ms_dtensor as md
        >>> md.comm.set_cpu_backend("shm")
    """
    if name not in registry.cpu_backends():
        raise ConfigError(f"For 'set_cpu_backend', '{name}' is not a backend.", "",
                          f"CPU has the backends {', '.join(registry.cpu_backends())}.",
                          ('use "shm" on one host', 'use "mccl" over several hosts', "register_backend adds one"))
    if _started is not None and _started.size > 1 and type(_started.backend) is not registry.load(name):
        raise ConfigError("For 'set_cpu_backend', the world has started.", f"backend '{_started.backend.name}'",
                          "A world keeps its backend.", "call it before the first mesh is made")
    registry.serving["CPU"] = name


def start(device_type: str = "cpu") -> World:
    """Starts the world, or returns the one that runs (the fake one inside `fake_world`).

    Args:
        device_type: "cpu", "npu" (or "Ascend"), "gpu".

    Raises:
        ConfigError: unknown or absent device, a world on another device, or an environment that does not fit.
        PeerLost: ranks that did not come in time.
    """
    global _started
    device = _DEVICES.get(device_type.lower())
    if device is None:
        raise ConfigError(f"For 'start', '{device_type}' is not a device type.", "",
                          "A world runs on one kind of device.", 'use "cpu", "npu" or "gpu"')
    fake = pretended.get()
    if fake is not None:
        return fake
    if _started is None:
        launcher.check_device(device, device_type)
        _started = _start(device)
        atexit.register(_at_exit)
    elif _started.device_type != device:
        raise ConfigError(f"For 'start', the world runs on {_started.device_type}.", f"asked for {device}",
                          "A process has one world on one kind of device.", "use one device type")
    return _started


def _start(device: str) -> World:
    import mindspore

    from ..internals.target import cpu_kernels
    from .fake import FakeBackend
    role, rank, size = _environment(device)
    kind = FakeBackend if size == 1 and role != "MS_SCHED" else registry.load(registry.serving[device])
    # msrun runs the script once more as scheduler, whom a worker that is alone never calls
    if role == "MS_SCHED" and (size == 1 or not kind.needs_scheduler):
        raise SystemExit(0)
    blocking = device == "CPU"
    if blocking:
        # The asynchronous pipeline costs tens of times more than the ops themselves where cores are few.
        try:
            mindspore.set_device("CPU")
            mindspore.runtime.launch_blocking()
        except RuntimeError:  # an op has run already, so the runtime has started as it is
            blocking = False
            if not cpu_kernels():
                raise
    if role:
        launcher.end_with_msrun()
    backend = kind.start(rank, size, blocking)
    if size > 1:
        launcher.hold_mindspore()
    _log.info("rank %d of %d started on %s with %s", backend.rank, backend.size, device, kind.__name__)
    return World(backend.rank, backend.size, backend, device, blocking)


def _environment(device: str) -> tuple[str, int, int]:
    """msrun's role, rank and world size; without msrun a world of one."""
    env = os.environ
    role = env.get("MS_ROLE", "")
    if not role:
        return "", 0, 1
    words = {k: env.get(k, "") for k in ("MS_WORKER_NUM", "MS_NODE_ID", "RANK_ID")}
    try:
        size = int(words["MS_WORKER_NUM"])
        rank = int(words["MS_NODE_ID"] or words["RANK_ID"] or 0) if role != "MS_SCHED" else 0
    except ValueError:
        rank = size = -1
    if not 0 <= rank < size:
        raise ConfigError("For 'start', the launcher's environment does not fit together.", f"MS_ROLE={role} {words}",
                          "A worker has a rank below MS_WORKER_NUM.", "launch with msrun --worker_num=N script.py")
    if role != "MS_SCHED" and words["MS_NODE_ID"] and words["RANK_ID"] not in ("", words["MS_NODE_ID"]):
        raise ConfigError("For 'start', MS_NODE_ID and RANK_ID name two ranks.", f"MS_ROLE={role} {words}",
                          "Both are the rank of this process among all of the job.",
                          ("unset the one that another job or the shell has left", "launch with msrun, which sets both"))
    return role, rank, size


def current_world() -> World | None:
    """The fake world if one is active, else the started one, else None. Starts nothing."""
    return pretended.get() or _started


def ops_block() -> bool:
    """Whether MindSpore's ops have run when they return, as far as the started world can tell."""
    return _started is not None and _started.blocking


def synchronize() -> None:
    """On a host, waits for ops that have returned and may not have run, as memory that they read will be written, or go.

    They run behind their calls where one had run before the first mesh: then MindSpore stays as it is.
    """
    import mindspore
    if not ops_block():
        mindspore.runtime.synchronize()


def world_key() -> tuple[int, int, bool] | None:
    """What tells one fake world's cached plans from another's and from the real world's; None in the real one."""
    world = pretended.get()
    return None if world is None else (world.rank, world.size, world.executor is not None)


def get_backend(mesh: Any = None) -> Backend:
    """The backend that a mesh, as all of the current world, communicates with.

    Example:
        >>> import ms_dtensor as md
        >>> with md.comm.fake_world(4):
        ...     md.comm.get_backend(md.init_device_mesh("cpu", (4,))).name
        'fake'
    """
    world = current_world()
    if world is None:
        raise CommError("For 'get_backend', there is no world.", "", "Communication needs ranks.",
                        ("make a DeviceMesh first", "call ms_dtensor.comm.start()"))
    return world.backend


def group(ranks: Sequence[int], axes: Sequence[str] = ()) -> Group:
    """A group of ranks of the current world. Free: nothing is communicated or allocated."""
    from .group import Group
    made = Group(get_backend(), ranks, axes)
    _log.debug("made %s", made)
    return made


def named_group(ranks: Sequence[int], axes: Sequence[str] = ()) -> Group:
    """The same; it is a str, too: the name by which MindSpore's own collectives take it.

    Of MindSpore's own backends that is a communicator, which exists then; of `shm` see `mindspore_collectives`.
    """
    from .group import NamedGroup
    made = group(ranks, axes)
    name = made.backend.communicator(made.ranks)
    if name is None:
        return made
    if made.backend.named is None:
        made.backend.named = {}
    made.backend.named[name] = made.ranks
    return NamedGroup(name, made.backend, ranks, axes)


def of_name(name: Any = None) -> Group:
    """A group by what `mesh.get_group` gave, by its name, or by none: all ranks.

    Raises:
        CommError: no such group, or no world.
    """
    from .group import Group
    if isinstance(name, Group):
        return name
    backend = get_backend()
    if name is None or name in WORLD_NAMES:
        return group(tuple(range(backend.size)))
    if not isinstance(name, str) or name not in (backend.named or {}):
        raise CommError(f"For 'group', there is none of the name {name!r}.", f"backend '{backend.name}'",
                        "A group has a name from when it was made.", ('mesh.get_group("tp")', "None for all ranks"))
    return group((backend.named or {})[name])


@contextmanager
def fake_world(world_size: int, rank: int = 0, device_type: str = "cpu") -> Iterator[World]:
    """Pretends to be one rank of a world of any size; nothing is sent. Re-entrant, and of this thread only.

    Args:
        world_size: number of ranks.
        rank: the one to be.
        device_type: what the world pretends to run on.

    Example:
        >>> with fake_world(65536, rank=7) as world:
        ...     world.size, world.rank
        (65536, 7)
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"For 'fake_world', rank {rank} is not in a world of {world_size}.", "", "0 <= rank < size",
                          "pass a rank of the world")
    from .fake import FakeBackend
    world = World(rank, world_size, FakeBackend(world_size, rank), _DEVICES.get(device_type.lower(), "CPU"))
    with pretend(world):
        yield world


@contextmanager
def pretend(world: World) -> Iterator[None]:
    """Inside, and in this thread, that world is the only one."""
    token = pretended.set(world)
    try:
        yield
    finally:
        pretended.reset(token)


def shutdown() -> None:
    """Leaves the world. Ranks still at work fail only if they wait for this one."""
    _leave("")


def _leave(reason: str) -> None:
    global _started
    world, _started = _started, None
    if world is not None:
        atexit.unregister(_at_exit)
        launcher.release_mindspore()
        try:
            world.backend.close(reason)
        except CommError:
            if not reason:
                raise


def _at_exit() -> None:
    """Says goodbye with the reason, so that the others report our error and not merely our absence."""
    kind = getattr(sys, "last_type", None)
    if kind is None:
        _leave("")
        return
    first = str(getattr(sys, "last_value", "")).strip().split("\n")[0]
    _leave(f"{kind.__name__}: {first}"[:400])


bind_world(current_world, named_group)  # the mesh module must not import upwards, so it is told
