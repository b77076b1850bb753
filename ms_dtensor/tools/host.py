# SPDX-License-Identifier: Apache-2.0
"""Seconds of the host for an op of a DTensor, forward and backward, with caches as cold as kernels leave them.

On a CPU an op has run when it returns, so these seconds are a part of a step: dispatch, MindSpore's own, autograd's node.
In a loop of small ops alone they are a third of what they are in a step, where kernels between them have emptied the caches.
So between any two ops here, there and back, as much memory is read and written as no cache near the core holds.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

CHAIN = 12  # ops in a row, each of them twice
ROUNDS = 7
JUNK = 1 << 20  # float32, 4 MiB


def host_seconds() -> dict[str, tuple[float, float]]:
    """{"op": (forward, backward), "view": (forward, backward)} on this rank, in the median of some ops of each."""
    import numpy as np
    from mindspore import Tensor, mint, ops

    from ..comm import current_world
    from ..core.mesh import DeviceMesh
    from ..internals.names import Function
    from ..tensor.autograd import value_and_grad
    from ..tensor.distribute import distribute_tensor
    from ..tensor.dtensor import DTensor

    junk, spent = np.ones(JUNK, np.float32), [0.0]

    def emptied() -> None:
        started = time.perf_counter()
        np.add(junk, 1.0, out=junk)
        spent[0] += time.perf_counter() - started

    class Between(Function):
        """Empties the caches, there and back."""

        @staticmethod
        def forward(ctx, x):
            emptied()
            return x

        @staticmethod
        def backward(ctx, grad):
            emptied()
            return grad

    world: Any = current_world()
    mesh = DeviceMesh("cpu", [world.rank], mesh_dim_names=("alone",))
    x, w = (distribute_tensor(Tensor(np.ones((8, 8), np.float32)), mesh) for _ in range(2))

    def seconds(op: Callable) -> tuple[float, float]:
        """Of a chain of an op and of what empties the caches, there and back."""
        there = 0.0

        def chain(y):
            nonlocal there
            for _ in range(CHAIN):
                y = DTensor.from_local(Between.apply(op(y).to_local()), mesh)
            there = time.perf_counter() - began - spent[0]
            return y.sum()
        times = []
        for _ in range(ROUNDS + 2):
            spent[0], began = 0.0, time.perf_counter()
            value_and_grad(chain)(x)
            times.append((there, time.perf_counter() - began - spent[0] - there))
        return tuple(median(side) / CHAIN for side in zip(*times[2:]))  # type: ignore[return-value]
    nothing = seconds(lambda y: y)
    kinds: dict[str, list[Callable]] = {
        "op": [lambda y: y * w, lambda y: ops.matmul(y, w), lambda y: y + w, mint.nn.functional.silu],
        "view": [lambda y: y.reshape(4, 16), lambda y: y.permute(1, 0)]}
    return {kind: tuple(max(0.0, median(side) - less) for side, less in zip(zip(*map(seconds, ops_)), nothing))
            for kind, ops_ in kinds.items()}  # type: ignore[misc]
