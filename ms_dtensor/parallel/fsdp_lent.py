# SPDX-License-Identifier: Apache-2.0
"""Gathered parameters, and views of them, that a program keeps past the cell whose unit has gathered them.

Their memory goes when the cell returns, and read as zeros. So what still lives then is refused, until the unit's parameters
are gathered again: in its backward, where what autograd and own functions have kept is needed. Not here: local tensors and
NumPy arrays that were taken from them, of which nobody knows.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mindspore import Tensor

from ..core.layout import Layout
from ..dispatch.memo import memo_of
from ..errors import LayoutError
from ..tensor.dtensor import DTensor


class LentDTensor(DTensor):
    """In the memory of a unit's gathered parameters; everything that reads a DTensor asks for its `_layout` first."""

    @property
    def _layout(self) -> Layout:  # type: ignore[override]
        held = self.__dict__
        unit = held["_memo"].lent
        if not unit.full:
            raise LayoutError(
                "For 'fully_shard', a gathered parameter, or a view of one, is used after its cell has returned.",
                f"{held['_layout'].describe()} of {unit.name}", "The memory was given back when the cell returned.",
                ("return it from the cell: views of parameters are copied there", "keep w.clone() in place of w",
                 "use the cell's parameter itself: outside the cell it is a cut DTensor, and right"))
        return held["_layout"]

    def __fallback__(self, func, args=(), kwargs=None):
        self._layout  # noqa: B018  also where dispatch is switched off
        return super().__fallback__(func, args, kwargs)


def lend(unit: Any, whole: Iterable[Tensor]) -> None:
    """What lives of a unit's gathered parameters, and of views of them, may be read while the unit has them."""
    for w in whole:
        kin = None if w._memo is None else w._memo.kin
        for x in (w,) if kin is None else [x for ref in kin.members if (x := ref()) is not None]:
            if x.__class__ is DTensor:
                memo_of(x).lent = unit
                x.__class__ = LentDTensor
