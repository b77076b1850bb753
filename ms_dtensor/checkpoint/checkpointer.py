# SPDX-License-Identifier: Apache-2.0
"""When a training loop saves: every so many steps, when the system asks it to end, and at its end; and where it goes on.

Not here: how. A loop of one's own calls `begin`, `after` and `finish`; `callback.py` does it for `Model.train`. Ranks agree
on each decision, so that all save or none does.
"""
from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.mesh import DeviceMesh
from ..errors import CheckpointError
from .background import wait
from .folder import latest
from .loading import load
from .ranks import all_ranks, gathered
from .saving import save


class Checkpointer:
    """Saves a training run's state into a folder of steps.

    Args:
        state: as for `save`: the model, the optimizer, where the data are, a `RandomState`.
        path: the folder; each save makes `step-00000010` in it.
        interval: save after each so many steps, and after the last; None: only when asked to end.
        keep_last: as for `save`.
        keep_every: as for `save`.
        async_save: as for `save`.
        on_sigterm: on SIGTERM to any rank, all ranks save after the step they are at, and `after` tells them to leave. Costs
            an exchange of one bit in each step; to be made in the main thread.
        over: as for `save`, of a pipeline its axis; loads take it, too.

    Example:
        >>> import tempfile, numpy as np, ms_dtensor as md
        >>> root, state = tempfile.mkdtemp(), {"w": np.zeros(1)}
        >>> def train(steps):
        ...     saver = md.checkpoint.Checkpointer(state, root, interval=2)
        ...     for step in range(saver.begin("latest"), steps):
        ...         state["w"] += 1
        ...         if saver.after(step + 1):
        ...             break
        ...     saver.finish()
        >>> train(3)  # saves after step 2, and at the end
        >>> state["w"] = np.zeros(1)
        >>> train(5)
        >>> state["w"].tolist(), md.checkpoint.latest(root).name
        ([5.0], 'step-00000005')
    """

    def __init__(self, state: Mapping[str, Any], path: str | os.PathLike, *, interval: int | None = None,
                 keep_last: int | None = 2, keep_every: int | None = None, async_save: bool = False,
                 on_sigterm: bool = False, over: DeviceMesh | None = None):
        if interval is not None and (isinstance(interval, bool) or not isinstance(interval, int) or interval < 1):
            raise CheckpointError(f"For 'Checkpointer', 'interval' is {interval!r}.", "", "It is a number of steps.",
                                  "None to save on SIGTERM only")
        self.state, self.path, self.interval = state, Path(path), interval
        self._options: dict[str, Any] = {"keep_last": keep_last, "keep_every": keep_every, "async_save": async_save,
                                         "over": over}
        self._saved, self._step, self._asked = -1, 0, False
        self._before: Any = None
        self._on_sigterm = on_sigterm
        if on_sigterm and threading.current_thread() is not threading.main_thread():
            raise CheckpointError("For 'Checkpointer', 'on_sigterm' was asked for in another thread than the main one.", "",
                                  "Python gives signals to the main thread.", "make it there, or on_sigterm=False")

    def begin(self, resume: str | os.PathLike | None = None) -> int:
        """Loads a checkpoint into the state, if there is one; every rank calls it before the first step.

        Args:
            resume: "latest": the latest of the folder, or none if it has none yet. A path: that one. None: a run begins.

        Returns:
            How many steps have been done.

        Raises:
            CheckpointError: on all ranks the same; as `load`, or a new run in the folder of another.
        """
        there = gathered(all_ranks(), str(latest(self.path) or ""))[0]
        if resume is None and there and (self.interval is not None or self._on_sigterm):
            raise CheckpointError(f"For 'Checkpointer', '{self.path}' has checkpoints of a run.", there,
                                  "A new run's steps would mix with them.",
                                  ("resume='latest' goes on with that run", "another folder", "remove them"))
        source = there if resume == "latest" else resume
        if source:
            loaded = load(self.state, source, over=self._options["over"])
            if loaded.step is None:
                raise CheckpointError(f"For 'Checkpointer', '{source}' is of no step.", "", "Steps are counted on from it.",
                                      "load(state, path), and begin a new run")
            self._step = loaded.step
            self._saved = loaded.step if resume == "latest" else -1
        if self._on_sigterm:
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self._step

    def after(self, step: int) -> bool:
        """To be called by every rank when so many steps have been done; saves if it is time. True: leave the loop."""
        self._step = step
        stop = self._on_sigterm and any(gathered(all_ranks(), self._asked))
        if stop or self.interval is not None and step % self.interval == 0:
            self._save()
        return stop

    def finish(self) -> None:
        """Saves the last step, if it was not, and waits until all is on the disk; every rank calls it."""
        if self.interval is not None and self._step > 0:
            self._save()
        wait()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _save(self) -> None:
        if self._saved != self._step:
            save(self.state, self.path, step=self._step, **self._options)
            self._saved = self._step

    def _ask(self, *_) -> None:
        self._asked = True
