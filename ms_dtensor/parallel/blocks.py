# SPDX-License-Identifier: Apache-2.0
"""Attention of packed runs on a CPU as one node: it keeps its operands and its result, and no scores.

On devices the fused kernel does this (`ops/local/varlen.py`). Differentiable once, as that.
"""
from __future__ import annotations

import numpy as np
from mindspore import Tensor

from ..custom_ops.function import DFunction
from ..ops.local import varlen_cpu
from ..ops.local.dtypes import wider


class Runs(DFunction):
    """`varlen.runs`, with its arguments in its order."""

    @staticmethod
    def forward(ctx, q, k, v, q_ends, k_ends, mask, scale):
        of, keys, values = (wider(x).asnumpy() for x in (q, k, v))
        made, top, total = varlen_cpu.forward(of, keys, values, q_ends, k_ends, mask, scale)
        out = Tensor.from_numpy(made)
        ctx.save_for_backward(q, k, v, out, Tensor.from_numpy(top + np.log(total)))
        ctx.rest = q_ends, k_ends, mask, scale
        return out.astype(q.dtype) if out.dtype != q.dtype else out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, log_total = ctx.saved_tensors
        made = varlen_cpu.backward(*(wider(x).asnumpy() for x in (q, k, v, dout, out, log_total)), *ctx.rest)
        return tuple(Tensor.from_numpy(g).astype(x.dtype) for g, x in zip(made, (q, k, v)))
