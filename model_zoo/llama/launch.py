# SPDX-License-Identifier: Apache-2.0
"""Runs `train.py` on several ranks of this machine with msrun: free port, own log folder, live output, clear failure.

    python model_zoo/llama/launch.py --workers 8 --config model_zoo/llama/configs/quickstart.yaml [--section.key value]

Shows rank 0's output as it comes. When a rank fails or is killed it prints the traceback of the rank that failed first, ends
what is left of this run within seconds and exits non-zero. With `--max_restarts N` it then starts again, up to N times, from
the latest checkpoint (see --checkpoint.interval). SIGTERM is passed on to the ranks, which may save and end by themselves.
It ends only processes that it started: msrun's children, by id and start time.
"""
from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

if __package__ in (None, ""):  # run as a script: make the repository root importable, and not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from model_zoo.llama.ranks import FAILED

HERE = Path(__file__).resolve().parent
REASON = re.compile(rf"^{FAILED} rank=(\S+) time=([\d.]+)\n", re.M)
KILLED = re.compile(r"Worker process (\d+) exit with exception. Error code: -(\d+)")  # msrun's words of what a signal ended
GRACE = 5.0  # seconds the scheduler gets to leave by itself once no worker is left


def free_port() -> int:
    """A port of the range msrun accepts that nobody listens on."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise OSError("For 'launch.py', no free port was found between 20000 and 32000.")


def msrun_command(script: Path, workers: int, log_dir: Path, args: list[str]) -> list[str]:
    return [str(Path(sys.executable).parent / "msrun"), f"--worker_num={workers}", f"--local_worker_num={workers}",
            "--master_addr=127.0.0.1", f"--master_port={free_port()}", "--join=True", f"--log_dir={log_dir}",
            "--tail_worker_log=99999",  # no such worker: this file shows rank 0's log itself
            str(script), *args]


def environment() -> dict[str, str]:
    """Quiet logs, one thread a rank, quick retries while ranks find each other; the user's own settings win."""
    defaults = {"GLOG_v": "3", "OMP_NUM_THREADS": "1", "MS_RETRY_INTERVAL_LOWER": "1", "MS_RETRY_INTERVAL_UPPER": "1"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # msrun starts "python"
    return {**defaults, **os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}


class Run:
    """One launch; `wait` returns the exit code with nothing of it left alive."""

    def __init__(self, script: Path, workers: int, log_dir: Path, args: list[str], show: bool = True):
        self.workers, self.log_dir, self.show = workers, log_dir, show
        for old in [*log_dir.glob("worker_*.log"), log_dir / "scheduler.log"]:
            old.unlink(missing_ok=True)
        with open(log_dir / "msrun.log", "wb") as log:
            self.msrun = subprocess.Popen(msrun_command(script, workers, log_dir, args), env=environment(),
                                          stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                          start_new_session=True)
        self.known: dict[int, psutil.Process] = {}
        self.ranks: dict[int, str] = {}  # by process id
        self.killed = ""  # says which rank a signal ended
        self.asked = False  # to end
        self.shown = 0

    def wait(self) -> int:
        alone_since = None
        try:
            while self.msrun.poll() is None:
                self._look()
                self._print_new()
                self._look_for_killed()
                if self.killed:
                    break
                living = [p for p in self.known.values() if _alive(p)]
                if len(self.known) > self.workers and all(_role(p) == "MS_SCHED" for p in living):
                    # no rank is left; after a failure msrun's scheduler would take half a minute to notice
                    alone_since = alone_since or time.monotonic()
                    if time.monotonic() - alone_since > GRACE:
                        self.end()
                else:
                    alone_since = None
                time.sleep(0.2)
        finally:
            self.end()
            if self.killed and self.msrun.poll() is None:  # it would wait for its scheduler's word
                self.msrun.kill()
            self.msrun.wait()
        self._print_new()
        if self.asked:
            return 143 if self.msrun.returncode else 0
        return 1 if self.killed or self.msrun.returncode < 0 else self.msrun.returncode

    def end(self) -> None:
        """Ends the scheduler and workers that are still there; psutil checks that an id was not reused."""
        self._look()
        for process in self.known.values():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(list(self.known.values()), timeout=5)

    def ask_to_end(self, *_) -> None:
        """SIGTERM for the ranks, who may save then (--checkpoint.on_sigterm); the second time all is ended."""
        if self.asked:
            sys.exit(143)  # so that `finally` runs
        self.asked = True
        for pid in self.ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.known[pid].terminate()

    def _look(self) -> None:
        try:
            for child in psutil.Process(self.msrun.pid).children(recursive=True):
                self.known.setdefault(child.pid, child)
                if child.pid not in self.ranks and child.ppid() == self.msrun.pid and _role(child) == "MS_WORKER":
                    self.ranks[child.pid] = child.environ().get("RANK_ID", "?")
                    if self.asked:  # before it was there
                        child.terminate()
        except psutil.Error:
            pass

    def _look_for_killed(self) -> None:
        found = KILLED.search((self.log_dir / "msrun.log").read_text(errors="replace"))
        if found and not self.asked:
            rank, number = self.ranks.get(int(found[1]), "?"), int(found[2])
            why = " (by somebody, or by the system for want of memory)" if number == signal.SIGKILL else ""
            self.killed = f"rank {rank} was ended by {signal.Signals(number).name}{why}:\n" + _tail(self.log_dir, rank)

    def _print_new(self) -> None:
        log = self.log_dir / "worker_0.log"
        if self.show and log.exists():
            with open(log, "rb") as file:
                file.seek(self.shown)
                new = file.read()
            self.shown += len(new)
            output, failed, _ = new.decode(errors="replace").partition(FAILED)
            self.show = not failed  # what follows is said once, by `first_failure`
            print(output, end="", flush=True)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _role(process: psutil.Process) -> str:
    try:
        return process.environ().get("MS_ROLE", "")
    except psutil.Error:
        return ""


def _tail(log_dir: Path, rank: str) -> str:
    log = log_dir / f"worker_{rank}.log"
    return "".join(log.read_text(errors="replace").splitlines(True)[-5:]) if log.exists() else ""


def failures(log_dir: Path) -> Iterator[tuple[float, str, str]]:
    """(time, rank, text) of each rank that said why it failed."""
    for log in log_dir.glob("worker_*.log"):
        text = log.read_text(errors="replace")
        for found in REASON.finditer(text):
            yield float(found[2]), found[1], text[found.end():]


def first_failure(log_dir: Path) -> str:
    """The words of the rank that failed first; without any, the end of each log that is not rank 0's."""
    said = sorted(failures(log_dir))
    if said:
        return f"rank {said[0][1]} failed first:\n{said[0][2].rstrip()}"
    tails = [f"{log.name}:\n" + "".join(log.read_text(errors="replace").splitlines(True)[-5:])
             for log in sorted(log_dir.glob("*.log"))]
    return "a rank ended without a traceback (killed, or out of memory?):\n" + "\n".join(tails)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=8, help="number of ranks on this machine")
    parser.add_argument("--log-dir", type=Path, help="where the logs of all ranks go; default: a temporary folder")
    parser.add_argument("--max_restarts", type=int, default=0, help="start so many times again after a failure")
    options, rest = parser.parse_known_args()
    root = (options.log_dir or Path(tempfile.mkdtemp(prefix="ms_dtensor_llama_"))).resolve()
    for attempt in range(options.max_restarts + 1):
        log_dir = root / f"restart_{attempt}" if attempt else root
        log_dir.mkdir(parents=True, exist_ok=True)
        print(f"starting {options.workers} ranks; logs of all ranks in {log_dir}", flush=True)
        run = Run(HERE / "train.py", options.workers, log_dir, rest)
        signal.signal(signal.SIGTERM, run.ask_to_end)
        try:
            code = run.wait()
        except KeyboardInterrupt:
            return 130
        if not code:
            return 0
        why = (run.killed or first_failure(log_dir)).rstrip()
        print(f"\nlaunch.py: {why}\nlogs: {log_dir}", file=sys.stderr, flush=True)
        if run.asked or "ConfigError: " in why.partition("\n")[2][:40]:  # it would be refused again
            break
        rest = resumed(rest)
    return code


def resumed(args: list[str]) -> list[str]:
    """The arguments of a run that goes on from its latest checkpoint."""
    return [*args, "--checkpoint.resume", "latest"]


if __name__ == "__main__":
    sys.exit(main())
