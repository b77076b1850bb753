# SPDX-License-Identifier: Apache-2.0
"""A hostfile, and one msrun on each of its nodes: over ssh, or here for localhost.

A line is `host slots=8` (or `host:8`), `#` begins a comment; ranks go host by host, and all hosts have one number of slots,
as msrun counts ranks so. The first host is the scheduler's. A host that is named twice is two nodes. Ends what it started
and nothing else: SIGINT, by which msrun ends its workers, then the process itself; our ranks leave when their msrun is gone.
"""
from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...errors import ConfigError
from ..ranks import end_with_parent, failures, free_port
from .suites import recipe

PACKAGE = Path(__file__).resolve().parents[3]  # the folder that has ms_dtensor
LOCAL = ("localhost", "127.0.0.1", "::1")
PASSED = ("HCCL_", "ASCEND", "MS_", "GLOG_", "CANN", "OMP_", "LD_LIBRARY_PATH", "PYTHONPATH")  # of the environment, by ssh
GRACE = 15.0  # seconds for the other nodes, when one has failed


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    slots: int

    @property
    def local(self) -> bool:
        return self.name in (*LOCAL, socket.gethostname())


def read_hosts(text: str) -> list[Host]:
    """The hosts of a hostfile's text; ConfigError for a line that is none, and for unequal slots."""
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        found = re.fullmatch(r"(\S+?)(?:\s+slots=|:)(\d+)", line)
        if not found or int(found[2]) < 1:
            raise ConfigError(f"For the hostfile, line {number} names no host and slots.", repr(line[:80]),
                              "A line is a host and its number of devices.", "write `worker-1 slots=8`")
        hosts.append(Host(found[1], int(found[2])))
    if not hosts or len({h.slots for h in hosts}) > 1:
        raise ConfigError("For the hostfile, the hosts have no one number of slots.",
                          f"slots {sorted({h.slots for h in hosts})}",
                          "There is a host, and all have the same number: msrun numbers ranks so.",
                          "give each the least of them")
    if hosts[0].name in LOCAL and not all(h.local for h in hosts):
        raise ConfigError("For the hostfile, the first host is this machine by a name that is another's elsewhere.",
                          hosts[0].name, "All others reach the first by its name.",
                          "write its name or address in the network")
    return hosts


def msrun(hosts: list[Host], slots: int, node: int, port: int, logs: Path, argument: str) -> list[str]:
    """The command of a node. Argument: what `ranks.py` is given."""
    address = "127.0.0.1" if all(h.local for h in hosts) else hosts[0].name.rpartition("@")[2]
    return [str(Path(sys.executable).parent / "msrun"), f"--worker_num={len(hosts) * slots}", f"--local_worker_num={slots}",
            f"--master_addr={address}", f"--master_port={port}", f"--node_rank={node}", "--join=True",
            f"--log_dir={logs / f'node_{node}'}", "--tail_worker_log=99999",  # no such worker: the log files say it all
            "python", "-m", "ms_dtensor.tools.bench.ranks", argument, str(node)]


def environment(extra: dict[str, str]) -> dict[str, str]:
    defaults = {"GLOG_v": "3", "MS_RETRY_INTERVAL_LOWER": "1", "MS_RETRY_INTERVAL_UPPER": "1"}
    ours = [str(PACKAGE), *recipe()] if PACKAGE != Path(sysconfig.get_path("purelib")).resolve() else recipe()
    path = os.pathsep.join(filter(None, (*dict.fromkeys(ours), os.environ.get("PYTHONPATH"))))
    return {**defaults, **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **extra,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}  # msrun starts "python"


def shell_text(command: list[str], extra: dict[str, str], setup: str) -> str:
    """The command for a shell that knows nothing of this one: folder, environment, and what the user does before."""
    env = {k: v for k, v in environment(extra).items() if k.startswith(PASSED) or k in extra}
    words = " ".join(shlex.quote(w) for w in ("env", *(f"{k}={v}" for k, v in sorted(env.items()))))
    path = f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"  # what `setup` puts there stays
    return " && ".join(filter(None, (setup, f"cd {shlex.quote(os.getcwd())}", f"{words} {path} {shlex.join(command)}")))


class Nodes:
    """The msruns of a launch."""

    def __init__(self, hosts: list[Host], slots: int, argument: str, logs: Path, extra: dict[str, str], ssh: str,
                 setup: str):
        self.running: list[tuple[Host, subprocess.Popen]] = []
        port = free_port()
        extra = {**extra, "MS_DTENSOR_JOB": f"cluster{os.getpid()}x{port}"}  # of all nodes, for shm
        for node, host in enumerate(hosts):
            folder = logs / f"node_{node}"
            folder.mkdir(parents=True, exist_ok=True)
            command = msrun(hosts, slots, node, port, logs, argument)
            if not host.local:
                command = [*shlex.split(ssh), host.name, shell_text(command, extra, setup)]
            with open(folder / "msrun.log", "wb") as log:
                self.running.append((host, subprocess.Popen(command, env=environment(extra), stdin=subprocess.DEVNULL,
                                                            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                                                            preexec_fn=partial(end_with_parent, os.getpid()))))

    def wait(self, deadline: Callable[[], float]) -> str:
        """What went wrong, or "" when all nodes are done; nothing of the launch is left. `deadline` is of time.time()."""
        limit, failed = float("inf"), ""
        try:
            while True:
                codes = [process.poll() for _, process in self.running]
                bad = next(((i, code) for i, code in enumerate(codes) if code), None)
                if bad and not failed:
                    failed = f"node {bad[0]} ({self.running[bad[0]][0].name}) ended with {bad[1]}"
                    limit = time.time() + GRACE
                if None not in codes:
                    return failed
                if time.time() > min(limit, deadline()):
                    return failed or "not done in time"
                time.sleep(0.2)
        finally:
            self.end()

    def end(self) -> None:
        for number in (signal.SIGINT, signal.SIGKILL):
            for _, process in self.running:
                if process.poll() is None:
                    process.send_signal(number)
            until = time.monotonic() + 5
            while time.monotonic() < until and any(process.poll() is None for _, process in self.running):
                time.sleep(0.1)


def reason(logs: Path) -> str:
    """The words of the rank that failed first, as far as its log is here; else the last lines of all."""
    said = sorted(found for folder in sorted(logs.glob("node_*")) for found in failures(folder))
    if said:
        lines = [x for x in said[0][2].strip().splitlines() if x[:1] != "["]  # what MindSpore logs while it ends
        return "\n".join([f"rank {said[0][1]}:", *filter(None, lines)])[-3000:]
    tails = [f"{log.relative_to(logs)}: " + " | ".join(log.read_text(errors="replace").splitlines()[-3:])
             for log in sorted(logs.glob("node_*/*.log"))]
    return "no rank said why\n" + "\n".join(tails)[-3000:]
