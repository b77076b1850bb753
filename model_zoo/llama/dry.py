# SPDX-License-Identifier: Apache-2.0
"""A training step of a configuration as one rank of any world would take it, without data: see `md.debug.dry_run`.

Not here: what is made of it (`tools/predict.py`, `scripts/bench`). The one invariant: the step is the trainer's own, so
what is communicated is what `train.py` communicates in a step that is not its first.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ms_dtensor import DTensor
from ms_dtensor.debug import dry_run
from ms_dtensor.errors import OpRuleError

from .config import Config
from .parallelize import make_mesh, stage_mesh
from .trainer import Trainer


class _DryTrainer(Trainer):
    """What it reads of tensors are loads and biases of experts, of which nothing follows here.

    All is DTensors, which a dry run counts.
    """

    def laid_out_over(self, mesh):
        return stage_mesh(mesh)

    def read(self, x) -> np.ndarray:
        return np.zeros(x.shape, np.int64 if "Int" in str(x.dtype) else np.float32)


def dry_step(cfg: Config, world: int, rank: int = 0, device: str = "CPU"):
    """The `DryRun` of a step of this rank, its second; of a pipeline, those that its stages wait for run first.

    The core of attention is not compiled, as nobody sees into what is; experts are taken as chosen equally often.
    """
    return dry_stages(cfg, world, rank, device, rank // (world // cfg.parallel.pp) + 1)[-1]


def dry_stages(cfg: Config, world: int, rank: int = 0, device: str = "CPU", count: int | None = None) -> list:
    """The same of the first `count` ranks of a pipeline, by default all: those that have this one's place in their stages.

    A rank of several stages waits for ranks behind it: each runs as far as it is told what comes, again and again.
    """
    cfg = replace(cfg, train=replace(cfg.train, compile=False))
    each = world // cfg.parallel.pp
    messages: dict[str, bytes] = {}
    values = {} if cfg.model.experts is None else {"experts": cfg.model.experts.count}
    runs: dict[int, Any] = {}
    while True:
        before, refused = (len(runs), len(messages)), None
        for stage in range(cfg.parallel.pp):
            if stage in runs:
                continue
            try:
                with dry_run(world, rank % each + stage * each, device, values=values, messages=messages) as run:
                    _two_steps(cfg, run)
                runs[stage] = run
            except OpRuleError as error:
                refused = error
            messages |= run.messages
            if runs.keys() >= {*range(cfg.parallel.pp if count is None else count)}:
                return [runs[stage] for stage in sorted(runs)][:count]
        if refused is not None and before == (len(runs), len(messages)):
            raise refused


def _two_steps(cfg: Config, run) -> None:
    """Lays the model out and trains it; what the run tells is of the second step."""
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
    if cfg.data.documents:
        run.assumed["documents"] = "one a row"
