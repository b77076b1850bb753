# SPDX-License-Identifier: Apache-2.0
"""Schedules: functions of the step, counted from 0, that give the factor of the learning rate.

Our optimizers that take `schedule=` apply it themselves; of others assign `optimizer.lr = lr * schedule(step)`.
MindSpore's take a list: `nn.SGD(params, [lr * schedule(step) for step in range(steps)])`.
"""
from __future__ import annotations

import math

from .base import Schedule


def cosine(steps: int, *, warmup: int = 0, low: float = 0.0) -> Schedule:
    """Linear warm-up, then half a cosine down to `low`.

    Args:
        steps: of the whole run; later ones stay at `low`.
        warmup: steps until the factor is 1; the first is 1 / warmup, not 0.
        low: the last factor.

    Example:
        >>> from ms_dtensor.optim import cosine
        >>> schedule = cosine(6, warmup=2, low=0.1)
        >>> [round(schedule(step), 3) for step in range(7)]
        [0.5, 1.0, 1.0, 0.868, 0.55, 0.232, 0.1]
    """
    return _warmed(steps, warmup, low, lambda done: 0.5 * (1.0 + math.cos(math.pi * done)), steps - warmup)


def linear(steps: int, *, warmup: int = 0, low: float = 0.0) -> Schedule:
    """Linear warm-up, then a straight line down to `low`; arguments as of `cosine`.

    Example:
        >>> from ms_dtensor.optim import linear
        >>> [round(linear(4)(step), 3) for step in range(5)]
        [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return _warmed(steps, warmup, low, lambda done: 1.0 - done, steps - warmup)


def wsd(steps: int, *, decay: int, warmup: int = 0, low: float = 0.0) -> Schedule:
    """Warm-up, stable, decay: 1 between the warm-up and the last `decay` steps, then a straight line down to `low`.

    Example:
        >>> from ms_dtensor.optim import wsd
        >>> [round(wsd(6, warmup=2, decay=2)(step), 3) for step in range(7)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    return _warmed(steps, warmup, low, lambda done: 1.0 - done, decay)


def _warmed(steps: int, warmup: int, low: float, shape, decay: int) -> Schedule:
    """`shape` goes from 1 to 0 while the share of the last `decay` steps that is done goes from 0 to 1."""
    if warmup < 0 or decay < 0 or warmup + decay > steps:
        raise ValueError(f"A schedule of {steps} steps has no room for {warmup} of warm-up and {decay} of decay.")

    def schedule(step: int) -> float:
        if not step >= 0:
            raise ValueError(f"For a schedule, step {step} is out of range: steps count from 0.")
        if step < warmup:
            return (step + 1) / warmup
        done = min(max(step - (steps - decay), 0) / max(decay, 1), 1.0) if step < steps else 1.0
        return low + (1.0 - low) * shape(done)
    return schedule
