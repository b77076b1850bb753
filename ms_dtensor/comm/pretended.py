# SPDX-License-Identifier: Apache-2.0
"""The world that is pretended in this thread, if one is, and what makes results in the place of kernels there.

Beneath the rest of this package, which asks it; what a world is says `world.py`.
"""
from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from ..errors import ConfigError, OpRuleError

pretended: ContextVar[Any] = ContextVar("ms_dtensor_fake_world", default=None)

MADE_DRY = "_ms_dtensor_made_dry"  # attribute of a Parameter that was made in a dry run


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


def keeps_values(params: Iterable[Any]) -> None:
    """For what puts others in the place of parameters, which in a dry run have no values.

    Raises:
        ConfigError: a dry run is under way, and a parameter was made before it.
    """
    if executing() is None:
        return
    for p in params:
        if MADE_DRY not in p.__dict__:
            raise ConfigError(f"For 'dry_run', parameter '{p.name}' was made before the block.", f"shape {tuple(p.shape)}",
                              "What is laid out in a dry run has no values, so the model's would be gone behind it.",
                              "make the model inside of the block")
