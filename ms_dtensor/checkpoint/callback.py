# SPDX-License-Identifier: Apache-2.0
"""`CheckpointCallback`: what `Checkpointer` does, for those who train by `mindspore.train.Model`."""
from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mindspore.train import Callback

from .checkpointer import Checkpointer


class CheckpointCallback(Callback):
    """Saves during `Model.train`, and lets a later run go on.

    `mindspore.train.ModelCheckpoint` writes each rank's shards into a file that only that mesh can read.

    Args:
        state: as for `save`: {"model": net, "optimizer": optimizer}.
        path: as for `Checkpointer`.
        interval: as for `Checkpointer`.
        resume: "latest", a path, or None; as for `Checkpointer.begin`. It is loaded now, and `step` then tells how many
            steps have been done. `Model.train` knows nothing of that: give it the epochs, and the rows, that are left.
        options: further ones of `Checkpointer`: keep_last, keep_every, async_save, on_sigterm, over.

    Attributes:
        step: steps done, those of earlier runs included.
        stopped: whether a SIGTERM ended the training.

    Example:
        >>> import tempfile, numpy as np, mindspore as ms, ms_dtensor as md
        >>> from mindspore import nn
        >>> from mindspore.train import Model
        >>> net, root = nn.Dense(2, 1), tempfile.mkdtemp()
        >>> optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
        >>> rows = ms.dataset.NumpySlicesDataset((np.ones((6, 2), np.float32), np.ones((6, 1), np.float32)), ["x", "y"],
        ...                                      shuffle=False).batch(2)
        >>> state = {"model": net, "optimizer": optimizer}
        >>> saving = md.checkpoint.CheckpointCallback(state, root, interval=2)
        >>> Model(net, nn.MSELoss(), optimizer).train(1, rows, callbacks=[saving], dataset_sink_mode=False)
        >>> again = md.checkpoint.CheckpointCallback(state, root, interval=2, resume="latest")
        >>> saving.step, again.step
        (3, 3)
    """

    def __init__(self, state: Mapping[str, Any], path: str | os.PathLike, *, interval: int,
                 resume: str | os.PathLike | None = None, **options: Any):
        self._saver = Checkpointer(state, path, interval=interval, **options)
        self.step = self._saver.begin(resume)
        self.stopped = False

    def on_train_step_end(self, run_context) -> None:
        """Counts a step, saves if it is time, and ends the training if it is to be ended."""
        self.step += 1
        if self._saver.after(self.step):
            self.stopped = True
            run_context.request_stop()

    def on_train_end(self, run_context) -> None:
        """Saves the last step, and waits until all is on the disk."""
        self._saver.finish()
