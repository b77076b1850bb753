# SPDX-License-Identifier: Apache-2.0
"""Parallel training as declarative styles: they rewrite a cell's parameters and register forward hooks, nothing more.

`module.py` applies a plan of styles, `suggest.py` computes one; `styles.py` holds the tensor- and sequence-parallel ones,
`fused.py` that for fused projections; `data.py` data parallelism, `fsdp.py` that with parameters cut over the ranks,
`batch.py` what both do with the batch; `precision.py` mixed precision; `recompute.py` chooses cells to run again; `loss.py`
the vocabulary-parallel loss. Everything here uses only the public DTensor API: what a style does, a user could write.
"""
from __future__ import annotations

from .data import replicate
from .fsdp import fully_shard
from .fsdp_memory import CPUOffloadPolicy, OffloadPolicy
from .fused import FusedColwiseParallel
from .loss import loss_parallel
from .module import parallelize_module
from .precision import MixedPrecisionPolicy
from .recompute import checkpoint_wrapper
from .styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from .suggest import suggest_plan

__all__ = ["CPUOffloadPolicy", "ColwiseParallel", "FusedColwiseParallel", "MixedPrecisionPolicy", "OffloadPolicy",
           "ParallelStyle", "PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput", "RowwiseParallel",
           "SequenceParallel", "checkpoint_wrapper", "fully_shard", "loss_parallel", "parallelize_module", "replicate",
           "suggest_plan"]
