# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of logits whose classes are sharded, in DTensor ops and two of our own; nothing of the logits is gathered.

`parallel/loss.py` tells how, and offers it as a function; inside its block MindSpore's `cross_entropy` comes here, too.
"""
from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, mint, ops

from ..ops.local.loss import class_sums, row_max
from .dispatcher import call
from .labels import check_labels, looked_up

REDUCTIONS = ("mean", "sum", "none")


def class_loss(who: str, logits, labels, ignore_index: int, reduction: str, label_smoothing: float, least: int = 0):
    """The loss of logits `f32[..., classes]` and labels, both DTensors; those from `least` to -1 count from the last."""
    labels = looked_up(labels)
    classes = logits.shape[-1]
    check_labels(who, labels, classes, ignore_index, least)
    keep = labels != ignore_index
    if least < 0:
        labels = labels + (labels < 0).astype(labels.dtype) * classes
    target = mint.unsqueeze(labels * keep.astype(labels.dtype), -1)
    rows = row_losses(logits, target, label_smoothing) if labels.size else logits.sum(-1).reduce_partial()
    keep = keep.astype(rows.dtype)
    loss = rows * keep
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / keep.sum()


def row_losses(logits, target, label_smoothing: float = 0.0):
    """The loss of each row of logits [..., classes], DTensors or plain tensors; `target` [..., 1] has classes, unchecked."""
    constant, smooth = ops.stop_gradient(logits), bool(label_smoothing)
    if getattr(logits, "_layout", None) is None:
        sums = class_sums(logits, target, row_max(constant), 0, logits.shape[-1], smooth)
    else:
        top = call("row_max", input=constant).reduce_partial()
        sums = call("class_sums", input=logits, target=target, top=top, smooth=smooth).reduce_partial()
    log_total, picked = mint.log(sums[..., 0]), sums[..., 1]
    loss = log_total - picked
    if label_smoothing:
        share, rest = label_smoothing, 1 - label_smoothing
        if loss.dtype == ms.float64:  # MindSpore takes a number beside it for float32
            share, rest = Tensor(share, ms.float64), Tensor(rest, ms.float64)
        loss = rest * loss + share * (log_total - sums[..., 2])
    return loss


def fits(input, target, weight, ignore_index, reduction, label_smoothing) -> bool:
    """Whether `class_loss` gives what MindSpore's own `cross_entropy` does of these, and with less communication."""
    layout = getattr(input, "_layout", None)
    if layout is None or getattr(target, "_layout", None) is None or weight is not None or len(layout.shape) != 2:
        return False
    return (bool(layout.dim_axes[1]) and input.is_floating_point() and target._layout.dtype in ("int32", "int64")
            and target.shape == layout.shape[:1] and reduction in REDUCTIONS and type(ignore_index) is int
            and isinstance(label_smoothing, float) and 0 <= label_smoothing <= 1)
