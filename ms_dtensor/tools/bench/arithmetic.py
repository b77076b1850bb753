# SPDX-License-Identifier: Apache-2.0
"""The formulas behind the columns: bus bandwidth, floating-point operations, share of the peak, scaling efficiency.

Pure, no MindSpore, so that a test checks them by hand. Units: bytes, seconds; GB and TFLOP are powers of ten. Peaks and the
figures that others published are in `known.json`, each with its source; a peak that nobody stated is None, never a guess.
"""
from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

KNOWN = json.loads(Path(__file__).with_name("known.json").read_text(encoding="utf-8"))
# (integers that a float type counts without a gap, hccl_test's word for it is NULL beyond)
EXACT = {"float": 2**24, "bfloat16": 2**8, "half": 2**11, "int32": 2**31 - 1}


def digits(x: float) -> float:
    """Four of them: figures here go from a CPU's thousandth of a GB/s to a cluster's thousands."""
    return float(f"{x:.4g}")


def bus_factor(op: str, ranks: int) -> float:
    """Bus over algorithm bandwidth, as nccl-tests has it: what each link carries for a byte of `size`."""
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share, "broadcast": 1.0}[op]


def bandwidths(op: str, ranks: int, size: int, seconds: float) -> tuple[float, float]:
    """(algbw, busbw) in GB/s. `size`: what one rank holds of the whole (output of a gather, input of a scatter)."""
    algorithm = size / seconds / 1e9
    return algorithm, algorithm * bus_factor(op, ranks)


def matmul_flops(m: int, k: int, n: int) -> int:
    return 2 * m * k * n


def attention_flops(b: int, t: int, heads: int, width: int, backward: bool) -> float:
    """Causal: half of the two products of scores; with the backward, which has five of them, 3.5 times."""
    return 2 * 2 * b * heads * t * t * width / 2 * (3.5 if backward else 1)


def flops_per_token(parameters: int, layers: int = 0, seq: int = 0, attention_width: int = 0) -> int:
    """Forward and backward of a token: 6 a parameter, and 6 * L * t * h * e for causal attention; no recomputation."""
    return 6 * parameters + 6 * layers * seq * attention_width


def tflops(flops: float, seconds: float) -> float:
    return flops / seconds / 1e12


def peak_of(device: str, dtype: str, stated: Mapping[str, float] | None = None) -> float | None:
    """TFLOP/s to divide by: what the user stated, else the table's for exactly this device, else None."""
    if stated and dtype in stated:
        return stated[dtype]
    return next((row.get(dtype) for row in KNOWN["peaks"] if row["device"] == device), None)


def share(value: float, peak: float | None) -> float | None:
    return None if peak is None else value / peak


def efficiency(rows: Sequence[Mapping[str, Any]], kind: str) -> list[float]:
    """Of the first row's: weak, tokens/s/p kept as the work grows with the ranks; strong, of a fixed batch, speed-up a rank.

    Both are the ratio of tokens/s per rank, since a fixed batch's speed-up is that of tokens/s.
    """
    batches = {row["batch"] if kind == "strong" else row["batch"] / row["ranks"] for row in rows}
    if len(batches) > 1:
        raise ValueError(f"For 'efficiency', the rows are of no {kind} scaling: {sorted(batches)} sequences.")
    return [row["tokens_s_p"] / rows[0]["tokens_s_p"] for row in rows]


def sample(fn: Callable[[], object], calls: int) -> float:
    """Microseconds per call of one short burst."""
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - start) / calls * 1e6


def warm_sample(fn: Callable[[], object], calls: int, wait: Callable[[], object] = lambda: None) -> float:
    """Microseconds per call, after some that bring the process back into the caches: it was another's turn before."""
    sample(fn, calls // 4)
    wait()
    return sample(fn, calls)
