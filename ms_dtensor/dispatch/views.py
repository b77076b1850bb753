# SPDX-License-Identifier: Apache-2.0
"""Families of views: which living tensors would be views of one another on one device, and which share storage here.

A view of shards may be a copy (`y = x[1:3]` of a sharded dim); a write must know, see `inplace.py`. Invariant: what is
remembered follows from plans, so it is the same on every rank.
"""
from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any, TypeAlias

from mindspore import Tensor

from ..errors import OpRuleError

# Where one tensor stands among the views of one tensor, its `_kin`: the members of the family, all its tensors, in one list
# that all share; the kin of what this one was made of, or None; and what `link` was told. What follows from that is found
# when a write asks: views are many, writes few. A tuple, as it costs a fifth of an object, and each view makes one.
Kin: TypeAlias = "tuple[list[weakref.ref[Any]], Kin | None, tuple[bool, bool, str]]"


def _path(kin: Kin | None) -> Iterator[Kin]:
    while kin is not None:
        yield kin
        kin = kin[1]


def _storage(kin: Kin) -> Kin:
    """Whose storage it has by what was planned: the same for those that have it in common."""
    while (source := kin[1]) is not None and kin[2][0] and (kin[2][2] != "unsure" or _in_order(source)):
        kin = source
    return kin


def _in_order(kin: Kin | None) -> bool:
    """Whether the elements lie as in what the family comes from."""
    return all(how[2] in ("same", "unsure", "itself") for _, _, how in _path(kin))


def _native(kin: Kin) -> bool:
    """Whether only MindSpore's own ops led here, so what is no view here is none on one device either."""
    return all(how[1] for _, _, how in _path(kin))


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
        kin = source._kin = [_ref(source)], None, _FIRST
    members = kin[0]
    result._kin = members, kin, how
    if not len(members) & 31:
        members[:] = [ref for ref in members if ref() is not None]
    members.append(_ref(result))


_FIRST = True, True, "same"
_ref = weakref.ref  # looked up once: each view is linked


def is_view(x) -> bool:
    """Whether a DTensor is on one device a view of another; one that was only handed back is none."""
    return any(source is not None and how[2] != "itself" for _, source, how in _path(x._kin))


def is_repeated(x) -> bool:
    """Whether several elements of a DTensor share one place."""
    for _, _, how in _path(x._kin):
        if how[2] == "repeated" or not how[0]:
            return how[2] == "repeated"
    return False


def contiguous(x):
    """`x`, or a copy of a view in another order, as one device makes one as a rule; writes to either are refused."""
    if _in_order(x._kin):
        return x
    out = x.clone()
    link(x, out, (False, False, "unsure"))
    return out


def refuse_view(x, what: str, *fix: str) -> None:
    """Raises if `x` is a view of another tensor: of how its global memory is arranged nothing is known here."""
    if is_view(x):
        raise OpRuleError(f"For '{what}', the tensor is a view.", x._layout.describe(),
                          "On one device it lies as what it is a view of; shards lie each for itself.", fix)


def family(x) -> list:
    """The living tensors that are views of `x`, that it is a view of, and their other views; with `x`, if it has any."""
    return [] if x._kin is None else [other for ref in x._kin[0] if (other := ref()) is not None]


def relatives_of(x) -> Iterator[tuple[Any, bool]]:
    """(tensor, shares storage) of the family of `x` but for itself."""
    for other in family(x):
        if other is x:
            continue
        shared = _storage(x._kin) is _storage(other._kin)
        if shared and math.prod(x._shape) and math.prod(other._shape) and storage_of(x) != storage_of(other):
            if _native(x._kin) and _native(other._kin):
                continue
            shared = False
        yield other, shared


def storage_of(x) -> int:
    """Where the storage of a tensor of any class begins."""
    return Tensor.untyped_storage(x).data_ptr()
