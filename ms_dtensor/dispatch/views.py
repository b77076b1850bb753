# SPDX-License-Identifier: Apache-2.0
"""Families of views: which living tensors would be views of one another on one device, and which share storage here.

A view of shards may be a copy (`y = x[1:3]` of a sharded dim); a write must know, see `inplace.py`. Invariant: what is
remembered follows from plans, so it is the same on every rank.
"""
from __future__ import annotations

import math
import weakref
from typing import Any

from mindspore import Tensor

from ..errors import OpRuleError
from .memo import Memo, memo_of


class Kin:
    """Where one tensor stands among the views of one tensor."""

    __slots__ = ("in_order", "members", "native", "parent", "repeated", "storage")
    members: list[weakref.ref]  # all tensors of the family; one list that all share
    parent: Kin | None  # of what this one is a view of; None: of nothing, or it is a tensor that was handed back
    storage: object  # a token that those have in common who share storage by what was planned
    in_order: bool  # the elements lie as in what the family comes from
    repeated: bool  # several elements share one place
    native: bool  # only MindSpore's own ops led here, so what is no view here is none on one device either


def link(source, result: Any, shares: bool, native: bool, order: str) -> None:
    """Remembers that `result` is on one device a view of `source`.

    Args:
        source: the DTensor that was viewed.
        result: the view, or a tuple of views; made just now.
        shares: by what was planned the storage is the source's.
        native: MindSpore's own op ran, so what is no view here is none on one device either.
        order: see `order_of_view`.
    """
    if result.__class__ in (tuple, list):
        for r in result:
            link(source, r, shares, native, order)
        return
    memo = source._memo
    parent = None if memo is None else memo.kin
    if parent is None:
        parent = memo_of(source).kin = Kin()
        parent.members, parent.native, parent.parent, parent.storage = [weakref.ref(source)], True, None, object()
        parent.in_order, parent.repeated = True, False
    members = parent.members
    if not len(members) & 31:
        members[:] = [ref for ref in members if ref() is not None]
    members.append(weakref.ref(result))
    result._memo = memo = Memo()
    memo.kin = kin = Kin()
    kin.members = members
    kin.parent = parent.parent if order == "itself" else parent
    kin.native = native and parent.native
    kin.in_order = parent.in_order and order in ("same", "unsure", "itself")
    kin.repeated = order == "repeated" or (shares and parent.repeated)
    kin.storage = parent.storage if shares and (order != "unsure" or parent.in_order) else object()


def kin_of(x) -> Kin | None:
    """Where a DTensor stands in a family of views; None: in none."""
    return None if x._memo is None else x._memo.kin


def is_view(x) -> bool:
    """Whether a DTensor is on one device a view of another."""
    kin = kin_of(x)
    return kin is not None and kin.parent is not None


def contiguous(x):
    """`x`, or a copy of a view in another order, as one device makes one as a rule; writes to either are refused."""
    kin = kin_of(x)
    if kin is None or kin.in_order:
        return x
    out = x.clone()
    link(x, out, False, False, "unsure")
    return out


def refuse_view(x, what: str, *fix: str) -> None:
    """Raises if `x` is a view of another tensor: of how its global memory is arranged nothing is known here."""
    if is_view(x):
        raise OpRuleError(f"For '{what}', the tensor is a view.", x._layout.describe(),
                          "On one device it lies as what it is a view of; shards lie each for itself.", fix)


def relatives_of(x):
    """(tensor, shares storage) of the living tensors that are views of `x`, that it is a view of, and their other views."""
    kin = kin_of(x)
    if kin is None:
        return
    for ref in kin.members:
        other = ref()
        if other is None or other is x:
            continue
        its = other._memo.kin
        shared = kin.storage is its.storage
        if shared and math.prod(x._shape) and math.prod(other._shape) and _storage(x) != _storage(other):
            if kin.native and its.native:
                continue
            shared = False
        yield other, shared


def _storage(x) -> int:
    return Tensor.untyped_storage(x).data_ptr()
