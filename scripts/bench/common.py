# SPDX-License-Identifier: Apache-2.0
"""What the benchmark scripts share: interleaved samples, the machine's description, JSON and a table.

Not a framework: a script measures and calls `finish`; `docs/tools/performance.py` makes the page from what was written.
The invariant: what is compared is sampled in turns within one run, so that other load on the machine hits all alike.
"""
from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "performance"
LOAD = os.getloadavg()[0]  # before the script adds its own


def one_thread() -> None:
    """One compute thread per process; before MindSpore or torch are imported."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOG_v", "3")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))


def sample(fn: Callable[[], object], calls: int) -> float:
    """Microseconds per call of one short burst."""
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - start) / calls * 1e6


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and least, rounded."""
    return {"median": round(statistics.median(values), 2), "least": round(min(values), 2)}


def versions() -> dict[str, str]:
    """Of what is installed here; torch's only if it is."""
    from importlib.metadata import PackageNotFoundError, version

    out = {"python": platform.python_version()}
    for name in ("mindspore", "torch", "numpy"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out


def machine() -> dict[str, object]:
    """Processor, cores and how busy the machine was at the start."""
    model = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), platform.processor())
    return {"cpu": model, "cores": os.cpu_count(), "load": round(LOAD, 1)}


def commit() -> str:
    """The commit this was measured at, with "+" when files differ from it."""
    def git(*args):
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "ms_dtensor", "model_zoo") else "")


def finish(name: str, result: dict, rows: Sequence[Sequence[object]] = (), save: bool = True) -> None:
    """Prints the table and the JSON, and keeps the JSON for the page unless told not to."""
    result = {"benchmark": name, "date": datetime.date.today().isoformat(), "commit": commit(), "machine": machine(),
              "versions": versions(), **result}
    if rows:
        widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            print("  ".join(str(v).ljust(w) if i == 0 else str(v).rjust(w) for i, (v, w) in enumerate(zip(row, widths))))
    text = json.dumps(result, indent=1)
    print(text)
    if save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
