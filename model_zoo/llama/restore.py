# SPDX-License-Identifier: Apache-2.0
"""A trained model to use: of a run of `train.py`, of one checkpoint, or of a Hugging Face folder; on any mesh.

No optimizer, no data. What `generate.py` and `evaluate.py` begin with.
"""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ms_dtensor.errors import ConfigError

from .config import Config, ParallelConfig, check, checkpoint_folder
from .configio import check_same_model, held_values, load


class Restored(NamedTuple):
    cfg: Config
    model: Any
    """a Llama; of a pipeline a `Schedule` of one micro-batch that has no loss"""
    mesh: Any
    """of a pipeline that of this rank's stage; None: plain tensors"""
    source: str


def source_config(source: str | Path, options: list[str] = ()) -> tuple[Config, Path, bool]:
    """The configuration of a run's folder (`config.yaml`) or a Hugging Face folder (`config.json`), where its weights are,
    and whether they are Hugging Face's."""
    root = Path(source)
    if (root / "config.json").is_file():
        cfg, _ = load(["--train.init_hf", str(root), *options])
        return cfg, root, True
    for folder in (root, *list(root.parents)[:2]):  # a run, its checkpoints, one of these
        if (folder / "config.yaml").is_file():
            cfg, _ = load(["--config", str(folder / "config.yaml"), *options])
            return cfg, checkpoint_folder(cfg, folder) if folder == root else root, False
    raise ConfigError(f"For '{source}', there is no model.", "neither config.yaml nor config.json",
                      "It is train.log_dir of a run that saved, a checkpoint of one, or a Hugging Face folder.",
                      "train with --checkpoint.interval, or download a model's folder")


def restore(source: str | Path, device: str, world: int, *, tp: int | None = None, pp: int = 1,
            options: list[str] = ()) -> Restored:
    """The model with its weights, laid out over `world` ranks: pp x tp of them to a copy; tp as many as divide the heads."""
    from contextlib import nullcontext

    import mindspore as ms
    from mindspore.nn.utils import no_init_parameters

    from ms_dtensor import MixedPrecisionPolicy
    from ms_dtensor.checkpoint import load as load_checkpoint
    from ms_dtensor.checkpoint.folder import find
    from ms_dtensor.checkpoint.reader import read_index
    from ms_dtensor.pipeline import ScheduleGPipe, pipeline

    from . import hf, lora
    from .model import Llama
    from .parallelize import make_mesh, parallelize, stage_mesh

    cfg, weights, published = source_config(source, options)
    m = cfg.model
    held = {} if published else held_values(read_index(find(weights)).values, "config")
    if held:
        check_same_model(cfg, held, str(weights))
    for name, n, left in (("pp", pp, world), ("tp", tp or 1, world // max(pp, 1))):
        if n < 1 or left % n:
            raise ConfigError(f"For '{source}', a copy of the model over --{name} = {n} ranks does not fit.",
                              f"{world} process{'es' * (world > 1)}" + f", --pp {pp}" * (pp > 1),
                              "The processes are a multiple of --pp times --tp.",
                              [f"msrun --worker_num={max(n, 1)} --local_worker_num={max(n, 1)} --join=True <this command>",
                               f"no --{name}"])
    degree = tp or next(t for t in range(world // pp, 0, -1) if world // pp % t == 0 == m.n_kv_heads % t)
    parallel = ParallelConfig(world // pp // degree, degree, loss_parallel=cfg.parallel.loss_parallel, pp=pp)
    cfg = replace(cfg, parallel=parallel, train=replace(cfg.train, batch=parallel.dp, micro_batches=1))
    check(cfg, world)
    mesh = make_mesh(device, parallel) if world > 1 or cfg.train.dtype != "float32" else None
    with no_init_parameters() if pp > 1 else nullcontext():  # a rank never has other stages
        model: Any = Llama(m)
    if cfg.lora is not None:
        lora.add(model, cfg.lora, 0)
    policy = MixedPrecisionPolicy(ms.bfloat16, ms.float32) if cfg.train.dtype == "bfloat16" else None
    over = mesh["pp"] if pp > 1 else None
    stages = [] if over is None else pipeline(model, over)
    for part in [stage.module for stage in stages] or [model]:
        if mesh is not None:
            parallelize(part, stage_mesh(mesh), parallel, policy)
        part.set_train(False)
    if stages:
        model = ScheduleGPipe(stages, 1)
    if published:
        hf.load(stages or model, weights, over)
    else:
        done = load_checkpoint({"model": model}, weights, strict=False, over=over)
        if done.missing:
            raise ConfigError(f"For '{weights}', the checkpoint is not this model's.",
                              f"missing: {', '.join(done.missing[:5])}",
                              "All parameters are in it.", "the config.yaml of the run that saved it")
        weights = done.path
    return Restored(cfg, model, mesh and stage_mesh(mesh), str(weights))
