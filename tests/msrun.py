# SPDX-License-Identifier: Apache-2.0
"""Runs a script on real ranks under msrun, and never leaves one of them behind.

Test side: `run_ranks(script, 4)` returns what each rank reported, or raises with the first failing rank's traceback.
Rank side: `report(obj)` hands one JSON-able object to the test.

msrun puts every worker in a session of its own, so killing msrun, or its process group, orphans them. Every process of
a launch therefore inherits a mark in its environment, and what ends a launch ends the processes that carry this mark.
For many cases in one launch see `tests/cases.py`.
"""
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ms_dtensor.tools.ranks import free_port

ROOT = Path(__file__).resolve().parent.parent
MARK = "MS_DTENSOR_RUN"
REPORTS = "MS_DTENSOR_REPORTS"
PATIENCE = 600  # seconds for another process or thread that works: no measure of speed, so that busy machines are no failure
SCHEDULER_GRACE = 3.0  # seconds msrun's scheduler gets to leave by itself after a rank failed


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a launch left: `reports[rank]` is the list that rank reported; `failure` is None when all ranks exited 0."""

    reports: list[list[Any]]
    failure: str | None


def python(*words: object, timeout: float = PATIENCE, **options: Any) -> subprocess.CompletedProcess[str]:
    """Another Python's end and what it said; it begins in the checkout."""
    return subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=timeout,
                          **options)


def run_ranks(script: str | Path, world_size: int, args: Sequence[str] = (), timeout: float = 240,
              **options: Any) -> list[list[Any]]:
    """`launch`, for a test that wants all ranks to succeed: returns their reports, raises AssertionError otherwise."""
    outcome = launch(script, world_size, args, timeout, **options)
    if outcome.failure is not None:
        raise AssertionError(outcome.failure)
    return outcome.reports


def launch(
    script: str | Path,
    world_size: int,
    args: Sequence[str] = (),
    timeout: float = 240,
    *,
    log_dir: Path | None = None,
    env: dict[str, str] | None = None,
    stopped: threading.Event | None = None,
    forked: bool = False,
) -> Outcome:
    """Runs `script` (a .py file, or a module's dotted name) on `world_size` ranks; returns when no rank is left alive.

    Args:
        timeout: seconds for everything, MindSpore's start included; then all ranks are ended.
        log_dir: where logs and reports go, and the ranks' working directory; a fresh temporary one by default.
        env: added to the ranks' environment.
        stopped: set by another thread that wants all ranks ended now.
        forked: `script` starts the ranks by itself, given their number as its first argument, in place of msrun.
    """
    log_dir = Path(log_dir or tempfile.mkdtemp(prefix="ms_dtensor_ranks_")).resolve()
    log_dir.mkdir(parents=True, exist_ok=True)
    bin_dir = Path(sys.executable).parent
    task = [str(Path(script).resolve())] if str(script).endswith(".py") else ["-m", str(script)]
    command = [sys.executable, *task, str(world_size), *map(str, args)] if forked else [
        str(bin_dir / "msrun"),
        f"--worker_num={world_size}",
        f"--local_worker_num={world_size}",
        "--master_addr=127.0.0.1",
        f"--master_port={free_port()}",
        "--join=True",
        f"--log_dir={log_dir}",
        "--tail_worker_log=99999",  # no such worker: otherwise msrun starts one `tail -f` a rank
        *(task if len(task) == 1 else ["python", *task]),
        *map(str, args),
    ]
    mark = uuid.uuid4().hex
    full_env = {
        **os.environ,
        "GLOG_v": "3",
        # Seconds between a worker's tries to reach the scheduler: saves 5 s and more of each launch.
        "MS_RETRY_INTERVAL_LOWER": "1",
        "MS_RETRY_INTERVAL_UPPER": "1",
        "PATH": f"{bin_dir}{os.pathsep}{os.environ.get('PATH', '')}",  # msrun starts "python"
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        **(env or {}),
        MARK: mark,
        REPORTS: str(log_dir),
    }
    failure = None
    with open(log_dir / "msrun.log", "wb") as log:
        process = subprocess.Popen(
            command,
            env=full_env,
            cwd=log_dir,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = _wait(process, timeout, log_dir / "msrun.log", stopped)
            if code != 0:
                failure = f"the launcher exited with {code}; {_first_failure(log_dir)}"
        except subprocess.TimeoutExpired:
            failure = f"not done after {timeout:g} s, ended; {_first_failure(log_dir)}"
        finally:  # also when pytest's own time-out or Ctrl-C comes out of wait()
            end_marked(mark)
            process.wait()
    reports = [_read_report(log_dir / f"rank_{rank}.jsonl") for rank in range(world_size)]
    return Outcome(reports, failure and f"{world_size} ranks of {script}: {failure}\nlogs: {log_dir}")


def _wait(process: subprocess.Popen, timeout: float, log: Path, stopped: threading.Event | None) -> int:
    """msrun's exit code. After a failure it ends the other ranks, then waits half a minute for its scheduler."""
    limit, failed = time.monotonic() + timeout, False
    while True:
        try:
            return process.wait(0.2)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            if not failed and b"exit with exception" in log.read_bytes():
                failed, limit = True, min(limit, now + SCHEDULER_GRACE)
            if (now > limit and failed) or (stopped and stopped.is_set()):
                return 1
            if now > limit:
                raise


def report(obj: Any) -> None:
    """Called on a rank: hands `obj` to the test, at once, so that a later crash does not lose it."""
    with open(Path(os.environ[REPORTS]) / f"rank_{os.environ['RANK_ID']}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(obj) + "\n")


def marked(mark: str) -> list[Any]:
    """The live processes of the launch with this mark, as psutil.Process."""
    import psutil  # MindSpore brings it

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):  # gone meanwhile, or somebody else's
            continue
    return found


def end_marked(mark: str) -> None:
    """Ends what is left of a launch, and nothing else. Twice over, as one may have been starting a child."""
    while left := marked(mark):
        for process in left:
            try:
                process.kill()
            except Exception:  # gone meanwhile
                continue


def headline(trace: str) -> str:
    """The line of a traceback that names the error; lines after it belong to a long message and are indented."""
    lines = trace.strip().splitlines()
    found = [line for before, line in zip(lines, lines[1:]) if before.startswith(" ") and line[:1].strip()]
    return found[-1] if found else lines[-1]


def _read_report(path: Path) -> list[Any]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # a killed rank's last line may be a torn one
    return [json.loads(line) for line in lines]


# How Python, faulthandler after a crash, and faulthandler after a case's time limit open what they print.
_OPENINGS = ("Traceback (most recent call last)", "Fatal Python error", "Timeout (")


def _first_failure(log_dir: Path) -> str:
    """The traceback of the rank whose log ended first among those with one; a rank that failed writes no more."""
    logs = {path.stem: path for path in sorted(log_dir.glob("*.log"), key=lambda path: path.stat().st_mtime_ns)}
    texts = {name: path.read_text(encoding="utf-8", errors="replace").strip() for name, path in logs.items()}
    traces = []
    for name, text in texts.items():
        starts = [at for at in map(text.find, _OPENINGS) if at >= 0]
        if starts and name.startswith("worker_"):
            trace = text[min(starts) :].split("\n\nExtension modules:")[0]  # faulthandler's list of them is long
            traces.append((name.removeprefix("worker_"), trace))
    if not traces:
        tails = [f"--- end of {name}.log\n" + "\n".join(text.splitlines()[-8:]) for name, text in texts.items() if text]
        return "\n".join(["no rank left a traceback.", *tails])
    rank, trace = traces[0]
    others = [f"rank {other} after it: {headline(text)}" for other, text in traces[1:]]
    return "\n".join([f"rank {rank} failed first:", trace[-8000:], *others])
