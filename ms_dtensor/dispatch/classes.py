# SPDX-License-Identifier: Apache-2.0
"""Which classes are DTensors: dispatch makes and meets them, and cannot import them, as they import dispatch.

`tensor/dtensor.py` fills this once. Not here: anything that tells one kind of DTensor from another.
"""
from __future__ import annotations

from typing import Any

from mindspore import Tensor

ATOM, OURS, LIST = 1, 2, 3
KINDS: dict[type, int] = {**dict.fromkeys((int, float, bool, str, type(None), complex), ATOM), tuple: LIST, list: LIST}
DTENSOR: type = Tensor  # of results
PARAMETER: type = Tensor
ASYNC: type = Tensor  # of results whose data are under way
GATED: type = Tensor  # of what stands for a parameter (`held.py`)
UNSHARDED: Any = None  # in memory that goes (`parallel/sharding/stand_in.py`)
constant: Any = None  # makes a local tensor in such memory one that ops copy where MindSpore keeps it (`constants.py`)


def bind(dtensor: type, parameter: type, async_dtensor: type, gated: type) -> None:
    """Says what DTensors are."""
    global DTENSOR, PARAMETER, ASYNC, GATED
    DTENSOR, PARAMETER, ASYNC, GATED = dtensor, parameter, async_dtensor, gated
    KINDS[dtensor] = KINDS[parameter] = KINDS[gated] = OURS
