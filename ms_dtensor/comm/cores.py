# SPDX-License-Identifier: Apache-2.0
"""A CPU rank keeps to its share of the host's cores.

MindSpore gives every process a pool of threads for the whole host, and a thread of it that waits for work does so by
`sched_yield` in a loop: two ranks on two cores spend as much time on each other's waiting threads as on work (a Llama
step on two ranks took longer than on one; with this it takes two thirds). A rank bound to its cores has its own waiting
threads on them only, and they give way to it at once. Where that is one core, they sleep: one of four ranks on two cores,
which had run an op and then did nothing for a second, had been switched to such a thread 79,220 times.

The invariant: a process that somebody has bound already (taskset, `msrun --bind_core`, a container's cpuset) or whose
threads somebody has counted keeps what it was given.
"""
from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress


def share(cores: Sequence[int], rank: int, size: int) -> list[int]:
    """The cores of one rank of `size` on this host: as many for each, or one in turn where ranks outnumber cores."""
    each = len(cores) // size
    return list(cores[rank * each:(rank + 1) * each]) if each else [cores[rank % len(cores)]]


def keep_to_share(rank: int, size: int) -> None:
    """Binds this process's threads to its share of the cores and sizes MindSpore's thread pool for it."""
    from mindspore import device_context

    if not hasattr(os, "sched_setaffinity"):
        return  # not Linux
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < (os.cpu_count() or 1):
        return
    mine = share(cores, rank, size)
    for thread in os.listdir("/proc/self/task"):  # NumPy's products have threads of their own since it was imported
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), mine)
    try:
        device_context.cpu.op_tuning.threads_num(len(mine))
    except RuntimeError:  # set already, which MindSpore allows once
        pass
    if len(mine) == 1:
        let_threads_sleep()


def let_threads_sleep() -> None:
    """MindSpore's waiting threads sleep instead of yielding in a loop.

    That is how a graph leaves them when it has run: it has the threads look for work in a loop while it runs, and lets
    them sleep at its end. Ops outside of graphs wake them, but do not change how they wait. Right for a process of one
    core; of more, an op that is spread over threads would wait until they are awake.
    """
    import mindspore

    @mindspore.jit(backend="ms_backend")
    def graph(x):
        return x + 1

    graph(mindspore.Tensor(1))
