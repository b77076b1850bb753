# SPDX-License-Identifier: Apache-2.0
"""Optimizers, schedules, averages and gradient clipping for parameters of any layout.

An elementwise optimizer needs no communication: a gradient has its parameter's own layout, so each rank updates its own
shard. What communicates says so: `Adafactor` (sums of rows and columns), `Muon` (whole matrices), and the norm of all
gradients together.
"""
from .adafactor import Adafactor
from .adamw import AdamW
from .clip import clip_grad_norm_
from .ema import EMA
from .finite import step_if_finite
from .muon import Muon
from .qk_clip import max_logits, qk_clip_
from .schedules import cosine, linear, wsd
from .sgd import SGD

__all__ = ["EMA", "SGD", "Adafactor", "AdamW", "Muon", "clip_grad_norm_", "cosine", "linear", "max_logits", "qk_clip_",
           "step_if_finite", "wsd"]
