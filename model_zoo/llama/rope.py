# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: by which angle each pair of a head's numbers is turned. NumPy only, in float64."""
from __future__ import annotations

import math

import numpy as np

from .config import ModelConfig, RopeScaling


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """f64[e/2]: rotation per position of each pair, with a scaling of the frequencies when asked for.

    Linear: all wave lengths are stretched by `factor`. Llama-3's: those longer than the old context / low_freq_factor are,
    those shorter than the old context / high_freq_factor are kept, and a linear ramp joins the two. YaRN's: the ramp is by
    the number of the pair, from the one that turns `beta_fast` times in the old context to the one of `beta_slow` times.
    """
    half = head_dim // 2
    freq = theta ** (-np.arange(half, dtype=np.float64) / half)
    if scaling is None or scaling.kind == "linear":
        return freq if scaling is None else freq / scaling.factor
    if scaling.kind == "yarn":
        def pair(turns: float) -> float:
            return half * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / math.log(theta)
        first, last = max(math.floor(pair(scaling.beta_fast)), 0), min(math.ceil(pair(scaling.beta_slow)), head_dim - 1)
        keep = 1.0 - np.clip((np.arange(half) - first) / max(last - first, 1e-3), 0.0, 1.0)
    else:
        turns = scaling.original_max_seq_len * freq / (2 * np.pi)  # rotations within the old context
        ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = np.clip(ramp, 0.0, 1.0)
    return keep * freq + (1.0 - keep) * freq / scaling.factor


def angles(cfg: ModelConfig, t: int) -> np.ndarray:
    """f64[t, e] of positions 0..t-1; both numbers of a pair (see `turn`) have the same. What is not turned has 0."""
    latent = cfg.latent
    turned = cfg.head_dim if latent is None else latent.turned
    angle = np.arange(t)[:, None] * rope_frequencies(turned, cfg.rope_theta, cfg.rope_scaling)[None]
    if latent is None:
        return np.concatenate((angle, angle), axis=1)
    return np.concatenate((np.zeros((t, latent.plain)), np.repeat(angle, 2, axis=1)), axis=1)


def turn(cfg: ModelConfig) -> np.ndarray:
    """f32[e, e]: takes each pair (x1, x2) to (-x2, x1): numbers i and i + e/2, and of latent attention neighbours."""
    e, latent = cfg.head_dim, cfg.latent
    first = np.arange(e // 2) if latent is None else np.arange(latent.plain, e, 2)
    second = first + (e // 2 if latent is None else 1)
    out = np.zeros((e, e), np.float32)
    out[second, first], out[first, second] = -1.0, 1.0
    return out


def score_scale(cfg: ModelConfig) -> float:
    """By which the products of queries and keys are multiplied: 1/sqrt(e), and YaRN's factor, where a model has one."""
    scaling = cfg.rope_scaling
    more = 1.0
    if scaling is not None and scaling.kind == "yarn" and scaling.factor > 1:
        more = 0.1 * scaling.mscale * math.log(scaling.factor) + 1.0
    return cfg.head_dim ** -0.5 * more * more
