# SPDX-License-Identifier: Apache-2.0
"""Measures what the planner's cost model states, once per backend, and writes the file that MS_DTENSOR_COSTS names.

    msrun --worker_num=4 --local_worker_num=4 --join=True python -m ms_dtensor calibrate [--device cpu] [--out costs.json]
    MS_DTENSOR_COSTS=costs.json msrun ... train.py
    msrun ... python -m ms_dtensor calibrate --hardware mine.yaml        and the machine's own file, for `md.debug.suggest`

The model: seconds = alpha + beta * bytes a rank sends + gamma * bytes of the result (redistribute/cost.py). gamma comes from
local copies; alpha and beta from four collectives of several sizes over all ranks, by least squares on relative errors.
Other device types in the file are kept. Every rank must be given the same file.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ..debug.predict import load_hardware
from ..errors import ConfigError
from ..redistribute.cost import load_costs, sent_bytes
from .machine import measure_machine

SIZES = tuple(4 ** k << 10 for k in range(1, 8))  # 4 KiB to 16 MiB


def fit(samples: list[tuple[float, float, float]], copying: float) -> dict[str, float]:
    """The figures, none negative, from (seconds, bytes sent, bytes of the result) and a local copy's seconds a byte."""
    seconds, sent, after = np.array(samples, float).T
    gamma = min(copying, (seconds / after).min())  # several ranks copy at once: no collective takes less than its own copy
    rest = seconds - gamma * after
    rows = np.stack([np.ones_like(sent), sent], 1) / seconds[:, None]
    alpha, beta = np.linalg.lstsq(rows, rest / seconds, rcond=None)[0]
    if beta < 0:
        alpha, beta = np.median(rest), 0.0
    elif alpha < 0:
        alpha, beta = 0.0, np.median(rest / sent)
    return {"alpha": float(alpha), "beta": float(beta), "gamma": float(gamma)}


def median_seconds(call, agree, repeats: int = 9) -> float:
    """Median over repetitions of the slowest rank's time."""
    call()
    times = []
    for _ in range(repeats):
        agree(0.0)
        started = time.perf_counter()
        call()
        times.append(agree(time.perf_counter() - started))
    return statistics.median(times)


def measure(device: str, machine: bool) -> tuple[dict[str, float], dict[str, Any]]:
    """The three figures on this job's ranks, and if asked for those of a machine's file; on rank 0 alone."""
    import mindspore as ms

    from .. import comm
    world = comm.start(device)
    if world.size == 1 and not machine:
        raise ConfigError("For 'calibrate', one rank has nobody to send to.", "1 rank", "Costs are those of collectives.",
                          "msrun --worker_num=4 --local_worker_num=4 --join=True python -m ms_dtensor calibrate")
    g, n = comm.group(range(world.size)), world.size

    def agree(mine: float) -> float:
        return max(g.all_gather_object(mine))

    def synchronized(call):
        def run():
            call()
            if device != "cpu":  # there ops have run when they return
                ms.runtime.synchronize()
        return run
    copies, samples, cut = [], [], [1] * n
    for size in SIZES:
        count = size // 4 // n * n
        x = ms.Tensor(np.ones((n, count // n), np.float32))
        nbytes = x.nbytes
        copies.append(median_seconds(synchronized(lambda x=x: comm.Group(world.backend, (world.rank,)).all_reduce(x)), agree)
                      / nbytes)
        part = x[:1].copy()
        calls: dict[str, tuple] = {"all_reduce": (lambda x=x: g.all_reduce(x), nbytes, nbytes),
                 "all_gather": (lambda part=part: g.all_gather(part, 0, cut), nbytes // n, nbytes),
                 "reduce_scatter": (lambda x=x: g.reduce_scatter(x, "sum", 0, cut), nbytes, nbytes // n),
                 "all_to_all": (lambda x=x, w=count // n: g.all_to_all(x, 0, cut, 1, [w] * n), nbytes, nbytes)}
        for kind, (call, before, after) in calls.items():
            samples.append((median_seconds(synchronized(call), agree), sent_bytes(kind, n, before, after), after))
    figures = g.broadcast_object(fit(samples, min(copies)) if n > 1 else {}, 0)  # one rank has no links
    told = measure_machine(device, agree, g) if machine else {}
    comm.shutdown()
    return ({}, {}) if world.rank else (figures, told)


def main(arguments: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ms_dtensor calibrate", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "npu", "gpu"))
    parser.add_argument("--out", type=Path, default=Path("costs.json"))
    parser.add_argument("--hardware", type=Path, metavar="FILE.yaml", help="also writes this machine's own file")
    parser.add_argument("--json", action="store_true", help="this always prints JSON")
    args = parser.parse_args(arguments)
    try:
        told = before(args.out, args.hardware)
        figures, machine = measure(args.device, args.hardware is not None)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not figures and not machine:  # not rank 0
        return 0
    written = {}
    if args.hardware is not None:
        args.hardware.write_text(yaml.safe_dump(machine, sort_keys=False))
        load_hardware(args.hardware)
        written["hardware"] = str(args.hardware)
    if figures:
        told[args.device] = {k: float(f"{v:.4g}") for k, v in figures.items()}
        args.out.write_text(json.dumps(told, indent=1) + "\n")
        load_costs(args.out)
        written |= {"file": str(args.out), **told}
    print(json.dumps(written, indent=1))
    return 0


def before(out: Path, hardware: Path | None) -> dict[str, Any]:
    """What the file of costs has already. What cannot be read or written is refused here, not after minutes.

    Raises:
        ConfigError: on rank 0, which writes; msrun ends the others.
    """
    if os.environ.get("RANK_ID", "0") != "0":
        return {}
    files = [out, *([hardware] if hardware else [])]
    try:
        for file in files:
            made = not file.exists()
            file.open("a").close()
            if made:
                file.unlink()
        return dict(json.loads(out.read_text())) if out.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError("For 'calibrate', a file cannot be used.", f"{', '.join(map(str, files))}: {error}",
                          "--out has an object of JSON or is new, and both files can be written.",
                          "a file in a folder of yours") from None
