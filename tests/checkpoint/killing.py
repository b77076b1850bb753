# SPDX-License-Identifier: Apache-2.0
"""Jobs of forked ranks that save without pause and are killed at a random moment; what they have left is then read.

Ranks are children of a process that has imported everything and run nothing; they talk over the shm engine as under msrun.
"""
import contextlib
import os
import random
import signal
import time
from pathlib import Path

import numpy as np

from ms_dtensor import comm
from ms_dtensor.checkpoint import latest, save, verify, wait  # before the fork, so that no rank imports them
from ms_dtensor.checkpoint.folder import steps
from ms_dtensor.checkpoint.reader import Reader
from ms_dtensor.comm import world
from ms_dtensor.comm.shm.backend import ShmBackend

SHAPES = {"large": (1500, 1024), "other": (700, 500), "small": (3,)}  # of the first each rank writes rows
END = 10.0  # seconds in which the ranks that were not killed are to end
_jobs = 0


def values(step: int) -> dict[str, np.ndarray]:
    """What is saved at a step."""
    return {key: np.full(shape, step, np.float32) + np.arange(shape[-1], dtype=np.float32) for key, shape in SHAPES.items()}


def _rank(rank: int, ranks: int, name: str, root: Path, started: int, saved: int, asynchronous: bool) -> None:
    world._started = comm.World(rank, ranks, ShmBackend(rank, ranks, name, timeout=60.0), "CPU", True)
    os.write(started, b".")
    begun = steps(root)
    step = begun[-1] if begun else 0
    while True:
        step += 1
        save({**values(step), "step": step}, root, step=step, keep_last=2, async_save=asynchronous)
        if not asynchronous and rank == 0:
            os.write(saved, step.to_bytes(4, "little"))


def kill_once(root: Path, seed: int, ranks: int = 3) -> dict:
    """One job in a folder, killed; what is wrong with what it left.

    Returns:
        "wrong": texts; what was killed, when, the step that `latest` then names, and whether a save was under way.
    """
    global _jobs
    _jobs += 1
    rng = random.Random(seed)
    before = latest(root)
    first = 0 if before is None else int(before.name[5:])
    asynchronous = rng.random() < 0.4
    read, started = os.pipe()
    saved_read, saved = os.pipe()
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                _rank(rank, ranks, f"ms_dtensor-kill-{os.getppid()}-{_jobs}", root, started, saved, asynchronous)
            except BaseException:
                with contextlib.suppress(BaseException):  # as at the exit of a job
                    wait()
                with contextlib.suppress(BaseException):
                    comm.shutdown()
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    os.close(started)
    os.close(saved)
    for _ in range(ranks):
        os.read(read, 1)
    pause = rng.random() * 0.8
    time.sleep(pause)
    victims = list(range(ranks)) if rng.random() < 0.3 else [rng.randrange(ranks)]
    for rank in victims:
        os.kill(pids[rank], signal.SIGKILL)
    under_way = any(name.endswith(".saving") for name in os.listdir(root))
    wrong, until = [], time.monotonic() + END
    for rank, pid in enumerate(pids):
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                wrong.append(f"rank {rank} has not ended after {END:g} s")
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(0.01)
    with os.fdopen(saved_read, "rb") as file:
        told = [int.from_bytes(part, "little") for part in iter(lambda: file.read(4), b"")]
    os.close(read)
    now = latest(root)
    step = None if now is None else int(now.name[5:])
    if (step or 0) < max([first, *told]):
        wrong.append(f"step {max(told)} was saved, latest is {now}")
    for found in steps(root):
        wrong += verify(root / f"step-{found:08d}")
    if now is not None:
        with Reader(now) as reader:
            wrong += [f"{key} of {now} has other values" for key, array in values(step or 0).items()
                      if not np.array_equal(reader.array(key), array)]
            if reader.index.values != {"step": step}:
                wrong.append(f"{now} has the values {reader.index.values}")
    return {"killed": "all" if len(victims) == ranks else f"rank {victims[0]}", "after": round(pause, 3), "step": step,
            "asynchronous": asynchronous, "under_way": under_way, "wrong": wrong}


def left_over(root: Path) -> list[str]:
    """What is still there after another save, and should not be."""
    found = steps(root)
    save({**values(found[-1] + 1 if found else 1), "step": found[-1] + 1 if found else 1}, root,
                    step=found[-1] + 1 if found else 1, keep_last=2)
    return [name for name in os.listdir(root) if name != "latest" and not name.startswith("step-")]
