# SPDX-License-Identifier: Apache-2.0
"""What one device computes a second: products of a Llama's sizes, attention, fused ops; all devices at the same time.

TFLOP/s of the median device and its share of the peak (None where nobody stated one); the slowest and the fastest device, as
one slow device holds up a cluster. Norms, rotary embedding, SwiGLU and AdamW move data: GB/s of what they must read and
write. On a CPU, which has no such kernels, operands are DTensors of one rank, and the library's own forms stand in; their
figures say nothing of a device.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from ...core.mesh import DeviceMesh
from ...core.placements import Replicate
from ...optim.adamw import AdamW
from ...tensor.autograd import grad
from ...tensor.dtensor import DTensor
from .arithmetic import attention_flops, digits, matmul_flops, peak_of, share, tflops
from .suites import PRODUCTS
from .world import Bench, spread

DTYPES = {name: getattr(ms, name) for name in PRODUCTS}
Case = tuple[str, Callable[[], object], float, float]  # shape, call, operations, bytes
Place = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of a Llama."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


def products(cfg: Sizes, tokens: int, tp: int) -> dict[str, tuple[int, int, int]]:
    """(m, k, n) of a layer's products and of the head, on one of `tp` ranks."""
    heads, keys = cfg.n_heads * cfg.head_dim // tp, cfg.n_kv_heads * cfg.head_dim // tp
    return {"wq": (tokens, cfg.dim, heads), "wk": (tokens, cfg.dim, keys), "wo": (tokens, heads, cfg.dim),
            "w1": (tokens, cfg.dim, cfg.ffn_dim // tp), "w2": (tokens, cfg.ffn_dim // tp, cfg.dim),
            "head": (tokens, cfg.dim, cfg.vocab_size // tp)}


def some(dtype: str, *shape: int) -> Tensor:
    return Tensor(np.random.default_rng(0).standard_normal(shape, np.float32)).astype(DTYPES[dtype])


def itself(case: Case) -> Case:
    return case


def alone(mesh: DeviceMesh, x: Tensor) -> DTensor:
    return DTensor.from_local(x, mesh, [Replicate()])


def matmul(dtype: str, m: int, k: int, n: int) -> Case:
    x, w, product = some(dtype, m, k), some(dtype, n, k), ops.MatMul(transpose_b=True)
    return f"{m} x {k} x {n}", lambda: product(x, w), matmul_flops(m, k, n), 0


def attention(cfg: Sizes, dtype: str, t: int, tp: int, backward: bool, place: Place) -> Case:
    """One sequence."""
    h, k, e = cfg.n_heads // tp, cfg.n_kv_heads // tp, cfg.head_dim
    qkv = [place(some(dtype, 1, t, n, e)) for n in (h, k, k)]
    mask = place(Tensor(np.triu(np.ones((2048, 2048), np.uint8), 1)))  # as the kernel wants it for any length

    def forward(q, key, value):
        return ops.flash_attention_score(q, key, value, h, attn_mask=mask, scalar_value=e ** -0.5, input_layout="BSND",
                                         sparse_mode=2)
    call = grad(lambda *x: forward(*x).sum(), (0, 1, 2)) if backward else forward
    return f"1 x {t} x {h} ({k}) x {e}", lambda: call(*qkv), attention_flops(1, t, h, e, backward), 0


def angles(cfg: Sizes, tokens: int, dtype: str) -> list[Tensor]:
    """Cosine and sine of each position's angles, [1, t, 1, e]."""
    half = 1 / cfg.rope_theta ** (np.arange(0, cfg.head_dim, 2) / cfg.head_dim)
    angle = np.concatenate([np.outer(np.arange(tokens), half)] * 2, 1)[None, :, None]
    return [Tensor(f(angle).astype(np.float32)).astype(DTYPES[dtype]) for f in (np.cos, np.sin)]


def fused(cfg: Sizes, dtype: str, tokens: int, tp: int, place: Place) -> dict[str, Case]:
    """What moves data; bytes read and written once."""
    wide, d, f, h, e = (2 if dtype != "float32" else 4), cfg.dim, cfg.ffn_dim // tp, cfg.n_heads // tp, cfg.head_dim
    x, weight, q, both, cos, sin = map(place, (some(dtype, tokens, d), some(dtype, d), some(dtype, 1, tokens, h, e),
                                               some(dtype, tokens, 2, f), *angles(cfg, tokens, dtype)))
    w = Parameter(some("float32", f, d), name="w")
    optimizer, gradient = AdamW([w], lr=1e-4), some("float32", f, d)
    return {"rms_norm": (f"{tokens} x {d}", lambda: ops.rms_norm(x, weight, 1e-5), 0, 2 * wide * tokens * d),
            "rotary": (f"1 x {tokens} x {h} x {e}", lambda: ops.rotary_position_embedding(q, cos, sin, 0), 0,
                       2 * wide * tokens * h * e),
            "swiglu": (f"{tokens} x {f}", lambda: ops.swiglu(both, 1), 0, 3 * wide * tokens * f),
            # reads w, g, m, v; writes w, m, v
            "adamw float32": (f"{f} x {d}", lambda: optimizer([gradient]), 0, 28 * f * d)}


def run(bench: Bench, options: dict) -> list[dict]:
    """Options: model (sizes), tokens, seqs, tp, dtypes, times."""
    cfg, tokens, tp, on_cpu = Sizes(**options["model"]), options["tokens"], options["tp"], bench.device == "cpu"
    place: Place = partial(alone, DeviceMesh("cpu", [bench.rank])) if on_cpu else lambda x: x
    rows = []
    for dtype in options["dtypes"]:
        cases: list[tuple[str, Callable[[], Case]]] = [
            *((f"matmul {name}", partial(matmul, dtype, *sizes))
              for name, sizes in products(cfg, tokens, tp).items())]
        if on_cpu or dtype != "float32":  # a device's kernels of these take 16 bits
            cases += [(f"attention {'forward and backward' if b else 'forward'}",
                       partial(attention, cfg, dtype, t, tp, b, place))
                      for t in options["seqs"] for b in (False, True)]
            cases += [(name, partial(itself, case)) for name, case in fused(cfg, dtype, tokens, tp, place).items()]
        for name, make in cases:
            shape, call, operations, moved = make()
            taken = spread(bench.seconds(call, options["times"]))
            seconds = taken["time"] / 1e6
            speed = tflops(operations, seconds) if operations else None
            peak = peak_of(bench.name, dtype, bench.peaks)
            part = share(speed, peak) if speed is not None else None
            rows.append({"op": name, "shape": shape, "type": dtype, **taken,
                         "tflops": None if speed is None else digits(speed), "peak": peak,
                         "share": None if part is None else digits(part),
                         "gbs": digits(moved / seconds / 1e9) if moved else None})
    return rows
