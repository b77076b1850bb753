# SPDX-License-Identifier: Apache-2.0
"""Constants that a cell makes in its `construct`: `arange`, `zeros`, `Tensor(...)`, alike on all ranks, as replicas.

Where a plain tensor comes from cannot be asked of it. So inside such a cell nothing else is plain: a call into which plain
tensors come is left as it is, and a style that hands one out is refused. Parameters, and what is computed of them, are no
constants. Whether ranks do make them alike is compared under `debug.checks()`.
"""
from __future__ import annotations

import functools
from collections.abc import Callable

from mindspore import Tensor

from ..core.tree import leaves
from ..dispatch import modes
from ..dispatch.planner import CONSTANTS_ALIKE
from ..errors import MixedOperandError
from ..tensor.dtensor import DTensor

ALIKE = "_ms_dtensor_constants"  # cell attribute: what it makes is alike on all ranks, in a method that is registered, too


def with_constants(given: Callable) -> Callable:
    """A `construct` inside which what cells make meets DTensors."""
    @functools.wraps(given)
    def run(cell, *args, **kwargs):
        plain = [x for x in leaves((args, kwargs), Tensor) if not isinstance(x, DTensor) and x.ndim]
        if not plain or modes.mode.get().constants:
            with modes.Constants():
                return given(cell, *args, **kwargs)
        try:
            return given(cell, *args, **kwargs)
        except MixedOperandError as e:
            raise MixedOperandError(e.attempt, e.operands, e.rule, (
                f"distribute_tensor(t, device_mesh, placements), for each input of {type(cell).__name__}: beside plain ones "
                'constants="replicate" knows of no tensor that it was made inside',
                *(way for way in e.fix if way != CONSTANTS_ALIKE))) from e
    return run
