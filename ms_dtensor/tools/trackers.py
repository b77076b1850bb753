# SPDX-License-Identifier: Apache-2.0
"""Where numbers of a run go besides its own file: TensorBoard, Weights & Biases, SwanLab.

Not a dependency: each is imported when a run asks for it, and `check` says before the run what is missing. The invariant: a
tracker gets numbers by name and step, nothing else, and never more often than the file.
"""
from __future__ import annotations

import importlib.util
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ..core.files import make_folder, own_file
from ..errors import ConfigError


class Tracker(Protocol):
    """What takes numbers."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by name, after so many steps."""

    def close(self) -> None:
        """The run has ended."""


def check(names: Iterable[str]) -> None:
    """Refuses trackers that are unknown or not installed; imports none.

    Example:
        >>> check(["mlflow"])
        Traceback (most recent call last):
        ms_dtensor.errors.ConfigError: For 'metrics.trackers', 'mlflow' is not a tracker.
          on:   metrics.trackers = mlflow
          rule: Known are tensorboard, wandb, swanlab.
          fix:  leave it out: metrics.jsonl is always written
    """
    names = tuple(names)
    for name in names:
        on = f"metrics.trackers = {', '.join(names)}"
        if name not in TRACKERS:
            raise ConfigError(f"For 'metrics.trackers', '{name[:60]}' is not a tracker.", on,
                              f"Known are {', '.join(TRACKERS)}.", "leave it out: metrics.jsonl is always written")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"For 'metrics.trackers', the package '{name}' is not installed.", on,
                              "A tracker is imported by the run that asks for it.",
                              [f"pip install {name}", "leave it out: metrics.jsonl is always written"])


def start(names: Iterable[str], folder: Path, project: str, run: str, config: Mapping[str, Any]) -> list[Tracker]:
    """Opens trackers for a run.

    Args:
        names: of `TRACKERS`.
        folder: the run's; their files go there.
        project: under which they list it.
        run: its name.
        config: the resolved configuration.
    """
    check(names)
    try:
        return [TRACKERS[name](folder, project, run, config) for name in names]
    except Exception as error:  # no network, no login, a version that differs: whatever it is, it is theirs
        raise ConfigError("For 'metrics.trackers', a tracker did not start.", f"{type(error).__name__}: {str(error)[:500]}",
                          "A tracker that was asked for has to work.",
                          ["offline: WANDB_MODE=offline, SWANLAB_MODE=offline", "leave it out"]) from error


FLUSH = 5.0  # seconds until TensorBoard sees what was written


class TensorBoard:
    """Writes an event file into `tensorboard` in the run's folder.

    Not with TensorBoard's own writer, whose thread takes the interpreter from the training loop at each step.
    """

    def __init__(self, folder: Path, project: str, run: str, config: Mapping[str, Any]):
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-not-found]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-not-found]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-not-found]

        self._event, self._summary, self._flushed = Event, Summary, time.monotonic()
        make_folder(folder / "tensorboard")
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(folder / "tensorboard" / name, "wb", opener=own_file)  # noqa: SIM115  until `close`
        self._records = RecordWriter(self._file)
        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        rows = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=rows))
        self._records.write(event.SerializeToString())
        if time.monotonic() - self._flushed > FLUSH:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()


class WandB:
    """A run of Weights & Biases."""

    def __init__(self, folder: Path, project: str, run: str, config: Mapping[str, Any]):
        import wandb  # type: ignore[import-not-found]

        self._run = wandb.init(project=project, name=run, dir=str(folder), config=dict(config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class SwanLab:
    """A run of SwanLab."""

    def __init__(self, folder: Path, project: str, run: str, config: Mapping[str, Any]):
        import swanlab  # type: ignore[import-not-found]

        self._lab = swanlab
        swanlab.init(project=project, experiment_name=run, logdir=str(folder / "swanlog"), config=dict(config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._lab.log(dict(values), step=step)

    def close(self) -> None:
        self._lab.finish()


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "swanlab": SwanLab}
