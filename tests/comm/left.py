# SPDX-License-Identifier: Apache-2.0
"""What jobs on the shm engine have left on this machine. Other programs work here too: only what has a job's name counts."""
import os
from collections.abc import Iterable

from ms_dtensor.comm.shm import address


def marks(jobs: Iterable[str]) -> list[str]:
    """What is in the name of each file and socket of these jobs."""
    return [mark for job in jobs for mark in (job, address._start_of(job, 0).removesuffix("-0."))]


def files_of(jobs: Iterable[str]) -> list[str]:
    """Files of these jobs: sockets that a rank listens on while it starts, and memory, were it to have a name."""
    wanted = marks(jobs)
    return [f"{folder}/{name}" for folder in address._folders() for name in os.listdir(folder)
            if any(mark in name for mark in wanted)]


def left_of(jobs: Iterable[str]) -> list[str]:
    """Files and open sockets of these jobs, whose ranks have ended."""
    jobs = list(jobs)
    with open("/proc/net/unix") as f:
        return files_of(jobs) + [line.split()[-1] for line in f if any(mark in line for mark in marks(jobs))]
