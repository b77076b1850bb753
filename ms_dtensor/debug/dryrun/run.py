# SPDX-License-Identifier: Apache-2.0
"""`dry_run`: what a step would do on one rank of any world, found out in one process and without data.

Everything but kernels and transport is the program's own: its cells, its layouts, the library's plans, MindSpore's
autograd. Not here: how long it takes, which is a pure function of `run.events` and a machine.
"""
from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from mindspore.nn.utils import no_init_parameters

from ...comm.record import CommEvent, record_into
from ...comm.world import World, pretend
from ...core.dry_event import DryEvent
from ...errors import ConfigError
from ...internals.target import rehearsal
from ..cell_names import CellNames
from ..predict import load_hardware, timelines
from . import page
from .abstract import KINDS
from .asked import values_watched
from .backend import AbstractBackend
from .executor import Executor
from .report import write_report

_DEVICES = {"cpu": "CPU", "npu": "Ascend", "ascend": "Ascend", "gpu": "GPU", "cuda": "GPU"}


class DryRun:
    """What a dry run has found.

    Attributes:
        world: number of ranks.
        rank: the one that was run.
        device: MindSpore's name of the device.
        events: ops and communication in the order in which the rank issues them, see `DryEvent`.
        communication: the same communication as `comm.record()` lists it.
    """

    def __init__(self, world: int, rank: int, device: str, values: dict[str, Any], messages: dict[str, bytes]):
        self.world, self.rank, self.device = world, rank, device
        self._executor = Executor(values, messages, device == "CPU")
        self.communication: list[CommEvent] = _Moves(self._executor)
        self._cells: CellNames | None = CellNames()
        self._parameters: list[page.Parameter] = []

    @property
    def events(self) -> list[DryEvent]:
        return self._executor.events

    @property
    def messages(self) -> dict[str, bytes]:
        """What a stage of a pipeline tells the next one, for the dry run of a rank of that."""
        return self._executor.messages

    @property
    def assumed(self) -> dict[str, str]:
        """What was taken for granted, in words."""
        return self._executor.assumed

    def forget(self) -> None:
        """What has happened so far is told no more: events, communication and memory begin here; what is alive stays.

        For set-up, and for a first step, which communicates what later ones know.

        Example:
            >>> import ms_dtensor as md
            >>> from ms_dtensor.debug import dry_run
            >>> with dry_run(world=8, device="CPU") as run:
            ...     mesh = md.init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
            ...     x = md.zeros(64, 64, device_mesh=mesh, placements=[md.Shard(0)])
            ...     run.forget()
            ...     whole = x.full_tensor()
            >>> [e.op for e in run.events], run.memory().peak
            (['all_gather'], 18432)
        """
        self.communication.clear()
        self._executor.forget()

    def flops(self) -> int:
        """Floating-point operations of products, forward and backward; a product and a sum are two."""
        return sum(e.flops for e in self.events)

    def seconds(self, hardware, beside: Sequence[DryRun] = ()) -> float:
        """Of the events on a machine, by its figures.

        Args:
            hardware: of `load_hardware`, or what it takes: "910b", "a100", a file.
            beside: the same step of other ranks that are waited for: one of each other stage of a pipeline.
        """
        ranks = {run.rank: run.events for run in (self, *beside)}
        return timelines(ranks, load_hardware(hardware))[self.rank].seconds

    def comms(self) -> dict[tuple[str, tuple[str, ...], str, str], tuple[int, int]]:
        """(collective, axes, phase, line of the user's code) -> (how many, bytes that leave this rank)."""
        count: Counter = Counter()
        size: Counter = Counter()
        for e in self.events:
            if e.is_move:
                key = e.op, e.axes, e.phase, e.site
                count[key] += 1
                size[key] += e.bytes
        return {key: (n, size[key]) for key, n in count.items()}

    def memory(self) -> Memory:
        """Bytes over time, by kind."""
        ledger = self._executor.ledger
        return Memory(ledger.changes, ledger.pool.most + sum(ledger.kernels.values()))

    def parameters(self) -> list[page.Parameter]:
        """Those of the cells that were called, with the names of these; the layout of each, and what this rank holds."""
        if self._cells is not None:
            self._parameters = [
                page.Parameter(f"{cell}.{key}", tuple(p.shape), layout.describe(), (local := layout.local_shape()),
                               prod(local) * p.itemsize)
                for cell, own in self._cells.parameters().items() for key, p in own.items()
                if (layout := getattr(p, "_layout", None)) is not None]
        return self._parameters

    def pipeline(self) -> str:
        """The picture of the schedule of a pipeline that the block ran, an SVG; empty if it ran none."""
        return self._executor.picture()

    def report(self, path: str | os.PathLike, *, title: str = "", hardware=None, measured: Mapping[str, Any] | None = None,
               links: Sequence[tuple[str, str]] = ()) -> None:
        """Writes what was found as one HTML page, which needs nothing but itself.

        Args:
            path: of the page.
            title: its heading.
            hardware: as for `seconds`; without it no time is predicted.
            measured: of a real run, to stand beside what is predicted: "seconds" of a step, "bytes" of tensors at the peak,
                "comm" as {"all_reduce tp": (calls, bytes)}, as the recipe's `metrics.jsonl` has it.
            links: (file beside the page, what it is).

        Example:
            >>> from pathlib import Path
            >>> from tempfile import mkdtemp
            >>> from ms_dtensor.debug import dry_run
            >>> with dry_run(world=8, device="CPU") as run:
            ...     pass
            >>> run.report(Path(mkdtemp()) / "step.html", title="nothing at all")
        """
        write_report(self, path, title, hardware, measured or {}, links)

    def _leave(self) -> None:
        """The block ends: the program's cells may go."""
        self.parameters()
        self._cells = None
        if not self.events and not self._parameters:
            self.assumed["plain tensors"] = "no op on a DTensor was met: what is plain is computed as ever, and not counted"
        self._executor.end()


class Memory:
    """Bytes of tensors over time, by kind; what kernels take beside (workspace) is not known.

    Attributes:
        peak: the most at one time, all kinds.
        at_peak: by kind, at that time.
        at: of that time, in events.
        end: by kind, at the end.
        resident: the most pages that this takes in a process, of the "CPU" device: of each allocator its own peak, as none
            gives back to another what it no longer needs; of MindSpore's pool with the gaps between what it hands out, and
            from the dry run's beginning on, as it gives nothing back (`pool.py`); and what kernels keep once they have run.
    """

    workspace = "not known"

    def __init__(self, changes, stays: int):
        self.changes = changes
        now, most = dict.fromkeys(KINDS, 0), 0
        self.peak, self.at, self.at_peak = 0, 0, dict(now)
        total, parts, high = 0, dict[str, int](), dict[str, int]()
        for change in changes:
            parts[change.where] = parts.get(change.where, 0) + change.bytes
            high[change.where] = max(high.get(change.where, 0), parts[change.where])
            now[change.kind] += change.bytes
            total += change.bytes
            if total > most:
                most, self.at, self.at_peak = total, change.at, dict(now)
        self.peak, self.end, self.resident = most, now, stays + sum(size for where, size in high.items() if where != "pool")

    def over_time(self) -> Iterator[tuple[int, dict[str, int]]]:
        """(events that had happened, bytes by kind), after each event that changed it."""
        now, at = dict.fromkeys(KINDS, 0), None
        for change in self.changes:
            if at is not None and change.at != at:
                yield at, dict(now)
            now[change.kind] += change.bytes
            at = change.at
        if at is not None:
            yield at, dict(now)


class _Moves(list):
    """Who records communication, and tells the executor."""

    def __init__(self, executor: Executor):
        super().__init__()
        self._executor = executor

    def append(self, event: CommEvent) -> None:
        super().append(event)
        self._executor.note_move(event)


@contextmanager
def dry_run(world: int, rank: int = 0, device: str = "Ascend", *, values: dict[str, Any] | None = None,
            messages: dict[str, bytes] | None = None) -> Iterator[DryRun]:
    """Inside, what DTensors would do is found out and not done; what the step says of memory and the like is in the value.

    Models are made inside, and their parameters are never: initialisation is deferred as by `no_init_parameters`. To lay out
    one that was made before is refused, as its values would be lost. What is seen are ops on DTensors; plain tensors are
    computed as ever.

    Args:
        world: number of ranks.
        rank: the one to be.
        device: whose branches of the library are walked: "Ascend", "GPU" or "CPU".
        values: what data would tell. "train.py:40": what a tensor asked for its value there holds; "experts": how many there
            are, which are then taken as chosen equally often, or this rank's choices `i[n, k]`.
        messages: of a pipeline's stage, `run.messages` of the dry run of a rank of the stage before.

    Raises:
        ConfigError: no such rank or device; a dry run inside a dry run; inside, a model that was made before.

    Example:
        >>> import mindspore as ms, numpy as np, ms_dtensor as md
        >>> from mindspore import nn
        >>> from ms_dtensor.debug import dry_run
        >>> with dry_run(world=8, rank=3, device="CPU") as run:
        ...     mesh = md.init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
        ...     net = md.parallelize_module(nn.Dense(4096, 8192, has_bias=False), mesh, md.ColwiseParallel())
        ...     x = md.distribute_tensor(ms.Tensor(np.zeros((16, 4096), np.float32)), mesh)
        ...     loss, grads = ms.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())(x)
        >>> run.flops() == 3 * 2 * 16 * 4096 * 8192 // 8  # MindSpore takes the gradient of a fresh tensor, too
        True
    """
    kind = _DEVICES.get(device.lower()) if isinstance(device, str) else None
    if kind is None:
        raise ConfigError(f"For 'dry_run', {device!r} is not a device.", "", "A run is of one kind of device.",
                          'device="Ascend", "GPU" or "CPU"')
    if any(isinstance(n, bool) or not isinstance(n, int) for n in (world, rank)) or not 0 <= rank < world:
        raise ConfigError(f"For 'dry_run', rank {rank!r} is not in a world of {world!r}.", "", "0 <= rank < world",
                          "pass a rank of the world")
    for name, given in (("values", values), ("messages", messages)):
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"For 'dry_run', '{name}' is {type(given).__name__}.", "", "What is told has a name.",
                              f"a dict, see `help(dry_run)`: {name}={{...}}")
    run = DryRun(world, rank, kind, dict(values or {}), dict(messages or {}))
    backend = AbstractBackend(world, rank, run._executor, on_host=kind == "CPU")
    pretending: Any = World(rank, world, backend, kind, executor=run._executor)
    with (values_watched(), rehearsal(kind), pretend(pretending), record_into(run.communication), no_init_parameters(),
          run._cells.naming()):  # type: ignore[union-attr]
        try:
            yield run
        finally:
            run._leave()

