# SPDX-License-Identifier: Apache-2.0
"""`CommDebugMode`: the communication of a block, counted, listed by call site, and drawn on a time line.

A view on `comm.record`, which every collective of the library passes, those of the backward included. It holds what
one rank saw; nothing is gathered from the others. The invariant: recording changes neither values nor communication.
"""
from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from mindspore import nn

from .. import comm
from ..comm import CommEvent
from ..errors import ConfigError
from .cell_names import CellNames
from .cell_tree import tree_json, tree_text
from .text import columns, human, plural, short_site

_FIELDS = ("op", "axes", "phase", "implicit", "site", "module", "src", "dst", "dtype", "group")


class CommDebugMode:
    """Records the communication inside a `with` block.

    A backward belongs to the block its forward ran in; its events carry the forward's line, and its cell. Cells go by
    their paths below the model, as a plan names them: the model is `module`, or the first cell called. Of nested blocks
    the inner one gives the names.

    Args:
        module: the model, if the first cell called is another.

    Attributes:
        events: one `CommEvent` per collective, in order.

    Example:
        >>> from ms_dtensor import DTensor, Replicate, Shard, comm, init_device_mesh
        >>> from ms_dtensor.debug import CommDebugMode
        >>> import mindspore as ms
        >>> with comm.fake_world(4), CommDebugMode() as mode:
        ...     mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        ...     x = DTensor.from_local(ms.ops.ones((2, 8)), mesh, [Shard(0)])
        ...     y = x.redistribute(placements=[Replicate()])
        >>> mode.get_comm_counts(), mode.get_comm_bytes("op", "axes")
        ({'all_gather': 1}, {('all_gather', ('tp',)): 192})
    """

    def __init__(self, module: nn.Cell | None = None):
        if module is not None and not isinstance(module, nn.Cell):
            raise ConfigError(f"For 'CommDebugMode', 'module' must be a Cell, but got {type(module).__name__}.")
        self.cells = CellNames(module)
        self.events: list[CommEvent] = []
        self.rank = 0
        self._stack = ExitStack()

    def __enter__(self) -> CommDebugMode:
        world = comm.current_world()
        self.rank = 0 if world is None else world.rank
        self.events = self._stack.enter_context(comm.record())
        self._stack.enter_context(self.cells.naming())
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def get_comm_counts(self, *fields: str) -> dict:
        """How many collectives, by name; or by any fields of an event.

        Args:
            *fields: of "op", "axes", "phase", "implicit", "site", "module", "src", "dst", "dtype", "group"; several
                give tuples.
        """
        return self._by(fields, lambda e: 1)

    def get_comm_bytes(self, *fields: str) -> dict:
        """Bytes this rank sent to others; arguments as `get_comm_counts`."""
        return self._by(fields, lambda e: e.bytes)

    def get_total_counts(self) -> int:
        """All collectives."""
        return len(self.events)

    def table(self) -> str:
        """Text: one line per call site, collective, phase and pair of layouts."""
        return table(self.events, self.rank)

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Text: a tree of cells, with the collectives and bytes of each and of all below it.

        Args:
            noise_level: 0: cells that communicate; 1: and what each did by itself; 2: and all cells that were called,
                and how their parameters lie; 3: and the lines of code.

        Example:
            >>> import ms_dtensor as md
            >>> from mindspore import mint, nn
            >>> from ms_dtensor.debug import CommDebugMode
            >>> with md.comm.fake_world(4), CommDebugMode() as mode:
            ...     mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
            ...     net = md.parallelize_module(nn.SequentialCell(nn.Dense(4, 8), nn.Dense(8, 4)), mesh,
            ...                                 {"0": md.ColwiseParallel(), "1": md.RowwiseParallel()}, src_data_rank=None)
            ...     y = net(mint.ones((2, 4)))
            parallelize_module over tp=4:
              0  ColwiseParallel: 0
              1  RowwiseParallel: 1
            >>> print(mode.generate_comm_debug_tracing_table(noise_level=0))
            cell            forward          backward
            SequentialCell  1 (48 B)
              1             1 (48 B)
        """
        return tree_text(self.cells, self.events, noise_level)

    def log_comm_debug_tracing_table_to_file(self, file_name: str | os.PathLike = "comm_mode_log.txt",
                                             noise_level: int = 3) -> None:
        """Writes `generate_comm_debug_tracing_table` to a file."""
        Path(file_name).write_text(self.generate_comm_debug_tracing_table(noise_level) + "\n", encoding="utf-8")

    def generate_json_dump(self, file_name: str | os.PathLike = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Writes the tree of cells as JSON; `noise_level` as for the table."""
        Path(file_name).write_text(json.dumps(tree_json(self.cells, self.events, noise_level), indent=1) + "\n",
                                   encoding="utf-8")

    def get_parameter_info(self) -> dict[str, dict]:
        """The parameters of each cell that was called: {cell: {name: Parameter}}."""
        return {name: dict(own) for name, own in self.cells.parameters().items()}

    def get_sharding_info(self) -> dict[str, tuple]:
        """The placements of the parameters that are DTensors, of the cells that were called: {"cell.name": placements}."""
        return {f"{name}.{key}": p.placements for name, own in self.cells.parameters().items()
                for key, p in own.items() if hasattr(p, "placements")}

    def export_chrome_trace(self, path: str | os.PathLike) -> None:
        """Writes the events as a Chrome trace (chrome://tracing, Perfetto); one process per rank, one track per axes.

        Times of the ranks of one host share a clock, so their files can be joined.
        """
        Path(path).write_text(json.dumps(chrome_trace(self.events, self.rank), indent=1) + "\n", encoding="utf-8")

    def _by(self, fields, amount) -> dict:
        unknown = [f for f in fields if f not in _FIELDS]
        if unknown:
            raise ConfigError(f"For 'CommDebugMode', an event has no field {unknown[0]!r}.", "", "",
                              f"use {', '.join(_FIELDS)}")
        fields = fields or ("op",)
        out: Counter = Counter()
        for e in self.events:
            key = tuple(getattr(e, f) for f in fields)
            out[key if len(fields) > 1 else key[0]] += amount(e)
        return dict(out)


def table(events: Iterable[CommEvent], rank: int = 0) -> str:
    """The events as aligned text, with a summary line first."""
    events = list(events)
    if not events:
        return "no communication"
    groups: dict[tuple, list[CommEvent]] = {}
    for e in events:
        groups.setdefault((e.site, e.phase, e.op, e.axes, e.implicit, e.src, e.dst), []).append(e)
    rows = [("where", "phase", "collective", "count", "sent", "", "layouts")]
    for (site, phase, op, axes, implicit, src, dst), same in groups.items():
        rows.append((short_site(site), phase, f"{op}({', '.join(axes) or f'{len(same[0].group)} ranks'})", str(len(same)),
                     human(sum(e.bytes for e in same)), "implicit" if implicit else "", f"{src} -> {dst}" if src else ""))
    backward = sum(e.phase == "backward" for e in events)
    summary = (f"{plural(len(events), 'collective')}, {human(sum(e.bytes for e in events))} sent by rank {rank}: "
               f"{len(events) - backward} forward, {backward} backward, {sum(e.implicit for e in events)} implicit")
    return summary + "\n" + columns(rows, right=(3, 4))


def chrome_trace(events: Iterable[CommEvent], rank: int = 0) -> dict:
    """The events in the trace format of Chrome and Perfetto."""
    tracks: dict[tuple[str, ...], int] = {}
    out = [{"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}]
    for e in events:
        if e.axes not in tracks:
            tracks[e.axes] = len(tracks)
            out.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": tracks[e.axes],
                        "args": {"name": ", ".join(e.axes) or "no axis"}})
        out.append({"name": e.op, "cat": e.phase, "ph": "X", "ts": e.start * 1e6, "dur": e.seconds * 1e6, "pid": rank,
                    "tid": tracks[e.axes],
                    "args": {"bytes": e.bytes, "shape": list(e.shape), "dtype": e.dtype, "ranks": list(e.group),
                             "site": e.site, "module": e.module, "implicit": e.implicit, "src": e.src,
                             "dst": e.dst}})
    return {"traceEvents": out, "displayTimeUnit": "ms"}
