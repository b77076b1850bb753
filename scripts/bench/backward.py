# SPDX-License-Identifier: Apache-2.0
"""A step by `recorded` and `backward` beside one by `value_and_grad`, in turns: the ratio of their times, as JSON.

    msrun --worker_num=2 --local_worker_num=2 --join=True scripts/bench/backward.py [--rounds 40]
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import numpy as np
from mindspore import Tensor, nn

import ms_dtensor as md


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
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

    def kept() -> None:
        with md.recorded(net):
            md.backward((net(x) ** 2).mean())
        for p in params:
            p.grad = None
    spent: dict[str, list[float]] = {"value_and_grad": [], "backward": []}
    for i in range(rounds + 5):
        for name, call in (("value_and_grad", lambda: step(x)), ("backward", kept)):
            begun = time.perf_counter()
            call()
            if i >= 5:
                spent[name].append(time.perf_counter() - begun)
    if mesh.get_rank() == 0:
        median = {name: statistics.median(times) for name, times in spent.items()}
        print(json.dumps({"ranks": ranks, "rounds": rounds, "median_ms": {k: round(v * 1e3, 3) for k, v in median.items()},
                          "backward_over_value_and_grad": round(median["backward"] / median["value_and_grad"], 3)}))


if __name__ == "__main__":
    main()
