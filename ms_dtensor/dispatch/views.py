# SPDX-License-Identifier: Apache-2.0
"""Families of views: which living tensors would be views of one another on one device, and which share storage here.

A view of shards may be a copy (`y = x[1:3]` of a sharded dim); a write must know, see `inplace.py`. Invariant: what is
remembered follows from plans, so it is the same on every rank.
"""
from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

from mindspore import Tensor

from ..errors import OpRuleError


class Kin:
    """Where one tensor stands among the views of one tensor.

    Only what `link` was told is kept, and what follows from it is found when a write asks: views are many, writes few.
    """

    __slots__ = ("how", "members", "source")
    members: list[weakref.ref[Any]]  # all tensors of the family; one list that all share
    source: Kin | None  # of what this one was made of; None: of nothing
    how: tuple[bool, bool, str]  # what `link` was told

    def _path(self) -> Iterator[Kin]:
        kin: Kin | None = self
        while kin is not None:
            yield kin
            kin = kin.source

    @property
    def parent(self) -> Kin | None:
        """Of what this one is a view of; None: of nothing, or it is a tensor that was handed back."""
        return next((kin.source for kin in self._path() if kin.how[2] != "itself"), None)

    @property
    def storage(self) -> Kin:
        """Whose storage this one has by what was planned: the same for those that have it in common."""
        kin = self
        while kin.source is not None and kin.how[0] and (kin.how[2] != "unsure" or kin.source.in_order):
            kin = kin.source
        return kin

    @property
    def in_order(self) -> bool:
        """Whether the elements lie as in what the family comes from."""
        return all(kin.how[2] in ("same", "unsure", "itself") for kin in self._path())

    @property
    def repeated(self) -> bool:
        """Whether several elements share one place."""
        for kin in self._path():
            if kin.how[2] == "repeated" or not kin.how[0]:
                return kin.how[2] == "repeated"
        return False

    @property
    def native(self) -> bool:
        """Whether only MindSpore's own ops led here, so what is no view here is none on one device either."""
        return all(kin.how[1] for kin in self._path())


def link(source, result: Any, how: tuple[bool, bool, str]) -> None:
    """Remembers that `result` is on one device a view of `source`.

    Args:
        source: the DTensor that was viewed.
        result: the view, or a tuple of views; made just now.
        how: by what was planned, whether the storage is the source's; whether MindSpore's own op ran, so what is no view
            here is none on one device either; see `order_of_view`.
    """
    if result.__class__ is tuple or result.__class__ is list:
        for r in result:
            link(source, r, how)
        return
    kin = source._kin
    if kin is None:
        kin = source._kin = Kin()
        kin.members, kin.source, kin.how = [_ref(source)], None, _FIRST
    result._kin = own = Kin()
    members = kin.members
    own.members, own.source, own.how = members, kin, how
    if not len(members) & 31:
        members[:] = [ref for ref in members if ref() is not None]
    members.append(_ref(result))


_FIRST = True, True, "same"
_ref = weakref.ref  # looked up once: each view is linked


def is_view(x) -> bool:
    """Whether a DTensor is on one device a view of another."""
    kin: Kin | None = x._kin
    return kin is not None and kin.parent is not None


def contiguous(x):
    """`x`, or a copy of a view in another order, as one device makes one as a rule; writes to either are refused."""
    kin: Kin | None = x._kin
    if kin is None or kin.in_order:
        return x
    out = x.clone()
    link(x, out, (False, False, "unsure"))
    return out


def refuse_view(x, what: str, *fix: str) -> None:
    """Raises if `x` is a view of another tensor: of how its global memory is arranged nothing is known here."""
    if is_view(x):
        raise OpRuleError(f"For '{what}', the tensor is a view.", x._layout.describe(),
                          "On one device it lies as what it is a view of; shards lie each for itself.", fix)


def relatives_of(x):
    """(tensor, shares storage) of the living tensors that are views of `x`, that it is a view of, and their other views."""
    kin: Kin | None = x._kin
    if kin is None:
        return
    for ref in kin.members:
        other = ref()
        if other is None or other is x:
            continue
        its = other._kin
        shared = kin.storage is its.storage
        if shared and math.prod(x._shape) and math.prod(other._shape) and storage_of(x) != storage_of(other):
            if kin.native and its.native:
                continue
            shared = False
        yield other, shared


def storage_of(x) -> int:
    """Where the storage of a tensor of any class begins."""
    return Tensor.untyped_storage(x).data_ptr()
