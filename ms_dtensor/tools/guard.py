# SPDX-License-Identifier: Apache-2.0
"""Looks at each step's loss and gradient norm: is it a number, and is it far above the steps before.

Not the place that acts: a trainer asks `judge` and warns, leaves the step out or ends. The invariant: a verdict depends on
the losses and norms of this and earlier steps only, so ranks that saw the same numbers agree.
"""
from __future__ import annotations

import math
from collections import deque
from typing import Literal, NamedTuple

from ..errors import DTensorError

LEAST = 10  # good steps before anything is a spike


class Diverged(DTensorError, ArithmeticError):
    """A run that its guard ended."""


class Verdict(NamedTuple):
    """What to do with a step, and why."""

    action: Literal["go", "warn", "skip", "stop"]
    reason: str = ""


class Guard:
    """Judges steps.

    Args:
        nan: what to do with a loss or norm that is not finite: "stop" or "skip".
        spike: a loss this many standard deviations above the mean of the window is a spike; 0: none is.
        on_spike: "warn", "skip" or "stop".
        window: how many good steps are remembered.
        patience: this many skipped steps in a row end the run.

    Example:
        >>> guard = Guard(spike=6.0)
        >>> [guard.judge(step, 2.0 + 0.1 * (step % 2), 1.0).action for step in range(12)].count("go")
        12
        >>> guard.judge(12, 9.0, 1.0)
        Verdict(action='warn', reason='loss 9 at step 13 is a spike: the 12 steps before have 2.05 +- 0.05')
        >>> guard.judge(13, float("nan"), 1.0).action
        'stop'
    """

    def __init__(self, nan: str = "stop", spike: float = 0.0, on_spike: str = "warn", window: int = 50, patience: int = 10):
        self.nan, self.spike, self.on_spike, self.patience = nan, spike, on_spike, patience
        self._losses: deque[float] = deque(maxlen=window)
        self._skipped = 0

    @property
    def skips(self) -> bool:
        """Whether a verdict may be "skip", so that it has to be known before the update."""
        return self.nan == "skip" or bool(self.spike) and self.on_spike == "skip"

    def judge(self, step: int, loss: float, norm: float) -> Verdict:
        """The verdict on a step (from 0)."""
        verdict = self._judge(step, loss, norm)
        if verdict.action == "skip":
            self._skipped += 1
            if self._skipped >= self.patience:
                return Verdict("stop", f"{verdict.reason}; {self._skipped} steps in a row were left out")
            return verdict
        self._skipped = 0
        if verdict.action == "go":
            self._losses.append(loss)
        return verdict

    def _judge(self, step: int, loss: float, norm: float) -> Verdict:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return Verdict(self.nan, f"loss {loss:g}, gradient norm {norm:g} at step {step + 1}")  # type: ignore[arg-type]
        if self.spike and len(self._losses) >= LEAST:
            mean = sum(self._losses) / len(self._losses)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in self._losses) / len(self._losses))
            if loss > mean + self.spike * max(deviation, 1e-3 * abs(mean)):  # a flat curve has next to none
                return Verdict(self.on_spike, f"loss {loss:.4g} at step {step + 1} is a spike: "  # type: ignore[arg-type]
                               f"the {len(self._losses)} steps before have {mean:.4g} +- {deviation:.2g}")
        return Verdict("go")


def stopped(reason: str) -> Diverged:
    """The error that ends a run."""
    return Diverged(f"For 'train', the guard ends the run: {reason}.", "",
                    "A run whose numbers are lost is not gone on with.",
                    ["a lower --optim.lr, or a longer --optim.warmup", "go on from the last checkpoint before: "
                     "--checkpoint.resume latest, with --guard.nan skip or --guard.on_spike skip"])
