# SPDX-License-Identifier: Apache-2.0
"""What a dry run has found, as `page.py` takes it, and the page in its file."""
from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.files import replacing
from ...errors import ConfigError
from ..text import human, short_site
from .abstract import KINDS
from .page import Exchange, Facts, beside, html

if TYPE_CHECKING:
    from .run import DryRun


def write_report(run: DryRun, path: str | os.PathLike, title: str, hardware, measured: Mapping[str, Any],
                 links: Sequence[tuple[str, str]]) -> None:
    """See `DryRun.report`."""
    _check(measured)
    seconds, memory = None if hardware is None else run.seconds(hardware), run.memory()
    facts = [("rank", f"{run.rank} of {run.world}, {run.device}"), ("operations and communication", f"{len(run.events):,}"),
             ("floating-point operations of products", f"{run.flops():.4g}"), ("tensors at the peak", human(memory.peak)),
             ("communication", f"{len(run.communication):,} calls, {human(sum(e.bytes for e in run.communication))} sent"),
             ("seconds of a step", "not known, as no hardware was named" if seconds is None else f"{seconds:.4g}"),
             *((f"taken for granted: {what}", how) for what, how in run.assumed.items())]
    compared: list[tuple] = []
    if measured:
        if "seconds" in measured:
            compared.append(("a step", "s", seconds, measured["seconds"]))
        if "bytes" in measured:
            compared.append(("tensors at the peak", "bytes", float(memory.peak), measured["bytes"]))
        if "comm" in measured:
            compared += beside(by_name(run), measured["comm"])
    page = Facts(title or f"A step of rank {run.rank} of {run.world}", facts, run.parameters(),
                 [Exchange(e.module or short_site(e.site), e.op, e.axes, e.phase, e.bytes) for e in run.communication],
                 KINDS, [(at, tuple(kinds[k] for k in KINDS)) for at, kinds in memory.over_time()], run.pipeline(), compared,
                 links)
    with replacing(Path(path)) as file:
        file.write(html(page).encode())


def _check(measured: Any) -> None:
    """A name that is spelt in another way would stand nowhere on the page."""
    def number(x) -> bool:
        return isinstance(x, int | float | np.number) and not isinstance(x, bool) and bool(0 <= x < math.inf)
    known = isinstance(measured, Mapping) and not set(measured) - {"seconds", "bytes", "comm"}
    comm = measured.get("comm", {}) if known else {}
    if not known or not all(number(measured[k]) for k in ("seconds", "bytes") if k in measured) or not (
            isinstance(comm, Mapping) and all(isinstance(v, tuple | list) and len(v) > 1 and all(map(number, v))
                                              for v in comm.values())):
        raise ConfigError("For 'DryRun.report', 'measured' is not what a real run has shown.", f"{measured!r:.200}",
                          "It has seconds and bytes, numbers from 0 on, and comm: calls and bytes by name.",
                          'measured={"seconds": 1.5, "bytes": 1 << 30, "comm": {"all_reduce tp": (4, 1024)}}')


def by_name(run: DryRun) -> dict[str, tuple[int, int]]:
    """"collective axes" -> (calls, bytes sent), as the recipe's metrics name them."""
    out: dict[str, tuple[int, int]] = {}
    for e in run.communication:
        name = f"{e.op} {','.join(e.axes)}".rstrip()
        calls, size = out.get(name, (0, 0))
        out[name] = calls + 1, size + e.bytes
    return out
