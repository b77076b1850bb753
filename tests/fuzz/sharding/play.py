# SPDX-License-Identifier: Apache-2.0
"""Runs a program, on one device or as one of its ranks; after each step everything that it can be judged by.

One device gets the whole batch and none of the wraps. Both sides are the same lines, so what differs is the library.
"""
import contextlib
import copy
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import DTensor, Replicate, Shard, comm, distribute_tensor
from tests.fuzz.sharding.cells import Embed, Node, build, write
from tests.fuzz.sharding.programs import DATA, Pass, Program, Step, Wrap

SAVES = {"tanh": [mint.tanh], "products": lambda op, args: op in ("matmul", "linear", "dense", "redistribute")}


@dataclass
class Record:
    """What one step left."""

    values: dict[str, np.ndarray] = field(default_factory=dict)
    events: list = field(default_factory=list)
    micro: list[list] = field(default_factory=list)  # of a training step, by micro-batch


def _list(x) -> list:
    return list(x) if isinstance(x, tuple | list) else [x]


class Player:
    """One side of a program: `rank` None is the one device.

    Plain MindSpore gives a wrong gradient, without a word, where a parameter that an op saved is written before the backward
    (`set_data`, `assign`, `p[:] =`, of `nn.Dense`, say). With `copies` parameters are read through copies: that is right.
    """

    def __init__(self, program: Program, rank: int | None = None, copies: bool = False):
        self.program, self.rank, self.copies = program, rank, copies
        self.net: Any = build(program.body, program.width, program.embeds, program.tied)
        self.net.state.copies = copies
        self.checked = any(w.kind == "checkpoint" for w in program.wraps)
        if rank is not None:
            self.lay_out()

    # -- how it is wrapped -----------------------------------------------------------------------------------------

    def lay_out(self) -> None:
        axes = self.program.axes
        self.whole = whole = md.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        self.data = whole["a", "b"].flatten("dp") if "a" in axes else whole["copies", "cut"] if "cut" in axes else \
            whole["dp"]
        for wrap in self.program.wraps:
            self.wrap(wrap)

    def wrap(self, wrap: Wrap) -> None:
        cell, options = self.cell(wrap.where), wrap.options
        how: dict[str, Any] = {}
        if "mp" in options:
            answer = ms.float64 if "float64" in options["mp"] else None
            how["mp_policy"] = md.MixedPrecisionPolicy(ms.float32, ms.float32, answer)
        if wrap.kind == "tp":
            md.parallelize_module(cell, self.whole["tp"], {"up": md.ColwiseParallel(use_local_output=False),
                                                           "down": md.RowwiseParallel(use_local_output=False)})
        elif wrap.kind == "checkpoint":
            md.checkpoint_wrapper(cell, save=SAVES.get(options.get("save", "")))
        elif wrap.kind == "fsdp":
            number = options.get("reshard", True)
            if not isinstance(number, bool) and self.data.shape[-1] % number:
                number = 1
            if "place" in options:
                how["shard_placement_fn"] = lambda p: _place(options["place"], p)
            if "ignored" in options and (params := list(cell.get_parameters())):
                how["ignored_params"] = [params[options["ignored"] % len(params)]]
            md.fully_shard(cell, mesh=self.data, reshard_after_forward=number, **how)
        else:
            md.replicate(cell, mesh=self.data, bucket_mb=options.get("bucket_mb", 25), zero1=wrap.kind == "zero1", **how)

    def cell(self, where: str) -> nn.Cell:
        return dict(self.net.cells_and_names())[where]

    def wrapped(self) -> list:
        """The cells with methods of data parallelism."""
        return [] if self.rank is None else [self.cell(w.where) for w in self.program.wraps if w.kind in DATA]

    def sync(self, now: bool) -> None:
        for cell in self.wrapped():
            if hasattr(cell, "set_requires_gradient_sync"):
                cell.set_requires_gradient_sync(now)

    def forget(self) -> None:
        for cell in self.wrapped():
            if hasattr(cell, "forget_gradients"):
                cell.forget_gradients()

    # -- tensors ---------------------------------------------------------------------------------------------------

    def batch(self, one: Pass) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng([one.seed, 9])
        x, ids = rng.normal(0.2, 1, (one.rows, self.program.width)), rng.integers(0, 5, one.rows).astype(np.int32)
        return self.given(Tensor(x)), self.given(Tensor(ids))

    def given(self, x: Tensor) -> Tensor:
        if self.rank is None:
            return x
        if self.program.laid and "a" not in self.program.axes and any(w.kind == "tp" for w in self.program.wraps):
            return distribute_tensor(x, self.whole, {a: Shard(0) for a in self.data.mesh_dim_names}, src_data_rank=None)
        there = distribute_tensor(x, self.data, [Shard(0)] * self.data.ndim, src_data_rank=None)
        return there if self.program.laid else there.to_local()

    def array(self, x) -> np.ndarray:
        x = x.full_tensor() if isinstance(x, DTensor) else x
        return x.asnumpy().copy()  # it shares memory with what later steps write

    def of_input(self, g, rows: int) -> np.ndarray:
        """A gradient of an input; each rank has that of its rows."""
        if self.rank is not None and not isinstance(g, DTensor):
            g = DTensor.from_local(g, self.data, [Shard(0)] * self.data.ndim, shape=(rows, self.program.width))
        return self.array(g)

    # -- what steps do ---------------------------------------------------------------------------------------------

    def forward(self, one: Pass, x, ids) -> tuple:
        state = self.net.state
        state.order, state.off, state.kept = one.order, set(one.off), []
        return self.net(x, ids)

    def loss(self, one: Pass, x, ids):
        scores, middle = self.forward(one, x, ids)
        total = 0
        if one.uses != "second":
            total = (scores * scores).mean() + scores.mean() * 0.25
        if one.uses != "first":
            total = (middle ** 3).mean() * 0.5 + total
        for kept in self.net.state.kept:
            total = total + (kept * kept).mean() * 0.25
        self.net.state.kept = []
        return total

    def asked(self, step: Step) -> list:
        if step.wrt == "inputs":
            return []
        params = list(self.net.trainable_params())
        if step.wrt == "some" and params:
            rng = np.random.default_rng([step.which, 3])
            params = [params[i] for i in sorted(rng.choice(len(params), (len(params) + 1) // 2, replace=False))]
        return params

    def gradient(self, micro: list[Pass], step: Step, params: list | None = None) -> tuple[Any, list, list]:
        """Loss, gradients of these parameters or of those that the step asks for, and of the inputs."""
        if self.checked:  # a cell that runs again does what it did: one order for all forwards of a gradient
            micro = [micro[0], *(Pass(p.rows, p.seed, micro[0].order, micro[0].off, p.uses) for p in micro[1:])]
        if self.rank is not None and self.rank == step.odd and step.other is not None:
            micro = [*micro[:-1], step.other]
        batches, params = [self.batch(p) for p in micro], self.asked(step) if params is None else params
        inputs, frozen = step.wrt in ("inputs", "both") or not params, list[Any]()

        def fn(*xs):
            total = 0
            for k, one in enumerate(micro):
                if k and step.between == "freeze":
                    frozen.extend(self.turn(step))
                elif k and step.between not in ("", "turn"):
                    every = list(self.net.get_parameters())
                    p = every[step.which % len(every)]
                    write(p, ops.stop_gradient(p) * 0.5 + 0.125, "set_data" if self.copies else step.between)
                if step.other is None or self.rank is not None:
                    total = self.loss(one, xs[k], batches[k][1]) * (1 + k) + total
                else:  # what the ranks have together, each of its own program
                    ranks = math.prod(self.program.axes.values())
                    for r in range(ranks):
                        x, ids = (t.chunk(ranks)[r] for t in (xs[k], batches[k][1]))
                        total = self.loss(step.other if r == step.odd else one, x, ids) / ranks + total
            return total
        place, weights = tuple(range(len(micro))) if inputs else None, params or None
        xs = [x for x, _ in batches]
        try:
            if step.how == "grad":
                value, grads = Tensor(0.0), ms.grad(fn, place, weights)(*xs)
            else:
                value, grads = (md if step.how == "md" and self.rank is not None else ms).value_and_grad(
                    fn, place, weights)(*xs)
        finally:
            for p in frozen:
                p.requires_grad = not p.requires_grad
        if inputs and params:
            of_inputs, of_params = grads
        else:
            of_inputs, of_params = (grads, []) if inputs else ([], grads)
        return value, _list(of_params), _list(of_inputs)

    def train(self, step: Step) -> dict[str, Any]:
        found, totals, params = {}, None, self.asked(step)
        for m, micro in enumerate(step.passes):
            last = m == len(step.passes) - 1
            if len(step.passes) > 1:
                self.sync(last)
            turned = self.turn(step) if m and step.between == "turn" else []
            with comm.record() as events:
                found[f"loss {m}"], grads, of_inputs = self.gradient(micro, step, params)
            for p in turned:
                p.requires_grad = not p.requires_grad
            self.sent.append(events)
            for k, g in enumerate(of_inputs):
                found[f"gradient of input {k}, {m}"] = (g, micro[k].rows)
            totals = grads if totals is None else [a + b for a, b in zip(totals, grads, strict=True)]
            if step.then == "eval" and not last:
                self.evaluate(micro[0], "md")
        found |= {f"gradient of {p.name}": g for p, g in zip(params, totals or [])}
        if step.then in ("sgd", "adamw") and totals:
            kind: Any = md.optim.SGD if step.then == "sgd" else md.optim.AdamW
            # in float32 a small `eps` lets a gradient that is all rounding, behind a norm, decide the sign of an update
            eps = 1.0 if self.program.short else 1e-3
            optimizer = kind(params, 0.05) if step.then == "sgd" else kind(params, 0.05, eps=eps)
            optimizer(tuple(totals))
        return found

    def evaluate(self, one: Pass, how: str) -> dict[str, Any]:
        with ms._no_grad() if how == "no_grad" else contextlib.nullcontext():
            scores, middle = self.forward(one, *self.batch(one))
        self.net.state.kept = []
        return {"scores": scores, "middle": middle}

    def broken(self, step: Step) -> None:
        self.sync(False)
        self.gradient(step.passes[0], Step("train"))
        self.forget()
        self.sync(True)

    def raising(self, step: Step) -> None:
        """A step that raises on purpose, after others that were not synchronised."""
        plainly = Step("train")
        for micro in step.passes[:-1]:
            self.sync(False)
            self.gradient(micro, plainly)
        self.sync(True)
        armed = [True]

        def refuse(*_):
            if armed:
                raise ValueError("on purpose")
        nodes = [c for _, c in self.net.cells_and_names() if isinstance(c, Node)]
        tensors = [c for c in nodes if c.part.out == "tensor"]
        node, place = nodes[step.which % len(nodes)], None
        if step.how == "forward":
            self.net.state.raises = node.where
        elif step.how == "forward_hook":
            place = node.register_forward_hook(refuse)
        elif step.how == "backward_hook" and tensors:
            place = tensors[step.which % len(tensors)].register_backward_hook(refuse)
        elif params := list(self.net.trainable_params()):
            place = params[step.which % len(params)].register_hook(refuse)
        try:
            self.gradient(step.passes[-1], plainly)
        except ValueError as e:
            if "on purpose" not in str(e):
                raise
        finally:
            armed.clear()
            self.net.state.raises = None
            if place is not None:
                place.remove()
        self.forget()

    def turn(self, step: Step) -> list:
        """A cell's parameters are frozen, or trained again; gives them."""
        nodes = [c for _, c in self.net.cells_and_names() if isinstance(c, Node | nn.Dense | Embed)]
        params = [p for p in nodes[step.which % len(nodes)].get_parameters() if not p.name.endswith("moving_mean")]
        for p in params:
            p.requires_grad = not p.requires_grad
        return params

    def do(self, step: Step) -> dict[str, Any]:
        if step.kind == "train":
            return self.train(step)
        if step.kind == "eval":
            return self.evaluate(step.passes[0][0], step.how)
        if step.kind == "broken":
            self.broken(step)
        elif step.kind == "raise":
            self.raising(step)
        elif step.kind == "write":
            params = list(self.net.get_parameters())
            p = params[step.which % len(params)]
            write(p, p * 0.75 + 0.125, step.how)
        elif step.kind == "freeze":
            self.turn(step)
        elif step.kind == "copy":
            self.net = copy.deepcopy(self.net)
        elif cells := [c for c in self.wrapped() if hasattr(c, "unshard")]:
            cell = cells[step.which % len(cells)]
            if step.kind == "keep":
                cell.set_reshard_after_forward(step.how == "True")
            else:
                getattr(cell, step.kind)()
        return {}

    def play(self) -> Iterator[Record]:
        """The program, a step at a time."""
        for step in self.program.steps:
            with md.implicit_replication() if self.rank is not None and self.program.plain else contextlib.nullcontext():
                self.sent: list[list] = []
                with comm.record() as events:
                    found = self.do(step)
            values = {}
            for name, x in found.items():
                values[name] = self.of_input(*x) if isinstance(x, tuple) else self.array(x)
            for p in self.net.get_parameters():
                values[p.name] = self.array(p)
            yield Record(values, events, self.sent)


def _place(how: str, p):
    kind = {"last": 0, "keep": 1}.get(how, zlib.crc32(p.name.encode()) % 3)
    return (Shard(len(p.shape) - 1), Replicate(), None)[kind]
