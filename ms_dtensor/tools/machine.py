# SPDX-License-Identifier: Apache-2.0
"""Measures this machine for `md.debug.suggest` and dry runs: what a rank computes, reads and sends in a second.

    msrun --worker_num=2 --local_worker_num=2 --join=True python -m ms_dtensor calibrate --hardware mine.yaml

All ranks compute at the same time, as they do in a step: on a CPU they share its cores and its memory. Products of several
sizes give the share of the peak by size, sums of vectors the memory's; the peak is the quickest product. Ops whose kernels
are slower than memory have rates of their own. Collectives give those of the links, as for the planner's costs. Nothing is
fitted to a model's step.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

PRODUCTS = ((64, 64, 64), (256, 256, 256), (512, 1024, 512), (1024, 1024, 1024), (2048, 1024, 2048))  # rows, inner, columns
VECTORS = (1 << 12, 1 << 16, 1 << 20, 1 << 23)  # elements of float32
REPEATS = 15


def measure_machine(device: str, alpha: float, per_byte: float, agree: Callable[[float], float],
                    ranks: int) -> dict[str, Any]:
    """The figures of a machine's file, in its units.

    Args:
        device: "cpu", "npu" or "gpu".
        alpha, per_byte: seconds of a collective, and of each byte of it, sending and copying; as `calibrate` measures them.
        agree: gives the largest of all ranks' numbers; every rank calls it alike.
        ranks: how many there are.
    """
    import mindspore as ms
    import numpy as np
    import psutil
    from mindspore import Parameter, Tensor, mint, ops

    from ..internals.target import card_memory
    from ..optim import AdamW

    def seconds(call: Callable[[], Any]) -> float:
        call()
        times = []
        for _ in range(REPEATS):
            agree(0.0)  # begin together
            started = time.perf_counter()
            call()
            if device != "cpu":
                ms.runtime.synchronize()
            times.append(time.perf_counter() - started)
        return agree(median(times))

    if device == "cpu":  # as the recipe does: else an op has not run when it returns
        ms.runtime.launch_blocking()
    rng = np.random.default_rng(0)

    def filled(*shape: int) -> Tensor:
        return Tensor(rng.normal(size=shape).astype(np.float32))

    def beyond(total: float, launches: int = 1) -> float:
        """Seconds but for those of the host, where these are not almost all."""
        return max(total - launches * launch, 0.1 * total, 1e-9)

    def rate(size: int, call: Callable[..., Tensor], *operands: Tensor, kept: float) -> list[float]:
        """GB/s, forward and backward, of an op whose backward reads so many bytes beside the cotangent."""
        x, *others = operands
        there = seconds(lambda: call(*operands))
        both = seconds(lambda: ms.grad(lambda x: call(x, *others))(x))
        written = Tensor.numel(call(*operands)) * 4
        return [_digits(1e-9 * (size + written) / beyond(there)),
                _digits(1e-9 * (written + kept + 4 * Tensor.numel(x)) / beyond(both - there, 3))]

    one = filled(8)
    launch = seconds(lambda: mint.add(one, one))
    rates = {}
    product = ops.MatMul(transpose_b=True)  # what `nn.Dense` runs
    for m, k, n in PRODUCTS:
        x, w = filled(m, k), filled(n, k)
        rates[2e-9 * m * k * n] = 2 * m * k * n / beyond(seconds(partial(product, x, w)))
    rows = {}
    for size in VECTORS:
        x, y = filled(size), filled(size)
        rows[12e-6 * size] = 12 * size / beyond(seconds(partial(mint.add, x, y)))
    size = 1 << 20
    x = filled(size)
    vector = size * 8 / beyond(seconds(lambda: mint.exp(x)))  # an exponential is some eight operations
    x, y, places = filled(1024, 2048), filled(1024, 2048), Tensor(np.arange(1024, dtype=np.int32))
    first, bias, whole = Tensor(np.zeros((1024, 1), np.int32)), filled(2048), x.size * 4
    kernels = {
        "softmax": rate(whole, lambda x: mint.softmax(x, -1), x, kept=whole),
        "log_softmax": rate(whole, lambda x: ops.log_softmax(x, -1), x, kept=whole),
        "silu": rate(whole, mint.nn.functional.silu, x, kept=whole), "exp": rate(whole, mint.exp, x, kept=whole),
        "gather": rate(whole, lambda x: ops.gather(x, places, 0), x, kept=0),
        "take_along": rate(whole, lambda x: ops.gather_elements(x, 1, first), x, kept=whole),
        "bias_add": rate(whole, lambda x: ops.bias_add(x, bias), x, kept=0),
        "mul": rate(2 * whole, lambda x, y: x * y, x, y, kept=whole)}
    param = Parameter(filled(1 << 21), name="w")
    grad, optimizer = filled(1 << 21), AdamW([param], 1e-3)
    kernels["AdamW"] = [_digits(1e-9 * 28 * (1 << 21) / seconds(lambda: optimizer((grad,))))] * 2
    total = psutil.virtual_memory().total / ranks if device == "cpu" else \
        card_memory()
    return {"source": f"measured on {ranks} ranks by python -m ms_dtensor calibrate, MindSpore {ms.__version__}",
            "matrix": {"tflops": _digits(max(rates.values()) / 1e12), "reached": shares(rates)},
            "vector": {"tflops": _digits(vector / 1e12), "reached": [[0, 1.0]]},
            "memory": {"gib": round(total / 2**30, 1), "gb_s": _digits(max(rows.values()) / 1e9), "reached": shares(rows)},
            "kernels": kernels, "overlap": True, "launch_us": _digits(launch * 1e6),
            "links": [{"ranks": 65536, "gb_s": _digits(1e-9 / per_byte), "latency_us": _digits(alpha * 1e6),
                       "ring": True, "processor": 0.5 if device == "cpu" else 0.05,
                       "factors": {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "exchange": 1}}]}


def shares(rates: dict[float, float]) -> list[list[float]]:
    """Of the quickest, by size, the largest first; the smallest size stands for all below it.

    Example:
        >>> from ms_dtensor.tools.machine import shares
        >>> shares({1.0: 50.0, 8.0: 100.0, 64.0: 90.0})
        [[64.0, 0.9], [8.0, 1.0], [0, 0.5]]
    """
    most = max(rates.values())
    out = [[_digits(size), min(1.0, _digits(rate / most))] for size, rate in sorted(rates.items(), reverse=True)]
    out[-1][0] = 0
    return out


def _digits(x: float) -> float:
    return float(f"{x:.3g}")
