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


def _apart(k: Tensor, v: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    both = wider(k).asnumpy()
    return (both, wider(v).asnumpy()) if v is not None else (both[:, :both.shape[1] // 2], both[:, both.shape[1] // 2:])


class Runs(DFunction):
    """`varlen.runs`, with its arguments in its order; or with k and v beside each other as one, and None.

    MindSpore's kernels copy a part of what stands beside another, and its gradient is the part in zeros.
    """

    @staticmethod
    def forward(ctx, q, k, v, q_ends, k_ends, mask, scale):
        made, top, total = varlen_cpu.forward(wider(q).asnumpy(), *_apart(k, v), q_ends, k_ends, mask, scale)
        out = Tensor.from_numpy(made)
        ctx.save_for_backward(q, k, v, out, Tensor.from_numpy(top + np.log(total)))
        ctx.rest = q_ends, k_ends, mask, scale
        return out.astype(q.dtype) if out.dtype != q.dtype else out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, log_total = ctx.saved_tensors
        of, *rest = (wider(x).asnumpy() for x in (q, dout, out, log_total))
        dq, dk, dv = varlen_cpu.backward(of, *_apart(k, v), *rest, *ctx.rest)
        made = (dq, dk, dv) if v is not None else (dq, np.concatenate((dk, dv), 1), None)
        return tuple(None if g is None else Tensor.from_numpy(g).astype(q.dtype) for g in made)
