# SPDX-License-Identifier: Apache-2.0
"""What the library remembers of one tensor: its attribute `_memo`, None until there is something to remember.

Invariant: it is never copied. A tensor that takes another's place starts with none: nodes, views and bucket are the old
one's.
"""
from __future__ import annotations

from typing import Any


class Memo:
    """Defaults stand in the class, not in an `__init__`: a call costs more than the object."""

    with_cotangent: dict | None = None  # of a recorded tensor: cotangent layout -> the node that takes it
    moved: dict | None = None  # of a recorded tensor: layout -> itself there
    source: tuple | None = None  # of the result of a recorded move: (what was moved, its layout, that of its gradient)
    view_of: tuple | None = None  # of a recorded view: (what it is a view of, the plan that made it, the call's arguments)
    copy_of: tuple | None = None  # of a parameter's compute copy: (the parameter, the dtype in which gradients are reduced)
    takes: Any = None  # of what stands for a parameter: is given summands of its gradient, and says what goes to autograd
    work: Any = None  # data under way (`tensor/async_tensor.py`)
    late_gradient: bool = False  # of a Parameter: its gradient is completed when the backward ends (`sharding/reduce.py`)
    written: int = 0  # how often it, or what shares its memory, was written; of a Parameter by `set_data`, too
    stepped: int = 0  # of a Parameter: how often an optimizer has written it, of which `written` does not tell
    versioned: int = 0  # of these writes, those that MindSpore refuses between a use and its backward
    stood_for: Any = None  # of a Parameter in whose place another tensor stands: is called when the Parameter is written
    lent: Any = None  # (the call for which its memory is filled, whose place it is in), while that may go (`sharding/`)
    partial_grad_axes: tuple[int, ...] = ()  # of a Parameter: where its gradient stays partial (`sharding/reduce.py`)
    reads: tuple[list[str], str] | None = None  # of such a one: where recorded ops that read it are noted, and its name

    def forget_values(self) -> None:
        """Drops what was derived from the tensor's values."""
        self.with_cotangent = self.moved = self.source = self.view_of = None


def wrote(x, versioned: bool = False) -> None:
    """A DTensor has other values from here on."""
    memo = memo_of(x)
    memo.written += 1
    memo.versioned += versioned
    if memo.stood_for is not None:
        memo.stood_for()


def times_written(x) -> int:
    """How often a DTensor was written, other than by an optimizer; of others nobody counts."""
    memo = getattr(x, "_memo", None)
    return 0 if memo is None else memo.written


def stepped(x) -> None:
    """An optimizer has written it: of a DTensor, what is kept of its values for a backward is of others."""
    if getattr(x, "_layout", None) is not None:
        memo_of(x).stepped += 1


def memo_of(x) -> Memo:
    """The memo of a DTensor, which gets one if it has none."""
    memo = x._memo
    if memo is None:
        memo = x._memo = Memo()
    return memo
