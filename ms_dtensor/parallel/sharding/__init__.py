# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: `fully_shard`, `replicate`, ZeRO-1. One unit, whose parameters come and go, or stay.

A parameter's way: `api.py` lays it out and makes a `Unit`; in a step `call.py` says when the unit's events happen
(`unit.py`: `prefetch`, `unshard`, `reshard`), of which `block.py` makes collectives, in memory that comes and goes
(`memory.py`, on devices `rooms.py`); `stand_in.py` puts the whole parameter into its slot; its gradient goes through
`reduce.py`, of which `sums.py` has what is under way. Beside that way: `batch.py` says what plain inputs are, `local.py`
what cells of local tensors see of a parameter, `methods.py` what a cell can be told.
"""
from __future__ import annotations

from .api import CPUOffloadPolicy, OffloadPolicy, fully_shard, replicate
from .methods import register_fsdp_forward_method

__all__ = ["CPUOffloadPolicy", "OffloadPolicy", "fully_shard", "register_fsdp_forward_method", "replicate"]
