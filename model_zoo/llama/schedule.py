# SPDX-License-Identifier: Apache-2.0
"""Learning rate of a step: linear warm-up, then cosine decay or a constant. A pure function of the step."""
from __future__ import annotations

import math

from .config import OptimConfig


def learning_rate(cfg: OptimConfig, step: int, steps: int) -> float:
    """The rate used by step `step` (from 0) of a run of `steps` steps; never zero."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    if cfg.schedule == "constant":
        return cfg.lr
    done = (step - cfg.warmup) / max(1, steps - cfg.warmup)
    low = cfg.lr * cfg.min_lr_ratio
    return low + 0.5 * (cfg.lr - low) * (1.0 + math.cos(math.pi * min(1.0, done)))
