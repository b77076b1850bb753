# SPDX-License-Identifier: Apache-2.0
"""What cross entropy needs of each row of logits, for CPUs, as one node that makes nothing of the logits' size forward.

MindSpore's ops, one by one, keep the logits less the greatest of each row and their exponentials, and make two more such
tensors on the way back; with many tokens these are the peak of a step. Here a few rows at a time go through a core's cache,
and the backward makes the gradient and nothing else. Not here: labels of other shards, which `loss.py` takes away.
"""
from __future__ import annotations

import numpy as np
from mindspore import Tensor

from ...errors import OpRuleError
from ...internals.host import host_array
from ...internals.names import Function, recording
from .rows_cpu import parts


class ClassSums(Function):
    """`ClassSums.apply(logits, top, local, mine, classes)`: [..., 2], or [..., 3] if `classes`; all relative to `top`.

    Of each row of logits [..., C]: the sum of exponentials, the logit `local` [..., 1] where `mine`, else 0, and the sum of
    logits over `classes`. The greatest of a row, `top` [..., 1], is a constant.
    """

    @staticmethod
    @np.errstate(invalid="ignore")  # infinite logits, which give NaN as on one device
    def forward(ctx, logits: Tensor, top: Tensor, local: Tensor, mine: Tensor, classes: int):
        ctx.save_for_backward(logits, top, local, mine)
        ctx.classes = classes
        x, top, local, mine = _by_rows(logits, top, local, mine)
        sums = np.empty((len(x), 3 if classes else 2), x.dtype)
        for a, b, (part,) in parts(x):
            off = np.subtract(x[a:b], top[a:b], out=part)
            sums[a:b, 1] = np.where(mine[a:b, 0], np.take_along_axis(off, local[a:b], 1)[:, 0], 0)
            if classes:
                sums[a:b, 2] = off.sum(1) / classes
            sums[a:b, 0] = np.exp(off, out=off).sum(1)
        return Tensor.from_numpy(sums.reshape(*logits._shape[:-1], -1))

    @staticmethod
    @np.errstate(invalid="ignore")
    def backward(ctx, dout: Tensor):
        if recording():
            raise OpRuleError("For 'cross_entropy', a second derivative is asked for.", "",
                              "Of classes on a CPU it is differentiated once.", "mint.nn.functional.log_softmax(logits, -1)")
        shape, classes = ctx.saved_tensors[0]._shape, ctx.classes
        x, top, local, mine = _by_rows(*ctx.saved_tensors)
        share = host_array(dout).reshape(len(x), -1)
        grad = np.empty_like(x)
        for a, b, _ in parts(x):
            part = np.subtract(x[a:b], top[a:b], out=grad[a:b])
            np.exp(part, out=part)
            part *= share[a:b, :1]
            if classes:
                part += share[a:b, 2:] / classes
            own = np.flatnonzero(mine[a:b, 0])
            part[own, local[a:b, 0][own]] += share[a:b, 1][own]
        return Tensor.from_numpy(grad.reshape(shape)), None, None, None, None


def greatest(logits: Tensor) -> Tensor:
    """[..., 1]: of each row."""
    return Tensor.from_numpy(host_array(logits).max(-1, keepdims=True))


def _by_rows(*tensors: Tensor) -> list[np.ndarray]:
    return [host_array(x).reshape(-1, x._shape[-1]) for x in tensors]
