# SPDX-License-Identifier: Apache-2.0
"""What a machine can do, read from one file: how fast a device computes, reads memory, and exchanges data.

A file is made once per kind of machine, from data sheets, published measurements, or `python -m ms_dtensor calibrate`; it
says itself which. Nothing in it is fitted to the run that is predicted. Read next: `cost.py`, which asks these figures.
"""
from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.files import regular
from ...core.plain_yaml import plain_yaml
from ...errors import ConfigError

MOST = 1e15  # in a file's units no figure is as large
LARGEST = 1 << 18  # bytes of a file, which has one or two thousand
MACHINES = Path(__file__).parent / "machines"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange")


@dataclass(frozen=True, slots=True)
class Curve:
    """A peak, and the share of it that work of a size reaches.

    Attributes:
        peak: a second: operations, or bytes.
        steps: (size from which on, share), the largest first; the last size is 0.
    """

    peak: float
    steps: tuple[tuple[float, float], ...]

    def seconds(self, size: float) -> float:
        """For so many operations or bytes at once.

        Example:
            >>> from ms_dtensor.debug.predict.hardware import Curve
            >>> Curve(100.0, ((50, 0.5), (0, 0.1))).seconds(100), Curve(100.0, ((50, 0.5), (0, 0.1))).seconds(10)
            (2.0, 1.0)
        """
        return size / (self.peak * next(share for least, share in self.steps if size >= least)) if size else 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """What joins so many neighbouring ranks.

    Attributes:
        ranks: how many of them; rank numbers that are further apart go over the next link.
        bandwidth: bytes a second of one rank.
        latency: seconds of a collective.
        factors: how often a collective sends its whole tensor; a ring's all_reduce 2.
        ring: whether a rank's own part is not sent, so that (ranks - 1) / ranks of that goes over the link.
        processor: share of the device's computing that a running collective takes; 1: nothing is computed meanwhile.
        wait: of ranks that have computed for s seconds the slowest is later by this times the root of s than one alone: what
            hinders them comes now and then, and adds up as such things do.
    """

    ranks: int
    bandwidth: float
    latency: float
    factors: Mapping[str, float]
    ring: bool
    processor: float
    wait: float = 0.0

    def seconds(self, op: str, size: float, ranks: int) -> float:
        """Of a collective over so many ranks; `size`: bytes of the whole tensor, which a gather makes."""
        sent = self.factors[op] * size * ((ranks - 1) / ranks if self.ring and op != "exchange" else 1.0)
        return self.latency + sent / self.bandwidth


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine.

    Attributes:
        name: of its file.
        source: where its figures are from.
        matrix: products; operations a second, by operations of one product.
        vector: everything else that is computed.
        memory: bytes a second, by bytes that one op reads and writes.
        overlap: whether an op reads memory while it computes: then the longer of both counts, else their sum.
        launch: seconds of the host for each op that a device is given.
        capacity: bytes of a device's memory that tensors may take.
        links: the quickest first.
        communicator: bytes of a device's memory that a communicator's buffers take.
        kernels: of ops that are slower than memory: (forward, backward), bytes a second that they read and write.
        host: in the place of `launch` where an op has run when it returns, so that all of the library's and MindSpore's own
            work for it counts: (forward, backward) seconds of an "op", and of a "view", which computes nothing.
        asking: of a device, seconds of the host for an "op" on DTensors and for a "collective"; empty if not measured there.
    """

    name: str
    source: str
    matrix: Curve
    vector: Curve
    memory: Curve
    overlap: bool
    launch: float
    capacity: int
    links: tuple[Link, ...]
    communicator: int = 0
    kernels: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    host: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    asking: Mapping[str, float] = field(default_factory=dict)

    def link(self, span: int) -> Link:
        """That joins ranks whose numbers lie in one aligned block of `span`; the last one joins all."""
        return next((link for link in self.links if span <= link.ranks), self.links[-1])


def load_hardware(machine: str | Path | Hardware) -> Hardware:
    """A machine by its name or by a file of yours.

    Args:
        machine: `"910b"`, `"910c"`, `"a100"`, `"h100"`, `"cpu"`, the path of a YAML file such as these, or what this
            function gave.

    Raises:
        ConfigError: there is no such machine, or its file lacks a figure.

    Example:
        >>> from ms_dtensor.debug.predict import load_hardware
        >>> load_hardware("a100").matrix.peak
        312000000000000.0
    """
    if isinstance(machine, Hardware):
        return machine
    known = sorted(file.stem for file in MACHINES.glob("*.yaml"))
    if not isinstance(machine, str | Path):
        raise ConfigError(f"For 'hardware', {machine!r} is no machine.", "", f"Known are {', '.join(known)}.",
                          'hardware="910b", or the path of a file')
    file = MACHINES / f"{machine}.yaml" if str(machine) in known else Path(machine)
    try:
        raw = _bytes(regular(file))
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        raise ConfigError(f"For 'hardware', there is no machine {str(machine)!r}.",
                          f"{str(file)!r}: {getattr(error, 'strerror', None) or error}",
                          f"Known are {', '.join(known)}; others are files of yours.",
                          ["python -m ms_dtensor calibrate --hardware FILE measures this one",
                           f"copy {MACHINES / 'a100.yaml'} and change its figures"]) from None
    try:
        told = plain_yaml(raw.decode("utf-8"))
    except ValueError as error:
        raise ConfigError(f"For 'hardware', '{file}' is no YAML.", str(error)[:200], "A machine is one YAML file.",
                          f"write it as {MACHINES / 'a100.yaml'} is") from None
    try:
        return parse(file.stem, told)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"For 'hardware', '{file}' lacks a figure, or has one of another kind.",
                          f"{type(error).__name__}: {error}",
                          "All figures are needed; none has a default, as a guess would look like a measurement.",
                          f"write it as {MACHINES / 'a100.yaml'} is") from None


def _bytes(file: Path) -> bytes:
    with file.open("rb") as stream:
        raw = stream.read(LARGEST + 1)
    if len(raw) > LARGEST:
        raise OSError(errno.EFBIG, f"more than {LARGEST >> 10} KiB, and a machine's file has one or two")
    return raw


def parse(name: str, told: Mapping[str, Any]) -> Hardware:
    """A machine of what its file says, in the file's units: TFLOP/s, GB/s, GFLOP, MB, microseconds, GiB."""
    def curve(which: str, peak: str, scale: float, size: float) -> Curve:
        part = told[which]
        steps = tuple((_number("reached", least) * size, _number("reached", share)) for least, share in part["reached"])
        if not steps or steps[-1][0] != 0 or any(a <= b for (a, _), (b, _) in zip(steps, steps[1:])):
            raise ValueError(f"reached: sizes fall, and the last is 0: {part['reached']}")
        if not all(0 < share <= 1 for _, share in steps):
            raise ValueError(f"reached: shares are above 0 and at most 1: {part['reached']}")
        return Curve(_positive(peak, part[peak]) * scale, steps)

    if not isinstance(told, Mapping):
        raise ValueError("it is no mapping of figures")
    _known("", told, ("source", "matrix", "vector", "memory", "overlap", "launch_us", "links", "kernels", "host_us",
                      "asking_us"))
    for which, names in (("matrix", ("tflops", "reached")), ("vector", ("tflops", "reached")),
                         ("memory", ("gib", "gb_s", "reached", "communicator_mib"))):
        _known(which, told[which], names)
    _known("host_us", told.get("host_us", {}), ("op", "view"))
    links = tuple(_link(link) for link in told["links"])
    if not links or any(near.ranks >= far.ranks for near, far in zip(links, links[1:])):
        raise ValueError("links: one at least, those of the fewest ranks first")
    return Hardware(name, str(told["source"]), curve("matrix", "tflops", 1e12, 1e9), curve("vector", "tflops", 1e12, 1e9),
                    curve("memory", "gb_s", 1e9, 1e6), _truth("overlap", told["overlap"]),
                    _number("launch_us", told["launch_us"]) * 1e-6,
                    int(_number("gib", _positive("gib", told["memory"]["gib"]) * 2**30)), links,
                    int(_number("communicator_mib", told["memory"].get("communicator_mib", 0)) * 2**20),
                    {op: (_positive(op, there) * 1e9, _positive(op, back) * 1e9)
                     for op, (there, back) in told.get("kernels", {}).items()},
                    {what: (_number(what, there) * 1e-6, _number(what, back) * 1e-6)
                     for what, (there, back) in told.get("host_us", {}).items()},
                    {what: _positive(what, us) * 1e-6 for what, us in told.get("asking_us", {}).items()})


def _link(told: Mapping[str, Any]) -> Link:
    _known("links", told, ("ranks", "gb_s", "latency_us", "ring", "processor", "factors", "wait"))
    processor = _number("processor", told["processor"])
    if processor > 1:
        raise ValueError(f"processor: {processor}, a share")
    ranks = _positive("ranks", told["ranks"])
    if ranks % 1:
        raise ValueError(f"ranks: {ranks}")
    return Link(int(ranks), _positive("gb_s", told["gb_s"]) * 1e9,
                _number("latency_us", told["latency_us"]) * 1e-6,
                {op: _positive(op, told["factors"][op]) for op in COLLECTIVES}, _truth("ring", told["ring"]), processor,
                _number("wait", told.get("wait", 0.0)))


def _known(part: str, told: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """A name that is spelt in another way would be a figure that counts nothing."""
    for name in told:
        if name not in names:
            raise ValueError(f"{part} {name}: unknown; there are {', '.join(names)}".lstrip())


def _number(name: str, value: float) -> float:
    try:
        number = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < MOST:
        raise ValueError(f"{name}: {value!r}"[:200])
    return number


def _positive(name: str, value: float) -> float:
    if not _number(name, value):
        raise ValueError(f"{name}: {value}")
    return float(value)


def _truth(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: {value!r}, in the place of true or false")
    return value
