# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps and gradient clipping for parameters of any layout.

An optimizer needs no communication: a gradient has its parameter's own layout, so each rank updates its own shard.
Only the norm of all gradients together is a global number.
"""
from .adamw import AdamW
from .clip import clip_grad_norm_

__all__ = ["AdamW", "clip_grad_norm_"]
