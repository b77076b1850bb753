# SPDX-License-Identifier: Apache-2.0
"""Measures this machine for `md.debug.suggest` and dry runs: what a rank computes, reads and sends in a second.

    msrun --worker_num=2 --local_worker_num=2 --join=True python -m ms_dtensor calibrate --hardware mine.yaml

As in a step: all ranks at the same time, as on a CPU they share its cores and its memory; other operands each time, so that
no cache has them; results are kept, as a forward keeps them. Products of several sizes, each in the three forms that it has
in a step, give the share of the peak by size; sums of vectors the memory's. Ops whose kernels are slower than memory have
rates of their own, and so has each collective. On a CPU the host's own work for an op (`host.py`) is no small part of a
step. Nothing is fitted to a model's step.
"""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from statistics import median
from typing import Any

from .host import host_seconds

# Rows, inner, columns; between two sizes the share of the smaller one counts, so they are not far apart.
PRODUCTS = ((2048, 1, 512), (1024, 64, 64), (2048, 64, 96), (384, 320, 512), (384, 640, 512), (768, 640, 1536),
            (1024, 768, 3072))
# of a device, in bfloat16: a block of the 8B and parts of it
DEVICE_PRODUCTS = ((256, 256, 256), (1024, 1024, 1024), (4096, 4096, 1792), (8192, 4096, 4096), (8192, 4096, 14336))
VECTORS = (1 << 12, 1 << 16, 1 << 20, 1 << 23)  # elements of float32
REPEATS, MOST, ROUNDS = 12, 200, 3  # calls of a round at least and at most, rounds
WHILE = 0.05  # seconds of a round, if that is not more than the most calls: some slices of the scheduler's
CACHED = 64 << 20  # bytes: of so many other operands, or results, none is still in a cache
LARGE, SMALL = 16 << 20, 16 << 10  # bytes of a collective


class Stopwatch:
    """Mean seconds of a call that is made again and again, on the slowest rank; the median of some rounds.

    A mean over a while, not a median of calls: where ranks share a core, most calls run alone on it, and some wait for long.
    """

    def __init__(self, device: str, agree: Callable[[float], float]):
        self.device, self.agree = device, agree

    def of(self, call: Callable[..., Any], make: Callable[[], Sequence[Any]], kept: int | None = None) -> float:
        """A call, each time with other operands than the time before, whose result goes where the ones before do not lie.

        So many results are kept, else as many as no cache has, up to `MOST`; in memory used before.
        """
        first = make()
        count = min(REPEATS, CACHED // max(1, sum(getattr(x, "nbytes", 0) for x in first)) + 2)
        operands = [first, *(make() for _ in range(count - 1))]
        if kept is None:
            self._began, size = time.perf_counter(), getattr(call(*first), "nbytes", 0)
            kept = max(REPEATS, min(MOST, CACHED // size)) if size else REPEATS
        least = max(REPEATS, kept)
        self._round(call, operands, least, kept)
        calls = max(least, min(MOST, int(WHILE / self._round(call, operands, least, kept))))
        return median(self._round(call, operands, calls, kept) for _ in range(ROUNDS))

    def _round(self, call: Callable[..., Any], operands: Sequence[Sequence[Any]], calls: int, kept: int) -> float:
        results: deque = deque(maxlen=kept)
        self.agree(0.0)  # begin together
        started = time.perf_counter()
        self._left_out = 0.0
        for i in range(calls):
            self._began = time.perf_counter()
            results.append(call(*operands[i % len(operands)]))
            self._wait()
        return self.agree(time.perf_counter() - started - self._left_out) / calls

    def begins(self) -> None:
        """Of this call only what comes now counts."""
        self._wait()
        self._left_out += time.perf_counter() - self._began

    def _wait(self) -> None:
        if self.device != "cpu":
            import mindspore as ms
            ms.runtime.synchronize()


def measure_machine(device: str, agree: Callable[[float], float], group: Any) -> dict[str, Any]:
    """The figures of a machine's file, in its units.

    Args:
        device: "cpu", "npu" or "gpu".
        agree: gives the largest of all ranks' numbers; every rank calls it alike.
        group: of all ranks.
    """
    import mindspore as ms
    import numpy as np
    import psutil
    from mindspore import Parameter, Tensor, mint, ops

    from ..internals.target import card_memory
    from ..optim import AdamW, clip_grad_norm_

    if device == "cpu":  # as the recipe does: else an op has not run when it returns
        ms.runtime.launch_blocking()
    watch, rng, ranks = Stopwatch(device, agree), np.random.default_rng(0), group.size

    def filled(*shape: int) -> Tensor:
        return Tensor(rng.random(shape, np.float32))

    def many(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [filled(*shape) for shape in shapes]
    launch = watch.of(mint.add, partial(many, (8,), (8,)))

    def beyond(total: float, launches: int = 1) -> float:
        """Seconds but for those of the host, where these are not almost all."""
        return max(total - launches * launch, 0.1 * total, 1e-9)

    def rate(size: int, call: Callable[..., Tensor], make: Callable[[], Sequence[Tensor]], kept: float) -> list[float]:
        """GB/s, forward and backward, of an op whose backward reads so many bytes beside the cotangent."""
        x, *others = make()
        given = filled(*call(x, *others).shape)

        def there(x, *others):
            out = call(x, *others)
            watch.begins()
            return out
        back = watch.of(lambda x, *others: ops.GradOperation(sens_param=True)(lambda x: there(x, *others))(x, given), make)
        written = given.nbytes
        return [_digits(1e-9 * (size + written) / beyond(watch.of(call, make))),
                _digits(1e-9 * (written + kept + 4 * Tensor.numel(x)) / beyond(back))]

    rates = {}
    forms = ops.MatMul(transpose_b=True), ops.MatMul(), ops.MatMul(transpose_a=True)  # of `nn.Dense`, there and back
    dtype = ms.float32 if device == "cpu" else ms.bfloat16

    def factors(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [x.astype(dtype) for x in many(*shapes)]
    for m, k, n in PRODUCTS if device == "cpu" else DEVICE_PRODUCTS:
        shapes = (((m, k), (n, k)), ((m, n), (n, k)), ((m, n), (m, k)))
        taken = [beyond(watch.of(form, partial(factors, *both))) for form, both in zip(forms, shapes)]
        rates[2e-9 * m * k * n] = 6 * m * k * n / sum(taken)
    rows = {12e-6 * size: 12 * size / beyond(watch.of(mint.add, partial(many, (size,), (size,)))) for size in VECTORS}
    size = 1 << 20
    vector = size * 8 / beyond(watch.of(mint.exp, lambda: (filled(size),)))  # an exponential is some eight operations
    whole, places = 4 * 4096 * 512, Tensor(rng.permutation(4096).astype(np.int32))
    first, bias = Tensor(np.zeros((4096, 1), np.int32)), filled(512)

    one, two = partial(many, (4096, 512)), partial(many, (4096, 512), (4096, 512))
    kernels = {
        "softmax": rate(whole, lambda x: mint.softmax(x, -1), one, kept=whole),
        "log_softmax": rate(whole, lambda x: ops.log_softmax(x, -1), one, kept=whole),
        "silu": rate(whole, mint.nn.functional.silu, one, kept=whole), "exp": rate(whole, mint.exp, one, kept=whole),
        "gather": rate(whole, lambda x: ops.gather(x, places, 0), one, kept=0),
        "take_along": rate(whole, lambda x: ops.gather_elements(x, 1, first), one, kept=whole),
        "bias_add": rate(whole, lambda x: ops.bias_add(x, bias), one, kept=0),
        "add": rate(2 * whole, mint.add, two, kept=0), "mul": rate(2 * whole, lambda x, y: x * y, two, kept=whole)}
    params = [Parameter(filled(1 << 20), name=f"w{i}") for i in range(8)]
    grads, optimizer = [filled(1 << 20) for _ in params], AdamW(params, 1e-3)
    kernels["AdamW"] = [_digits(1e-9 * 28 * (8 << 20) / watch.of(lambda: optimizer(grads), tuple))] * 2
    clip = watch.of(lambda: clip_grad_norm_(grads, 1e-6), tuple)
    kernels["clip_grad_norm"] = [_digits(1e-9 * 12 * (8 << 20) / clip)] * 2
    if (window := group.backend.window(LARGE)) is not None:
        kernels["mapping"] = [_digits(1e-9 * LARGE / watch.of(partial(_come_and_go, window), tuple))] * 2
    total = psutil.virtual_memory().total / ranks if device == "cpu" else \
        card_memory()
    link = measure_link(watch, group, filled) if ranks > 1 else {  # which nothing is sent over
        "gb_s": 1.0, "latency_us": 0.0, "factors": {op: 1 for op in ("all_reduce", "all_gather", "reduce_scatter",
                                                                     "all_to_all", "exchange")}}
    told = {"source": f"measured on {ranks} ranks by python -m ms_dtensor calibrate, MindSpore {ms.__version__}",
            "matrix": {"tflops": _digits(max(rates.values()) / 1e12), "reached": shares(rates)},
            "vector": {"tflops": _digits(vector / 1e12), "reached": [[0, 1.0]]},
            "memory": {"gib": round(total / 2**30, 1), "gb_s": _digits(max(rows.values()) / 1e9), "reached": shares(rows)},
            "kernels": kernels, "overlap": True, "launch_us": _digits(launch * 1e6),
            "links": [{"ranks": 65536, "ring": True, "processor": 1.0 if device == "cpu" else 0.05, **link}]}
    if device == "cpu":  # who sends is who computes, and an op has run when it returns
        told["host_us"] = {what: [_digits(1e6 * agree(s)) for s in both] for what, both in host_seconds().items()}
    return told


def measure_link(watch: Stopwatch, group: Any, filled: Callable[..., Any]) -> dict[str, Any]:
    """What joins all ranks: each collective of a large tensor, and the quickest of a small one."""
    n, rank = group.size, group.rank_index
    cut, to, of = [1] * n, group.ranks[(rank + 1) % n], group.ranks[(rank - 1) % n]
    calls = {"all_reduce": lambda x: group.all_reduce(x), "all_gather": lambda x: group.all_gather(x[:1], 0, cut),
             "reduce_scatter": lambda x: group.reduce_scatter(x, "sum", 0, cut),
             "all_to_all": lambda x: group.all_to_all(x, 0, cut, 1, [x.shape[1]] * n),
             "exchange": lambda x: group.exchange([(to, x)], [(of, x.shape, x.dtype)])}

    def seconds(size: int) -> dict[str, float]:
        return {op: watch.of(call, lambda: (filled(n, size // 4 // n),), kept=1) for op, call in calls.items()}
    small, large = seconds(SMALL), seconds(LARGE)
    latency = median(small.values())
    sent = {op: LARGE * (1.0 if op == "exchange" else (n - 1) / n) for op in calls}
    speed = {op: sent[op] / max(large[op] - latency, 1e-6) for op in calls}
    return {"gb_s": _digits(speed["all_gather"] / 1e9), "latency_us": _digits(latency * 1e6),
            "wait": _digits(_wait(watch, calls["all_reduce"], filled, latency)),
            "factors": {op: _digits(speed["all_gather"] / speed[op]) for op in calls}}


def _come_and_go(window: Any) -> None:
    """Memory under addresses that stay, as gathered parameters have it; of pages that have been written before."""
    window.claim()
    window.release()


def _wait(watch: Stopwatch, meet: Callable, filled: Callable[..., Any], latency: float) -> float:
    """How much longer than alone ranks take that meet behind each piece of work, over the root of its seconds alone."""
    from mindspore import ops
    product, small = ops.MatMul(), filled(2, SMALL // 8)

    def make() -> Sequence[Any]:
        return filled(512, 512), filled(512, 2048)
    alone = watch.of(product, make, REPEATS)
    met = watch.of(lambda a, b: (product(a, b), meet(small)), make, REPEATS)
    return max(0.0, met - alone - latency) / sqrt(alone)


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
