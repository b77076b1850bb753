# SPDX-License-Identifier: Apache-2.0
"""Collectives by size, group and interface, in the columns of nccl-tests and of hccl_test.

Two interfaces over one transport: ms_dtensor's `Group`, which redistribution uses, and MindSpore's `mint.distributed`.
Groups: the world; each axis of the mesh of nodes and their devices, all groups of an axis at once, as in training; the first
and the last rank alone. `size` is what one rank holds of the whole: a gather's output, a scatter's input. Results are
compared with the right ones, number by number; where sums may leave the integers that a dtype counts, "wrong" is None
(hccl_test: NULL). In place where the interface is: all-reduce and broadcast; whether HCCL gathers into a buffer of which it
reads a part nobody says. What an interface lacks on this device is left out, and named in `lacks`.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import mindspore as ms
import mindspore.mint.distributed as dist
import numpy as np
from mindspore import Tensor, mint

from ... import comm
from .arithmetic import EXACT, bandwidths, digits
from .world import Bench

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
DTYPES = {"float": ms.float32, "bfloat16": ms.bfloat16, "half": ms.float16, "int32": ms.int32}
WIDTH = {"float": 4, "bfloat16": 2, "half": 2, "int32": 4}
SUMS = ("all_reduce", "reduce_scatter")
ON_CPU = ("all_reduce", "broadcast")  # MindSpore's CPU has kernels for these of `mint.distributed`, and in place only


def values(count: int, rank: int, dtype: str) -> np.ndarray:
    """What a rank brings: small integers, others on each rank; of 16 bits 0 and 1."""
    return ((np.arange(count) + rank) % 2 if WIDTH[dtype] == 2 else np.arange(count) % 7 + rank).astype(np.float32)


def answer(op: str, n: int, index: int, count: int, dtype: str) -> np.ndarray:
    """What member `index` has afterwards."""
    each, mine = count // n, slice(index * (count // n), (index + 1) * (count // n))
    if op == "broadcast":
        return values(count, 0, dtype)
    if op == "all_gather":
        return np.concatenate([values(count, i, dtype)[:each] for i in range(n)])
    if op == "all_to_all":
        return np.concatenate([values(count, i, dtype)[mine] for i in range(n)])
    total = np.zeros(count, np.float32)
    for i in range(n):
        total += values(count, i, dtype)
    return total if op == "all_reduce" else total[mine]


def ours(op: str, group: comm.Group, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    n, count = group.size, x.size
    even = [count // n] * n
    part = x[:count // n] * 1
    square = x.reshape(n, count // n)
    calls = {"all_reduce": lambda: group.all_reduce(x), "all_gather": lambda: group.all_gather(part, 0, even),
             "reduce_scatter": lambda: group.reduce_scatter(x, "sum", 0, even),
             "all_to_all": lambda: group.all_to_all(square, 0, [1] * n, 1, even),
             "broadcast": lambda: group.broadcast(x, group.ranks[0])}
    return {"out": calls[op], **({"in": lambda: group.all_reduce_(x).wait()} if op == "all_reduce" else {})}


def mindspores(op: str, group: comm.Group, x: Tensor, cpu: bool) -> dict[str, Callable[[], Tensor]]:
    """The same by MindSpore's own functions, on plain tensors."""
    n, name = group.size, group.backend.communicator(group.ranks)
    if cpu and op not in ON_CPU or name is None:
        return {}

    def into(out: Tensor, call: Callable, *rest: Any) -> Tensor:
        call(out, *rest, group=name)
        return out
    if op in ON_CPU:
        rest = ("sum",) if op == "all_reduce" else (group.ranks[0],)
        return {"in": lambda: into(x, getattr(dist, op), *rest)}
    part = x[:x.size // n] * 1
    whole, slot = mint.empty_like(x), mint.empty_like(part)
    return {"all_gather": {"out": lambda: into(whole, dist.all_gather_into_tensor, part)},
            "reduce_scatter": {"out": lambda: into(slot, dist.reduce_scatter_tensor, x, "sum")},
            "all_to_all": {"out": lambda: into(whole, dist.all_to_all_single, x)}}[op]


def groups(bench: Bench) -> list[tuple[str, comm.Group | None]]:
    """(label, this rank's group or None), in the same order everywhere."""
    n, slots = bench.size, bench.ranks_a_node
    found: list[tuple[str, comm.Group | None]] = [("world", bench.everybody)]
    if 1 < slots < n:
        mesh = bench.mesh(inter=n // slots, intra=slots)
        found += [(f"axis {a}", mesh[a].get_group()) for a in mesh.mesh_dim_names]
    ends = (0, n - 1)
    return [*found, ("first and last", comm.group(ends) if bench.rank in ends else None)]


def one(bench: Bench, op: str, group: comm.Group | None, interface: str, size: int, dtype: str, times: int) -> dict | None:
    """A row, or None where the interface has no such collective here."""
    n = group.size if group is not None else 2
    count = size // WIDTH[dtype] // n * n
    found: dict[str, Any] = {}
    there: Any = group
    for way in ("out", "in"):
        make = (lambda x: ours(op, there, x)) if interface == "ms_dtensor" else \
            (lambda x: mindspores(op, there, x, bench.device == "cpu"))
        calls = {} if group is None else make(_tensor(values(count, group.rank_index, dtype), dtype))
        if not any(bench.each(way in calls)):
            continue
        wrong = 0
        if group is not None:
            got = calls[way]()
            bench.wait()
            want = answer(op, n, group.rank_index, count, dtype)
            wrong = int((got.astype(ms.float32).asnumpy().reshape(-1) != want).sum())
            calls = make(_tensor(np.zeros(count, np.float32), dtype))  # sums in place of zeros stay finite
        taken = max(bench.seconds(calls.get(way, lambda: None), times, take_part=group is not None))
        algorithm, bus = bandwidths(op, n, count * WIDTH[dtype], taken)
        found[way] = {"time": round(taken * 1e6, 2), "algbw": digits(algorithm), "busbw": digits(bus),
                      "wrong": sum(bench.each(wrong)) if exact(op, n, dtype) else None}
    if not found:
        return None
    each = count // n if op in ("all_gather", "reduce_scatter", "all_to_all") else count
    return {"op": op, "interface": interface, "ranks": n, "size": count * WIDTH[dtype], "count": each, "type": dtype,
            "redop": "sum" if op in SUMS else "none", "root": 0 if op == "broadcast" else -1, **found}


def exact(op: str, n: int, dtype: str) -> bool:
    """Whether the dtype holds every sum of `values`, however it is added up."""
    return op not in SUMS or (n if WIDTH[dtype] == 2 else 7 * n + n * n // 2) <= EXACT[dtype]


def _tensor(x: np.ndarray, dtype: str) -> Tensor:
    return Tensor(x).astype(DTYPES[dtype])


def run(bench: Bench, options: dict) -> list[dict]:
    """Options: least, most, factor (bytes), times, dtypes, ops."""
    rows: list[dict] = []
    lacks: dict[str, set[str]] = {}
    algorithm = os.environ.get("HCCL_ALGO") or {"hccl": "HCCL's choice"}.get(bench.backend.name, bench.backend.name)
    for label, group in groups(bench):
        for dtype in options["dtypes"]:
            for op in options.get("ops", OPS):
                for interface in ("ms_dtensor", "mindspore"):
                    size = options["least"]
                    while size <= options["most"]:
                        row = one(bench, op, group, interface, size, dtype, options["times"])
                        if row is None:
                            lacks.setdefault(interface, set()).add(op)
                            break
                        rows.append({"group": label, "algorithm": algorithm, **row})
                        size *= options["factor"]
    return [*rows, *({"lacks": sorted(ops), "interface": name} for name, ops in lacks.items())]
