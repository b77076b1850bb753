# SPDX-License-Identifier: Apache-2.0
"""Parameters remember what took their place, so that whoever meets the old object uses the new one.

A cell that shares a parameter with one that was distributed already, a list of weights that was made before, what
`cell.recompute()` wrote down: all hold the old object. The memory is weak; it keeps no parameter alive.
"""
from __future__ import annotations

import weakref

PLACE = "_ms_dtensor_place"  # parameter attribute: shared by all that stood in one place, it knows the one that does now


class _Place:
    """Where one parameter after another stands."""

    __slots__ = ("holder",)

    def __init__(self):
        self.holder = None


def remember(old, new) -> None:
    """`new` takes the place of the parameter `old`."""
    place = old.__dict__.setdefault(PLACE, _Place())
    new.__dict__[PLACE] = place
    place.holder = weakref.ref(new)


def current(param):
    """The parameter that is in the place of `param` now: itself, or what replaced it."""
    place = param.__dict__.get(PLACE)
    holder = None if place is None else place.holder()
    return param if holder is None else holder
