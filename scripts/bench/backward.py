# SPDX-License-Identifier: Apache-2.0
"""A step by `recorded` and `backward` beside one by `value_and_grad`: the ratio of their times, as JSON.

The two take turns in one process, and which of them comes first changes with every round, so that what the machine does
meanwhile meets both alike: 1 is as fast. Beside it `value_and_grad` to itself, measured in the same way, says how far
from 1 a ratio is by chance.

    msrun --worker_num=2 --local_worker_num=2 --join=True scripts/bench/backward.py [--rounds 200]
"""
from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
from common import finish
from mindspore import Tensor, nn

import ms_dtensor as md

WARM = 5  # rounds that are not counted: the first plan


def ratio(calls: tuple[Callable, Callable], rounds: int) -> dict:
    """How long the first takes to the second, in rounds of both, begun by each in turn: quartiles of the rounds' ratios."""
    spent: tuple[list[float], list[float]] = [], []
    for i in range(rounds + WARM):
        for k in (i % 2, 1 - i % 2):
            begun = time.perf_counter()
            calls[k]()
            spent[k].append(time.perf_counter() - begun)
    ratios = [a / b for a, b in zip(*(times[WARM:] for times in spent))]
    return {"quartiles": [round(q, 4) for q in statistics.quantiles(ratios, n=4)],
            "median_ms": [round(statistics.median(times[WARM:]) * 1e3, 3) for times in spent]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    ranks = int(os.environ.get("MS_WORKER_NUM", "1"))
    mesh = md.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    net = nn.SequentialCell([cell for _ in range(6) for cell in (nn.Dense(64, 64), nn.Tanh())])
    for cell in net:
        if isinstance(cell, nn.Dense):
            md.fully_shard(cell, mesh=mesh)
    md.fully_shard(net, mesh=mesh)
    x = Tensor(np.random.default_rng(mesh.get_local_rank()).normal(size=(16, 64)).astype(np.float32))
    params = net.trainable_params()
    step = md.value_and_grad(lambda t: (net(t) ** 2).mean(), None, params)

    def by_function() -> None:
        step(x)

    def by_backward() -> None:
        with md.recorded(net):
            md.backward((net(x) ** 2).mean())
        for p in params:
            p.grad = None

    measured = {"backward_to_value_and_grad": ratio((by_backward, by_function), rounds),
                "value_and_grad_to_itself": ratio((by_function, by_function), rounds)}
    if mesh.get_rank() == 0:
        finish("backward", {"ranks": ranks, "rounds": rounds, **measured}, save=False)


if __name__ == "__main__":
    main()
