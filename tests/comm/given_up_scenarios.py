# SPDX-License-Identifier: Apache-2.0
"""What ranks do in `test_failures.py`: a process forks three, and prints what each reported."""
import json
import sys
import time

import numpy as np

from ms_dtensor.comm.shm import given_up
from ms_dtensor.comm.shm.engine import Engine
from ms_dtensor.errors import CommError, PeerLost
from tests.long.check_failures import Job

WORLD = (0, 1, 2)


def error_of(call) -> CommError:
    try:
        call()
    except CommError as error:
        return error
    raise AssertionError("nothing raised")


def step(e: Engine, rank: int, leaver: int, number: int) -> list:
    """Rank 0 sends to rank 2, and all add up; one rank leaves before that."""
    given_up.resume(e, WORLD)
    if rank == 0:
        e.exchange([(2, np.full(3, number, np.float32)), (2, np.full(5000, number, np.float32))], [])
    if rank == leaver:
        given_up.tell(e, PeerLost(f"step {number} was left by rank {rank}"), WORLD)
        return []
    e.all_reduce(np.ones(2, np.float32), "sum", WORLD)
    if rank == 2:
        got = e.exchange([], [(0, (3,), np.dtype(np.float32)), (0, (5000,), np.dtype(np.float32))])
        return [float(x.sum()) for x in got]
    return [float(e.all_reduce(np.ones(2, np.float32), "sum", (0, 1))[0])]


def rounds(e: Engine, rank: int) -> list:
    out = []
    for number in range(12):
        leaver = number % 4  # 3: nobody
        if leaver == 3 or rank == leaver:
            out.append(step(e, rank, leaver, number))
        else:
            error = error_of(lambda n=number, left=leaver: step(e, rank, left, n))
            assert isinstance(error, PeerLost) and error.given_up, error
            out.append(str(error))
        if leaver != 3:
            assert "have left a step" in str(error_of(lambda: e.barrier(WORLD)))
    return out


def late(e: Engine, rank: int) -> str:
    """Who comes to the step after the others have left it leaves it, too: so all count the same steps."""
    if rank == 1:
        time.sleep(0.3)
        return str(error_of(lambda: step(e, rank, 3, 0))) + str(step(e, rank, 3, 1))
    if rank == 0:
        step(e, rank, 0, 0)
    else:
        error_of(lambda: step(e, rank, 3, 0))
    return str(step(e, rank, 3, 1))


def dying(e: Engine, rank: int) -> str:
    if rank == 1:
        given_up.tell(e, PeerLost("left by rank 1"), WORLD)
        raise ValueError("not caught")
    error_of(lambda: e.barrier(WORLD))
    return str(error_of(lambda: given_up.resume(e, WORLD)))


if __name__ == "__main__":
    print(json.dumps(Job(3, globals()[sys.argv[1]]).reports(time.monotonic() + 40)))
