# SPDX-License-Identifier: Apache-2.0
"""One stage of a pipeline on this rank: its module, its parameters, and one forward and backward of a micro-batch."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from mindspore import Parameter, nn

from ..comm.pretended import executing
from ..core.mesh import DeviceMesh
from ..dispatch.held import holding
from ..dispatch.recording import HeldRecording, Recording
from ..errors import ConfigError
from ..parallel.sharding.call import held_back, units_among, units_of
from ..parallel.sharding.unit import cells_in

if TYPE_CHECKING:
    from .split import Tie


class PipelineStage:
    """A part of a model, as `pipeline` cuts it, or as you do.

    Args:
        module: what it computes: of the outputs of the stage before (of the first, of the batch) and of the keyword
            arguments of `step`.
        stage_index: which one it is, from 0.
        num_stages: how many there are.
        mesh: the axis that the stages are dealt over, `mesh["pp"]`.
        ties: parameters that other stages have, too.

    Raises:
        ConfigError: no such stage.

    Names and meanings are those of `torch.distributed.pipelining.PipelineStage`.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        >>> stage = md.pipeline.PipelineStage(nn.Dense(4, 4), 0, 1, mesh)
        >>> stage.is_first, stage.is_last
        (True, True)
    """

    def __init__(self, module: nn.Cell, stage_index: int, num_stages: int, mesh: DeviceMesh, *, ties: Sequence[Tie] = ()):
        if not isinstance(module, nn.Cell) or not 0 <= stage_index < num_stages:
            raise ConfigError(f"For 'PipelineStage', stage {stage_index} of {num_stages} is none.", type(module).__name__,
                              "A stage is a cell, and stages count from 0.", "stage_index from 0 to num_stages - 1")
        self.module, self.stage_index, self.num_stages, self.mesh, self.ties = module, stage_index, num_stages, mesh, ties
        self.held_back = set[int]()  # ids of parameters whose gradients the next backward hands out as zeros

    @property
    def is_first(self) -> bool:
        """Whether the batch enters here."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage_index == self.num_stages - 1

    def params(self) -> list[Parameter]:
        """Its trainable parameters."""
        return list(self.module.trainable_params())

    def record(self, inputs: tuple, kwargs: dict[str, Any], then: Callable | None, in_parts: bool = False) -> Recording:
        """The forward of a micro-batch; `then` is applied to the output. The backward comes in one part or in two."""
        def run(*inputs):
            return self.run(inputs, kwargs, then, in_parts)
        kind = HeldRecording if in_parts else Recording
        return kind.of(lambda: run(*inputs)) if self.is_first else kind.of(run, *inputs)  # nobody wants the batch's gradient

    def run(self, inputs: tuple, kwargs: dict[str, Any], then: Callable | None, in_parts: bool = False) -> Any:
        """The forward alone; what nobody records is an evaluation."""
        def whole(inputs, kwargs):
            with self._gated() if in_parts else nullcontext():
                out = self.module(*inputs, **kwargs)
            return out if then is None else then(out)
        dry = executing()
        return whole(inputs, kwargs) if dry is None else dry.plain_cell(self.module, whole, inputs, kwargs)

    @contextmanager
    def _gated(self) -> Iterator[None]:
        """Inside, gates stand in the place of trainable parameters; units see to those for which they put others there."""
        store: Any = holding.get()
        cells = list(cells_in(self.module))
        units = units_among(cells)
        for unit in units:  # a parameter that is trained since the last forward is told who adds up its gradient
            unit.reduction.begin()
        theirs = {(id(cell), key) for unit in units for cell, key, _ in unit.standing}
        slots = [(held, key, p) for cell in cells for key, p in cell._params.items()
                 if isinstance(p, Parameter) and p.requires_grad and (id(cell), key) not in theirs
                 for held in (cell._params, cell.__dict__) if key in held]
        for held, key, p in slots:
            held[key] = store.gate(p)
        try:
            yield
        finally:
            for held, key, p in slots:
                held[key] = p

    def synchronise(self, now: bool) -> None:
        """Whether the next backward reduces gradients over data-parallel ranks: that of the last micro-batch does.

        One rank with all data has nothing to wait for.
        """
        units = units_of(self.module)
        for unit in units:
            unit.reduction.sync = now or unit.mesh.size() == 1
        self.held_back = held_back(units)
