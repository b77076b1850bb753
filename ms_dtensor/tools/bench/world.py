# SPDX-License-Identifier: Apache-2.0
"""What a benchmark on the ranks needs: the world, a clock that waits for the device, and the slowest rank's word.

Not a benchmark. The invariant: figures are equal on all ranks when a benchmark returns its rows, so that rank 0's file is
everybody's. A call is timed as nccl-tests does it: warm up, barrier, `times` calls, wait for the device, divide; the slowest
rank counts unless said otherwise.
"""
from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mindspore as ms

from ... import comm
from ...core.mesh import DeviceMesh
from ...tensor.distribute import init_device_mesh


@dataclass
class Bench:
    """A rank of the benchmark.

    Args:
        device: "cpu", "npu" or "gpu".
        slots: ranks a node; None: as many as have the first rank's host name.
        peaks: TFLOP/s by dtype that the user stated.
    """

    device: str
    slots: int | None = None
    peaks: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        world = comm.start(self.device)
        self.rank, self.size, self.backend = world.rank, world.size, world.backend
        self.everybody = comm.group(tuple(range(world.size)))

    @cached_property
    def ranks_a_node(self) -> int:
        names = self.each(socket.gethostname()) if self.slots is None else [""] * self.slots
        return names.count(names[0])

    @property
    def name(self) -> str:
        """The device's own name, by which a peak is found; "CPU" there."""
        return "CPU" if self.device == "cpu" else ms.hal.get_device_name(0)

    def mesh(self, **axes: int) -> DeviceMesh:
        return init_device_mesh(self.device, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def wait(self) -> None:
        """For the device; a CPU has computed when an op returns."""
        if self.device != "cpu":
            ms.runtime.synchronize()

    def each(self, value: Any) -> list[Any]:
        """Every rank's value."""
        return self.everybody.all_gather_object(value) if self.size > 1 else [value]

    def slowest(self, seconds: float) -> float:
        return max(self.each(seconds))

    def seconds(self, call: Callable[[], object], times: int, warm: int = 2, take_part: bool = True) -> list[float]:
        """Seconds a call on every rank; of those who do not take part 0."""
        for _ in range(warm if take_part else 0):
            call()
        self.wait()
        self.everybody.barrier()
        start = time.perf_counter()
        for _ in range(times if take_part else 0):
            out = call()
        self.wait()
        taken = (time.perf_counter() - start) / times if take_part else 0.0
        if take_part:
            del out
        return self.each(taken)

    def memory(self) -> int | None:
        """Most bytes allocated on any device; None on a CPU, whose MindSpore does not count."""
        return None if self.device == "cpu" else max(self.each(ms.runtime.max_memory_allocated()))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most over the ranks, in microseconds."""
    return {name: round(x * 1e6, 2) for name, x in
            (("time", statistics.median(values)), ("fastest", min(values)), ("slowest", max(values)))}
