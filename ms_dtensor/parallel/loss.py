# SPDX-License-Identifier: Apache-2.0
"""Cross entropy on logits whose classes are sharded: two small reductions instead of gathering the logits.

With classes cut over an axis, log-sum-exp needs the maximum and the sum over shards, and the label's logit is on one
shard; the maximum travels first, the other per-row numbers together. Written in DTensor ops and two of our own
(`dispatch/class_loss.py`), so layouts, gradients and any further axes follow from the rules. One name, two uses: with
logits it is the loss; without, PyTorch's context manager, in which MindSpore's own `cross_entropy` does the same, its other
losses and cases go op by op (`dispatch/composite.py`) and an op that would have to gather is refused.
"""
from __future__ import annotations

from ..core.layout import Layout
from ..dispatch.class_loss import REDUCTIONS, class_loss
from ..dispatch.modes import LossParallelBlock
from ..dispatch.operands import dtype_name, wrap
from ..errors import LayoutError
from ..tensor.dtensor import DTensor


def loss_parallel(logits: DTensor | None = None, labels=None, *, ignore_index: int = -100, reduction: str = "mean",
                  label_smoothing: float = 0.0):
    """Cross entropy of logits `f32[..., classes@tp]` and labels `i32[...]`; the logits are never gathered.

    `with loss_parallel():` (or `@loss_parallel()`) is PyTorch's form. Inside, `ops.cross_entropy`,
    `mint.nn.functional.cross_entropy` and their cells take logits whose class dim is sharded (and plain labels and class
    weights, the same on every rank), and an op that would gather a sharded operand raises `ImplicitCommError` instead.
    Nothing else may be plain there.

    Args:
        logits: DTensor, classes last, sharded or not; None for the context manager.
        labels: class indices, of any integer dtype; a plain tensor counts as the same on every rank.
        ignore_index: label of rows that do not count.
        reduction: "mean" (over rows that count), "sum" or "none".
        label_smoothing: share of the target spread evenly over all classes.

    Returns:
        The loss as a DTensor, equal to the one-device loss; its gradient is too. Of 16-bit logits it is float32. Without
        arguments, the context manager.

    Raises:
        LayoutError: `logits` is not a DTensor, shapes do not fit, or `reduction` is unknown.
        IndexError: on CPU, a label that counts is no class, -1 among them; on all ranks, for which they exchange two
            numbers where labels are sharded.

    Source: Shoeybi et al. 2019, section 3 (vocabulary-parallel cross entropy); meaning of the arguments as
    `torch.nn.functional.cross_entropy`.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> logits = md.ones((4, 8), device_mesh=mesh, placements=[md.Shard(1)])
        >>> labels = ms.Tensor([0, 3, -100, 7])
        >>> round(md.loss_parallel(logits, labels).item(), 4)
        2.0794
        >>> with md.loss_parallel():
        ...     loss = ms.ops.cross_entropy(logits, labels)
        >>> round(loss.item(), 4)
        2.0794
    """
    if logits is None and labels is None:
        return LossParallelBlock()
    if not isinstance(logits, DTensor):
        raise LayoutError(f"For 'loss_parallel', 'logits' must be a DTensor, but got {type(logits).__name__}.")
    if reduction not in REDUCTIONS:
        raise LayoutError(f"For 'loss_parallel', 'reduction' must be mean, sum or none, but got {reduction!r}.")
    if tuple(labels.shape) != logits.shape[:-1]:
        raise LayoutError(f"For 'loss_parallel', 'labels' has shape {list(labels.shape)}.", logits.layout.describe(),
                          f"One label per row: {list(logits.shape[:-1])}.")
    if not isinstance(labels, DTensor):
        labels = wrap(labels, Layout(logits.device_mesh, None, tuple(labels.shape), dtype_name(labels.dtype)))
    return class_loss("loss_parallel", logits, labels, ignore_index, reduction, label_smoothing)
