# SPDX-License-Identifier: Apache-2.0
"""MindFormers 2.1.0's Trainer from its YAML: its data set, scheduler, clipping, optimizers, callbacks, against one device.

The reference starts with the weights that its `init_states` gave, takes the whole batch on one device, and steps its
optimizer with `value_and_grad`'s gradients, clipped by their whole norm.
"""
from __future__ import annotations

import tempfile
from pathlib import Path

import mindspore as ms
import numpy as np
import yaml
from mindspore import Tensor

import ms_dtensor as md
from ms_dtensor import comm
from ms_dtensor.compat.backward import enable_mindspore_backward_compat
from ms_dtensor.internals.names import no_grad
from tests.cases import case
from tests.dist.support import counted, equal
from tests.third_party.cases_mindformers import LENGTH, TINY, TOLERANCE, VOCABULARY, loss_of, made, wheel

STEPS, GLOBAL, LOCAL, NORM = 20, 8, 2, 0.5
COLUMNS = ["input_ids", "labels", "loss_mask", "position_ids"]


def rows_of(count: int) -> list[dict]:
    rng = np.random.default_rng(5)
    return [{"input_ids": rng.integers(1, VOCABULARY, LENGTH).astype(np.int32),
             "labels": rng.integers(1, VOCABULARY, LENGTH).astype(np.int32),
             "loss_mask": np.ones(LENGTH, np.float32), "position_ids": np.arange(LENGTH, dtype=np.int32)}
            for _ in range(count)]


def written(folder: Path) -> str:
    """A MindRecord of as many rows as the steps take."""
    from mindspore.mindrecord import FileWriter
    path = str(folder / "rows.mindrecord")
    writer = FileWriter(path, shard_num=1)
    kinds = dict.fromkeys(COLUMNS, "int32") | {"loss_mask": "float32"}
    writer.add_schema({name: {"type": kind, "shape": [LENGTH]} for name, kind in kinds.items()}, "rows")
    writer.write_raw_data(rows_of(STEPS * GLOBAL))
    writer.commit()
    return path


def written_yaml(folder: Path, records: str, optimizer: dict, **parallelism) -> str:
    """Its configuration file, of the sections that its pretrain_deepseek3_1b_8p_pynative.yaml has."""
    sections = {
        "checkpoint": {"enable_save": False},
        "training": {"steps": STEPS, "local_batch_size": LOCAL, "global_batch_size": GLOBAL, "max_norm": NORM, "seed": 42,
                     "deterministic": False},
        "optimizer": optimizer,
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 1e-2, "warmup_steps": 4},
        "parallelism": parallelism,
        "train_dataset": {"dataloader": {"type": "MindDataset", "dataset_files": records, "column_names": COLUMNS,
                                         "shuffle": False}, "num_parallel_workers": 1, "drop_remainder": True},
        "model": {"model_type": "qwen3", "architectures": "Qwen3ForCausalLM", **TINY}}
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(sections), "utf-8")
    return str(path)


def everyone(world, value) -> list:
    return comm.group(tuple(range(world.size))).all_gather_object(value)


def watched():
    """A callback of its kind, which keeps what a run tells."""
    from mindformers.pynative.callback import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self):
            self.losses, self.norms = [], []

        def on_step_end(self, args, state, loss=None, grad_norm=None, **kwargs):
            self.losses.append(float(loss.asnumpy()))
            self.norms.append(float(grad_norm.asnumpy()))
    return Watch()


def whole(trainer) -> dict[str, np.ndarray]:
    """Its weights, put together from all ranks."""
    return {name: p.full_tensor().asnumpy() if isinstance(p, md.DTensor) else p.asnumpy()
            for net in trainer.model for name, p in net.parameters_and_names()}


def batches(world, trainer) -> list[list[np.ndarray]]:
    """Of each step, the rows that its data set gives all ranks, column by column."""
    own = [[row[name].asnumpy() for name in COLUMNS[:2]] for row in
           trainer.train_dataset.create_dict_iterator(output_numpy=False, num_epochs=1)]
    parts = everyone(world, own)[::world.size // trainer.config.parallelism.data_parallel]
    each = trainer.num_accumulation_steps
    steps = [[np.concatenate([part[i][column] for part in parts for i in range(at, at + each)]) for column in range(2)]
             for at in range(0, each * STEPS, each)]
    rows = {row.tobytes() for ids, _ in steps for row in ids}
    assert len(rows) == STEPS * GLOBAL == sum(len(ids) for ids, _ in steps)  # no row is met twice
    return steps


def one_device(config, start: dict, steps: list):
    """Losses, norms and weights of its model and optimizer on one device."""
    from mindformers.pynative.trainer.utils import _build_lr_scheduler, _build_optimizer
    net = made()
    for name, p in net.parameters_and_names():
        p.set_data(Tensor(start[name]))
    net.set_train(True)
    optimizer = _build_optimizer(config.optimizer, [net], _build_lr_scheduler(config.lr_scheduler, STEPS))
    params = list(optimizer.parameters)
    losses, norms = [], []
    for ids, labels in steps:
        loss, grads = ms.value_and_grad(lambda ids=ids, labels=labels: loss_of(net, ids, labels), None, params)()
        norm = float(np.sqrt(sum(np.square(g.asnumpy().astype(np.float64)).sum() for g in grads)))
        scale = min(1.0, NORM / (norm + 1e-6))
        optimizer(tuple(g * scale for g in grads))
        losses.append(float(loss.asnumpy()))
        norms.append(norm)
    return losses, norms, {name: p.asnumpy() for name, p in net.parameters_and_names()}


def trained(config: str, checkpoint: str | None = None):
    """Its Trainer after its run, what it told, the weights that it began with, and its data."""
    from mindformers.pynative.trainer.trainer import Trainer
    watch = watched()
    try:
        trainer = Trainer(config, callbacks=[watch])
        with no_grad():
            start = whole(trainer)
        trainer.train(checkpoint)
    finally:
        enable_mindspore_backward_compat().disable()  # it turns it on for good
    return trainer, watch, start


def is_one_devices(world, optimizer: dict, **parallelism) -> None:
    records = everyone(world, written(Path(tempfile.mkdtemp())) if world.rank == 0 else "")[0]
    config = written_yaml(Path(tempfile.mkdtemp()), records, optimizer, **parallelism)
    with counted() as count:
        trainer, watch, start = trained(config)
    dims = trainer.config.parallelism
    assert sum(n for (kind, _), n in count.items() if kind == "reduce_scatter") >= 5 * STEPS, count
    steps = batches(world, trainer)
    losses, norms, wanted = one_device(trainer.config, start, steps)
    what = (optimizer["type"], dims.data_parallel, dims.tensor_parallel)
    assert min(norms) > NORM, norms  # each step is clipped
    assert np.allclose(watch.losses, losses, rtol=TOLERANCE, atol=0), (what, watch.losses, losses)
    assert np.allclose(watch.norms, norms, rtol=TOLERANCE, atol=0), (what, watch.norms, norms)
    for name, p in trainer.model[0].parameters_and_names():
        equal(p, Tensor(wanted[name]), f"{what}: {name}", TOLERANCE)


ADAMW = {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.1}


@case(2, timeout=400)
def its_trainer_runs_twenty_steps_of_its_yaml(world):
    wheel()
    is_one_devices(world, ADAMW)
    is_one_devices(world, ADAMW, tensor_parallel=2, sequence_parallel=True)
