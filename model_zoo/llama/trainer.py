# SPDX-License-Identifier: Apache-2.0
"""Model, data, optimizer and mesh together: one training step, on one device or on many.

Not here: printing, files, command line (`train.py`). The one invariant: for given `Config` sections model, data, optim
and train, `step(i)` computes the same numbers on every mesh, up to the rounding of sums taken in another order.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.nn.utils import no_init_parameters

from ms_dtensor import (
    DeviceMesh,
    DTensor,
    MixedPrecisionPolicy,
    comm,
    loss_parallel,
    manual_seed,
    update_expert_bias,
    value_and_grad,
)
from ms_dtensor.checkpoint import RandomState
from ms_dtensor.errors import ConfigError
from ms_dtensor.internals.target import on_cpu
from ms_dtensor.optim import AdamW, clip_grad_norm_, cosine, wsd
from ms_dtensor.parallel.sharding.call import held_back, units_of
from ms_dtensor.pipeline import (
    PerMicrobatch,
    Schedule,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBH1,
    ScheduleZBVZeroBubble,
    pipeline,
    simulate,
)
from ms_dtensor.tools.guard import Guard, Verdict, stopped

from . import hf, kept, logits, lora
from .at_once import compile_products
from .config import VEE, Config, OptimConfig, joins
from .configio import model_values
from .cpu import compile_attention
from .data import Text, stream_values
from .joined import Apart, parts_of
from .model import Llama, cross_entropy, init_weights
from .parallelize import data_axes, here, own_list, own_rows, parallelize, stage_mesh, token_axes

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B, "zbh1": ScheduleZBH1,
             "zbv": ScheduleZBVZeroBubble, "dualpipev": ScheduleDualPipeV}


def schedule(cfg: OptimConfig, steps: int) -> Callable[[int], float]:
    """The factor of the learning rate by step, in a run of so many; one may end while it warms up."""
    steps = max(steps, cfg.warmup)
    if cfg.schedule == "constant":
        return wsd(steps, decay=0, warmup=cfg.warmup, low=1.0)
    return cosine(steps, warmup=cfg.warmup, low=cfg.min_lr_ratio)


class StepResult(NamedTuple):
    loss: float
    """global mean, before this step's update"""
    grad_norm: float
    """norm of the whole gradient, before clipping"""
    lr: float
    """0 if the guard left the update out"""
    verdict: Verdict = Verdict("go")
    loads: np.ndarray | None = None
    """i64[layers, experts]: how many choices each expert computed; None without experts"""
    logits: np.ndarray | None = None
    """float64[layers, heads]: the largest of attention, before this step's update; None if they are not watched"""


class Trainer:
    """A model in training.

    Args:
        cfg: a checked configuration.
        text: tokens; every rank holds all of them and draws the same global batches.
        mesh: of `parallelize.make_mesh`, or None for plain tensors on one device.
        initialize: fills the model's weights before it is laid out; by default `init_weights` with train.seed, or nothing
            where train.init_hf says whose weights to begin with.

    Attributes:
        sizes: elements of all parameters of the model, and of those that are trained.
        stages: of a pipeline its schedule, whose stages have the model's cells; else None.
    """

    def __init__(self, cfg: Config, text: Text | None, mesh: DeviceMesh | None,
                 initialize: Callable[[Llama], None] | None = None):
        _check_device(cfg, mesh)
        cfg = replace(cfg, train=replace(cfg.train, qkv_concat=joins(cfg, not on_cpu())))
        ms.set_seed(cfg.train.seed)  # whatever is to be drawn is drawn alike on every rank, and again after a restart
        ms.manual_seed(cfg.train.seed)
        manual_seed(cfg.train.seed)
        self.cfg, self.text, self.all_ranks = cfg, text, mesh
        self.count = cfg.train.micro_batches  # of the batch at work
        self.mesh = None if mesh is None else self.laid_out_over(mesh)
        with no_init_parameters() if mesh is not None and initialize is None else nullcontext():  # never whole on a rank
            self.model = Llama(cfg.model, joins(cfg))
        if initialize is not None:
            initialize(self.model)
        if cfg.lora is not None:
            lora.add(self.model, cfg.lora, cfg.train.seed)
        if cfg.train.compile and on_cpu():
            compile_attention(self.model, cfg.model)
            if cfg.parallel.tp == 1 and cfg.lora is None and not cfg.train.recompute:  # these find single layers
                compile_products(self.model)
        policy = MixedPrecisionPolicy(ms.bfloat16, ms.float32) if cfg.train.dtype == "bfloat16" else None
        self.sizes = tuple(sum(int(p.size) for p in some) for some in (self.model.get_parameters(),
                                                                       self.model.trainable_params()))
        self.over = mesh["pp"] if cfg.parallel.pp > 1 else None
        stages = [] if self.over is None else pipeline(
            self.model, self.over, split=cfg.parallel.pp_split or "cost", n_stages=cfg.parallel.stages,
            style="v" if cfg.parallel.pp_schedule in VEE else "loop")
        models = [stage.module for stage in stages] or [self.model]
        for model in models:
            self._lay_out(model, policy)
            if initialize is None and cfg.train.init_hf is None:
                with lora.without_adapters(model):
                    init_weights(model, cfg.train.seed)
        if initialize is None and cfg.train.init_hf is not None:  # each rank its shards
            with lora.without_adapters(*models):
                hf.load(stages or self.model, cfg.train.init_hf, self.over)
        self.joined = parts_of(*models)
        self.watched = logits.watch(self.model) if cfg.optim.qk_clip else []
        if cfg.train.recompute:
            for model in models:
                kept.install(cfg, model.layers)
        self.stages: Schedule | None = None
        if stages:
            del self.model  # other ranks have its other cells
            self.stages = SCHEDULES[cfg.parallel.pp_schedule](stages, cfg.train.micro_batches, self._of_last_stage)
        self.params = tuple(self.model.trainable_params() if self.stages is None else self.stages.params)
        o = cfg.optim
        # None: this rank's stages have no adapter
        self.optimizer = AdamW(self.params, o.lr, o.betas, o.eps, o.weight_decay, offload=o.offload) if self.params else None
        self.schedule = schedule(o, cfg.train.steps)
        g = cfg.guard
        self.guard = Guard(g.nan, g.spike, g.on_spike, g.window, g.patience)
        make = ms.value_and_grad if mesh is None else value_and_grad
        self.mixed = cfg.model.experts is not None
        self.value_and_grad = make(self._loss_and_loads if self.mixed else self.loss, None, self.params, has_aux=self.mixed)
        self.loads: np.ndarray | None = None  # of the last step
        self._loads: list[Tensor] = []  # of a step's micro-batches, on the last stage of a pipeline

    def laid_out_over(self, mesh: DeviceMesh) -> DeviceMesh | None:
        """The ranks of this one's stage; None: it is one alone, whose tensors are plain, as on one device.

        DTensors of one rank take some 3 % of a small model's step on a CPU, where 16 bits need them.
        """
        of_stage, narrow = stage_mesh(mesh), self.cfg.train.dtype != "float32"
        return None if self.cfg.parallel.pp > 1 and of_stage.size() == 1 and not (on_cpu() and narrow) else of_stage

    def _lay_out(self, model: Llama, policy: MixedPrecisionPolicy | None) -> None:
        if self.mesh is not None:
            parallelize(model, self.mesh, self.cfg.parallel, policy)
        elif policy is not None:
            policy.apply(model)

    def loss(self, ids: Tensor, labels: Tensor, *places: Tensor) -> Tensor:
        """A micro-batch's summand of the mean over the global batch."""
        return self._share(self.model(ids, *places), labels)

    def _loss_and_loads(self, ids: Tensor, labels: Tensor, *places: Tensor) -> tuple[Tensor, Tensor]:
        """It, and the loads of the experts: a result, so that nothing which runs again counts twice."""
        out = self.model(ids, *places)
        return self._share(out, labels), out[2]

    def _share(self, out: Tensor | tuple[Tensor, Tensor, Tensor], labels: Tensor) -> Tensor:
        loss = self._mean(out, labels)
        return loss if self.count == 1 else loss / self.count

    def _mean(self, out: Tensor | tuple[Tensor, Tensor, Tensor], labels: Tensor) -> Tensor:
        """The loss of what the model makes of a micro-batch."""
        logits, balance, _ = out if isinstance(out, tuple) else (out, None, None)
        if self.mesh is not None and self.cfg.parallel.loss_parallel and self.cfg.parallel.tp > 1:
            loss = loss_parallel(logits, labels.reshape(-1))
        else:
            loss = cross_entropy(logits, labels)
        if balance is not None:
            loss = loss + self.cfg.model.experts.balance * balance
        return loss

    def _of_last_stage(self, out: Tensor | tuple[Tensor, Tensor, Tensor], labels: Tensor) -> Tensor:
        """The loss of a micro-batch of a pipeline, where loads are no result."""
        if isinstance(out, tuple):
            self._loads.append(out[2])
        return self._mean(out, labels)

    def _told_by_last_stage(self) -> np.ndarray:
        """The loads of a step, which the stages have handed on to the last one, on all ranks."""
        group, last, total = self.stages.group, self.stages.actions.owner[-1], None
        if self._loads:
            rows = sum(self._loads[1:], self._loads[0])
            total = self.read(rows.full_tensor() if isinstance(rows, DTensor) else rows)
        return group.broadcast_object(total, group.ranks[last])

    def parts(self, *batch: np.ndarray) -> Iterator[tuple[Tensor, ...]]:
        """This rank's parts of the micro-batches of a global batch, which is shorter while it grows."""
        self.count = max(1, len(batch[0]) * self.cfg.train.micro_batches // self.cfg.train.batch)
        for rows in zip(*(np.split(x, self.count) for x in batch), strict=True):
            if self.cfg.parallel.cp > 1:
                yield own_list(self.mesh, self.cfg.parallel, self.cfg.model.sliding_window, *rows)
            else:
                yield tuple(own_rows(x, self.mesh) for x in rows)

    def gradients(self, *batch: np.ndarray) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss and gradients (in the order of `params`) of a global batch."""
        if self.stages is not None:
            ids, how = self._for_stages(*batch)
            self._loads = []
            loss, grads = self.stages.step(ids, **how)
            if self.mixed:
                self.loads = self._told_by_last_stage()
            return loss, grads
        loss, loads, grads = None, None, dict[int, Tensor]()
        for i, part in enumerate(self.parts(*batch), 1):
            if self.mesh is not None and token_axes(self.mesh).size() > 1:  # summed up before they are reduced
                self.model.set_requires_gradient_sync(i == self.count)
            late = held_back(units_of(self.model))
            one, mine = self.value_and_grad(*part)
            one, load = one if self.mixed else (one, 0)
            loss, loads = (one, load) if loss is None else (loss + one, loads + load)
            for k, (p, grad) in enumerate(zip(self.params, mine, strict=True)):
                if id(p) not in late:  # else zeros: the last micro-batch's gradient has all
                    grads[k] = grads[k] + grad if k in grads else grad
            del mine, grad  # the next micro-batch has none beside the sums
        if self.mixed:  # one all-reduce for all layers
            self.loads = self.read(loads.full_tensor() if isinstance(loads, DTensor) else loads)
        return loss, tuple(grads[k] for k in range(len(self.params)))

    def read(self, x: Tensor) -> np.ndarray:
        """The values of a plain tensor; a dry run, which has none, says others."""
        return x.asnumpy()

    def _for_stages(self, ids: np.ndarray, labels: np.ndarray, *places: np.ndarray) -> tuple[Any, dict[str, Any]]:
        """A global batch as a schedule takes it: it cuts each rank's rows, so they lie in the order of `parts`.

        Lists that ranks share are cut here, each in an order of its own.
        """
        if self.cfg.parallel.cp > 1:
            lists, targets, orders = map(PerMicrobatch, zip(*self.parts(ids, labels, *places), strict=True))
            return lists, {"target": targets, "places": orders}

        def own(rows: np.ndarray) -> Tensor:
            ranks = 1 if self.mesh is None else data_axes(self.mesh).size()
            parts = rows.reshape(self.cfg.train.micro_batches, ranks, -1, rows.shape[1])
            return own_rows(parts.swapaxes(0, 1).reshape(rows.shape), self.mesh)
        how = {"target": own(labels), "length": ids.shape[1]}
        return own(ids), how | ({"places": own(places[0])} if places else {})

    def update(self, grads: tuple[Tensor, ...], step: int,
               leave_out: Callable[[float | Tensor], bool] = lambda norm: False) -> tuple[float | Tensor, float]:
        """Clips, steps the optimizer; the gradient norm and the learning rate used: 0 if by that norm it is left out."""
        o = self.cfg.optim
        norm = clip_grad_norm_(zip(self.params, grads, strict=True), o.clip_norm or float("inf"), over=self.over)
        if leave_out(norm):
            return norm, 0.0
        lr = o.lr * self.schedule(step)
        if self.optimizer is not None:
            self.optimizer.lr = lr
            self.optimizer(grads)
        if self.watched:
            logits.clip(self.model, o.qk_clip)
        self._move_biases()
        return norm, lr

    def _move_biases(self) -> None:
        """Of experts, by the loads of the step."""
        experts = self.cfg.model.experts
        if self.loads is None or not experts.bias_rate:
            return
        models = [self.model] if self.stages is None else [stage.module for stage in self.stages.stages.values()]
        moved = [(layer.feed_forward.expert_bias, i - experts.dense_layers) for model in models
                 for i, layer in enumerate(model.layers) if here([layer]) and layer.mixed]
        for bias, row in moved:
            new = update_expert_bias(bias, Tensor(self.loads[row]), experts.bias_rate)
            bias.set_data(Tensor(self.read(new.to_local() if isinstance(new, DTensor) else new)))

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """Inputs and labels of the global batch of a step, and where documents count, each token's place in its own."""
        t = self.cfg.train
        return self.text.batch(t.seed, step, t.rows_at(step), t.seq)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds. Batches are a function of the text, the seed and the step, which a checkpoint knows."""
        told = {"model": self.stages or self.model} | ({} if self.optimizer is None else {"optimizer": self.optimizer})
        if self.joined:
            told = {key: Apart(what, self.joined) for key, what in told.items()}
        return {**told, "data": stream_values(self.cfg.train, self.text),
                "random": RandomState(), "config": model_values(self.cfg)}

    def step(self, step: int) -> StepResult:
        """Forward, backward and update number `step` (from 0).

        Raises:
            Diverged: the guard ends the run.
        """
        for attention in self.watched:  # evaluations are no step's
            attention.largest = None
        loss, grads = self.gradients(*self.batch(step))
        known: list[tuple[float, float, Verdict]] = []  # what a device is asked for, once

        def judge(norm: float | Tensor) -> str:
            numbers = float(loss), float(norm)
            verdict = self.guard.judge(step, *numbers)
            known.append((*numbers, self._agreed(verdict) if self.guard.skips else verdict))
            return known[0][2].action

        if self.guard.skips:  # a device is waited for before the update
            _, lr = self.update(grads, step, lambda norm: judge(norm) in ("skip", "stop"))
        else:
            norm, lr = self.update(grads, step)
            judge(norm)
        (loss_now, norm_now, verdict), = known
        if verdict.action == "stop":
            raise stopped(verdict.reason)
        seen = np.stack([attention.largest for attention in self.watched]) if self.watched else None
        return StepResult(loss_now, norm_now, lr, verdict, self.loads, seen)

    def _agreed(self, verdict: Verdict) -> Verdict:
        """Rank 0's: whether a step is left out may not hang on the last bit of a sum."""
        if self.all_ranks is None:
            return verdict
        ranks = self.all_ranks.rank_list
        return Verdict(*comm.group(ranks).broadcast_object(tuple(verdict), ranks[0]))

    def bubble(self) -> float | None:
        """The share of a step in which a rank waits for other stages, if they are all alike; by simulation."""
        if self.stages is None:
            return None
        timeline = simulate(self.stages.actions)
        return sum(timeline.idle) / (len(timeline.idle) * timeline.span)

    def held_out_loss(self) -> float:
        """Mean loss on fixed held-out batches."""
        t = self.cfg.train
        batches = (self.text.held_out_batch(i, t.eval_batches, t.batch, t.seq) for i in range(t.eval_batches))
        if self.stages is not None:
            return sum(float(self.stages.eval(ids, **how)) for ids, how in
                       (self._for_stages(*batch) for batch in batches)) / t.eval_batches
        return sum(float(self.loss(*part)) for batch in batches for part in self.parts(*batch)) / t.eval_batches


def _check_device(cfg: Config, mesh: DeviceMesh | None) -> None:
    """What a kind of device cannot run: its fused attention takes 16 bits only, and a CPU has no other kernels for them.

    Raises:
        ConfigError: on every rank alike, before anything is made.
    """
    dtype, width = cfg.train.dtype, cfg.model.head_dim
    if on_cpu() and dtype != "float32" and mesh is None:
        raise ConfigError(f"For 'Trainer', a CPU cannot compute with plain tensors of {dtype}.", f"train.dtype = {dtype}",
                          "MindSpore has kernels for float32; DTensors of 16 bits are computed in that.",
                          "a mesh, of one rank if need be: init_device_mesh('cpu', (1, 1), mesh_dim_names=('dp', 'tp'))")
    if not on_cpu() and (dtype == "float32" or width % 16):
        raise ConfigError("For 'Trainer', fused attention cannot run this model.",
                          f"train.dtype = {dtype}, model.dim / model.n_heads = {width}",
                          "It takes 16-bit floats, and heads whose width is a multiple of 16.",
                          ["--train.dtype bfloat16", "a --model.n_heads that makes wider heads"])
