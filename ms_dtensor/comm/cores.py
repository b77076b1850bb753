# SPDX-License-Identifier: Apache-2.0
"""A CPU rank keeps to its share of the host's cores.

MindSpore gives every process a pool of threads for the whole host, and a thread of it that waits for work does so by
`sched_yield` in a loop: two ranks on two cores spend as much time on each other's waiting threads as on work (a Llama
step on two ranks took longer than on one; with this it takes two thirds). A rank bound to its cores has its own waiting
threads on them only, and they give way to it at once.

MindSpore's thread for graphs spins, too, as long as no compiled graph has run: ranks that wait for each other burn what
another one could use. One that has run a graph sleeps.

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


def _graph(x):
    return x + x


def end_spinning() -> None:
    """Runs a compiled graph, the smallest: 50 ms, after which MindSpore's thread for graphs waits asleep."""
    import mindspore as ms

    ms.jit(_graph)(ms.Tensor([0.0]))
