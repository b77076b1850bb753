# SPDX-License-Identifier: Apache-2.0
"""Saving and loading a sharded state: GB/s of all ranks together beside plain files; an async save's stall.

Each rank holds matrices of 16 MiB (the toy size: less), cut over all ranks. "plain" is every rank's own file, written with
fsync, or read: what the storage gives these ranks at that moment. Loads are "cold": pages have left this host's cache, as
far as the system obeys. The folder is the runner's, which on a cluster is on the shared file system to be measured.
"""
from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor

from ...checkpoint import load, save
from ...core.placements import Shard
from ...tensor.dtensor import DTensor
from .arithmetic import digits
from .world import Bench


def plain_write(path: Path, data: memoryview) -> None:
    with open(path, "wb", buffering=0) as file:
        for at in range(0, len(data), 8 << 20):
            file.write(data[at:at + (8 << 20)])
        os.fsync(file.fileno())


def plain_read(path: Path, data: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        at = 0
        while count := file.readinto(data[at:at + (8 << 20)]):
            at += count


def forget(folder: Path) -> None:
    """Lets this host's page cache drop the files."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def run(bench: Bench, options: dict) -> list[dict]:
    """Options: mib (a rank), folder, rounds."""
    folder = Path(options["folder"])
    mesh = bench.mesh(all=bench.size)
    side = 2048 if options["mib"] >= 16 else 256
    pieces = max(1, (options["mib"] << 20) // (4 * side * side))
    draw = np.random.default_rng(bench.rank)
    state = {f"w{i}": DTensor.from_local(Tensor(draw.random((side, side), np.float32)), mesh, [Shard(0)])
             for i in range(pieces)}
    mine = 4 * side * side * pieces
    data = memoryview(bytearray(draw.bytes(mine)))
    plain = folder / "plain"

    def saved_async() -> None:
        saving: Any = save(state, folder / "async", async_save=True)
        stalls.append(bench.slowest(time.perf_counter() - began))
        saving.wait()
    stalls: list[float] = []
    steps: dict[str, Callable[[], object]] = {
        "plain write": lambda: plain_write(plain / str(bench.rank), data),
        "save": lambda: save(state, folder / "sync"), "async save, whole": saved_async,
        "plain read": lambda: plain_read(plain / str(bench.rank), data),
        "load": lambda: load(state, folder / "sync")}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options["rounds"]):
        for name, step in steps.items():
            if bench.rank == 0:
                plain.mkdir(parents=True, exist_ok=True)
                if name in ("plain read", "load"):
                    os.sync()
            if name in ("plain read", "load"):
                bench.everybody.barrier()
                forget(folder)
            bench.everybody.barrier()
            began = time.perf_counter()
            step()
            taken[name].append(bench.slowest(time.perf_counter() - began))
    bench.everybody.barrier()
    if bench.rank == 0:
        shutil.rmtree(folder)
    taken["async save, stall"] = stalls
    rows = []
    for name, values in taken.items():
        seconds = sorted(values)[len(values) // 2]
        rows.append({"what": name, "ranks": bench.size, "bytes": mine * bench.size, "seconds": round(seconds, 4),
                     "gbs": digits(mine * bench.size / seconds / 1e9), "gbs_p": digits(mine / seconds / 1e9)})
    return rows
