# SPDX-License-Identifier: Apache-2.0
"""What one device computes a second: products of a Llama's sizes, attention, fused ops; all devices at the same time.

TFLOP/s of the median device and its share of the peak (None where nobody stated one); the slowest and the fastest device, as
one slow device holds up a cluster. Norms, rotary embedding, SwiGLU and AdamW move data: GB/s of what they must read and
write. On a CPU the model zoo's CPU forms stand in; their figures say nothing of a device.
"""
from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from model_zoo.llama import cpu, model
from model_zoo.llama.config import ModelConfig
from ms_dtensor.optim import AdamW

from .arithmetic import attention_flops, digits, matmul_flops, peak_of, share, tflops
from .world import Bench, spread

DTYPES = {"float32": ms.float32, "bfloat16": ms.bfloat16, "float16": ms.float16}
Case = tuple[str, Callable[[], object], float, float]  # shape, call, operations, bytes


def products(cfg: ModelConfig, tokens: int, tp: int) -> dict[str, tuple[int, int, int]]:
    """(m, k, n) of a layer's products and of the head, on one of `tp` ranks."""
    heads, keys = cfg.n_heads * cfg.head_dim // tp, cfg.n_kv_heads * cfg.head_dim // tp
    return {"wq": (tokens, cfg.dim, heads), "wk": (tokens, cfg.dim, keys), "wo": (tokens, heads, cfg.dim),
            "w1": (tokens, cfg.dim, cfg.ffn_dim // tp), "w2": (tokens, cfg.ffn_dim // tp, cfg.dim),
            "head": (tokens, cfg.dim, cfg.vocab_size // tp)}


def some(dtype: str, *shape: int) -> Tensor:
    return Tensor(np.random.default_rng(0).standard_normal(shape, np.float32)).astype(DTYPES[dtype])


def matmul(dtype: str, m: int, k: int, n: int) -> Case:
    x, w, product = some(dtype, m, k), some(dtype, n, k), ops.MatMul(transpose_b=True)
    return f"{m} x {k} x {n}", lambda: product(x, w), matmul_flops(m, k, n), 0


def attention(cfg: ModelConfig, dtype: str, t: int, tp: int, backward: bool, on_cpu: bool) -> Case:
    """One sequence; on a device the kernel alone, on a CPU with the rotary embedding."""
    h, k, e = cfg.n_heads // tp, cfg.n_kv_heads // tp, cfg.head_dim
    qkv = some(dtype, 1, t, h, e), some(dtype, 1, t, k, e), some(dtype, 1, t, k, e)

    def forward(q, key, value):
        if on_cpu:
            return cpu.attend(cfg, q, key, value)
        return ops.flash_attention_score(q, key, value, h, attn_mask=model.causal_mask(), scalar_value=e ** -0.5,
                                         input_layout="BSND", sparse_mode=2)
    call = ms.grad(lambda *x: forward(*x).sum(), (0, 1, 2)) if backward else forward
    return f"1 x {t} x {h} ({k}) x {e}", lambda: call(*qkv), attention_flops(1, t, h, e, backward), 0


def fused(cfg: ModelConfig, dtype: str, tokens: int, tp: int, on_cpu: bool) -> dict[str, Case]:
    """What moves data; bytes read and written once."""
    wide, d, f, h, e = (2 if dtype != "float32" else 4), cfg.dim, cfg.ffn_dim // tp, cfg.n_heads // tp, cfg.head_dim
    x, weight, q = some(dtype, tokens, d), some(dtype, d), some(dtype, 1, tokens, h, e)
    if on_cpu:
        table = cpu.constants(cfg, 1, tokens, h)
        gate, up = some(dtype, tokens, f), some(dtype, tokens, f)
        norm, gated = (lambda: cpu.rms_norm(x, weight, 1e-5)), (lambda: cpu.swiglu(gate, up))
        rows = q.reshape(-1, e)
        turned = lambda: cpu.rotary(rows, table.cos, table.sin, table.turn)  # noqa: E731
    else:
        both, tables = some(dtype, tokens, 2, f), model.rotary_tables(cfg, tokens, x.dtype)
        norm, gated = (lambda: ops.rms_norm(x, weight, 1e-5)), (lambda: ops.swiglu(both, 1))
        turned = lambda: ops.rotary_position_embedding(q, *tables, 0)  # noqa: E731
    w = Parameter(some("float32", f, d), name="w")
    optimizer, grad = AdamW([w], lr=1e-4), some("float32", f, d)
    return {"rms_norm": (f"{tokens} x {d}", norm, 0, 2 * wide * tokens * d),
            "rotary": (f"1 x {tokens} x {h} x {e}", turned, 0, 2 * wide * tokens * h * e),
            "swiglu": (f"{tokens} x {f}", gated, 0, 3 * wide * tokens * f),
            "adamw float32": (f"{f} x {d}", lambda: optimizer([grad]), 0, 28 * f * d)}  # reads w, g, m, v; writes w, m, v


def run(bench: Bench, options: dict) -> list[dict]:
    """Options: model (sizes), tokens, seqs, tp, dtypes, times."""
    cfg, tokens, tp, on_cpu = ModelConfig(**options["model"]), options["tokens"], options["tp"], bench.device == "cpu"
    rows = []
    for dtype in options["dtypes"]:
        cases: list[tuple[str, Callable[[], Case]]] = [
            *((f"matmul {name}", lambda sizes=sizes, dtype=dtype: matmul(dtype, *sizes))
              for name, sizes in products(cfg, tokens, tp).items())]
        if on_cpu or dtype != "float32":  # a device's kernels of these take 16 bits
            cases += [(f"attention {'forward and backward' if b else 'forward'}",
                       lambda t=t, b=b, dtype=dtype: attention(cfg, dtype, t, tp, b, on_cpu))
                      for t in options["seqs"] for b in (False, True)]
            cases += [(name, lambda case=case: case) for name, case in fused(cfg, dtype, tokens, tp, on_cpu).items()]
        for name, make in cases:
            shape, call, operations, moved = make()
            taken = spread(bench.seconds(call, options["times"]))
            seconds = taken["time"] / 1e6
            speed = tflops(operations, seconds) if operations else None
            peak = peak_of(bench.name, dtype, bench.peaks)
            rows.append({"op": name, "shape": shape, "type": dtype, **taken,
                         "tflops": None if speed is None else digits(speed), "peak": peak,
                         "share": None if speed is None or peak is None else digits(share(speed, peak)),
                         "gbs": digits(moved / seconds / 1e9) if moved else None})
    return rows
