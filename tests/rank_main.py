# SPDX-License-Identifier: Apache-2.0
"""What every rank of a `tests/cases.py` launch runs, started by `tests/forks.py`.

After each case the ranks agree whether to go on. They do so through a file, not through the communication under test:
a rank that fails before a collective leaves its peers waiting inside it, and only an outside channel still works then.
When a rank failed and its peers come through, one object gather shows whether messages still arrive in step.
A launch that lost step ends with exit code 3; going on would let the next case read stale bytes and blame it.
"""
import faulthandler
import importlib
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.cases import SYNC_FILE, call
from tests.msrun import REPORTS, report

GRACE = 15.0  # seconds a peer of a failed rank may take to finish the case too
LOST_STEP = 3  # exit code
OK, BAD, PENDING = b"o", b"x", b"\0"


def load(arguments: list[str]) -> list[tuple[str, Callable, float]]:
    """Of each case its address, function and limit."""
    split = [argument.split(":") for argument in arguments]
    return [(f"{home}:{name}", getattr(importlib.import_module(home), name), float(limit)) for home, name, limit in split]


def run(cases: list[tuple[str, Callable, float]]) -> int:
    """On every rank; the exit code."""
    from ms_dtensor import comm

    faulthandler.enable()  # a crash in native code leaves its Python stack in the log
    world = comm.start("cpu")
    sync = os.open(Path(os.environ[REPORTS]) / SYNC_FILE, os.O_RDWR)
    for index, (address, fn, limit) in enumerate(cases):
        # A case that hangs: every thread's stack goes to the log, the process ends, and the launcher ends the others.
        faulthandler.dump_traceback_later(limit, exit=True)
        ok = run_case(fn, world, address.partition(":")[2])
        faulthandler.cancel_dump_traceback_later()  # who waits for a hanging peer leaves the last word to it
        row = agree(sync, index, world.rank, world.size, OK if ok else BAD)
        if PENDING not in row:
            comm.group(tuple(range(world.size))).resume()  # of a step that the case gave up nothing meets the next case
        if PENDING in row or (BAD in row and not in_step(comm, world, index)):
            print(f"stopped after {address}: the ranks lost step", flush=True)
            return LOST_STEP
    return 0


def run_case(fn: Callable, world: Any, name: str) -> bool:
    start, used, trace = time.time(), time.process_time(), None
    try:
        call(fn, world)
    except BaseException:  # SystemExit too: a case must not end its rank
        trace = traceback.format_exc()
    end = time.time()
    report({"name": name, "ok": trace is None, "traceback": trace, "seconds": end - start, "ended": end,
            "cpu": time.process_time() - used})
    return trace is None


def agree(sync: int, index: int, rank: int, size: int, mine: bytes) -> bytes:
    """Writes this rank's byte for the case and waits for the others'; gives up GRACE seconds after one failed."""
    os.pwrite(sync, mine, index * size + rank)
    give_up = None
    while True:
        row = os.pread(sync, size, index * size)
        now = time.monotonic()
        if BAD in row:
            give_up = give_up or now + GRACE
        if PENDING not in row or (give_up and now > give_up):
            return row
        time.sleep(0.003)


def in_step(comm: ModuleType, world: Any, index: int) -> bool:
    """Whether messages of this very moment arrive, from everyone; a wait of GRACE seconds counts as no."""
    faulthandler.dump_traceback_later(GRACE, exit=True)
    try:
        heard = comm.group(tuple(range(world.size))).all_gather_object(f"{index}/{world.rank}")
    except Exception:
        traceback.print_exc()
        return False
    faulthandler.cancel_dump_traceback_later()
    return list(heard) == [f"{index}/{rank}" for rank in range(world.size)]
