# SPDX-License-Identifier: Apache-2.0
"""A step that is left out, on all ranks alike, where a gradient is not finite."""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from mindspore import Tensor

from ..core.mesh import DeviceMesh
from .clip import clip_grad_norm_


def step_if_finite(optimizer, grads: Sequence[Tensor | None], max_norm: float = math.inf, *,
                   over: DeviceMesh | None = None) -> float:
    """Clips gradients by their joint norm and steps; leaves the step out if the norm is infinite or not a number.

    Args:
        optimizer: one of ours or MindSpore's.
        grads: in the order of its parameters.
        max_norm: the bound of the norm.
        over: of a pipeline, its axis, as for `clip_grad_norm_`.

    Returns the norm from before clipping. It is the same number on every rank, so all of them step or none does, and what
    it communicates is what `clip_grad_norm_` does; on a device the guard waits for it. After a step that was left out the
    gradients are of no use.

    Example:
        >>> import mindspore as ms
        >>> from ms_dtensor.optim import SGD, step_if_finite
        >>> w = ms.Parameter(ms.Tensor([1.0]), name="w")
        >>> step_if_finite(SGD([w], lr=0.5), [ms.Tensor([float("inf")])]), w.asnumpy().tolist()
        (inf, [1.0])
        >>> step_if_finite(SGD([w], lr=0.5), [ms.Tensor([1.0])]), w.asnumpy().tolist()
        (1.0, [0.5])
    """
    params = optimizer.params if hasattr(optimizer, "params") else optimizer.parameters
    with np.errstate(invalid="ignore"):  # of an infinite norm clipping makes 0 * inf
        norm = float(clip_grad_norm_(zip(params, grads, strict=True), max_norm, over=over))
    if math.isfinite(norm):
        optimizer(tuple(grads))
    return norm
