# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: by which angle each pair of a head's numbers is turned. NumPy only, in float64."""
from __future__ import annotations

import numpy as np

from .config import ModelConfig, RopeScaling


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """f64[e/2]: rotation per position of each pair, with a scaling of the frequencies when asked for.

    Linear: all wave lengths are stretched by `factor`. Llama-3's: those longer than the old context / low_freq_factor are,
    those shorter than the old context / high_freq_factor are kept, and a linear ramp joins the two.
    """
    half = head_dim // 2
    freq = theta ** (-np.arange(half, dtype=np.float64) / half)
    if scaling is None or scaling.kind == "linear":
        return freq if scaling is None else freq / scaling.factor
    turns = scaling.original_max_seq_len * freq / (2 * np.pi)  # rotations within the old context
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(ramp, 0.0, 1.0)
    return keep * freq + (1.0 - keep) * freq / scaling.factor


def angles(cfg: ModelConfig, t: int) -> np.ndarray:
    """f64[t, e] of positions 0..t-1; number i of a head is turned with number i + e/2, so both halves are alike."""
    angle = np.arange(t)[:, None] * rope_frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)[None]
    return np.concatenate((angle, angle), axis=1)
