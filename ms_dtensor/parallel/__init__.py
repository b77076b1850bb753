# SPDX-License-Identifier: Apache-2.0
"""Parallel training as declarative styles: they rewrite a cell's parameters and register forward hooks, nothing more.

`module.py` applies a plan of styles, `suggest.py` computes one; `styles.py` holds the tensor- and sequence-parallel ones,
`fused.py` that for fused projections, `overlapped.py` those that hide their communication (`pieces.py`);
`sharding/` is data parallelism, with parameters whole on every rank or cut over them;
`context.py` is attention of tokens that ranks share, `context_style.py` the style that puts it in a cell's place;
`router.py` and `experts.py` mixtures of experts;
`precision.py` mixed precision; `recompute.py` chooses cells to run again; `loss.py` the vocabulary-parallel loss. Styles use
only the public DTensor API: what a style does, a user could write.
"""
from __future__ import annotations

from .context import context_attention
from .context_style import ContextParallel
from .experts import ExpertParallel, moe
from .fused import FusedColwiseParallel
from .loss import loss_parallel
from .module import parallelize_module
from .overlapped import OverlappedColwise, OverlappedGradients, OverlappedRowwise
from .precision import MixedPrecisionPolicy
from .recompute import checkpoint_wrapper
from .router import Router, expert_balance_loss, expert_counts, router_z_loss, update_expert_bias
from .sharding import CPUOffloadPolicy, OffloadPolicy, fully_shard, register_fsdp_forward_method, replicate
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

__all__ = ["CPUOffloadPolicy", "ColwiseParallel", "ContextParallel", "ExpertParallel", "FusedColwiseParallel",
           "MixedPrecisionPolicy", "OffloadPolicy", "OverlappedColwise", "OverlappedGradients", "OverlappedRowwise",
           "ParallelStyle", "PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput", "Router",
           "RowwiseParallel", "SequenceParallel", "checkpoint_wrapper", "context_attention", "expert_balance_loss",
           "expert_counts", "fully_shard", "loss_parallel", "moe", "parallelize_module", "register_fsdp_forward_method",
           "replicate", "router_z_loss", "suggest_plan", "update_expert_bias"]
