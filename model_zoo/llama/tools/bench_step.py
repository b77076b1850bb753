# SPDX-License-Identifier: Apache-2.0
"""A Llama training step in one layout: tokens a second and device, TFLOP/s and device, share of the peak (MFU).

Forward, backward, clipping and AdamW of the model zoo's `Trainer`, on random tokens. A step ends when the loss is a number
on the host. TFLOP/s count the model's operations, 6 a parameter and causal attention, not what recomputation repeats; "6N"
leaves attention out, as published figures do. Scaling is this benchmark on growing worlds.
"""
from __future__ import annotations

import statistics
import time

import numpy as np

from model_zoo.llama.config import Config, ModelConfig, OptimConfig, ParallelConfig, RopeScaling, TrainConfig, check
from model_zoo.llama.parallelize import make_mesh
from model_zoo.llama.trainer import Trainer
from ms_dtensor.errors import ConfigError
from ms_dtensor.tools.bench.arithmetic import digits, flops_per_token, peak_of, share
from ms_dtensor.tools.bench.world import Bench


def model_config(sizes: dict) -> ModelConfig:
    scaling = sizes.get("rope_scaling")
    return ModelConfig(**{**sizes, "rope_scaling": RopeScaling(**scaling) if scaling else None})


def config(options: dict) -> Config:
    train = dict(options["train"])
    return Config(model=model_config(options["model"]), parallel=ParallelConfig(**options["layout"]),
                  train=TrainConfig(**train, steps=options["steps"]), optim=OptimConfig(lr=1e-4))


def batch(cfg: Config, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens, the same on every rank."""
    t = cfg.train
    tokens = np.random.default_rng(step).integers(0, cfg.model.vocab_size, (t.batch, t.seq + 1)).astype(np.int32)
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def run(bench: Bench, options: dict) -> list[dict]:
    """Options: name, model, layout, train, steps (after two that warm up), scaling (weak, strong or nothing)."""
    cfg = config(options)
    p, t, m = cfg.parallel, cfg.train, cfg.model
    base = {"model": options["name"], "ranks": bench.size, "layout": options["layout"], "batch": t.batch, "seq": t.seq,
            "micro_batches": t.micro_batches, "recompute": t.recompute, "type": t.dtype, "scaling": options.get("scaling")}
    try:
        check(cfg, bench.size)
    except ConfigError as error:  # on all ranks alike, before anything is communicated
        return [{**base, "refused": str(error).split("\n")[0]}]
    trainer = Trainer(cfg, None, make_mesh(bench.device, p))
    parameters = sum(int(x.size) for x in trainer.params)
    seconds, losses = [], []
    for step in range(options["steps"] + 2):
        bench.everybody.barrier()
        start = time.perf_counter()
        loss, grads = trainer.gradients(*batch(cfg, step))
        trainer.update(grads, step)
        losses.append(float(loss))
        del loss, grads
        seconds.append(bench.slowest(time.perf_counter() - start))
    step_s = statistics.median(seconds[2:])
    speed = t.batch * t.seq / step_s / bench.size
    six = flops_per_token(parameters) * speed / 1e12
    every = flops_per_token(parameters, m.n_layers, t.seq, m.n_heads * m.head_dim) * speed / 1e12
    peak, memory = peak_of(bench.name, t.dtype, bench.peaks), bench.memory()
    mfu = share(every, peak)
    return [{**base, "parameters": parameters, "step_s": round(step_s, 5), "first_step_s": round(seconds[0], 2),
             "tokens_s_p": digits(speed), "samples_s": digits(t.batch / step_s), "tflops_6n": digits(six),
             "tflops": digits(every), "peak": peak, "mfu": None if mfu is None else digits(mfu),
             "memory_gib": None if memory is None else round(memory / 2**30, 2),
             "first_loss": round(losses[0], 4), "last_loss": round(losses[-1], 4)}]
