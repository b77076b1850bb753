# SPDX-License-Identifier: Apache-2.0
"""What a DTensor adds to an op on a 4 x 4 tensor: forward, and forward and backward, on every rank at once.

On a device the time to issue: the host goes on before the device is done, which is waited for between samples. On a CPU
MindSpore runs blocking. "floor" is the least that a Tensor subclass can add. Medians of the slowest rank.
"""
from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from ...core.mesh import DeviceMesh
from ...core.placements import Replicate, Shard
from ...internals.names import NoFallbackGuard
from ...tensor.autograd import grad
from ...tensor.distribute import distribute_tensor, init_device_mesh
from ...tensor.dtensor import DTensor
from .arithmetic import warm_sample
from .world import Bench

ROWS = ("add", "mul scalar", "matmul", "relu", "transpose", "view", "sum", "softmax", "to_local", "from_local",
        "redistribute to itself")
N = 4
Cases = dict[str, dict[str, Callable[[], object]]]  # row -> {variant: call}


def mindspore_cases(blocking: bool = True, mesh_shape: Sequence[int] = (1,), device: str = "cpu",
                    ranks: Sequence[int] | None = None) -> Cases:
    """row -> {variant: thunk}; forward rows, then "fb ..." rows. `ranks`: those of the mesh, if not all."""
    if blocking:
        ms.runtime.launch_blocking()
    else:
        mint.add(Tensor([1.0]), Tensor([1.0]))  # once an op has run the library leaves the mode as it is
    make = Tensor._make_subclass

    class Floor(Tensor):
        def __fallback__(self, func, args=(), kwargs=None):
            with NoFallbackGuard():
                result = func(*args) if kwargs is None else func(*args, **kwargs)
            out = make(Floor, result)
            out.layout = None
            return out

    rng = np.random.default_rng(0)
    a, b = (Tensor(rng.standard_normal((N, N)).astype(np.float32)) for _ in range(2))
    mesh = init_device_mesh(device, mesh_shape) if ranks is None else DeviceMesh(device, ranks)
    rest = [Replicate()] * (len(mesh_shape) - 1)
    cut0, cut1, whole = ([p, *rest] for p in (Shard(0), Shard(1), Replicate()))

    def laid(t, placements):
        return distribute_tensor(t, mesh, placements, src_data_rank=None)

    relu = mint.nn.functional.relu
    ops: dict[str, Any] = {
        "add": (lambda x, y: mint.add(x, y), cut0, cut0),
        "mul scalar": (lambda x: x * 2.0, cut0),
        "matmul": (lambda x, y: mint.matmul(x, y), whole, cut1),
        "relu": (lambda x: relu(x), cut0),
        "transpose": (lambda x: mint.transpose(x, 0, 1), cut0),
        "view": (lambda x: x.view(N, 2, N // 2), cut0),
        "sum": (lambda x: mint.sum(x), cut0),
        "softmax": (lambda x: mint.softmax(x, dim=1), cut0),
    }
    cases: Cases = {}
    for row, (fn, *placed) in ops.items():
        variants = {"plain": (a, b), "floor": (make(Floor, a), make(Floor, b)),
                    "ours": tuple(laid(t, p) for t, p in zip((a, b), placed))}
        where = tuple(range(len(placed)))
        cases[row], cases["fb " + row] = {}, {}
        for name, xs in variants.items():
            taken, gradient = xs[:len(placed)], (grad if name == "ours" else ms.grad)(fn, where)
            cases[row][name] = partial(fn, *taken)
            cases["fb " + row][name] = partial(gradient, *taken)
    x = laid(a, cut0)
    cases["to_local"] = {"plain": lambda: None, "ours": lambda: x.to_local()}
    cases["from_local"] = {"plain": lambda: None, "ours": lambda: DTensor.from_local(a, mesh, cut0)}
    cases["redistribute to itself"] = {"plain": lambda: None, "ours": lambda: x.redistribute(placements=cut0)}
    view = ms.grad(lambda t: t.view(N, N))
    to_local, from_local = grad(lambda t: t.to_local()), grad(lambda t: DTensor.from_local(t, mesh, cut0))
    straight, itself = grad(lambda t: relu(t)), grad(lambda t: relu(t.redistribute(placements=cut0)))
    cases["fb to_local"] = {"plain": lambda: view(a), "ours": lambda: to_local(x)}
    cases["fb from_local"] = {"plain": lambda: view(a), "ours": lambda: from_local(a)}
    cases["fb redistribute to itself"] = {"plain": lambda: straight(x), "ours": lambda: itself(x)}
    return cases


def run(bench: Bench, options: dict) -> list[dict]:
    """Options: rounds, calls, rows (all, if not given)."""
    cases = mindspore_cases(blocking=bench.device == "cpu", device=bench.device, ranks=(bench.rank,))
    rows = []
    for row in (*ROWS, *(f"fb {name}" for name in ROWS)):
        if row.removeprefix("fb ") not in options.get("rows", ROWS):
            continue
        seen: dict[str, list[float]] = {name: [] for name in cases[row]}
        for _ in range(options["rounds"]):
            for name, fn in cases[row].items():  # in turns: what else runs hits all alike
                seen[name].append(warm_sample(fn, options["calls"], bench.wait))
                bench.wait()
        mine = {name: statistics.median(values) for name, values in seen.items()}
        added = {name: statistics.median(v - p for v, p in zip(seen[name], seen["plain"], strict=True))
                 for name in seen if name != "plain"}
        worst = max(bench.each((added["ours"], mine, added)), key=lambda item: item[0])
        rows.append({"op": row, "mode": "blocking" if bench.device == "cpu" else "issue",
                     "plain": round(worst[1]["plain"], 2), "ours": round(worst[1]["ours"], 2),
                     "added": round(worst[2]["ours"], 2),
                     "floor added": round(worst[2]["floor"], 2) if "floor" in worst[2] else None})
    return rows
