# SPDX-License-Identifier: Apache-2.0
"""Who has hooked into a cell: what runs in a cell's place has to leave it alone then."""
from __future__ import annotations

from mindspore import nn

_HOOKS = ("_lazy_forward_pre_hook", "_lazy_forward_hook", "_lazy_backward_pre_hook", "_lazy_backward_hook")


def is_hooked(cell: nn.Cell) -> bool:
    """Whether a hook on a cell has to run, or it has a `construct` of its own: any but a layout's (`ms_dtensor.parallel`).

    A pipeline's tells it which cells were called; `distribute_module` and `compat` call functions of the user's.

    Example:
        >>> from mindspore import nn
        >>> from ms_dtensor.internals.cells import is_hooked
        >>> cell = nn.Dense(2, 2)
        >>> before, _ = is_hooked(cell), cell.register_forward_hook(print)
        >>> before, is_hooked(cell)
        (False, True)
    """
    if "construct" in cell.__dict__:
        return True
    return any(not str(getattr(hook, "__module__", "")).startswith("ms_dtensor.parallel.")
               for name in _HOOKS for hook in (getattr(cell, name, None) or {}).values())
