# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: `fully_shard`, `replicate`, ZeRO-1. One unit, whose parameters come and go, or stay.

A parameter's way: `api.py` lays it out and makes a `Unit`; in a step `call.py` says when the unit's events happen
(`unit.py`: `prefetch`, `unshard`, `reshard`), of which `block.py` makes collectives, in memory that comes and goes;
`stand_in.py` puts the whole parameter into its slot; its gradient goes through `reduce.py`. `batch.py` says what plain
inputs are.
"""
from __future__ import annotations

from .api import CPUOffloadPolicy, OffloadPolicy, fully_shard, replicate
from .methods import register_fsdp_forward_method

__all__ = ["CPUOffloadPolicy", "OffloadPolicy", "fully_shard", "register_fsdp_forward_method", "replicate"]
