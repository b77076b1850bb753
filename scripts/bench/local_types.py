# SPDX-License-Identifier: Apache-2.0
"""What a check of types costs: the first, checked call of a local function beside a later one and an unchecked one, as JSON.

    python scripts/bench/local_types.py [--rounds 40]

One process pretends to be one of four ranks, so nothing is sent: what is measured is Python.
"""
from __future__ import annotations

import argparse
import json
import statistics
import time

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

import ms_dtensor as md
from ms_dtensor import Shard, local_map
from ms_dtensor.comm import fake_world
from ms_dtensor.debug import all_reduce


def block(x, w1, w2):
    """An MLP of ten ops with its sum."""
    h = mint.nn.functional.silu(x @ w1)
    scale = mint.rsqrt(mint.mean(mint.square(h), -1, keepdim=True) + 1e-5)
    return all_reduce((h * scale) @ w2, "tp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    ms.runtime.launch_blocking()
    with fake_world(4):
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        lies = {"dp": Shard(0)}, {"tp": Shard(1)}, {"tp": Shard(0)}
        x, w1, w2 = (md.DTensor.from_local(Tensor(np.ones(shape, np.float32)), mesh, at)
                     for shape, at in zip(((8, 16), (16, 32), (32, 16)), lies))
        spent: dict[str, list[float]] = {"unchecked": [], "checked": [], "checked before": []}
        plain = local_map(block, lies[0], device_mesh=mesh)
        for i in range(rounds + 3):
            fresh = local_map(block, lies[0], device_mesh=mesh, check=True)
            for name, call in (("unchecked", plain), ("checked", fresh), ("checked before", fresh)):
                begun = time.perf_counter()
                call(x, w1, w2)
                if i >= 3:
                    spent[name].append(time.perf_counter() - begun)
    median = {name: statistics.median(times) for name, times in spent.items()}
    print(json.dumps({"rounds": rounds, "median_ms": {k: round(v * 1e3, 3) for k, v in median.items()},
                      "checked_over_unchecked": round(median["checked"] / median["unchecked"], 2),
                      "checked_before_over_unchecked": round(median["checked before"] / median["unchecked"], 2)}))


if __name__ == "__main__":
    main()
