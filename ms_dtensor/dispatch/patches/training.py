# SPDX-License-Identifier: Apache-2.0
"""What stands around a training step: metrics and summaries read whole values, on every rank.

What `Metric.update` and `SummaryRecord.add_value` turn into an array is the global one: a DTensor is gathered in their
name, so the redistribution policy is asked. A plain tensor that entered a replicated cell (the labels that a replicated
loss took, say) is the shard it was taken for; another one beside a DTensor is refused, as in any op. Explained here: a
training cell whose optimizer holds the parameters of before the model was distributed; a batch norm with groups of its own.
"""
from __future__ import annotations

import functools

from mindspore import Tensor, nn
from mindspore.train import metrics
from mindspore.train.metrics import Metric
from mindspore.train.model import Model
from mindspore.train.summary import summary_record

from ... import comm
from ...core.tree import leaves
from ...errors import ConfigError, MixedOperandError
from .. import modes
from ..operands import LAID_OUT, wrap
from ..replaced import current


def _layout(x):
    """How a tensor is known to lie."""
    layout = getattr(x, "_layout", None)
    return x.__dict__.get(LAID_OUT) if layout is None and isinstance(x, Tensor) else layout


def _convert_data(original):
    @functools.wraps(original)
    def convert(self, data):
        return original(self, data) if _layout(data) is None else _whole(data, f"{type(self).__name__}.update")
    return convert


def _whole(x, who: str):
    x = x if getattr(x, "_layout", None) is not None else wrap(x, _layout(x))
    return x._whole_array(who, ("update the metric with x.full_tensor()",))


def _check_alike(who: str, inputs) -> None:
    ours = [x for x in inputs if getattr(x, "_layout", None) is not None]
    plain = [x for x in inputs if isinstance(x, Tensor) and x.shape and _layout(x) is None]
    if ours and plain and not modes.mode.get().implicit_replication:
        raise MixedOperandError(
            f"For '{who}', a plain Tensor of shape {list(plain[0].shape)} meets a DTensor.", ours[0]._layout.describe(),
            "A plain tensor does not say how it is laid out, so one rank's data could pass for the whole.",
            ("replicate(loss_fn, mesh=...), which takes plain labels as this rank's rows",
             "DTensor.from_local(t, device_mesh, placements), of this rank's rows",
             "with implicit_replication(): ..., if all ranks hold the same values"))


def _update(original):
    @functools.wraps(original)
    def update(self, *inputs):
        _check_alike(f"{type(self).__name__}.update", inputs)
        return original(self, *inputs)
    return update


def _update_metrics(original):
    """Before any metric reads them: a set of metrics' names has another order on every rank."""
    @functools.wraps(original)
    def update_metrics(self, outputs):
        if any(getattr(x, "_layout", None) is not None for x in leaves(outputs, Tensor)):
            outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
            read, at = set(range(len(outputs))), self._eval_indexes
            if at is not None and len(outputs) > max(at):
                losses = [isinstance(m, metrics.Loss) for m in self._metric_fns.values()]
                read = {*(at[:1] if any(losses) else ()), *(() if all(losses) else at[1:])}
            _check_alike("Model.eval", [outputs[i] for i in sorted(read)])
            outputs = tuple(Tensor(_whole(x, "Model.eval")) if i in read and _layout(x) is not None else x
                            for i, x in enumerate(outputs))
        return original(self, outputs)
    return update_metrics


def _add_value(original):
    @functools.wraps(original)
    def add_value(self, plugin, name, value):
        if getattr(value, "_layout", None) is not None:
            value = Tensor(value._whole_array("SummaryRecord.add_value", ("add x.full_tensor()",)))
        return original(self, plugin, name, value)
    return add_value


def _check_names(original):
    @functools.wraps(original)
    def check_names(self):
        try:
            return original(self)
        except ValueError:
            old = next((p for p in self.get_parameters() if current(p) is not p), None)
            if old is None:
                raise
            raise ConfigError(f"For '{type(self).__name__}', parameter '{old.name}' is there twice: as it was, and as the "
                              "DTensor that took its place.", current(old)._layout.describe(),
                              "An optimizer makes its states like the parameters that it is given.",
                              "make the optimizer after the model was distributed") from None
    return check_names


def _sync_batch_norm(original):
    @functools.wraps(original)
    def __init__(self, *args, **kwargs):  # noqa: N807
        try:
            original(self, *args, **kwargs)
        except (ValueError, RuntimeError) as e:
            world = comm.current_world()
            if world is None or world.size == 1:
                raise
            raise ConfigError("For 'nn.SyncBatchNorm', its group cannot be made.", f"{world.size} ranks",
                              "It communicates by MindSpore's own groups; a batch norm of a DTensor normalizes over the "
                              "global batch anyway, however that is sharded.",
                              "nn.BatchNorm2d (1d, 3d), and a DTensor as its input") from e
    return __init__


def doors() -> list[tuple]:
    """Those of the metrics that exist, too."""
    classes: list = [Metric]
    for cls in classes:
        classes += [c for c in cls.__subclasses__() if c not in classes]
    return [(Metric, "_convert_data", _convert_data), (Model, "_update_metrics", _update_metrics),
            (summary_record.SummaryRecord, "add_value", _add_value), (nn.Cell, "check_names", _check_names),
            (nn.SyncBatchNorm, "__init__", _sync_batch_norm),
            *((cls, "update", _update) for cls in classes[1:] if "update" in cls.__dict__)]
