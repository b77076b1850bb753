# SPDX-License-Identifier: Apache-2.0
"""What the library remembers of one tensor, in one attribute `_memo`; it belongs to that object and is never copied.

A DTensor has none until there is something to remember. Whoever makes another tensor of one (`like_parameter`, a
wrapper, a pickle) leaves the memo behind: its nodes, its views and its bucket are the old tensor's.
"""
from __future__ import annotations

from typing import Any


class Memo:
    """Defaults stand in the class, not in an `__init__`: every view gets a memo, and a call costs more than the object.

    Attributes:
        with_cotangent: cotangent layout -> the node that takes it, as all readers of a recorded tensor share it.
        moved: layout -> the recorded tensor in that layout.
        source: of the result of a recorded move: (what was moved, its layout, the layout of its gradient).
        view_of: of a recorded view: (what it is a view of, the plan and the call that made it).
        kin: where it stands among the views of one tensor, see `views.py`.
        work: data under way, see `tensor/async_tensor.py`.
        partial_grad_axes: of a Parameter: mesh axes on which its gradient stays partial, see `parallel/buckets.py`.
    """

    with_cotangent: dict | None = None
    moved: dict | None = None
    source: tuple | None = None
    view_of: tuple | None = None
    kin: Any = None
    work: Any = None
    partial_grad_axes: tuple[int, ...] = ()

    def forget_values(self) -> None:
        """Drops what was derived from the tensor's values."""
        self.with_cotangent = self.moved = self.source = self.view_of = None


def memo_of(x) -> Memo:
    """The memo of a DTensor, which gets one if it has none."""
    memo = x._memo
    if memo is None:
        memo = x._memo = Memo()
    return memo
