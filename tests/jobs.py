# SPDX-License-Identifier: Apache-2.0
"""Whole jobs, as a user starts them: watched while they work, and not left behind; what a run of the recipe has written."""
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.msrun import PATIENCE, ROOT


class Job:
    """A command at work in the checkout; what it says goes to a file, which is read as it comes."""

    def __init__(self, output: Path, *command: object, **env: str):
        self.output = output
        with open(output, "wb") as file:
            self.process = subprocess.Popen([*map(str, command)], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                                            env={**os.environ, "PYTHON": sys.executable, **env})

    def said(self) -> str:
        return self.output.read_text("utf-8", errors="replace")

    def until(self, happened: Callable[[], Any], limit: float = PATIENCE) -> float:
        """Seconds until something is so, while the job goes on."""
        begun = time.monotonic()
        while not happened():
            assert self.process.poll() is None and time.monotonic() - begun < limit, self.said()[-5000:]
            time.sleep(0.02)
        return time.monotonic() - begun

    def ended(self, code: int = 0) -> str:
        """What it said, once it is over."""
        assert self.process.wait(PATIENCE) == code, self.said()[-5000:]
        return self.said()

    def ranks(self) -> dict[str, psutil.Process]:
        """What trains here, by the rank's number; the scheduler apart."""
        found = {}
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if (env := one.environ()).get("MS_ROLE") == "MS_WORKER":
                    found[env["RANK_ID"]] = one
        return found

    def end(self) -> None:
        """All of its processes, at once."""
        with suppress(psutil.Error):
            for one in [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]:
                with suppress(psutil.Error):
                    one.kill()
        self.process.wait()


def recipe(ranks: int, *words: object) -> list[object]:
    """The command of a run."""
    return ["bash", ROOT / "scripts/run_llama.sh", ranks, *words]


def metrics(folder: Path) -> list[dict]:
    """What a run has written down, line by line."""
    file = folder / "metrics.jsonl"
    return [*map(json.loads, file.read_text("utf-8").splitlines())] if file.exists() else []


def losses(folder: Path) -> dict[int, float]:
    """By step."""
    return {row["step"]: row["loss"] for row in metrics(folder) if "loss" in row}


def running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def soon(what: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """What it comes to, waited for."""
    until = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < until:
        time.sleep(0.05)
    return found
