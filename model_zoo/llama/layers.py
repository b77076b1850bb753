# SPDX-License-Identifier: Apache-2.0
"""The cells that blocks are made of: linear layers, norms, SwiGLU, the embedding. Plain, as for one device."""
from __future__ import annotations

import mindspore as ms
from mindspore import mint, nn, ops
from mindspore.common.initializer import initializer

from ms_dtensor.internals.target import on_cpu

from . import at_once, cpu

F = mint.nn.functional


def linear(d_in: int, d_out: int, bias: bool = False) -> nn.Dense:
    """y = x @ weight.T + bias with weight [d_out, d_in]; filled by `init_weights`."""
    return nn.Dense(d_in, d_out, weight_init="zeros", bias_init="zeros", has_bias=bias)


class Joined(nn.Dense):
    """Linear layers that read the same input as one: their weights one under the other, their outputs side by side.

    Args:
        d_in: width of the input.
        parts: width of each one's output, by its name. Files know them by it, see `joined.py`.
        bias: whether they have one.
        units: a rank of several has so many, or a whole part of them, of each (heads of keys, say); None: rows.
    """

    def __init__(self, d_in: int, parts: dict[str, int], bias: bool = False, units: int | None = None):
        super().__init__(d_in, sum(parts.values()), weight_init="zeros", bias_init="zeros", has_bias=bias)
        self.parts, self.units = parts, units


class Embedding(mint.nn.Embedding):
    """Ids of any shape -> the list of their rows of `weight` [vocab, d]."""

    def __init__(self, vocab: int, dim: int):
        super().__init__(vocab, dim, _weight=initializer("zeros", (vocab, dim), ms.float32))

    def construct(self, ids):
        return (cpu if on_cpu() else F).embedding(ids.reshape(-1), self.weight)


class RMSNorm(nn.Cell):
    """x / rms(x) * weight over the last dim of x [..., d]."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = ms.Parameter(ops.ones((dim,), ms.float32), name="weight")
        self.eps = eps

    def construct(self, x):
        return cpu.rms_norm(x, self.weight, self.eps) if on_cpu() else ops.rms_norm(x, self.weight, self.eps)[0]


class FeedForward(nn.Cell):
    """SwiGLU: w2(silu(w1 x) * w3 x); `joined`: with w1 and w3 as one."""

    def __init__(self, dim: int, width: int, joined: bool = False):
        super().__init__()
        self.width, self.joined = width, joined
        self.core = None  # stands for all of it, of x, w1, w3 and w2 (`at_once.py`)
        if joined:
            self.w13, self.w2 = Joined(dim, {"w1": width, "w3": width}), linear(width, dim)
        else:
            self.w1, self.w2, self.w3 = linear(dim, width), linear(width, dim), linear(dim, width)

    def construct(self, x):
        if self.core is not None and at_once.fits(x, self.w1, self.w3, self.w2):
            return self.core(x, self.w1.weight, self.w3.weight, self.w2.weight)
        # between the two, dim 1 is whole on every rank, as the fused op needs it
        if self.joined:
            both = self.w13(x)
            return self.w2(cpu.swiglu(*cpu.split(both, [self.width] * 2)) if on_cpu() else
                           ops.swiglu(both.reshape(-1, 2, self.width), 1).reshape(-1, self.width))
        gate, up = self.w1(x), self.w3(x)
        return self.w2(cpu.swiglu(gate, up) if on_cpu() else ops.swiglu(mint.stack((gate, up), 1), 1).reshape(gate.shape))
