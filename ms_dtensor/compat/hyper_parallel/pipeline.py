# SPDX-License-Identifier: Apache-2.0
"""hyper_parallel's pipeline names over ours: `PipelineStage(module, index, stage_num)`, `Schedule1F1B(stage, n).run(x)`.

The last stage's module computes the loss itself, the first rank alone passes the batch, and gradients are the sums over
microbatches of what each output's sensitivity gives. New code says `pipeline` and `Schedule.step`, whose loss function is
apart, which cuts the model and its tied weights by itself, and which weighs microbatches before their backward.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor, nn

from ... import comm
from ... import pipeline as ours
from ...core.mesh import DeviceMesh
from ...core.tree import leaves, map_leaves
from ...dispatch.operands import detached
from ...dispatch.recorded import add_gradients, not_recorded
from ...errors import ConfigError, ScheduleError
from ...pipeline import schedule as schedules
from ...pipeline.stage import PipelineStage as Stage
from ..backward import compat_is_on


class PipelineStage(Stage):
    """One stage, cut by hand.

    Args:
        submodule: what it computes; that of the last stage gives the loss.
        stage_index: which one it is, from 0.
        stage_num: how many there are.
        device, group: of no effect; they follow from the mesh.
        mesh: the axis that stages are dealt over. Without it the world's ranks, each block of them a stage, in order.
        has_backward: False is refused.
        dyn_shape: of no effect; each step says what goes over a border, and its micro-batches have one shape.

    Raises:
        ConfigError: ranks that the stages do not divide, and no mesh; or no backward.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from mindspore import nn
        >>> from ms_dtensor.compat.hyper_parallel import PipelineStage, Schedule1F1B
        >>> class Model(nn.Cell):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Dense(4, 1)
        ...     def construct(self, x):
        ...         return self.layer(x).mean()
        >>> losses, grads = Schedule1F1B(PipelineStage(Model(), 0, 1), 2).run(ms.ops.ones((4, 4)))
        >>> len(losses), len(grads)
        (2, 2)
    """

    def __init__(self, submodule: nn.Cell, stage_index: int, stage_num: int, device: Any = None, group: Any = None, *,
                 mesh: DeviceMesh | None = None, has_backward: bool = True, dyn_shape: bool = False):
        if not has_backward:
            raise _refused("PipelineStage", "has_backward=False", "call the stages' cells under no_grad")
        super().__init__(submodule, stage_index, stage_num, _blocks(stage_num) if mesh is None else mesh)

    def get_last_stage_sens(self, last_stage_outputs: Any) -> Any:
        """What each tensor of the last stage's output is multiplied with before it is summed: to be overridden; else 1."""
        return [1.0 for _ in leaves(last_stage_outputs, Tensor)] if isinstance(last_stage_outputs, list | tuple) else 1.0


def _refused(who: str, asked: str, fix: str) -> ConfigError:
    return ConfigError(f"For '{who}', an argument asks for what is not offered.", asked,
                       "A step of a schedule is a forward and a backward of each microbatch, one action at a time.", fix)


def _blocks(count: int) -> DeviceMesh:
    world = comm.current_world() or comm.start("cpu")
    if world.size % count:
        raise ConfigError("For 'PipelineStage', the ranks are not cut into stages.", f"{world.size} ranks, {count} stages",
                          "Each stage has a block of ranks, and each rank one stage.", 'mesh=mesh["pp"] for several a rank')
    ranks = [[stage * (world.size // count) + i for i in range(world.size // count)] for stage in range(count)]
    return DeviceMesh(world.device_type, ranks, mesh_dim_names=("pp", "rest"))["pp"]


class _Runs:
    """`run`, for a schedule of ours; hyper_parallel's arguments of its schedules.

    Args:
        stages: this rank's, first to last.
        micro_batch_num: into how many pieces the first rank's batch is cut.
        overlap_p2p, p2p_transport: of no effect; a message is sent when it is made.
        overlap_b_f, enable_dxdw_split, swap: refused.

    Raises:
        ConfigError: what is refused.
        ScheduleError: an order of other stages than these.
    """

    kind: type[schedules.Schedule]

    def __init__(self, stages: PipelineStage | Sequence[PipelineStage], micro_batch_num: int, overlap_p2p: bool = False,
                 overlap_b_f: bool = False, enable_dxdw_split: bool = False, p2p_transport: str = "plain",
                 swap: bool = False):
        for asked, on, fix in (("overlap_b_f", overlap_b_f, "md.pipeline.ScheduleDualPipeV"),
                               ("enable_dxdw_split", enable_dxdw_split, "md.pipeline.ScheduleZBH1, ScheduleZBVZeroBubble"),
                               ("swap", swap, "checkpoint_wrapper(cell)")):
            if on:
                raise _refused(type(self).__name__, f"{asked}=True", fix)
        self._outputs: list[Any] = []
        self._last: Any = None
        given = [stages] if isinstance(stages, Stage) else list(stages)
        for stage in given:
            if stage.is_last:
                self._last = stage
        self.schedule = self.kind(given, micro_batch_num, self._loss)
        self.schedule.edges.every_step = True  # the first rank alone has the batch

    def _loss(self, out: Any, target: None) -> Any:
        self._outputs.append(map_leaves(detached, out, Tensor))
        tensors, sens = leaves(out, Tensor), self._last.get_last_stage_sens(out)
        weights = list(sens) if isinstance(sens, list | tuple) else [sens]
        if len(weights) != len(tensors):
            raise ScheduleError("For 'get_last_stage_sens', there is not one for each output.",
                                f"{len(weights)} for {len(tensors)}", "A backward begins at each.", "as many as outputs")
        total: Any = None
        for x, s in zip(tensors, weights):
            part = x if isinstance(s, float) and s == 1.0 else x * s
            part = part.sum() if part.shape else part
            total = part if total is None else total + part
        return total

    @property
    def params(self) -> list:
        """This rank's trainable parameters, in whose order gradients come."""
        return self.schedule.params

    @property
    def exec_order(self) -> str:
        """What each rank does, messages included: to be read, not to be changed."""
        return self.schedule.explain()

    @property
    def micro_batch_num(self) -> int:
        """Into how many pieces a batch is cut."""
        return self.schedule.n_microbatches

    @micro_batch_num.setter
    def micro_batch_num(self, number: int) -> None:
        raise _refused(type(self).__name__, f"micro_batch_num = {number}", f"{type(self).__name__}(stages, {number})")

    def register_custom_function(self, step_type: Any, function: Callable) -> None:
        """Refused: actions are what `ms_dtensor.pipeline` runs."""
        raise _refused(f"{type(self).__name__}.register_custom_function", str(step_type), "md.pipeline.ScheduleDualPipeV")

    def run(self, *args, **kwargs) -> Any:
        """Forward and backward; the first rank passes the batch, the others nothing, and side inputs all of them.

        Returns:
            What the last stage gave for each microbatch, an empty list on other ranks; and gradients, summed over them.
            While `enable_mindspore_backward_compat` is on, the former alone: gradients are added to `.grad` of this rank's
            parameters, or to their `main_grad`, as by `loss.backward()`.
        """
        self._outputs = []
        with not_recorded():  # each microbatch is a recording of its own
            _, grads = self.schedule.step(*args, weights=[1.0] * self.schedule.n_microbatches, **kwargs)
        outputs, self._outputs = self._outputs, []
        if not compat_is_on():
            return outputs, grads
        add_gradients(self.params, grads)
        return outputs


class ScheduleGPipe(_Runs):
    """See `ms_dtensor.pipeline.ScheduleGPipe`.

    Example:
        >>> from ms_dtensor.compat.hyper_parallel import ScheduleGPipe
        >>> ScheduleGPipe.kind.__name__
        'ScheduleGPipe'
    """

    kind = ours.ScheduleGPipe


class Schedule1F1B(_Runs):
    """See `ms_dtensor.pipeline.Schedule1F1B`.

    Example:
        >>> from ms_dtensor.compat.hyper_parallel import Schedule1F1B
        >>> Schedule1F1B.kind.__name__
        'Schedule1F1B'
    """

    kind = ours.Schedule1F1B


class ScheduleInterleaved1F1B(_Runs):
    """See `ms_dtensor.pipeline.ScheduleInterleaved1F1B`.

    Example:
        >>> from ms_dtensor.compat.hyper_parallel import ScheduleInterleaved1F1B
        >>> ScheduleInterleaved1F1B.kind.__name__
        'ScheduleInterleaved1F1B'
    """

    kind = ours.ScheduleInterleaved1F1B
