# SPDX-License-Identifier: Apache-2.0
"""RMS norm of rows, for CPUs, as one node that keeps what it is given and a number a row.

MindSpore has no such kernel there, and of its ops, one by one, those that broadcast a column and sum along rows take ten
times as long as the memory is read. Here some rows at a time go through a core's cache, forward and backward. Not here:
16 bits, which `cpu_nn.py` widens.
"""
from __future__ import annotations

import numpy as np
from mindspore import Tensor

from ...errors import OpRuleError
from ...internals.host import host_array
from ...internals.names import Function, recording
from .rows_cpu import parts


class RmsNormRows(Function):
    """`RmsNormRows.apply(x, weight, eps)`: (x scale weight, scale) with scale = 1 / rms [..., 1], over weight's dims."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float):
        rows, w = _rows(x, weight)
        y, scale, width = np.empty_like(rows), np.empty((len(rows), 1), rows.dtype), rows.dtype.type(w.size)
        with np.errstate(all="ignore"):  # infinities give NaN, as on a device
            for a, b, _ in parts(rows):
                np.reciprocal(np.sqrt(_dots(rows[a:b], rows[a:b]) / width + rows.dtype.type(eps)), out=scale[a:b])
                np.multiply(rows[a:b], scale[a:b], out=y[a:b])
                y[a:b] *= w
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        stats = (*x._shape[:len(x._shape) - len(weight._shape)], *(1,) * len(weight._shape))
        return Tensor.from_numpy(y.reshape(x._shape)), Tensor.from_numpy(scale.reshape(stats))

    @staticmethod
    def backward(ctx, dy: Tensor, dscale: Tensor):
        if recording():
            raise OpRuleError("For 'rms_norm', a second derivative is asked for.", "", "On a CPU it is differentiated once.",
                              "x * mint.rsqrt((x * x).mean(-1, True) + eps) * weight")
        x, weight = ctx.saved_tensors
        (rows, w), scale = _rows(x, weight), ctx.scale
        dy, dscale = host_array(dy).reshape(rows.shape), host_array(dscale).reshape(scale.shape)
        dx, dw, width = np.empty_like(rows), np.zeros_like(w), rows.dtype.type(w.size)
        with np.errstate(all="ignore"):
            for a, b, (normed,) in parts(rows, 1):
                np.multiply(rows[a:b], scale[a:b], out=normed)
                dw += np.einsum("ij,ij->j", dy[a:b], normed)
                np.multiply(dy[a:b], w, out=dx[a:b])
                # of 1 / rms: its own cotangent, and that of what it multiplies
                back = (_dots(dx[a:b], normed) + dscale[a:b] * scale[a:b]) / width * scale[a:b]
                dx[a:b] *= scale[a:b]
                normed *= back
                dx[a:b] -= normed
        return Tensor.from_numpy(dx.reshape(x._shape)), Tensor.from_numpy(dw.reshape(weight._shape)), None


def _dots(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of each row of two arrays [n, d] the products' sum, [n, 1]; nothing of the arrays' size is made."""
    return np.matmul(a[:, None], b[:, :, None])[:, 0]


def _rows(x: Tensor, weight: Tensor) -> tuple[np.ndarray, np.ndarray]:
    w = host_array(weight).reshape(-1)
    return host_array(x).reshape(-1, w.size), w
