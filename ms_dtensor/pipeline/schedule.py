# SPDX-License-Identifier: Apache-2.0
"""Runs a schedule: a loop over this rank's part of the one order, and what users call it by.

State of a step: recordings of forwards whose backward has not run, results that are waited for on this rank, and sums of
gradients. Nothing of it outlives the step, also where something raises. On host a message is taken where it is needed, in
the order in which its sender sends; on a device where the order has it, as the host does not wait there.
"""
from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from ..core.tree import leaves, map_leaves
from ..dispatch.operands import detached, local_alias, wrap
from ..dispatch.recording import HeldRecording, Recording
from ..errors import LayoutError, ScheduleError
from ..internals.names import NoFallbackGuard
from ..internals.target import on_cpu
from ..optim.base import restore
from ..optim.clip import STAGE
from ..tensor.dtensor import DTensor
from .actions import Action, Actions, Overlap, Result, computing
from .builders import dualpipe_v, gpipe, interleaved, one_f_one_b, zb_h1, zbv
from .check import check
from .order import Lowered, Recv, Send, lower, simulate
from .stage import PipelineStage
from .transfer import Edge

Builder = Callable[[int, int, int], Actions]  # of ranks, microbatches, stages a rank


class Schedule:
    """Trains the stages of a pipeline in any checked order of forwards and backwards, whole or in two parts.

    Args:
        stages: this rank's stage, or its stages, first to last.
        n_microbatches: into how many pieces each rank cuts its rows of a batch.
        loss_fn: `(output of the last stage, target) -> loss`, a mean over the rows it is given.
        actions: the order; default that of the class.

    Attributes:
        params: the trainable parameters of this rank's stages now, in whose order gradients come.
        actions: the order.

    Raises:
        ScheduleError: an order with faults, or of other stages than these.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from mindspore import nn
        >>> from ms_dtensor.pipeline import Schedule1F1B, pipeline
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        >>> stages = pipeline(nn.SequentialCell(nn.Dense(4, 4), nn.Dense(4, 1)), mesh)
        >>> schedule = Schedule1F1B(stages, 2, loss_fn=lambda y, t: ((y - t) ** 2).mean())
        >>> loss, grads = schedule.step(ms.ops.ones((4, 4)), target=ms.ops.ones((4, 1)))
        >>> len(grads) == len(schedule.params) == 4
        True
    """

    build: Builder | None = None

    def __init__(self, stages: PipelineStage | Sequence[PipelineStage], n_microbatches: int,
                 loss_fn: Callable | None = None, *, actions: Actions | None = None):
        stages = [stages] if isinstance(stages, PipelineStage) else list(stages)
        self.stages = {stage.stage_index: stage for stage in stages}
        self.mesh, count = stages[0].mesh, stages[0].num_stages
        self.group, size = self.mesh.get_group(), self.mesh.size()
        if actions is None:
            if self.build is None:
                raise ScheduleError("For 'Schedule', no order was given.", "", "It runs any, so it has to be told which.",
                                    ("Schedule1F1B(stages, ...)", "actions=Actions.load(path)"))
            actions = type(self).build(size, n_microbatches, count // size)  # type: ignore[misc]
        self.actions, self.n_microbatches, self.loss_fn = actions, n_microbatches, loss_fn
        self._check(count)
        self._lowered = lower(simulate(actions))
        for stage in stages:
            here = dict(stage.module.parameters_and_names())
            tied = {id(here[tie.paths[stage.stage_index]]): tie for tie in stage.ties}
            for p in stage.module.get_parameters():  # of a tied one the first rank's counts in norms
                p.__dict__[STAGE] = id(p) not in tied or tied[id(p)].ranks[0] == self.group.rank_index
        self._agreed = False

    @cached_property
    def _forward_only(self) -> Lowered:
        ranks = tuple(tuple(part for _, _, part in computing([rank]) if part.kind == "F") for rank in self.actions.ranks)
        return lower(simulate(Actions(ranks, self.actions.owner)))

    @property
    def params(self) -> list[Parameter]:
        """Those that are frozen are none of them."""
        return list({id(p): p for stage in self.stages.values() for p in stage.params()}.values())

    def _check(self, count: int) -> None:
        who, actions, here = type(self).__name__, self.actions, self.group.rank_index
        mine = [s for s, owner in enumerate(actions.owner) if owner == here]
        if len(actions.ranks) != self.mesh.size() or len(actions.owner) != count or mine != sorted(self.stages):
            raise ScheduleError(f"For '{who}', the stages are not those of the order.",
                                f"rank {here} of {self.mesh.size()} has stages {sorted(self.stages)} of {count}, and the "
                                f"order gives it {mine} of {len(actions.owner)}", "Order and model are cut alike.",
                                ("pipeline(model, mesh, n_stages=..., style=...)", "another schedule"))
        if actions.microbatches != self.n_microbatches:
            raise ScheduleError(f"For '{who}', the order is for {actions.microbatches} microbatches, not "
                                f"{self.n_microbatches}.", "", "An order names each microbatch.",
                                f"n_microbatches={actions.microbatches}")
        if faults := check(actions):
            raise ScheduleError(f"For '{who}', the order has {len(faults)} faults.", str(faults[0]),
                                "An order runs to its end, and makes each gradient once.", "check(actions) lists all faults")

    def step(self, *args, target: Any = None, weights: Sequence[float] | None = None, **kwargs) -> tuple[Tensor, list]:
        """Forward and backward of a batch.

        Args:
            *args: of the first stage: every rank passes its rows of the whole batch, other stages pass them on unread.
            target: of the loss, cut like the batch.
            weights: what the loss of each microbatch is multiplied with, before its backward; default 1/m each. Where
                targets are ignored, shares of those that count.
            **kwargs: of every stage, which each rank cuts itself and nobody sends: places, masks.

        Returns:
            The loss, a number alike on all ranks, and gradients in the order of `params`.

        Raises:
            LayoutError: rows that the microbatches do not divide, before anything is sent.
            ScheduleError: no loss function, or not one weight a microbatch.
        """
        if self.loss_fn is None:
            raise ScheduleError(f"For '{type(self).__name__}.step', there is no loss function.", "",
                                "A backward begins at a loss.", f"{type(self).__name__}(stages, m, loss_fn=...)")
        run = self._begin(self._lowered, args, kwargs, target, weights, training=True)
        sums = run.run()
        for stage in self.stages.values():
            for tie in stage.ties:
                self._add_tied(tie, stage, sums)
        grads = [sums[id(p)] for p in self.params]
        return run.loss(), grads

    def eval(self, *args, target: Any = None, weights: Sequence[float] | None = None, **kwargs):
        """Forward alone: the loss, alike on all ranks; without a loss function the outputs of the microbatches, on the last
        stage's rank, elsewhere None."""
        run = self._begin(self._forward_only, args, kwargs, target, weights, training=False)
        run.run()
        if self.loss_fn is None:
            return run.losses or None
        return run.loss()

    def explain(self) -> str:
        """What each rank does, messages included, as a grid."""
        return self._lowered.text()

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers of this rank's stages, not copies, by the names of one device.

        One that other stages share is there under their names, too. It is what `checkpoint.save({"model": schedule}, path,
        over=mesh["pp"])` saves.
        """
        found: dict[str, Tensor] = {}
        for stage in self.stages.values():
            own = stage.module.state_dict()
            found |= own
            for tie in stage.ties:
                found |= dict.fromkeys(tie.paths.values(), own[tie.paths[stage.stage_index]])
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over the values of a `state_dict` of the same stages in the same layouts."""
        own = self.state_dict()
        other = {name: x for name, x in state.items() if own.get(name) is not x}
        restore(type(self).__name__, {"state": {name: x for name, x in own.items() if state.get(name) is not x}},
                {"state": other})

    def _begin(self, lowered: Lowered, args, kwargs, target, weights, training: bool) -> _Step:
        m = self.n_microbatches
        if weights is None:
            weights = [1.0 / m] * m
        if len(weights) != m:
            raise ScheduleError(f"For '{type(self).__name__}.step', there are {len(weights)} weights.", f"{m} microbatches",
                                "Each microbatch has its own.", "one number for each")
        cut = _cut((args, kwargs, target), m, _rows_of_batch(args))
        if not self._agreed:
            text = self.explain()  # also where an evaluation comes first, whose order follows from it
            self.group.agree(f"a pipeline in the order {zlib.crc32(text.encode()):08x}, which begins\n{text[:600]}")
            self._agreed = True
        return _Step(self, lowered, cut, list(weights), training)

    def _add_tied(self, tie, stage: PipelineStage, sums: dict[int, Any]) -> None:
        """Gradients of one parameter that several ranks have; each adds them up in the order of the stages."""
        here = self.group.rank_index
        if stage.stage_index != next(s for s in tie.paths if s in self.stages):
            return  # of two stages on this rank one speaks
        param = dict(stage.module.parameters_and_names())[tie.paths[stage.stage_index]]
        own = local_alias(sums[id(param)])
        others = [r for r in tie.ranks if r != here]
        got = dict(zip(others, self.group.exchange([(self.group.ranks[r], own) for r in others], [
            (self.group.ranks[r], tuple(own._shape), own.dtype) for r in others])))
        total: Any = None
        with NoFallbackGuard():
            for r in tie.ranks:
                x = own if r == here else got[r]
                total = x if total is None else total + x
        sums[id(param)] = total if sums[id(param)].__class__ is Tensor else wrap(total, sums[id(param)]._layout)


class ScheduleGPipe(Schedule):
    """All forwards, then all backwards; see `gpipe`.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> from ms_dtensor.pipeline import ScheduleGPipe, pipeline
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        >>> ScheduleGPipe(pipeline(nn.SequentialCell(nn.Dense(4, 4)), mesh), 2).actions.csv()
        '0F0,0F1,0B0,0B1\\n'
    """

    build = staticmethod(lambda p, m, v: gpipe(p, m))


class Schedule1F1B(Schedule):
    """A backward as soon as there can be one; see `one_f_one_b`.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> from ms_dtensor.pipeline import Schedule1F1B, pipeline
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        >>> Schedule1F1B(pipeline(nn.SequentialCell(nn.Dense(4, 4)), mesh), 2).actions.csv()
        '0F0,0B0,0F1,0B1\\n'
    """

    build = staticmethod(lambda p, m, v: one_f_one_b(p, m))


class ScheduleInterleaved1F1B(Schedule):
    """1F1B over several stages a rank; see `interleaved`.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> from ms_dtensor.pipeline import ScheduleInterleaved1F1B, pipeline
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        >>> net = nn.SequentialCell(nn.Dense(4, 4), nn.Dense(4, 4))
        >>> ScheduleInterleaved1F1B(pipeline(net, mesh, n_stages=2), 1).actions.csv()
        '0F0,1F0,1B0,0B0\\n'
    """

    build = staticmethod(interleaved)


class ScheduleZBH1(Schedule):
    """1F1B whose weight gradients wait for a gap; see `zb_h1`.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> from ms_dtensor.pipeline import ScheduleZBH1, pipeline
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        >>> net = nn.SequentialCell(nn.Dense(4, 4))
        >>> ScheduleZBH1(pipeline(net, mesh), 1).actions.csv()
        '0F0,0I0,0W0\\n'
    """

    build = staticmethod(lambda p, m, v: zb_h1(p, m))


class ScheduleZBVZeroBubble(Schedule):
    """Two stages a rank in the shape of a V, backward in parts; see `zbv`.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> from ms_dtensor.pipeline import ScheduleZBVZeroBubble, pipeline
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        >>> net = nn.SequentialCell(nn.Dense(4, 4), nn.Dense(4, 4))
        >>> ScheduleZBVZeroBubble(pipeline(net, mesh, style="v"), 1).actions.csv()
        '0F0,1F0,1I0,1W0,0I0,0W0\\n'
    """

    build = staticmethod(lambda p, m, v: zbv(p, m))


class ScheduleDualPipeV(Schedule):
    """The same V, forwards beside whole backwards; see `dualpipe_v`.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> from ms_dtensor.pipeline import ScheduleDualPipeV, pipeline
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        >>> net = nn.SequentialCell(nn.Dense(4, 4), nn.Dense(4, 4))
        >>> ScheduleDualPipeV(pipeline(net, mesh, style="v"), 1).actions.csv()
        '0F0,1F0,1B0,0B0\\n'
    """

    build = staticmethod(lambda p, m, v: dualpipe_v(p, m))


def _rows_of_batch(args: tuple) -> set[int]:
    """Of the first tensor, here and over all data-parallel ranks."""
    first = next((x for x in leaves(args, Tensor) if x.shape), None)
    return set() if first is None else {first.shape[0], first._shape[0]}


def _cut(tree: Any, m: int, rows: set[int]) -> list:
    """The microbatches: each tensor's rows in m equal parts, everything else repeated."""
    if arrays := leaves(tree, np.ndarray):
        raise LayoutError("For a pipeline, a NumPy array was given.", f"{arrays[0].dtype}{list(arrays[0].shape)}",
                          "Tensors are cut into microbatches, and everything else goes to each as it is.",
                          "mindspore.Tensor(array)")
    return [map_leaves(lambda x, i=i: _rows(x, i, m, rows), tree, Tensor) for i in range(m)]


def _rows(x: Tensor, i: int, m: int, rows: set[int]) -> Tensor:
    if not x.shape:
        return x
    if rows and not rows & {x.shape[0], x._shape[0]}:
        raise LayoutError(f"For a pipeline, a tensor has {x.shape[0]} rows, and the batch {max(rows)}.", f"{list(x.shape)}",
                          "Tensors are cut along dim 0, each row belongs to one of the batch.",
                          ("hold what is the same for all rows in a cell, or in the loss function", "x.expand(...)"))
    layout = getattr(x, "_layout", None)
    pieces = m if layout is None else m * math.prod(layout.mesh.shape[a] for a in layout.dim_axes[0])
    if x.shape[0] % pieces:
        raise LayoutError(f"For a pipeline, {x.shape[0]} rows are not cut into {m} microbatches.",
                          f"{list(x.shape)}" if layout is None else layout.describe(),
                          "Each microbatch has as many rows, on each rank.", f"rows that {pieces} divides")
    n = x._shape[0] // m
    with NoFallbackGuard():
        piece = local_alias(x)[i * n:(i + 1) * n].contiguous()
    if layout is None:
        return piece
    return DTensor.from_local(piece, layout.mesh, list(layout.placements), shape=(layout.shape[0] // m, *layout.shape[1:]))


class _Step:
    """One batch on its way through this rank's stages."""

    def __init__(self, schedule: Schedule, lowered: Lowered, cut: list, weights: list[float], training: bool):
        self.schedule, self.cut, self.weights, self.training = schedule, cut, weights, training
        self.events, self.owner = lowered.ranks[schedule.group.rank_index], lowered.owner
        self.recordings: dict[tuple[int, int], Recording] = {}
        self.there: dict[Result, Any] = {}  # results that an action here waits for
        self.coming: dict[int, deque[Recv]] = {}  # by rank, messages that it sends, in its order
        self.edges: dict[int, Edge] = {}  # by the stage before the border
        self.left = {s: schedule.n_microbatches for s in schedule.stages}  # backwards to come
        self.in_parts = {(a.stage, a.microbatch) for _, _, a in computing(schedule.actions.ranks) if a.kind == "I"}
        self.params = {s: stage.params() for s, stage in schedule.stages.items()}
        self.sums: dict[int, Any] = {}
        self.losses: list[Any] = []

    def run(self) -> dict[int, Any]:
        """Runs all events; gives sums of gradients, by id of the parameter."""
        for event in self.events:
            if isinstance(event, Recv):
                self.coming.setdefault(event.peer, deque()).append(event)
                if not on_cpu():
                    self._arrive(event.result)
            elif isinstance(event, Send):
                self._send(event)
            elif isinstance(event, Action | Overlap):
                for part in event.parts:
                    with self._told(part):
                        self.forward(part) if part.kind == "F" else self.backward(part)
        assert not (self.recordings or self.there or any(self.coming.values())), "a pipeline left something in flight"
        return self.sums

    @contextmanager
    def _told(self, action: Action) -> Iterator[None]:
        """What raises says where."""
        try:
            yield
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"in {action} on rank {self.schedule.group.rank_index} of the pipeline")
            raise

    def forward(self, action: Action) -> None:
        s, i = action.stage, action.microbatch
        stage = self.schedule.stages[s]
        args, kwargs, target = self.cut[i]
        inputs = args if stage.is_first else _as_arguments(self._take(("F", s - 1, i)))
        loss_fn = self.schedule.loss_fn if stage.is_last else None
        then = None if loss_fn is None else lambda out: _number(loss_fn(out, target)) * self.weights[i]
        if self.training:
            made = self.recordings[s, i] = stage.record(inputs, kwargs, then, (s, i) in self.in_parts)
            out = map_leaves(detached, made.outputs, Tensor)
        else:
            out = stage.module(*inputs, **kwargs)
            out = out if then is None else then(out)
        if stage.is_last:
            self.losses.append(out)
        else:
            self.there["F", s, i] = out

    def backward(self, action: Action) -> None:
        s, i = action.stage, action.microbatch
        stage, made, params = self.schedule.stages[s], self.recordings[s, i], self.params[s]
        cotangents = None
        if action.kind != "W" and not stage.is_last:
            arriving = iter(self._take(("B", s + 1, i)))
            cotangents = [next(arriving) if x.is_floating_point() else x for x in leaves(made.outputs, Tensor)]
        grads: list = []
        if isinstance(made, HeldRecording) and action.kind == "I":
            dx = made.backward_inputs(cotangents, params)
        else:
            del self.recordings[s, i]
            self.left[s] -= 1
            if self.left[s] in (0, self.schedule.n_microbatches - 1):  # it walks through all cells
                stage.synchronise(self.left[s] == 0)
            if isinstance(made, HeldRecording):
                grads = made.backward_weights(params)
            else:
                dx, grads = made.backward(cotangents, params)
        for p, g in zip(params, grads):
            self.sums[id(p)] = self.sums[id(p)] + g if id(p) in self.sums else g
        if action.kind != "W" and not stage.is_first:
            self.there["B", s, i] = dx

    # -- results -----------------------------------------------------------------------------------------------------

    def _edge(self, before: int, peer: int) -> Edge:
        if before not in self.edges:
            self.edges[before] = Edge(self.schedule.group, peer, self.schedule.mesh.root)
        return self.edges[before]

    def _send(self, event: Send) -> None:
        made = self.there.pop(event.result)
        if event.what == "F":
            self._edge(event.stage, event.peer).send(made, event.result)
        else:
            self._edge(event.stage - 1, event.peer).send_back(made, event.result)

    def _take(self, result: Result) -> Any:
        """A result, of this rank or by a message."""
        self._arrive(result)
        return self.there.pop(result)

    def _arrive(self, result: Result) -> None:
        """A message comes behind those that its sender sent before."""
        peer = self.owner[result[1]]
        while result not in self.there and self.coming.get(peer):
            event = self.coming[peer].popleft()
            edge = self._edge(event.stage - 1 if event.what == "F" else event.stage, peer)
            self.there[event.result] = edge.receive(event.result) if event.what == "F" else edge.receive_back(event.result)

    def loss(self) -> Tensor:
        """The sum of the microbatches' weighted losses, from the last stage's rank to all."""
        total: Any = None
        for one in self.losses:
            total = one if total is None else total + one
        if isinstance(total, DTensor):
            total = total.full_tensor()
        group, last = self.schedule.group, self.owner[-1]
        if group.size == 1:
            return total
        if not on_cpu():
            return group.broadcast(Tensor(0.0, ms.float32) if total is None else total.astype(ms.float32), group.ranks[last])
        told = [0.0, 0.0] if total is None else [float(total.asnumpy()), float(total.dtype == ms.float64)]
        value, double = group.broadcast(Tensor(np.array(told)), group.ranks[last]).asnumpy().tolist()
        return Tensor(value, ms.float64 if double else ms.float32)


def _number(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.shape or not loss.is_floating_point():
        raise ScheduleError("For a pipeline, the loss function gave no number.", f"{type(loss).__name__} "
                            f"{list(getattr(loss, 'shape', ()))}", "A backward begins at one number of floating point.",
                            "return loss.mean(), a tensor without dims")
    return loss


def _as_arguments(made: Any) -> tuple:
    return made if isinstance(made, tuple) else (made,)
