# SPDX-License-Identifier: Apache-2.0
"""The styles: what happens to one cell's parameters, inputs and outputs on one mesh axis (usually "tp").

Arguments, defaults and meanings are those of `torch.distributed.tensor.parallel`. A placement argument is one
`Placement` for a mesh of one axis, or `{"axis": Placement}`. `use_local_output=True` hands out plain local tensors,
whose widths are a rank's own: a model that reads its global number of heads from one fails in a view, and is told so.
`False` keeps DTensors with global shapes.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from mindspore import Tensor, mint, nn

from ..core.mesh import DeviceMesh
from ..core.placements import Placement, Replicate, Shard
from ..errors import ConfigError, LayoutError
from ..tensor.distribute import replicate_buffers
from ..tensor.dtensor import DTensor
from .layouts import by_axis, check_one_axis, enter, hand_out, place, place_first_input, shard_parameter


class ParallelStyle(ABC):
    """One way to parallelise a cell.

    Attributes:
        src_data_rank: coordinate whose parameter values all take; None: every rank's own.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from mindspore import nn
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> class Replicated(md.ParallelStyle):
        ...     def apply(self, module, device_mesh):
        ...         return md.distribute_module(module, device_mesh)
        >>> Replicated().apply(nn.Dense(2, 2), mesh).weight.placements
        (Replicate(),)
    """

    src_data_rank: int | None = 0

    def check(self, module: nn.Cell, device_mesh: DeviceMesh) -> dict[str, Placement]:
        """Raises if the style cannot be applied to this cell; changes and communicates nothing.

        Returns:
            How the cell's own parameters will be laid out on the axis, by key, as far as the style says.
        """
        return {}

    @abstractmethod
    def apply(self, module: nn.Cell, device_mesh: DeviceMesh) -> nn.Cell:
        """Rewrites the cell's parameters and registers hooks; returns the cell."""

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in vars(self).items() if k != 'src_data_rank')})"


def _is_embedding(cell) -> bool:
    return _is_a(cell, nn.Embedding, mint.nn.Embedding)


def _is_linear(cell) -> bool:
    return _is_a(cell, nn.Dense, mint.nn.Linear)


def _is_a(cell, *kinds: Any) -> bool:
    """`isinstance`, or of a class of the same source: `mindspore.rewrite`, behind amp's O1, imports modules once more."""
    bases: list[Any] = [base for base in type(cell).__mro__ if "construct" in vars(base)]
    return isinstance(cell, kinds) or any(
        base.__name__ == kind.__name__ and base.construct.__code__.co_filename == kind.construct.__code__.co_filename
        for base in bases for kind in kinds)


class _Sharded(ParallelStyle):
    """What ColwiseParallel and RowwiseParallel share: cut parameters, then place input and output."""

    _input_default: Placement
    _output_default: Placement
    # of each kind of cell the placement of a parameter by its number of dims, and of the input
    _linear: tuple[dict[int, Placement], Placement]
    _embedding: tuple[dict[int, Placement], Placement]

    def __init__(self, *, input_layouts=None, output_layouts=None, use_local_output: bool = True):
        self.input_layouts = self._input_default if input_layouts is None else input_layouts
        self.output_layouts = self._output_default if output_layouts is None else output_layouts
        self.use_local_output = use_local_output

    def _placements(self, cell) -> tuple[dict[int, Placement], Placement]:
        if _is_linear(cell):
            return self._linear
        if _is_embedding(cell):
            return self._embedding
        who = type(self).__name__
        raise ConfigError(f"For '{who}', the cell is a {type(cell).__name__}.", "",
                          f"{who} knows how to cut Linear (nn.Dense, mint.nn.Linear) and Embedding.",
                          ("write a ParallelStyle of your own", "distribute_module(cell, mesh, partition_fn)"))

    def check(self, module: nn.Cell, device_mesh: DeviceMesh) -> dict[str, Placement]:
        who = type(self).__name__
        params, _ = self._placements(module)
        check_one_axis(device_mesh, who)
        by_axis(self.input_layouts, device_mesh, who)
        by_axis(self.output_layouts, device_mesh, who)
        return {key: params[min(param.ndim, 2)] for key, param in module._params.items() if param is not None}

    def apply(self, module: nn.Cell, device_mesh: DeviceMesh) -> nn.Cell:
        for key, placement in self.check(module, device_mesh).items():
            shard_parameter(module, key, device_mesh, [placement], self.src_data_rank)
        replicate_buffers(module, device_mesh, self.src_data_rank)
        place_first_input(module, device_mesh, self.input_layouts, self._placements(module)[1], type(self).__name__)
        module.register_forward_hook(lambda cell, inputs, output: self._leave(output, device_mesh, cell))
        return module

    def _leave(self, output: DTensor, mesh: DeviceMesh, cell: nn.Cell):
        return _leave(output, mesh, self.output_layouts, self.use_local_output, type(self).__name__, cell)


def _leave(x, mesh, placement, local: bool, who: str, cell=None):
    x = place(x, mesh, placement, who)
    return _to_local(x, who, cell) if local else x


def _to_local(x: DTensor, who: str, cell=None) -> Tensor:
    """The local tensor; refused where ranks would hold unlike pieces, which nothing downstream could put together."""
    for d, n in enumerate(x.shape):
        if n % x.layout.divisor(d):
            raise LayoutError(f"For '{who}', plain local outputs would differ in size: dim {d} of size {n} over "
                              f"{x.layout.divisor(d)} ranks.", x.layout.describe(),
                              "A plain tensor does not say which part of the whole it is.",
                              ("use_local_output=False keeps a DTensor, whose shape is the global one",
                               "choose a size that the ranks divide"))
    return hand_out(x, cell)


class ColwiseParallel(_Sharded):
    """Output features cut over the axis: Linear weight `f32[out@tp, in]`, Embedding weight `f32[vocab, dim@tp]`.

    The cut is contiguous: of a fused qkv weight the first ranks hold q. `split` of the DTensor output is right all the
    same, by moving data; a local output is the contiguous piece, not a third of q, k and v each.

    Args:
        input_layouts: how a plain input is laid out; default `Replicate()`. The input is brought to Replicate.
        output_layouts: layout of the output; default `Shard(-1)`.
        use_local_output: hand out the local tensor.

    Source: Shoeybi et al. 2019, "Megatron-LM"; API as `torch.distributed.tensor.parallel.ColwiseParallel`.

    Example:
        >>> from ms_dtensor import ColwiseParallel
        >>> ColwiseParallel(use_local_output=False)
        ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    """

    _input_default, _output_default = Replicate(), Shard(-1)
    _linear = {1: Shard(0), 2: Shard(0)}, Replicate()
    _embedding = {2: Shard(1)}, Replicate()


class RowwiseParallel(_Sharded):
    """Input features cut over the axis: Linear weight `f32[out, in@tp]`; Embedding weight `f32[vocab@tp, dim]`.

    The output is a sum over the axis, brought to `output_layouts` by one all-reduce or reduce-scatter. The bias is
    added once. An Embedding looks up only its own rows: ids are shifted and masked.

    Args:
        input_layouts: how a plain input is laid out; default `Shard(-1)`. A Linear's input is brought to Shard(-1), an
            Embedding's to Replicate.
        output_layouts: layout of the output; default `Replicate()`.
        use_local_output: hand out the local tensor.

    Source: as `ColwiseParallel`.

    Example:
        >>> from ms_dtensor import RowwiseParallel, Shard
        >>> RowwiseParallel(output_layouts=Shard(1))
        RowwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(1), use_local_output=True)
    """

    _input_default, _output_default = Shard(-1), Replicate()
    _linear = {1: Replicate(), 2: Shard(1)}, Shard(-1)
    _embedding = {2: Shard(0)}, Replicate()


class SequenceParallel(ParallelStyle):
    """Parameters replicated, activations cut along the sequence: norms and dropout between tensor-parallel blocks.

    Args:
        sequence_dim: dim of the input that is cut; default 1, for `[batch, sequence, hidden]`.
        use_local_output: hand out the local tensor.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from mindspore import nn
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> norm = md.SequenceParallel().apply(nn.LayerNorm((8,)), mesh)
        >>> norm(md.ones((2, 4, 8), mesh, [md.Shard(1)]))
        DTensor(f32[2, 4@tp, 8], mesh=(tp=1), rank 0 holds [2, 4, 8])
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False):
        self.sequence_dim, self.use_local_output = sequence_dim, use_local_output

    def check(self, module: nn.Cell, device_mesh: DeviceMesh) -> dict[str, Placement]:
        by_axis(Shard(self.sequence_dim), device_mesh, "SequenceParallel")
        return {key: Replicate() for key, param in module._params.items() if param is not None}

    def apply(self, module: nn.Cell, device_mesh: DeviceMesh) -> nn.Cell:
        self.check(module, device_mesh)
        for _, cell in module.cells_and_names():
            for key, param in cell._params.items():
                if param is not None:
                    shard_parameter(cell, key, device_mesh, [Replicate()] * device_mesh.ndim, self.src_data_rank)
            replicate_buffers(cell, device_mesh, self.src_data_rank)
        place_first_input(module, device_mesh, Shard(self.sequence_dim), Shard(self.sequence_dim), "SequenceParallel")
        if self.use_local_output:
            module.register_forward_hook(lambda cell, inputs, output: _to_local(output, "SequenceParallel", cell))
        return module


def _prepared(x, cell: nn.Cell, mesh: DeviceMesh, given, wanted, style, leaves=None):
    """An input or output as the style below wants it; `leaves`: the cell whose output it is."""
    if not isinstance(x, Tensor) or wanted is None or given is None and not isinstance(x, DTensor):
        return x
    who = type(style).__name__
    return _leave(enter(x, cell, mesh, given, who), mesh, wanted, style.use_local_output, who, leaves)


def _each(what: str, values, cell: nn.Cell, mesh: DeviceMesh, style, leaves=None) -> tuple:
    """Positional inputs, or outputs, as the style below wants them."""
    given, wanted = getattr(style, f"{what}_layouts"), getattr(style, f"desired_{what}_layouts")
    if len(values) != len(given):
        raise ConfigError(f"For '{type(style).__name__}', {type(cell).__name__} has {len(values)} {what}s, but "
                          f"'{what}_layouts' has {len(given)} entries.", "", f"There is one entry per positional {what}.",
                          f"write None for {what}s left alone")
    return tuple(_prepared(x, cell, mesh, g, w, style, leaves) for x, g, w in zip(values, given, wanted))


def _tuple(value):
    return value if isinstance(value, tuple) else (value,) if value is not None else ()


def _check_all(who: str, mesh: DeviceMesh, *placements) -> dict[str, Placement]:
    for p in placements:
        if p is not None:
            by_axis(p, mesh, who)
    return {}


class PrepareModuleInput(ParallelStyle):
    """Brings a cell's inputs from their layouts to the desired ones, before it runs.

    Args:
        input_layouts: per positional input: how a plain tensor is laid out; None leaves an input alone.
        desired_input_layouts: per positional input: what the cell gets.
        input_kwarg_layouts: the same by keyword.
        desired_input_kwarg_layouts: the same by keyword.
        use_local_output: hand the cell local tensors.

    Raises:
        ConfigError: the two sides do not pair.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from mindspore import nn
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> style = md.PrepareModuleInput(input_layouts=md.Shard(0), desired_input_layouts=md.Replicate())
        >>> style.apply(nn.Identity(), mesh)(ms.ops.ones((2, 3)))
        DTensor(f32[2, 3], mesh=(tp=1), rank 0 holds [2, 3])
    """

    def __init__(self, *, input_layouts=None, desired_input_layouts=None, input_kwarg_layouts=None,
                 desired_input_kwarg_layouts=None, use_local_output: bool = False):
        self.input_layouts, self.desired_input_layouts = _tuple(input_layouts), _tuple(desired_input_layouts)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        if len(self.input_layouts) != len(self.desired_input_layouts):
            raise ConfigError("For 'PrepareModuleInput', 'input_layouts' and 'desired_input_layouts' must pair, but have "
                              f"{len(self.input_layouts)} and {len(self.desired_input_layouts)} entries.")
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise ConfigError("For 'PrepareModuleInput', 'input_kwarg_layouts' and 'desired_input_kwarg_layouts' must "
                              f"name the same arguments, but name {sorted(self.input_kwarg_layouts)} and "
                              f"{sorted(self.desired_input_kwarg_layouts)}.")

    def check(self, module: nn.Cell, device_mesh: DeviceMesh) -> dict[str, Placement]:
        return _check_all("PrepareModuleInput", device_mesh, *self.input_layouts, *self.desired_input_layouts,
                          *self.input_kwarg_layouts.values(), *self.desired_input_kwarg_layouts.values())

    def apply(self, module: nn.Cell, device_mesh: DeviceMesh) -> nn.Cell:
        self.check(module, device_mesh)

        def before(cell, inputs, kwargs):
            if self.input_layouts:
                inputs = _each("input", inputs, cell, device_mesh, self)
            given, wanted = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
            return inputs, {k: _prepared(x, cell, device_mesh, given.get(k), wanted.get(k), self) for k, x in kwargs.items()}
        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


class PrepareModuleOutput(ParallelStyle):
    """Brings a cell's outputs from their layouts to the desired ones, after it ran.

    Args:
        output_layouts: per output: how a plain tensor is laid out; None leaves an output alone.
        desired_output_layouts: per output: what the caller gets.
        use_local_output: hand out local tensors.

    Raises:
        ConfigError: the two sides do not pair.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from mindspore import nn
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> style = md.PrepareModuleOutput(output_layouts=md.Replicate(), desired_output_layouts=md.Shard(0),
        ...                                use_local_output=False)
        >>> style.apply(nn.Identity(), mesh)(ms.ops.ones((2, 3)))
        DTensor(f32[2@tp, 3], mesh=(tp=1), rank 0 holds [2, 3])
    """

    def __init__(self, *, output_layouts, desired_output_layouts, use_local_output: bool = True):
        self.output_layouts, self.desired_output_layouts = _tuple(output_layouts), _tuple(desired_output_layouts)
        self.use_local_output = use_local_output
        if len(self.output_layouts) != len(self.desired_output_layouts):
            raise ConfigError("For 'PrepareModuleOutput', 'output_layouts' and 'desired_output_layouts' must pair, but "
                              f"have {len(self.output_layouts)} and {len(self.desired_output_layouts)} entries.")

    def check(self, module: nn.Cell, device_mesh: DeviceMesh) -> dict[str, Placement]:
        return _check_all("PrepareModuleOutput", device_mesh, *self.output_layouts, *self.desired_output_layouts)

    def apply(self, module: nn.Cell, device_mesh: DeviceMesh) -> nn.Cell:
        self.check(module, device_mesh)

        def after(cell, inputs, outputs):
            values = outputs if isinstance(outputs, tuple | list) else (outputs,)
            done = _each("output", values, cell, device_mesh, self, cell)
            return type(outputs)(done) if isinstance(outputs, tuple | list) else done[0]
        module.register_forward_hook(after)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one; see there for the arguments.

    Example:
        >>> from ms_dtensor import PrepareModuleInputOutput, Replicate, Shard
        >>> style = PrepareModuleInputOutput(input_layouts=Shard(0), desired_input_layouts=Replicate(),
        ...                                  output_layouts=Replicate(), desired_output_layouts=Shard(0))
        >>> style.prepare_input.desired_input_layouts
        (Replicate(),)
    """

    def __init__(self, *, input_layouts=None, desired_input_layouts=None, input_kwarg_layouts=None,
                 desired_input_kwarg_layouts=None, use_local_input: bool = False, output_layouts,
                 desired_output_layouts, use_local_output: bool = True):
        self.prepare_input = PrepareModuleInput(
            input_layouts=input_layouts, desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts, desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input)
        self.prepare_output = PrepareModuleOutput(
            output_layouts=output_layouts, desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output)

    def check(self, module: nn.Cell, device_mesh: DeviceMesh) -> dict[str, Placement]:
        return self.prepare_input.check(module, device_mesh) | self.prepare_output.check(module, device_mesh)

    def apply(self, module: nn.Cell, device_mesh: DeviceMesh) -> nn.Cell:
        self.prepare_input.apply(module, device_mesh)
        return self.prepare_output.apply(module, device_mesh)

    def __repr__(self):
        return f"PrepareModuleInputOutput({self.prepare_input!r}, {self.prepare_output!r})"
