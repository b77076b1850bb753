# SPDX-License-Identifier: Apache-2.0
"""What stands around a training step: metrics and summaries read whole values, on every rank.

What `Metric.update` and `SummaryRecord.add_value` turn into an array is the global one: a DTensor is gathered in their
name, so the redistribution policy is asked. A plain tensor that entered a replicated cell (the labels that a replicated
loss took, say) is the shard it was taken for; another one beside a DTensor is refused, as in any op. Explained here: a
training cell whose optimizer holds the parameters of before the model was distributed.
"""
from __future__ import annotations

import functools

from mindspore import Tensor, nn
from mindspore.train.metrics import metric
from mindspore.train.summary import summary_record

from ...errors import ConfigError, MixedOperandError
from .. import modes
from ..operands import LAID_OUT, wrap
from ..replaced import current
from .undo import Patched

_installed = Patched()


def _layout(x):
    """How a tensor is known to lie."""
    layout = getattr(x, "_layout", None)
    return x.__dict__.get(LAID_OUT) if layout is None and isinstance(x, Tensor) else layout


def _convert_data(original):
    @functools.wraps(original)
    def convert(self, data):
        layout = _layout(data)
        if layout is None:
            return original(self, data)
        data = data if getattr(data, "_layout", None) is not None else wrap(data, layout)
        return data._whole_array(f"{type(self).__name__}.update", ("update it with x.full_tensor()",))
    return convert


def _update(original):
    @functools.wraps(original)
    def update(self, *inputs):
        ours = [x for x in inputs if getattr(x, "_layout", None) is not None]
        plain = [x for x in inputs if isinstance(x, Tensor) and x.shape and _layout(x) is None]
        if ours and plain and not modes.mode.get().implicit_replication:
            raise MixedOperandError(
                f"For '{type(self).__name__}.update', a plain Tensor of shape {list(plain[0].shape)} meets a DTensor.",
                ours[0]._layout.describe(),
                "A plain tensor does not say how it is laid out, so one rank's data could pass for the whole.",
                ("replicate(loss_fn, mesh=...), whose plain labels are this rank's rows",
                 "DTensor.from_local(t, device_mesh, placements), of this rank's part",
                 "with implicit_replication(): ..., if all ranks hold the same values"))
        return original(self, *inputs)
    return update


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


def install() -> None:
    """Installs the doors, on the metrics that exist; does nothing where they are in place."""
    if _installed:
        return
    _installed.put(metric.Metric, "_convert_data", _convert_data(metric.Metric._convert_data))
    _installed.put(summary_record.SummaryRecord, "add_value", _add_value(summary_record.SummaryRecord.add_value))
    _installed.put(nn.Cell, "check_names", _check_names(nn.Cell.check_names))
    classes = [metric.Metric]
    for cls in classes:
        classes += [c for c in cls.__subclasses__() if c not in classes]
        if cls is not metric.Metric and "update" in cls.__dict__:
            _installed.put(cls, "update", _update(cls.__dict__["update"]))


def uninstall() -> None:
    """Takes them back."""
    _installed.take_back()
