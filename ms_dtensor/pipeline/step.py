# SPDX-License-Identifier: Apache-2.0
"""One batch on its way through this rank's stages: a loop over this rank's part of the one order.

State: recordings of forwards whose backward has not run, results that are waited for on this rank, and sums of gradients.
Nothing of it outlives the step, also where something raises: then all ranks leave the step, and the next one works. On host
a message is taken where it is needed, in the order in which its sender sends; on a device where the order has it, as the
host does not wait there.
"""
from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ..comm.packing import add_into, added
from ..comm.pretended import executing
from ..core.tree import leaves, map_leaves
from ..dispatch.operands import detached, local_alias, wrap
from ..dispatch.recording import HeldRecording, Recording
from ..errors import PeerLost, ScheduleError
from ..internals.names import NoFallbackGuard
from ..internals.target import on_cpu
from ..ops.local.dtypes import full
from ..parallel.sharding.call import units_of
from ..tensor.dtensor import DTensor
from .actions import Action, Actions, Overlap, Result, computing
from .draw import draw
from .microbatches import microbatch
from .order import Lowered, Recv, Send, Slot, Timeline, simulate
from .transfer import Edge

if TYPE_CHECKING:
    from .schedule import Schedule


class Step:
    """One batch on its way through this rank's stages."""

    def __init__(self, schedule: Schedule, lowered: Lowered, batch: tuple, weights: list[float], training: bool,
                 trace: bool):
        self.schedule, self.batch, self.weights, self.training = schedule, batch, weights, training
        self.slots: list[Slot] | None = [] if trace else None
        self.at = ""  # what is under way
        self.events, self.owner = lowered.ranks[schedule.group.rank_index], lowered.owner
        self.recordings: dict[tuple[int, int], Recording] = {}
        self.there: dict[Result, Any] = {}  # results that an action here waits for
        self.coming: dict[int, deque[Recv]] = {}  # by rank, messages that it sends, in its order
        self.edges = schedule.edges.of(batch, training)  # by the stage before the border
        self.left = {s: schedule.n_microbatches for s in schedule.stages}  # backwards to come
        self.in_parts = {(a.stage, a.microbatch) for _, _, a in computing(schedule.actions.ranks) if a.kind == "I"}
        self.params = {s: stage.params() for s, stage in schedule.stages.items()}
        self.sums: dict[int, Any] = {}
        self.own: set[int] = set()  # whose sums are tensors that this step made
        self.starts: dict[tuple, Tensor] = {}  # cotangents of losses, by weight and dtype
        self.losses: list[Any] = []
        self.written: dict[str, None] = {}  # names of what forwards have written
        if (dry := executing()) is not None:
            dry.picture = partial(_picture, schedule.actions)

    def run(self) -> dict[int, Any]:
        """Runs all events; gives sums of gradients, by id of the parameter."""
        for event in self.events:
            if isinstance(event, Recv):
                self.coming.setdefault(event.peer, deque()).append(event)
                if not on_cpu():
                    self.at = f"in {event}"
                    self._arrive(event.result)
            elif isinstance(event, Send):
                self.at = f"in {event}"
                self._send(event)
            elif isinstance(event, Action | Overlap):
                for part in event.parts:
                    self.at = f"in {part}"
                    self._compute(part)
        self.at = "at the step's end"
        assert not (self.recordings or self.there or any(self.coming.values())), "a pipeline left something in flight"
        return self.sums

    def _compute(self, action: Action) -> None:
        run = self.forward if action.kind == "F" else self.backward
        if self.slots is None:
            run(action)
            return
        for need in action.inputs(len(self.owner)):  # to wait for them is no part of it
            if self.owner[need[1]] != self.schedule.group.rank_index:
                self._arrive(need)
        start = time.time()
        run(action)
        if not on_cpu():
            ms.runtime.synchronize()
        self.slots.append(Slot(action, start, time.time()))

    def timeline(self) -> Timeline:
        """What all ranks have noted; by the clock of each, from the first action on."""
        own = [[*slot.action, slot.start, slot.end] for slot in self.slots or ()]
        noted = self.schedule.group.all_gather_object(own)
        first = min(start for slots in noted for *_, start, _ in slots)
        return Timeline(self.schedule.actions, tuple(
            tuple(Slot(Action(*action), start - first, end - first) for *action, start, end in slots) for slots in noted))

    # -- where something raises --------------------------------------------------------------------------------------

    @contextmanager
    def on_all_ranks_or_none(self, what: str) -> Iterator[None]:
        """What raises says where, and reaches all ranks; of this step nothing is left."""
        try:
            yield
            # By number: of a batch that some ranks refused, as they brought other rows, others have met the next.
            self.schedule.everybody.agree(f"the end of batch {self.schedule.batches} that this pipeline was given")
        except BaseException as error:
            here = f"{self.at} on rank {self.schedule.group.rank_index} of the pipeline"
            if hasattr(error, "add_note"):
                error.add_note(here)
            said = [str(error).partition("\n")[0][:400], *getattr(error, "__notes__", [here])[:-1]]
            if not isinstance(error, PeerLost):  # who told this one, or died, tells everybody
                self.schedule.everybody.give_up(PeerLost(
                    f"For '{type(self.schedule).__name__}.{what}', it was given up {here}.",
                    f"rank {self.schedule.group.backend.rank} (pid {os.getpid()}): {type(error).__name__}: "
                    f"{'; '.join(said)}", "A step ends on all ranks, or on none.",
                    ("look at that rank's log for the whole error", "catch it on all ranks: then the next step works")))
            self._drop()
            raise

    def _drop(self) -> None:
        for recording in self.recordings.values():
            recording.drop()
        for stage in self.schedule.stages.values():
            for unit in units_of(stage.module):
                unit.give_up()
            stage.synchronise(True)
        self.recordings, self.there, self.coming, self.sums = {}, {}, {}, {}
        self.schedule.edges.forget()  # on all ranks, so that the next step tells anew what it sends

    def forward(self, action: Action) -> None:
        s, i = action.stage, action.microbatch
        stage = self.schedule.stages[s]
        (args, kwargs, target), m = self.batch, self.schedule.n_microbatches
        inputs = microbatch(args, i, m) if stage.is_first else _as_arguments(self._take(("F", s - 1, i)))
        kwargs, target = microbatch(kwargs, i, m), microbatch(target, i, m) if stage.is_last else None
        loss_fn = self.schedule.loss_fn if stage.is_last else None
        then = None if loss_fn is None else lambda out: _number(loss_fn(out, target))
        if self.training:
            made = self.recordings[s, i] = stage.record(inputs, kwargs, then, (s, i) in self.in_parts)
            self.written.update(dict.fromkeys(made.written))
            out = map_leaves(detached, made.outputs, Tensor)
        else:
            out = stage.run(inputs, kwargs, then)
        if stage.is_last:
            self.losses.append(out if loss_fn is None else self._weighted(out, self.weights[i]))
        else:
            self.there["F", s, i] = out

    def _weighted(self, loss: Tensor, weight: float) -> Tensor:
        """A Python number would be rounded to float32 beside a loss in float64."""
        at = getattr(loss, "_layout", None)
        with NoFallbackGuard():
            made = local_alias(loss) * self._start(weight, loss.dtype)
        return made if at is None else wrap(made, at)

    def backward(self, action: Action) -> None:
        s, i = action.stage, action.microbatch
        stage, made, params = self.schedule.stages[s], self.recordings[s, i], self.params[s]
        cotangents = None
        if action.kind != "W" and stage.is_last:
            cotangents = self._start(self.weights[i], made.outputs.dtype)
        elif action.kind != "W":
            arriving = iter(self._take(("B", s + 1, i)))
            cotangents = [next(arriving) if x.is_floating_point() else x for x in leaves(made.outputs, Tensor)]
        grads: list = []
        if isinstance(made, HeldRecording) and action.kind == "I":
            with self._naming_what_was_written():
                dx = made.backward_inputs(cotangents, params)
        else:
            del self.recordings[s, i]
            self.left[s] -= 1
            if self.left[s] in (0, self.schedule.n_microbatches - 1):  # it walks through all cells
                stage.synchronise(self.left[s] == 0)
            with self._naming_what_was_written():
                if isinstance(made, HeldRecording):
                    grads = made.backward_weights(params)
                else:
                    dx, grads = made.backward(cotangents, params)
        for p, g in zip(params, grads):
            if id(p) in stage.held_back:  # zeros: the last micro-batch's gradient has all
                continue
            self._add(id(p), g)
        if action.kind != "W" and not stage.is_first:
            self.there["B", s, i] = dx

    @contextmanager
    def _naming_what_was_written(self) -> Iterator[None]:
        """MindSpore says that something was; it does not say what.

        Raises:
            ScheduleError: another microbatch's forward has written what this backward reads.
        """
        try:
            yield
        except RuntimeError as error:
            if not self.written or "modified by an inplace operation" not in str(error):
                raise
            raise ScheduleError("For a pipeline, a backward reads what a forward has written since.",
                                f"written: {', '.join(list(self.written)[:5])}", "Between a microbatch's forward and its "
                                "backward others run, which one device runs after both.",
                                ("read a copy: self.scale * 1 in place of self.scale",
                                 "checkpoint_wrapper(cell), which remembers what its forward has read")) from error

    def _start(self, weight: float, dtype: Any) -> Tensor:
        """The cotangent of a loss that counts by this weight."""
        if (weight, dtype) not in self.starts:
            self.starts[weight, dtype] = full((), float(weight), dtype)
        return self.starts[weight, dtype]

    def _add(self, key: int, grad: Any) -> None:
        """Adds up a parameter's gradients: the first may be somebody else's tensor, the sum with the second is not."""
        if key not in self.sums:
            self.sums[key] = grad
            return
        at = getattr(grad, "_layout", None)
        if key in self.own and at is getattr(self.sums[key], "_layout", None):
            made = add_into(local_alias(self.sums[key]), local_alias(grad))
            self.sums[key] = made if at is None else wrap(made, at)
        else:
            self.sums[key] = added(self.sums[key], grad)
            self.own.add(key)

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
        told = [0.0, 0.0]
        if total is not None:
            told = [math.nan if executing() is not None else float(total.asnumpy()), float(total.dtype == ms.float64)]
        value, double = group.broadcast(Tensor(np.array(told)), group.ranks[last]).asnumpy().tolist()
        return Tensor(value, ms.float64 if double else ms.float32)


def _picture(actions: Actions) -> str:
    return draw(simulate(actions), "svg")


def _number(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.shape or not loss.is_floating_point():
        raise ScheduleError("For a pipeline, the loss function gave no number.", f"{type(loss).__name__} "
                            f"{list(getattr(loss, 'shape', ()))}", "A backward begins at one number of floating point.",
                            "return loss.mean(), a tensor without dims")
    return loss


def _as_arguments(made: Any) -> tuple:
    return made if isinstance(made, tuple) else (made,)
