# SPDX-License-Identifier: Apache-2.0
"""What all random programs draw with: the same seed gives the same program."""
import numpy as np


class Draws:
    """Draws of a seed, which is several numbers."""

    def __init__(self, seed: list[int]):
        self.rng = np.random.default_rng(seed)

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def one(self, *of, p=None):
        return of[int(self.rng.choice(len(of), p=p))]
