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
from ...internals.names import Function, recording
from .lookup import host_values
from .rows_cpu import parts


class RmsNormRows(Function):
    """`RmsNormRows.apply(x, weight, eps)`: (x scale weight, scale) with scale = 1 / rms [..., 1], over weight's dims."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float):
        rows, w = _rows(x, weight)
        y, scale = np.empty_like(rows), np.empty((len(rows), 1), rows.dtype)
        with np.errstate(all="ignore"):  # infinities give NaN, as on a device
            for a, b, (square,) in parts(rows):
                np.multiply(rows[a:b], rows[a:b], out=square)
                np.reciprocal(np.sqrt(square.mean(1, keepdims=True) + rows.dtype.type(eps)), out=scale[a:b])
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
        dy, dscale = host_values(dy).reshape(rows.shape), host_values(dscale).reshape(scale.shape)
        dx, dw = np.empty_like(rows), np.zeros_like(w)
        with np.errstate(all="ignore"):
            for a, b, (normed, part) in parts(rows, 2):
                np.multiply(rows[a:b], scale[a:b], out=normed)
                np.multiply(dy[a:b], normed, out=part)
                dw += part.sum(0)
                part *= w
                # of 1 / rms: its own cotangent, and that of what it multiplies
                back = (part.mean(1, keepdims=True) + dscale[a:b] * scale[a:b] / len(w)) * scale[a:b]
                np.multiply(dy[a:b], w, out=dx[a:b])
                dx[a:b] *= scale[a:b]
                dx[a:b] -= np.multiply(normed, back, out=part)
        return Tensor.from_numpy(dx.reshape(x._shape)), Tensor.from_numpy(dw.reshape(weight._shape)), None


def _rows(x: Tensor, weight: Tensor) -> tuple[np.ndarray, np.ndarray]:
    w = host_values(weight).reshape(-1)
    return host_values(x).reshape(-1, w.size), w
