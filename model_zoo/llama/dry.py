# SPDX-License-Identifier: Apache-2.0
"""A training step of a configuration as one rank of any world would take it, without data: see `md.debug.dry_run`.

Not here: what is made of it (`tools/predict.py`, `scripts/bench`). The one invariant: the step is the trainer's own, so
what is communicated is what `train.py` communicates in a step that is not its first.
"""
from __future__ import annotations

from dataclasses import replace

import numpy as np

from ms_dtensor import DTensor
from ms_dtensor.debug import dry_run

from .config import Config
from .parallelize import make_mesh
from .trainer import Trainer


class _DryTrainer(Trainer):
    """What it reads of tensors are loads and biases of experts, of which nothing follows here."""

    def read(self, x) -> np.ndarray:
        return np.zeros(x.shape, np.int64 if "Int" in str(x.dtype) else np.float32)


def dry_step(cfg: Config, world: int, rank: int = 0, device: str = "CPU"):
    """The `DryRun` of a step of this rank, its second; of a pipeline, the stages before run first.

    The core of attention is not compiled, as nobody sees into what is; experts are taken as chosen equally often.
    """
    return dry_stages(cfg, world, rank, device, rank // (world // cfg.parallel.pp) + 1)[-1]


def dry_stages(cfg: Config, world: int, rank: int = 0, device: str = "CPU", count: int | None = None) -> list:
    """The same of the first `count` stages, by default all: of each the rank that has this one's place in its stage."""
    cfg = replace(cfg, train=replace(cfg.train, compile=False))
    each = world // cfg.parallel.pp
    messages: dict[str, bytes] = {}
    values = {} if cfg.model.experts is None else {"experts": cfg.model.experts.count}
    runs = []
    for stage in range(cfg.parallel.pp if count is None else count):
        with dry_run(world, rank % each + stage * each, device, values=values, messages=messages) as run:
            kind = "npu" if run.device == "Ascend" else run.device.lower()
            trainer = _DryTrainer(cfg, None, make_mesh(kind, cfg.parallel), initialize=lambda model: None)
            ids = np.zeros((cfg.train.batch, cfg.train.seq), np.int32)
            rows = [ids, ids, np.tile(np.arange(cfg.train.seq, dtype=np.int32), (len(ids), 1))][:2 + cfg.data.documents]
            for _ in range(2):
                run.forget()  # set-up; what only a first step communicates
                loss, grads = trainer.gradients(*rows)
                trainer.update(grads, 0)
                if isinstance(loss, DTensor):  # as who prints it
                    loss.full_tensor()
                del loss, grads
        messages = run.messages
        if cfg.data.documents:
            run.assumed["documents"] = "one a row"
        runs.append(run)
    return runs
