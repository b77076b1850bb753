# SPDX-License-Identifier: Apache-2.0
"""The divisors of a number: the sizes that an axis of so many ranks, or a cut of so many rows, can have."""
from __future__ import annotations

import math


def divisors(n: int) -> list[int]:
    """All of them, the least first.

    Example:
        >>> from ms_dtensor.core.divisors import divisors
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return [*small, *(n // d for d in reversed(small) if d * d != n)]
