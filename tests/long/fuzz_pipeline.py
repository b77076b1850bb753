# SPDX-License-Identifier: Apache-2.0
"""Random pipelines on real ranks against one device; ends with a line of JSON, fails if anything is wrong.

    python -m tests.long.fuzz_pipeline [--ranks 2] [--first 0] [--programs 1000] [--minutes 10]
    python -m tests.long.fuzz_pipeline --seeds 137,1173                these again

Programs: `tests/fuzz/pipelines.py`. Compared are losses, every gradient, norms, and at the end parameters and buffers. What
is planted in a forward or a backward has to reach all ranks, and the next step to be right. On four ranks most programs have
data or tensor parallelism beside the pipeline. Each failing seed is printed with its program.
"""
import sys

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

import ms_dtensor as md
from ms_dtensor.errors import CommError
from ms_dtensor.optim import clip_grad_norm_
from ms_dtensor.pipeline import PipelineStage, pipeline
from tests.fuzz.judged import agreed, differing, main
from tests.fuzz.pipelines import Link, Loss, Net, Planted, Program, batch, change, generate, optimizer_of, refer, zeros
from tests.pipeline.cases_run import KINDS, style_of
from tests.support import array

BAR = 1e-9


def lay_out(program: Program, stage: PipelineStage, mesh: md.DeviceMesh) -> None:
    module, how = stage.module, program.beside
    links = {i: link for i, link in enumerate(module.layers) if isinstance(link, Link)}
    if how == "tp" or program.grid:
        md.parallelize_module(module, mesh["tp" if program.grid else "dp"], {
            f"layers.{i}.{name}": style(use_local_output=how == "tp")
            for i, kind in enumerate(program.links) if kind == "mlp"
            for name, style in (("up", md.ColwiseParallel), ("down", md.RowwiseParallel))})
    policy = md.MixedPrecisionPolicy(reduce_dtype=ms.float64 if program.wide else None)
    for i, keeps in program.recomputed.items():
        if i in links:
            md.checkpoint_wrapper(links[i], save=[mint.tanh] if keeps else None)
    if how in ("fully_shard", "kept"):
        for cell in (*(links[i] for i in program.inner if i in links and list(links[i].get_parameters())), module):
            md.fully_shard(cell, mesh=mesh["dp"], reshard_after_forward=how == "fully_shard", mp_policy=policy)
    elif how in ("replicate", "zero1"):
        md.replicate(module, mesh=mesh["dp"], zero1=how == "zero1", mp_policy=policy, bucket_mb=0 if program.wide else 25)


class Judge:
    """Runs a program on the ranks, and notes what differs from one device."""

    def __init__(self, world, program: Program, want: list):
        self.world, self.program, self.off = world, program, list[str]()
        pp = 1 if program.grid else world.size // 2 if program.beside else world.size
        axes = {"pp": pp, "dp": 2, "tp": 2} if program.grid else {"pp": pp, "dp": 2} if program.beside else {"pp": pp}
        mesh = md.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        spread = program.share > 1
        self.mine = mesh["dp"].get_group().rank_index if spread else 0
        self.over, self.want = mesh["pp"], want
        kind, v = KINDS[program.schedule]
        stages = pipeline(Net(program), mesh["pp"], split=program.split, n_stages=pp * v, style=style_of(program.schedule))
        for stage in stages:
            lay_out(program, stage, mesh)
        loss_fn = Loss()
        loss_fn = md.replicate(loss_fn, mesh=mesh["dp"]) if spread else loss_fn
        self.schedule = kind(stages, program.m, loss_fn)
        self.others = {m: KINDS[program.other][0](stages, m, loss_fn)
                       for m in (step.m for step in program.steps if step.kind == "other")}
        self.saved = self.state()
        self.updated = self.schedule.params
        self.optimizer = optimizer_of(program, self.updated)
        self.modules = [stage.module for stage in stages]
        self.names = {id(p): n for module in self.modules for n, p in module.parameters_and_names()}

    def same(self, got, right, what: str) -> None:
        self.off += differing(got, right, what, BAR)

    def state(self) -> dict[str, Tensor]:
        return {name: x * 1 for name, x in self.schedule.state_dict().items()}

    def run(self) -> list[str]:
        for number, (step, right) in enumerate(zip(self.program.steps, self.want)):
            if step.kind in ("freeze", "write"):
                for module in self.modules:
                    change(self.program, module, step)
                continue
            if step.kind == "save":
                self.saved = self.state()
            if step.kind == "load":
                self.schedule.load_state_dict(self.saved)
            if step.kind in ("save", "load"):
                continue
            *given, weights = batch(self.program, step)
            rows = slice(self.mine * step.rows, (self.mine + 1) * step.rows)
            x, t, mask = (None if a is None else Tensor(a[rows]) for a in given)
            self.step(number, step, right, x, {"target": t, "weights": weights, **({} if mask is None else {"mask": mask})})
            if step.kind != "raise" and any(agreed(self.world, "; ".join(self.off))):
                return self.off
        for name, p in ((n, p) for module in self.modules for n, p in module.parameters_and_names()):
            if name in self.want[-1]:
                self.same(array(p), self.want[-1][name], f"at the end: {name}")
        return self.off

    def step(self, number: int, step, right, x, given) -> None:
        if step.kind == "eval":
            self.same(array(self.schedule.eval(x, **given)), right[0], f"step {number}: evaluation")
        elif step.kind == "raise":
            self.raising(number, step, x, given)
        else:
            self.train(self.others[step.m] if step.kind == "other" else self.schedule, number, right, x, given)

    def raising(self, number: int, step, x, given) -> None:
        here = [link for module in self.modules if isinstance(link := module.layers[step.which], Link)]
        for link in here:
            link.fails = step.where
        try:
            self.schedule.step(x, **given)
            self.off.append(f"step {number}: nothing was raised")
        except (Planted, CommError) as e:
            if here and not isinstance(e, Planted) and not self.program.beside:  # else a neighbour was first
                self.off.append(f"step {number}: {type(e).__name__} where it was raised")
        for link in here:
            link.fails = ""

    def train(self, schedule, number: int, right, x, given) -> None:
        loss, grads = schedule.step(x, **given)
        params, program = schedule.params, self.program
        self.same(array(loss), right[0], f"step {number}: loss")
        if program.clips:
            norm = clip_grad_norm_(zip(params, grads), .5, over=self.over)
            self.same(norm, right[2], f"step {number}: norm")
        firsts = {f"layers.{b}.up.weight": f"layers.{a}.up.weight" for a, b in program.ties} | (
            {"head.weight": "embed.w"} if program.tied else {})
        for p, g in zip(params, grads, strict=True):
            name = firsts.get(self.names[id(p)], self.names[id(p)])
            self.same(array(g), right[1].get(name, np.zeros(p.shape)), f"step {number}: gradient of {name}")
        if self.optimizer is not None:
            of = {id(p): g for p, g in zip(params, grads)}
            self.optimizer(tuple(of[id(p)] if id(p) in of else zeros(p) for p in self.updated))


if __name__ == "__main__":
    sys.exit(main(__doc__, "tests.long.fuzz_pipeline", 2, 1000, generate, refer, Judge))
