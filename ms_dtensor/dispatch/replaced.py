# SPDX-License-Identifier: Apache-2.0
"""Parameters remember what took their place, so that whoever meets the old object uses the new one.

A cell that shares a parameter with one that was distributed already, a list of weights that was made before, what
`cell.recompute()` wrote down: all hold the old object. The memory is weak; it keeps no parameter alive.
"""
from __future__ import annotations

import weakref

_NAME = "_ms_dtensor_replaced_by"


def remember(old, new) -> None:
    """`new` takes the place of the parameter `old`."""
    if old is not new:
        old.__dict__[_NAME] = weakref.ref(new)


def current(param):
    """The parameter that is in the place of `param` now: itself, or what replaced it."""
    while (ref := param.__dict__.get(_NAME)) is not None and (new := ref()) is not None:
        param = new
    return param
