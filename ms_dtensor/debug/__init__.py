# SPDX-License-Identifier: Apache-2.0
"""See what is communicated: `CommDebugMode` counts it, `explain` tells why and what it costs; `cache_info` counts plans.
`suggest` ranks the plans of a model that is not made yet, on a machine that is not here; `dry_run` is a step without data.

`checks` verifies what users teach the library; `convert`, `all_reduce` and the other moves are for local functions whose
types it follows. Nothing runs unless asked for. Read next: `comm_mode.py`, `plans.py`, `predict/`, `dryrun/`, `types/`.
"""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_MOVES = ("all_gather", "all_reduce", "all_to_all", "convert", "reduce_scatter", "reinterpret")
_HOME = {"CommDebugMode": ".comm_mode", "cache_info": ".caches", "checks": "..dispatch.modes", "dry_run": ".dryrun.run",
         "explain": ".plans", "suggest": ".predict", "visualize_sharding": ".visualize",
         **dict.fromkeys(_MOVES, ".types.moves")}
__all__ = ["CommDebugMode", "all_gather", "all_reduce", "all_to_all", "cache_info", "checks", "convert", "dry_run",
           "explain", "reduce_scatter", "reinterpret", "suggest", "visualize_sharding"]

if TYPE_CHECKING:
    from ..dispatch.modes import checks
    from .caches import cache_info
    from .comm_mode import CommDebugMode
    from .dryrun.run import dry_run
    from .plans import explain
    from .predict import suggest
    from .types.moves import all_gather, all_reduce, all_to_all, convert, reduce_scatter, reinterpret
    from .visualize import visualize_sharding
else:
    def __getattr__(name: str):
        if name not in _HOME:
            raise AttributeError(f"module 'ms_dtensor.debug' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name], __name__), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted(__all__)
