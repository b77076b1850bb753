# SPDX-License-Identifier: Apache-2.0
"""Writes to plain parameters and buffers in the forward of a `Recording`, of which MindSpore counts none but `copy_`.

What a pipeline's forward writes, the backward of the microbatch before would read, where one device had run it by then. So
they are counted, and such a backward is refused. Not here: DTensors (`dispatch/inplace.py`).
"""
from __future__ import annotations

import functools

from mindspore import Parameter, Tensor, ops

from ..memo import written_in_a_recording


def _writes(original):
    @functools.wraps(original)
    def call(*args, **kwargs):
        out = original(*args, **kwargs)
        for x in args[:2]:  # behind the primitive, if it is one's
            if isinstance(x, Tensor):
                if getattr(x, "_layout", None) is None:
                    written_in_a_recording(x)
                break
        return out
    return call


DOORS = ((ops.Assign, "__call__", _writes), (ops.AssignAdd, "__call__", _writes), (ops.AssignSub, "__call__", _writes),
         (Parameter, "set_data", _writes))
