# SPDX-License-Identifier: Apache-2.0
"""The world that is pretended in this thread, if one is, and what makes results in the place of kernels there.

Beneath the rest of this package, which asks it; what a world is says `world.py`.
"""
from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from ..errors import OpRuleError

pretended: ContextVar[Any] = ContextVar("ms_dtensor_fake_world", default=None)


def executing() -> Any:
    """What makes results in the place of kernels (`debug/dryrun/executor.py`); None but in a dry run."""
    world = pretended.get()
    return None if world is None else world.executor


def needs_data(who: str) -> None:
    """For what makes no sense without data.

    Raises:
        OpRuleError: a dry run is under way.
    """
    if executing() is not None:
        raise OpRuleError(f"For '{who}', a dry run is under way.", "", "It has no data: a file would be of zeros.",
                          "leave it out of the block of `dry_run`")
