# SPDX-License-Identifier: Apache-2.0
"""Random models with context and expert parallelism on real ranks against one device; ends with a line of JSON.

    python -m tests.long.fuzz_tokens [--ranks 2] [--first 0] [--programs 2000] [--minutes 10]
    python -m tests.long.fuzz_tokens --seeds 137,1173                  these again

Programs: `tests/fuzz/tokens.py`. Compared are losses, gradients of parameters and inputs, norms, and at the end parameters
and the routers' biases. What is raised on all ranks has to leave nothing behind. On four ranks data, tensor and sequence
parallelism or a pipeline lie beside. Each failing seed is printed with its program; it fails if there is any.
"""
import sys

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor import Replicate, Shard
from ms_dtensor.errors import DTensorError
from ms_dtensor.optim import clip_grad_norm_
from ms_dtensor.pipeline import PerMicrobatch, Schedule1F1B, pipeline
from tests.fuzz import tokens
from tests.fuzz.judged import agreed, differing, main
from tests.fuzz.tokens import Batch, Block, Loss, Net, Planted, Program, Step, gradient, refer
from tests.support import array

CUTTING = ("fsdp", "kept", "hsdp")
BARS = {"float64": 1e-9, "float32": 1e-3, "bfloat16": .2}  # rounding grows from layer to layer


def flat(mesh: md.DeviceMesh, names: list[str]) -> md.DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[tuple(names)].flatten("_".join(names))


class Core(nn.Cell):
    """Attention of rows, whose style takes the place of this."""

    def construct(self, q, k, v):
        raise AssertionError("the sequence is whole")


def attention(program: Program, layer, mesh: md.DeviceMesh):
    how = "ring" if layer.ring else "gather"
    if not layer.style:
        own = md.context_attention(mesh[tuple(program.shared)] if len(program.shared) > 1 else mesh[program.shared[0]], how)

        def run(q, k, v, batch):
            if layer.lies:
                q, k, v = (x.redistribute(placements=[Replicate() if a in program.shared else Shard(0)
                                                      for a in mesh.mesh_dim_names]) for x in (q, k, v))
            return own(q, k, v, batch.tokens, **layer.mask)
        return run
    axis = program.shared[0]
    core = md.ContextParallel(how, order=program.order, **layer.mask).apply(Core(), mesh[axis])

    def on_rows(q, k, v, batch):
        b, s, ranks = len(batch.one.documents[0]), batch.one.documents[0][0], program.ranks
        cut = {a: Shard(0) for a in program.cuts if a != axis} | {axis: Shard(1)} | (
            {"tp": Shard(2)} if "tp" in program.axes else {})
        rows = [md.DTensor.from_local(x.to_local().reshape(b, s // ranks, *x.to_local().shape[1:]), mesh, cut,
                                      shape=(b * program.parts, s, *x.shape[1:])) for x in (q, k, v)]
        y = core(*rows)
        return md.DTensor.from_local(y.to_local().reshape(b * s // ranks, *y.to_local().shape[2:]), mesh, q.placements,
                                     shape=(len(q), *y.shape[2:]))
    return on_rows


def lay_out(program: Program, net: nn.Cell, mesh: md.DeviceMesh) -> None:
    layers = [layer for layer in net.layers if isinstance(layer, Block)]
    data = mesh[tuple(program.cuts)] if program.wrap == "hsdp" else flat(mesh, program.cuts)
    for layer in layers:
        if layer.layer.kind == "attention":
            layer.core = attention(program, layer.layer, mesh)
    if "tp" in mesh.mesh_dim_names:
        columns, rows = md.ColwiseParallel(use_local_output=False), md.RowwiseParallel(use_local_output=False)
        plan = {"q": columns, "k": columns, "v": columns, "o": rows, "mlp.up": columns, "mlp.down": rows,
                "shared.up": columns, "shared.down": rows}
        for layer in layers:
            paths = {name for name, _ in layer.cells_and_names()}
            md.parallelize_module(layer, mesh["tp"], {path: style for path, style in plan.items() if path in paths})
    apart = []
    for layer in (layer for layer in layers if layer.layer.kind == "experts"):
        cell, over = layer.experts, [a for a in layer.layer.over if a in mesh.mesh_dim_names]
        rest = [a for a in program.cuts if a not in over]
        if over and "tp" not in mesh.mesh_dim_names and program.wrap:
            md.parallelize_module(cell, mesh[tuple(over)] if len(over) > 1 else mesh[over[0]], md.ExpertParallel())
        elif over or layer.layer.widths:
            lies = [a for a in mesh.mesh_dim_names if a in over or a == "tp" or not program.wrap]
            for name, dim in (("w1", 1), ("w2", 2), ("w3", 1)):
                p = cell._params[name]
                cut = [Shard(0) if a in over else Shard(dim) if a == "tp" and layer.layer.widths else Replicate()
                       for a in lies]
                whole = md.distribute_tensor(p, mesh[tuple(lies)] if len(lies) > 1 else mesh[lies[0]], cut)
                cell._params[name] = Parameter(whole, name=p.name, requires_grad=p.requires_grad)
        if over:
            apart.append(cell)
            if rest and program.wrap:
                wrap(program, cell, flat(mesh, rest))
    if "tp" in mesh.mesh_dim_names:
        md.distribute_module(net, mesh["tp"])
    elif not program.wrap:
        md.distribute_module(net, mesh)
    for layer in layers:
        if layer.layer.recomputed is not None:
            md.checkpoint_wrapper(layer.experts if layer.layer.inside else layer, save=layer.layer.recomputed or None)
        if layer.layer.unit and program.wrap in CUTTING:
            wrap(program, layer, data, apart)
    if program.wrap:
        wrap(program, net, data, apart)


def wrap(program: Program, cell: nn.Cell, mesh: md.DeviceMesh, apart=()) -> None:
    if program.wrap in CUTTING:
        md.fully_shard(cell, mesh=mesh, reshard_after_forward=program.wrap != "kept",
                       shard_placement_fn=lambda p: Shard(1) if len(p.shape) == 3 else None,
                       ignored_params=[p for one in apart for p in one.get_parameters()])
    else:
        md.replicate(cell, mesh=mesh, zero1=program.wrap == "zero1", ignored_modules=apart)


class Judge:
    """Runs a program on the ranks, and notes what differs from one device."""

    def __init__(self, world, program: Program, want: list[dict]):
        self.world, self.program, self.off = world, program, list[str]()
        self.want, self.schedule, self.loss_fn = want, None, Loss()
        mesh = md.init_device_mesh("cpu", tuple(program.axes.values()), mesh_dim_names=tuple(program.axes))
        self.over = mesh["pp"] if "pp" in program.axes else None
        self.mesh = mesh[tuple(a for a in program.axes if a != "pp")] if self.over is not None else mesh
        here, self.part = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate())), 0
        for a in program.cuts if program.parts > 1 else ():
            self.part = self.part * program.axes[a] + here[a] if a not in program.shared else self.part
        net = Net(program, tokens.DTYPES[program.dtype])
        self.modules = [net]
        if self.over is not None:
            stages = pipeline(net, self.over)
            self.modules = [stage.module for stage in stages]
        for module in self.modules:
            lay_out(program, module, self.mesh)
        if self.over is not None:
            self.schedule = Schedule1F1B(stages, len(program.steps[0].passes), self.loss_fn)
        self.updated = self.params()
        self.optimizer = tokens.optimizer_of(program, self.updated)
        self.names = {id(p): n for module in self.modules for n, p in module.parameters_and_names()}

    def params(self) -> list:
        return list(self.modules[0].trainable_params() if self.schedule is None else self.schedule.params)

    def same(self, got, right, what: str) -> None:
        got = got.astype(ms.float32) if isinstance(got, Tensor) and got.dtype == ms.bfloat16 else got
        self.off += differing(array(got), right, what, BARS[self.program.dtype])

    def run(self) -> list[str]:
        for number, (step, right) in enumerate(zip(self.program.steps, self.want)):
            self.step(number, step, right)
            if any(agreed(self.world, "; ".join(self.off))):
                return self.off
        for name, p in ((n, p) for module in self.modules for n, p in module.parameters_and_names()):
            self.same(p, self.want[-1][name], f"at the end: {name}")
        return self.off

    def batch(self, one) -> Batch:
        return Batch(self.program, one, self.mesh, self.part)

    def step(self, number: int, step: Step, right: dict) -> None:
        layer = next((layer for module in self.modules for i, layer in enumerate(module.layers)
                      if i == step.which and isinstance(layer, Block)), None)
        if step.kind == "freeze":
            if layer is not None:
                layer.freeze()
        elif step.kind == "eval":
            batch = self.batch(step.passes[0][0])
            with ms._no_grad():
                self.same(self.loss_fn(self.modules[0](batch.x, batch), batch), right["loss"], f"step {number}: evaluation")
        elif step.kind in ("raise", "nan"):
            self.raising(number, step, layer)
        else:
            self.train(number, step, right)

    def raising(self, number: int, step: Step, layer: Block) -> None:
        hook = None
        if step.kind == "nan":
            layer.spoils = True
        elif params := step.backward and layer.trainable_params():
            def refuse(grad):
                raise Planted(str(number))
            hook = params[0].register_hook(refuse)
        else:
            layer.raises = True
        try:
            self.gradients(step, self.params())
            self.off.append(f"step {number}: nothing was raised")
        except Planted:
            pass
        except DTensorError as e:
            if step.kind != "nan" or "NaN" not in str(e):
                raise
        layer.raises = layer.spoils = False
        if hook is not None:
            hook.remove()
        if hasattr(self.modules[0], "forget_gradients"):
            self.modules[0].forget_gradients()

    def gradients(self, step: Step, params: list) -> tuple[dict, list, list]:
        """Losses and gradients of inputs by name, those of parameters, and the loads of each gradient."""
        module, told, total, loads = self.modules[0], dict[str, Tensor](), [], []
        if self.schedule is not None:
            batches = [self.batch(one) for one, in step.passes]
            loss, grads = self.schedule.step(PerMicrobatch([b.x for b in batches]), batch=PerMicrobatch(batches),
                                             target=PerMicrobatch(batches))
            return {"loss": loss}, list(grads), loads
        for i, some in enumerate(step.passes):
            if self.program.wrap and not self.program.syncs:
                module.set_requires_gradient_sync(i == len(step.passes) - 1)
            (loss, mine), xs, grads = gradient(module, self.loss_fn, [self.batch(one) for one in some], step.inputs, params)
            told |= {f"loss {i}": loss} | {f"input {i}.{j}": g for j, g in enumerate(xs)}
            loads.append(mine)
            total = [a + b for a, b in zip(total, grads)] if total else grads
        return told, total, loads

    def train(self, number: int, step: Step, right: dict) -> None:
        params = self.params()
        told, grads, loads = self.gradients(step, params)
        if "loss" in told:
            right = right | {"loss": sum(right[f"loss {i}"] for i in range(len(step.passes)))}
        for name, x in told.items():
            self.same(x, right[name], f"step {number}: {name}")
        if self.program.clips and (params or self.over is not None):
            norm = clip_grad_norm_(list(zip(params, grads)), .05, over=self.over)
            self.same(norm, right["norm"], f"step {number}: norm")
        for p, g in zip(params, grads, strict=True):
            name = f"gradient of {self.names[id(p)]}"
            self.same(g, right.get(name, np.zeros(p.shape)), f"step {number}: {name}")
        if step.kind != "train":
            return
        if self.optimizer is not None:
            of = {id(p): g for p, g in zip(params, grads)}
            self.optimizer(tuple(of[id(p)] if id(p) in of else mint.zeros_like(p) if p.dtype != ms.float64 else p * 0
                                 for p in self.updated))
        if self.schedule is None:
            self.modules[0].move_biases(loads)


if __name__ == "__main__":
    sys.exit(main(__doc__, "tests.long.fuzz_tokens", 2, 2000, tokens.generate, refer, Judge))
