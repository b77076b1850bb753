# SPDX-License-Identifier: Apache-2.0
"""What one rank runs: the original call, another local form, or either of them on stand-ins for empty shards.

`LOCAL_OPS` maps the names that rules use in `LocalCall` to functions of plain local tensors (`basic.py` and one file per
family); `CPU` maps primitives that MindSpore has no CPU kernel for to decompositions with the same arguments (`cpu.py`).
Invariant: for one call every rank runs the same ops in the same order, whatever its offset, so that the backward's
collectives come in one order everywhere.
"""
from __future__ import annotations

import functools
from typing import Any

from . import (
    arrange,
    attention,
    basic,
    by_data,
    conv,
    cpu,
    cpu_index,
    cpu_matmul,
    lists,
    lookup,
    loss,
    moe,
    pool,
    random,
    rotary,
    write,
)
from .dtypes import wrapper_in_float32
from .run import HandedOn, Nothing, StandIn, fill_operands, run_local

FAMILIES = (basic, lookup, arrange, random, lists, write, conv, pool, attention, loss, by_data, moe, rotary)
LOCAL_OPS: dict[str, Any] = {**cpu_index.FORMS, **cpu_matmul.FORMS}
CPU: dict[str, Any] = {**cpu.TABLE}
WRITES: dict[str, Any] = write.WRITES
for family in FAMILIES:
    LOCAL_OPS.update(family.TABLE)
    CPU.update({name: cpu.by_public_names(fn) for name, fn in getattr(family, "CPU", {}).items()})


def decomposition(name: str, attrs: dict):
    """The CPU decomposition of a primitive, or None; what a classic primitive was made with is bound to it."""
    fn = CPU.get(name)
    return functools.partial(fn, attrs=attrs) if fn is not None and hasattr(fn, "takes_attributes") else fn


__all__ = ["CPU", "LOCAL_OPS", "WRITES", "HandedOn", "Nothing", "StandIn", "decomposition", "fill_operands", "run_local",
           "wrapper_in_float32"]
