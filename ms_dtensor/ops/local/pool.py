# SPDX-License-Identifier: Apache-2.0
"""Decompositions for CPU: pooling and resizing that only the `mint` primitives name.

What is linear and separable (adaptive averages, linear and cubic interpolation) is one small matrix per dim: the matrix
says which input counts how much for which output, and the gradient is its transpose.
"""
from __future__ import annotations

import math

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from ..rules.conv import per_dim
from ..rules.pool import mask_shape
from .cpu_matmul import matmul
from .dtypes import full


def _batched(fn, spatial: int):
    """`fn` for inputs without a batch dim, too."""
    def call(input, *args, **kwargs):
        if len(input._shape) == spatial + 2:
            return fn(input, *args, **kwargs)
        out = fn(mint.unsqueeze(input, 0), *args, **kwargs)
        return tuple(mint.squeeze(o, 0) for o in out) if isinstance(out, tuple) else mint.squeeze(out, 0)
    return call


def max_pool2d(input, kernel_size, stride=None, padding=0, dilation=(1, 1), ceil_mode=False, return_indices=False):
    """`FuncMaxPool2D`: (maxima, positions), or where these are not wanted, a mask that nobody reads."""
    out, at = ops.max_pool2d(input, kernel_size, kernel_size if stride is None else stride, padding, dilation,
                             return_indices=True, ceil_mode=ceil_mode)
    if not return_indices:
        return out, full(mask_shape(out._shape, per_dim(kernel_size, 2)), 0, ms.int8)
    return out, at.astype(ms.int64)


def avg_pool(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
    """`AvgPool1D`, `AvgPool2D`, `AvgPool3DExt`, as a 3-D average over dims of extent 1."""
    n = len(input._shape) - 2
    kernel, pad = per_dim(kernel_size, n), per_dim(padding, n)
    step = kernel if stride is None else per_dim(stride, n)
    lift = 3 - n
    x = mint.reshape(input, (*input._shape[:2], *(1,) * lift, *input._shape[2:]))
    pads = tuple(p for d in (*(0,) * lift, *pad) for p in (d, d))
    out = ops.AvgPool3D((*(1,) * lift, *kernel), (*(1,) * lift, *step), "pad", pads, ceil_mode, count_include_pad,
                        divisor_override or 0)(x)
    return mint.reshape(out, (*out._shape[:2], *out._shape[2 + lift:]))


def _apply(x, matrices):
    """Each matrix [out, in] applied to its dim, the last matrix to the last dim."""
    for i, m in enumerate(reversed(matrices)):
        d, last = len(x._shape) - 1 - i, len(x._shape) - 1
        m = Tensor(np.ascontiguousarray(m.T, np.float32)).astype(x.dtype)
        x = matmul(x, m) if d == last else mint.transpose(matmul(mint.transpose(x, d, last), m), d, last)
    return x


def _bins(n: int, out: int):
    return [(i * n // out, -(-(i + 1) * n // out)) for i in range(out)]


def _averages(n: int, out: int) -> np.ndarray:
    m = np.zeros((out, n))
    for i, (lo, hi) in enumerate(_bins(n, out)):
        m[i, lo:hi] = 1 / (hi - lo)
    return m


def _sizes(x, output_size, n: int):
    size = output_size if isinstance(output_size, tuple | list) else (output_size,) * n
    return [e if s in (None, -1) else s for e, s in zip(x._shape[-n:], size)]


def _adaptive_average(n: int):
    def call(input, output_size):
        size = _sizes(input, output_size, n)
        return _apply(input, [_averages(e, s) for e, s in zip(input._shape[-n:], size)])
    return call


def adaptive_max_pool1d(input, output_size):
    """`AdaptiveMaxPool1D`: (maxima, their positions)."""
    (size,) = _sizes(input, output_size, 1)
    pieces = [mint.narrow(input, -1, lo, hi - lo) for lo, hi in _bins(input._shape[-1], size)]
    at = [ops.argmax(p, -1).astype(ms.int64) + lo for p, (lo, _) in zip(pieces, _bins(input._shape[-1], size))]
    return ops.stack([ops.amax(p, -1) for p in pieces], -1), ops.stack(at, -1)


def _positions(n: int, out: int, scale, align: bool) -> np.ndarray:
    """Where each output lies among the inputs; computed in float32, as the device kernels do."""
    f = np.float32
    i = np.arange(out, dtype=f)
    if align:
        return i * f((n - 1) / (out - 1)) if out > 1 else i
    return (i + f(0.5)) * f(1 / scale if scale else n / out) - f(0.5)


def _linear(n: int, out: int, scale, align: bool) -> np.ndarray:
    at = np.clip(_positions(n, out, scale, align), 0, None)
    lo = np.minimum(at.astype(int), n - 1)
    hi, m = np.minimum(lo + 1, n - 1), np.zeros((out, n))
    np.add.at(m, (np.arange(out), lo), 1 - (at - lo))
    np.add.at(m, (np.arange(out), hi), at - lo)
    return m


def _cubic(n: int, out: int, scale, align: bool) -> np.ndarray:
    at, a, m = _positions(n, out, scale, align), -0.75, np.zeros((out, n))
    base = np.floor(at).astype(int)
    for k in range(-1, 3):
        d = np.abs(at - (base + k))
        weight = np.where(d <= 1, ((a + 2) * d - (a + 3)) * d * d + 1, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a)
        np.add.at(m, (np.arange(out), np.clip(base + k, 0, n - 1)), weight)
    return m


def _resize(matrix):
    def call(x, output_size=None, scales=None, align_corners=False):
        space = x._shape[2:]
        size = output_size or [math.floor(n * s) for n, s in zip(space, scales)]
        factors = scales if output_size is None else (None,) * len(space)
        return _apply(x, [matrix(n, o, s, align_corners) for n, o, s in zip(space, size, factors)])
    return call


def unfold(input, kernel_size, dilation=1, padding=0, stride=1):
    """`Im2ColExt`."""
    return ops.unfold(input, kernel_size, dilation, padding, stride)


def fold(input, output_size, kernel_size, dilation=1, padding=0, stride=1):
    """`Col2ImExt`."""
    n, c, count = input._shape
    kernel = per_dim(kernel_size, 2)
    x = mint.reshape(input, (n, c // math.prod(kernel), math.prod(kernel), count))
    return ops.Col2Im(kernel, per_dim(dilation, 2), per_dim(padding, 2), per_dim(stride, 2))(
        x, Tensor(list(per_dim(output_size, 2)), ms.int32))


def resize_to(input, size, kind, align_corners, half_pixel_centers):
    """`ResizeNearestNeighborV2`, `ResizeBicubic`, of a size in numbers: as the class would, which asks for DTensors."""
    op = getattr(ops, kind)(align_corners, half_pixel_centers)
    return ops.Primitive.__call__(op, input, Tensor(list(size), ms.int32), align_corners, half_pixel_centers)


TABLE = {"resize_to": resize_to, "affine_grid": ops.affine_grid}
CPU = {
    "FuncMaxPool2D": _batched(max_pool2d, 2), "AvgPool1D": _batched(avg_pool, 1), "AvgPool2D": _batched(avg_pool, 2),
    "AvgPool3DExt": _batched(avg_pool, 3), "AdaptiveAvgPool1D": _adaptive_average(1),
    "AdaptiveAvgPool2DExt": _adaptive_average(2), "AdaptiveAvgPool3DExt": _adaptive_average(3),
    "AdaptiveMaxPool1D": adaptive_max_pool1d, "UpsampleLinear1D": _resize(_linear), "UpsampleBilinear2D": _resize(_linear),
    "UpsampleTrilinear3D": _resize(_linear), "UpsampleBicubic2D": _resize(_cubic),
    "Im2ColExt": _batched(unfold, 2), "Col2ImExt": fold,
}
