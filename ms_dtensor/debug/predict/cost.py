# SPDX-License-Identifier: Apache-2.0
"""Seconds of a piece of work on a machine: an op, or a collective. Pure; the machine's figures are `hardware.py`'s.

A device computes and reads memory; which of both an op waits for the machine's file says. Ops below are what one rank
runs: sizes are those of its shards. Read next: `transformer.py`, which lists the work of a model.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from .hardware import Hardware


@dataclass(frozen=True, slots=True)
class Op:
    """What one kernel does on one rank.

    Attributes:
        name: for people.
        flops: operations.
        traffic: bytes read and written.
        matrix: whether the device's matrix units do it.
        backward: whether it is a gradient's.
        within: whether it is done within another op or between two, so that nobody asks for it.
    """

    name: str
    flops: float
    traffic: float
    matrix: bool = False
    backward: bool = False
    within: bool = False


@dataclass(frozen=True, slots=True)
class Collective:
    """One exchange of data.

    Attributes:
        op: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", or "exchange" with one neighbour.
        size: bytes of the whole tensor: what a gather makes, what a reduction reads, what is sent to one neighbour.
        ranks: how many take part.
        span: ranks from the first to the last of them, both counted, in the machine's order; decides about the link.
        axis: of the mesh, for people.
        mapped: bytes of memory that a host puts under the addresses of its result first.
    """

    op: str
    size: float
    ranks: int
    span: int
    axis: str = ""
    mapped: float = 0


Work: TypeAlias = Op | Collective


def seconds(work: Work, machine: Hardware) -> float:
    """Of one piece, alone.

    Example:
        >>> from ms_dtensor.debug.predict import Op, load_hardware, seconds
        >>> product = Op("matmul", 2 * 4096**3, 3 * 2 * 4096**2, matrix=True)
        >>> f"{seconds(product, load_hardware('a100')) * 1e3:.2f} ms"
        '0.52 ms'
    """
    if isinstance(work, Collective):
        own = machine.host.get("op", (0.0,))[0]  # it is given to the link as any op to a device
        own += work.mapped / machine.kernels["mapping"][0] if "mapping" in machine.kernels else 0.0
        return own + machine.link(work.span).seconds(work.op, work.size, work.ranks) if work.ranks > 1 else 0.0
    what = "op" if work.flops or work.traffic else "view"
    launch = machine.launch if work.within else machine.host.get(what, (machine.launch,) * 2)[work.backward]
    if work.name in machine.kernels:
        return launch + work.traffic / machine.kernels[work.name][work.backward]
    computing = (machine.matrix if work.matrix else machine.vector).seconds(work.flops)
    reading = machine.memory.seconds(work.traffic)
    return launch + (max(computing, reading) if machine.overlap else computing + reading)


def total(work: Iterable[Work], machine: Hardware) -> float:
    """One after the other."""
    return sum(seconds(one, machine) for one in work)


def together(computing: float, sending: float, processor: float) -> float:
    """Seconds of a computation and an exchange that go on side by side.

    Args:
        computing, sending: seconds of each alone.
        processor: share of the device that the exchange takes while it runs.

    Example:
        >>> from ms_dtensor.debug.predict.cost import together
        >>> together(1.0, 0.5, 0.2), together(0.1, 0.5, 0.2)
        (1.1, 0.5)
    """
    return max(sending, computing + processor * sending)
