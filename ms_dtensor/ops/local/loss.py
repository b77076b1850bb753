# SPDX-License-Identifier: Apache-2.0
"""Local forms of norms and losses: one shard's share of a mean over the whole batch, and groups counted per shard."""
from __future__ import annotations

from typing import Any

from mindspore import Tensor, mint, ops

from ...core.tree import map_leaves
from ...internals.target import on_cpu
from .class_sums_cpu import ClassSums, greatest
from .cpu_elementwise import bce_with_logits, binary_cross_entropy
from .cpu_nn import kl_div, log_sigmoid, softplus
from .dtypes import rounded, wider
from .lookup import masked, own_rows


def _mse(x, target):
    off = x - target
    return (off * off).sum()


_SUM: dict[str, Any] = {
    "mse_loss": _mse,
    "l1_loss": lambda x, target: mint.abs(x - target).sum(),
    "soft_margin_loss": lambda x, target: softplus(-target * x).sum(),
    "smooth_l1_loss": lambda x, target, beta: ops.smooth_l1_loss(x, target, beta, "sum"),
    "binary_cross_entropy": lambda x, target, weight: binary_cross_entropy(x, target, weight, "sum"),
    "bce_with_logits": lambda x, target, weight, pos_weight: bce_with_logits(x, target, weight, pos_weight, "sum"),
    "kl_div": lambda x, target, log_target: kl_div(x, target, "sum", log_target),
}


def loss_share(op, count, *arguments):
    """This shard's summand of a mean loss over `count` elements."""
    share = _SUM[op](*map_leaves(wider, arguments, Tensor)) / (count or float("nan"))
    return rounded(share, arguments[0])


def sparse_cross_entropy_share(logits, labels, rows):
    """This shard's summand of the mean over `rows` rows."""
    return ops.SparseSoftmaxCrossEntropyWithLogits()(logits, labels) * (logits._shape[0] / rows)


def row_max(logits):
    """The greatest of each row, of logits without a gradient."""
    return greatest(logits) if on_cpu() else mint.max(logits, -1, True)[0]


def class_sums(logits, labels, top, lo, classes, smooth):
    """This shard's share of each row, with logits relative to the row's `top` [..., 1]: sum of exp, the label's logit,
    and, if `smooth`, the mean, of 16-bit logits in float32. The shard has the classes from `lo` on; labels [..., 1] count
    from the first of all."""
    width, top = logits._shape[-1], wider(top)
    logits, count = wider(logits), len(logits._shape)
    local, mine = own_rows(labels, lo, width, classes)
    if on_cpu():
        return ClassSums.apply(logits, top, local, mine, classes if smooth else 0)
    off = logits - top
    sums = [mint.sum(mint.exp(off), -1, keepdim=True), masked(ops.gather_elements(off, count - 1, local), mine)]
    return mint.cat([*sums, mint.sum(off, -1, keepdim=True) / classes] if smooth else sums, -1)


def group_norm(x, groups, weight, bias, eps):
    """`GroupNorm` over the groups that this shard has: (y, mean, 1/std)."""
    return ops.auto_generate.group_norm_op(x, groups, weight, bias, eps)


TABLE = {"loss_share": loss_share, "sparse_cross_entropy_share": sparse_cross_entropy_share, "group_norm": group_norm,
         "row_max": row_max, "class_sums": class_sums,
         "log_sigmoid_pair": log_sigmoid}
