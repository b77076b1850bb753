# SPDX-License-Identifier: Apache-2.0
"""The sections of a configuration that watch a run and change none of its numbers: metrics, guard, profile."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """What is measured, and where it goes besides the terminal and `metrics.jsonl`; see docs/recipes_training.md."""

    trackers: tuple[Literal["tensorboard", "wandb", "swanlab"], ...] = ()
    project: str = "ms_dtensor"
    """Under which wandb and SwanLab list the run; the run is called by the name of train.log_dir."""
    peak_tflops: float | None = None
    """What one device computes at most, for MFU; null: as ms_dtensor/tools/peaks.py says of it, or n/a."""
    communication: bool = True
    """Communication is counted and timed, by collective and mesh axes."""
    idle_expert: int = 100
    """An expert that no token has chosen for so many steps is told; 0: none is."""
    bar: bool = True
    """A bar where the output is a terminal, if `rich` is installed."""


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """What happens to a step whose loss or gradient norm is no number, or whose loss jumps."""

    nan: Literal["stop", "skip"] = "stop"
    spike: float = 0.0
    """A loss so many standard deviations above the mean of the steps before, ten or more, is a spike; 0: none is."""
    on_spike: Literal["warn", "skip", "stop"] = "warn"
    window: int = 50
    """So many steps make up that mean."""
    patience: int = 10
    """So many skipped steps in a row end the run."""


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """Some steps in detail, in `profile` in train.log_dir."""

    first: int = 0
    """The first step that is profiled, from 1; 0: none."""
    steps: int = 2
    mindspore: bool = True
    """MindSpore's profiler too, besides the trace of dispatch and communication."""


COUNT = (1, 2 ** 31 - 1)
WATCH_RANGES: dict[str, tuple[float, float]] = {
    "metrics.peak_tflops": (1e-3, 1e6), "metrics.idle_expert": (0, 2 ** 31 - 1),
    "guard.spike": (0, 1e6), "guard.window": (10, 100_000), "guard.patience": COUNT,
    "profile.first": (0, 2 ** 53), "profile.steps": (1, 1000),
}
