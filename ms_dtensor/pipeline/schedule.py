# SPDX-License-Identifier: Apache-2.0
"""Schedules as users call them: stages, an order, and steps of it, which `step.py` runs.

A step ends on all ranks, or on none. The order and the kinds of what is sent are compared between ranks before a number is
used; nothing here knows an order by its name.
"""
from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from numbers import Real
from typing import Any

from mindspore import Parameter, Tensor, nn

from .. import comm
from ..dispatch.operands import dtype_name, local_alias, wrap
from ..errors import CollectiveMismatch, ScheduleError
from ..internals.names import NoFallbackGuard
from ..optim.base import restore
from ..optim.clip import STAGE
from .actions import Actions, computing, grid
from .builders import dualpipe_v, gpipe, interleaved, one_f_one_b, zb_h1, zbv
from .check import check
from .microbatches import check_rows
from .order import Lowered, Timeline, lower, simulate
from .split import Tie
from .stage import PipelineStage
from .step import Step
from .transfer import Edges

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
        timeline: when each rank ran what, of the last step that was traced; alike on all ranks.

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
    timeline: Timeline | None = None

    def __init__(self, stages: PipelineStage | Sequence[PipelineStage], n_microbatches: int,
                 loss_fn: Callable | None = None, *, actions: Actions | None = None):
        given: list = [stages] if isinstance(stages, PipelineStage | nn.Cell) else list(stages)
        if not given or not all(isinstance(stage, PipelineStage) for stage in given):
            raise ScheduleError(f"For '{type(self).__name__}', 'stages' are not this rank's stages.",
                                ", ".join(type(stage).__name__ for stage in given), "Each rank has at least one.",
                                ("pipeline(model, mesh)", "PipelineStage(cell, stage_index, num_stages, mesh)"))
        stages = given
        self.stages = {stage.stage_index: stage for stage in stages}
        self.mesh, count = stages[0].mesh, stages[0].num_stages
        self.group, size = self.mesh.get_group(), self.mesh.size()
        self.everybody = comm.group(self.mesh.root.mesh.ravel().tolist())  # no communicator: on devices it sends nothing
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
        if isinstance(loss_fn, nn.Cell) and count - 1 in self.stages:
            own = set(map(id, self.params))
            if untrained := [p.name for p in loss_fn.trainable_params() if id(p) not in own]:
                names = ", ".join(untrained[:3])
                warnings.warn(f"{type(self).__name__}: the loss has parameters of no stage, {names}, which no step trains; "
                              "let the model's last cell have them and hand them on, or freeze them",
                              stacklevel=2)
        self._agreed = False
        self.batches = 0  # calls of `step` and `eval`, by which ranks say where they are
        self.edges = Edges()

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

    def step(self, *args, target: Any = None, weights: Sequence[float] | None = None, trace: bool = False,
             **kwargs) -> tuple[Tensor, list]:
        """Forward and backward of a batch.

        Args:
            *args: of the first stage: every rank passes its rows of the whole batch, other stages pass them on unread. What
                is not cut by rows comes as `PerMicrobatch`, here and below.
            target: of the loss, cut like the batch.
            weights: what the loss of each microbatch is multiplied with, before its backward; default 1/m each. Where
                targets are ignored, shares of those that count.
            trace: note when each action runs, as `timeline`. On a device the host then waits for each action.
            **kwargs: of every stage, which each rank cuts itself and nobody sends: places, masks.

        Returns:
            The loss, a number alike on all ranks, and gradients in the order of `params`.

        Raises:
            LayoutError: rows that the microbatches do not divide, before anything is sent.
            ScheduleError: no loss function, or not one weight a microbatch.
            CollectiveMismatch: ranks with different orders, in the first step; or at different batches, where some
                refused the one before, as it had other rows there.
            PeerLost: another rank has left the step by an exception, which it names, or has died. Unless one died, the next
                step works once all ranks have caught what they got.
        """
        if self.loss_fn is None:
            raise ScheduleError(f"For '{type(self).__name__}.step', there is no loss function.", "",
                                "A backward begins at a loss.", f"{type(self).__name__}(stages, m, loss_fn=...)")
        run = self._begin(self._lowered, args, kwargs, target, weights, training=True, trace=trace)
        with run.on_all_ranks_or_none("step"):
            sums = run.run()
            ties = {tie.place(): tie for stage in self.stages.values() for tie in stage.ties}
            for place in sorted(ties):  # in an order that all ranks have, also those with stages of several
                self._add_tied(ties[place], sums)
            loss = run.loss()
            if trace:
                self.timeline = run.timeline()
        return loss, [sums[id(p)] for p in self.params]

    def eval(self, *args, target: Any = None, weights: Sequence[float] | None = None, **kwargs):
        """Forward alone: the loss, alike on all ranks; without a loss function the outputs of the microbatches, on the last
        stage's rank, elsewhere None."""
        run = self._begin(self._forward_only, args, kwargs, target, weights, training=False)
        with run.on_all_ranks_or_none("eval"):
            run.run()
            return (run.losses or None) if self.loss_fn is None else run.loss()

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

    def _begin(self, lowered: Lowered, args, kwargs, target, weights, training: bool, trace: bool = False) -> Step:
        m = self.n_microbatches
        self.batches += 1  # also if it is refused below
        if weights is None:
            weights = [1.0 / m] * m
        if len(weights) != m or not all(isinstance(w, Real) for w in weights):
            raise ScheduleError(f"For '{type(self).__name__}.step', there are {len(weights)} weights.",
                                f"{list(weights)!r}, {m} microbatches",
                                "Each microbatch has its own.", "one number for each")
        check_rows(args, (kwargs, target), m)
        try:
            self.everybody.resume()
            if not self._agreed:
                self._agree()
        except BaseException:  # also where a rank gave this step up before it was begun here
            self.edges.forget()
            raise
        return Step(self, lowered, (args, kwargs, target), list(weights), training, trace)

    def _agree(self) -> None:
        """Compares the order between ranks; also where an evaluation comes first, whose order follows from it."""
        what = f"a pipeline in the order {zlib.crc32(self.explain().encode()):08x}"
        try:
            self.everybody.agree(what)
        except CollectiveMismatch as error:
            if str(error).count(what[:-8]) < self.everybody.size:  # some rank is elsewhere
                raise
            raise self._differing(self.everybody.all_gather_object(self.actions.csv())) from error
        self._agreed = True

    def _differing(self, texts: Sequence[str]) -> CollectiveMismatch:
        """The first action of the least rank in which orders are not the same."""
        rank, place, cells = first_difference([[row.split(",") for row in text.splitlines()] for text in texts])
        said = "\n".join(f"rank {r}: {cell or 'nothing'}" for r, cell in enumerate(cells))
        mine = self.actions.ranks
        around = grid(mine, min(rank, len(mine) - 1), place)
        return CollectiveMismatch(f"For '{type(self).__name__}.step', ranks run a pipeline in different orders.",
                                  f"rank {rank}, place {place} is, to\n{said}\n{around}",
                                  "All ranks have the whole order, and the same one.",
                                  "build or load it alike on all ranks")

    def _add_tied(self, tie: Tie, sums: dict[int, Any]) -> None:
        """Gradients of one parameter that several ranks have; each adds them up in the order of the stages."""
        here, stage = self.group.rank_index, next(s for s in tie.stages if s in self.stages)
        param = dict(self.stages[stage].module.parameters_and_names())[tie.paths[stage]]
        holders = comm.group(tuple(sorted(self.group.ranks[r] for r in tie.ranks)))
        state = f"trained, {_own(param)}" if param.requires_grad else "frozen"
        holders.agree(f"tied weight '{tie.place()[1]}' is {state}")
        if not param.requires_grad:
            return
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


def _own(param: Parameter) -> str:
    """What a rank has of a parameter; the same on all that add up its gradients, element by element."""
    layout = getattr(param, "_layout", None)
    pieces = [((0, n),) for n in param.shape] if layout is None else layout.pieces()
    return f"{dtype_name(param.dtype)}[{', '.join('+'.join(f'{a}:{b}' for a, b in runs) for runs in pieces)}]"


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


def first_difference(orders: Sequence[Sequence[Sequence[str]]]) -> tuple[int, int, list[str]]:
    """Rank and place at which orders first differ, and what each has there; of orders that do.

    Example:
        >>> first_difference([[["0F0", "0B0"]], [["0F0", "0B1"]]])
        (0, 1, ['0B0', '0B1'])
    """
    def at(rows: Sequence, i: int, default):
        return rows[i] if i < len(rows) else default
    return next((rank, place, cells) for rank in range(max(map(len, orders)))
                for place in range(max(len(at(order, rank, ())) for order in orders))
                if len(set(cells := [at(at(order, rank, ()), place, "") for order in orders])) > 1)
