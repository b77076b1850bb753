# SPDX-License-Identifier: Apache-2.0
"""What a parameter begins with, by its name: NumPy alone, so that another library's model can begin with the same."""
from __future__ import annotations

import zlib

import numpy as np


def initial(name: str, shape: tuple[int, ...], layers: int, seed: int, std: float = 0.02) -> np.ndarray:
    """Normal(0, std) for matrices, ones for norms, zeros for biases; residual outputs (wo, w2) scaled by 1/sqrt(2 * layers).

    A name draws from a Philox stream of its own, keyed by (seed, name): neither the order of creation nor ranks matter.
    """
    if len(shape) == 1:
        return np.full(shape, not name.endswith("bias"), np.float32)
    stream = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))
    scale = std / np.sqrt(2.0 * layers) if name.endswith(("wo.weight", "w2.weight", "experts.w2")) else std
    return stream.standard_normal(shape, np.float32) * np.float32(scale)
