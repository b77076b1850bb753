# SPDX-License-Identifier: Apache-2.0
"""What the library remembers of one tensor: its attribute `_memo`, None until there is something to remember.

Invariant: it is never copied. A tensor that takes another's place starts with none: nodes, views and bucket are the old
one's.
"""
from __future__ import annotations

from contextvars import ContextVar
from itertools import count
from typing import Any

from mindspore import Parameter

from ..internals.names import set_versions

# Whether a cell runs its forward again, in the backward; what it writes then is not counted, and taken back.
recomputing: ContextVar[bool] = ContextVar("ms_dtensor_recomputing", default=False)
# Of the forward of a `Recording`, of which others may run before its backward: names of parameters that it has written.
# Each write is counted then, as `copy_` is: to MindSpore, `ops.assign` and `set_data` leave a tensor what it was.
written_apart: ContextVar[list[str] | None] = ContextVar("ms_dtensor_written_apart", default=None)
_versions = count(1 << 32)  # higher than those that MindSpore counts


class Memo:
    """Defaults stand in the class, not in an `__init__`: a call costs more than the object."""

    with_cotangent: dict | None = None  # of a recorded tensor: cotangent layout -> the node that takes it
    moved: dict | None = None  # of a recorded tensor: layout -> itself there
    source: tuple | None = None  # of the result of a recorded move: (what was moved, its layout, that of its gradient)
    view_of: tuple | None = None  # of a recorded view: (what it is a view of, the plan that made it, the call's arguments)
    copy_of: tuple | None = None  # of a parameter's compute copy: (the parameter, the dtype in which gradients are reduced)
    takes: Any = None  # of what stands for a parameter: is given summands of its gradient, and says what goes to autograd
    work: Any = None  # data under way (`tensor/async_tensor.py`)
    late_gradient: set | None = None  # of a Parameter that gets it when the backward ends: told that it has come, by id
    written: int = 0  # how often it, or what shares its memory, was written; of a Parameter by `set_data`, too
    written_back: int = 0  # of a Parameter: how often what stood for it in a unit was written
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
    if not recomputing.get():
        if memo.lent is None or not x._requires_grad:  # of a trained one a backward finds what its forward had
            versioned = written_in_a_recording(x) or versioned
        memo.versioned += versioned
        if memo.lent is not None and not x._requires_grad:  # who reads it backward asks for the parameter
            memo_of(memo.lent[1]).versioned += versioned
    if memo.stood_for is not None:
        memo.stood_for()


def written_in_a_recording(x) -> bool:
    """Whether it was; then a backward that needs what was there before is refused, by MindSpore or by a unit."""
    names = None if recomputing.get() else written_apart.get()
    if names is not None:
        given = x if isinstance(x, Parameter) else getattr(x, "inited_param", None)
        names.append("a tensor" if given is None else given.name)
        set_versions([x], [next(_versions)])
    return names is not None


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
