# SPDX-License-Identifier: Apache-2.0
"""Styles of sequence parallelism that hide its communication: products go on while rows are gathered, or sums scattered.

`OverlappedColwise` for Linears that read one input whose sequence is cut, `OverlappedRowwise` for the one behind.
The products are `pieces.py`'s. Where a rank's rows are not all ranks' equal share, the cell computes as `ColwiseParallel` or
`RowwiseParallel` has it: which of both happens follows from the layout of the input, so it does on all ranks alike.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, mint, nn

from ..core.layout import Layout
from ..core.mesh import DeviceMesh
from ..core.placements import FusedShard, Placement, Replicate, Shard
from ..custom_ops.local_map import local_map
from ..debug.types.doors import declared
from ..errors import ConfigError
from ..tensor.distribute import replicate_buffers
from ..tensor.dtensor import DTensor
from .late import RUN, Debt, Late
from .layouts import around_construct, check_one_axis, place, place_first_input, shard_parameter
from .pieces import Columns, How, Pieces, Rows
from .styles import ParallelStyle, _is_linear

_MADE = "_ms_dtensor_made_together"  # of an input: outputs of the cells that have not been called yet, by name
_TOGETHER = "_ms_dtensor_together"  # of a cell: its name, and the `_Together` it is one of
_ALONE = "_ms_dtensor_alone"  # of a cell: it has the style `OverlappedRowwise`
_OVERLAPPED = "_ms_dtensor_overlapped"  # of a block: its cells of both kinds, those together in one tuple


def _check(who: str, pieces: Pieces, cells: dict[str, nn.Cell], mesh: DeviceMesh) -> None:
    if pieces != "kernel" and (not isinstance(pieces, int) or isinstance(pieces, bool) or pieces < 1):
        raise ConfigError(f"For '{who}', 'pieces' is {pieces!r}.", "", 'It is a number from 1 on, or "kernel".', "pieces=4")
    check_one_axis(mesh, who)
    for name, cell in cells.items():
        plain = _is_linear(cell) and "construct" not in cell.__dict__ and \
            type(cell).construct in (nn.Dense.construct, mint.nn.Linear.construct)
        if not plain or getattr(cell, "activation", None) is not None:
            raise ConfigError(f"For '{who}', {name or 'the cell'} is a {type(cell).__name__} that is no plain Linear.", "",
                              "The style computes the product itself, in the place of the cell.",
                              ("nn.Dense without activation, or mint.nn.Linear", "ColwiseParallel or RowwiseParallel"))


class _Together:
    """Linears of one input, and how it lies; cells refer to it, so that a copy of a model has its own."""

    def __init__(self, cells: dict[str, nn.Cell], axis: str, pieces: Pieces, dim: int, parts: tuple[int, ...]):
        self.cells, self.axis, self.pieces, self.dim, self.parts = cells, axis, pieces, dim, parts

    def cut(self, dim: int) -> Placement:
        """That of the weights, and of the outputs' last dim."""
        return FusedShard(dim, self.parts) if self.parts else Shard(dim)

    def of(self, x: DTensor, name: str) -> DTensor:
        """The output of one of the cells for `x`: the first that is called makes those of all."""
        made = x.__dict__.get(_MADE, {})
        if name not in made:
            made = x.__dict__[_MADE] = dict(zip(self.cells, _columns(self, x)))
        return made.pop(name)


class OverlappedColwise(ParallelStyle):
    """`ColwiseParallel` of Linears that read one input, whose sequence is cut: it is gathered while they multiply.

    For a cell that holds them: `{"attention": OverlappedColwise("wq", "wk", "wv")}`. They compute as one product of their
    weights, one under the other; the first that is called does it for all. For one Linear: `OverlappedColwise()` of itself.
    Outputs are DTensors, `Shard(-1)`. The backward scatters the input's gradient while gradients are computed.

    Args:
        *cells: names of the Linears inside; none: the cell itself.
        pieces: so many products and collectives at most; or "kernel": Ascend's fused `all_gather_matmul` and
            `matmul_reduce_scatter`, *not run on hardware* (elsewhere a product and a collective, one after the other).
        sequence_dim: dim of the input that is cut; default 1, for `[batch, sequence, hidden]`.
        parts: of one Linear that is a fused projection, as `FusedColwiseParallel` has them; the axis divides each. Its
            output is `FusedShard(-1, parts)`.

    Raises:
        ConfigError: a cell that is no plain Linear, or has other parts. On an Ascend, in a forward, CommError: what the
            kernel does not take.

    Source: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
        Models"; the kernels are described with `mindspore.ops.all_gather_matmul`.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> from ms_dtensor.parallel import OverlappedColwise
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> cell = OverlappedColwise(pieces=4, sequence_dim=0).apply(nn.Dense(6, 16), mesh)
        >>> cell(md.ones((8, 6), mesh, [md.Shard(0)]))
        DTensor(f32[8, 16@tp], mesh=(tp=1), rank 0 holds [8, 16])
    """

    def __init__(self, *cells: str, pieces: Pieces = 4, sequence_dim: int = 1, parts: Sequence[int] = ()):
        self.cells, self.pieces, self.sequence_dim, self.parts = cells, pieces, sequence_dim, tuple(parts)

    def _cells(self, module: nn.Cell) -> dict[str, nn.Cell]:
        inside = module.name_cells()
        missing = [name for name in self.cells if name not in inside]
        if missing:
            raise ConfigError(f"For 'OverlappedColwise', {type(module).__name__} has no cell '{missing[0]}'.", "",
                              f"It has {', '.join(inside) or 'none'}.", "names of cells that it holds itself")
        return {name: inside[name] for name in self.cells} or {"": module}

    def check(self, module: nn.Cell, device_mesh: DeviceMesh) -> dict[str, Placement]:
        cells = self._cells(module)
        _check("OverlappedColwise", self.pieces, cells, device_mesh)
        if len({"bias" if cell._params.get("bias") is not None else "" for cell in cells.values()}) > 1:
            raise ConfigError("For 'OverlappedColwise', some of the cells have a bias, and some have none.",
                              ", ".join(cells), "They compute as one.", "a style for each of the two kinds")
        rows = [cell._params["weight"].shape[0] for cell in cells.values()]
        if self.parts and (rows != [sum(self.parts)] or any(n % device_mesh.size() for n in self.parts)):
            raise ConfigError(f"For 'OverlappedColwise', the parts {self.parts} are not those of one cell.",
                              f"{', '.join(cells)} with {rows} rows, mesh({device_mesh.describe()})",
                              "They are all of its output features, and every rank has as many of each.", "correct 'parts'")
        cut = FusedShard(0, self.parts) if self.parts else Shard(0)
        return {key: cut for key, p in module._params.items() if p is not None} if not self.cells else {}

    def apply(self, module: nn.Cell, device_mesh: DeviceMesh) -> nn.Cell:
        self.check(module, device_mesh)
        cells = self._cells(module)
        together = _Together(cells, device_mesh.mesh_dim_names[0], self.pieces, self.sequence_dim, self.parts)
        place_first_input(module, device_mesh, Shard(self.sequence_dim), Shard(self.sequence_dim), "OverlappedColwise")
        for name, cell in cells.items():
            for key, param in cell._params.items():
                if param is not None:
                    shard_parameter(cell, key, device_mesh, [together.cut(0)], self.src_data_rank)
            replicate_buffers(cell, device_mesh, self.src_data_rank)
            cell.__dict__[_TOGETHER] = name, together
            around_construct(cell, _one_of_them)
        return module


def _one_of_them(given):
    def construct(self, x: Tensor):
        name, together = self.__dict__[_TOGETHER]
        if isinstance(x, DTensor) and _even(_cut(x.layout, together.axis), together.axis, together.dim):
            return together.of(x, name)
        if isinstance(x, DTensor) and together.axis in x.device_mesh.mesh_dim_names:
            x = x.redistribute(placements=_with(x.layout, together.axis, Replicate()))
        return given(self, x)
    return construct


def _with(layout: Layout, axis: str, placement: Placement) -> list[Placement]:
    placed = list(layout.placements)
    placed[layout.mesh.axis_index(axis)] = placement
    return placed


def _cut(layout: Layout, axis: str) -> Layout:
    """The same layout, but for other axes of one rank: these cut nothing."""
    mesh = layout.mesh
    return layout.with_placements([Replicate() if n == 1 and name != axis else p for name, n, p in
                                   zip(mesh.mesh_dim_names, mesh.shape, layout.placements)])


def _even(layout: Layout, axis: str, dim: int) -> bool:
    """Whether the axis is the innermost that cuts this dim, every rank has as many rows, and nothing else is in the way."""
    mesh = layout.mesh
    if axis not in mesh.mesh_dim_names or any(p.is_partial() or p.parts for p in layout.placements):
        return False
    axes = layout.dim_axes
    return bool(axes[dim]) and axes[dim][-1] == mesh.axis_index(axis) and not axes[-1] and \
        all(n and n % layout.divisor(d) == 0 for d, n in enumerate(layout.shape))


_maps: dict[tuple, Any] = {}


def _mapped(fn, key: tuple, outs, ins, shapes):
    """A declaration of how local operands lie is worked out once."""
    if key not in _maps:
        if len(_maps) >= 256:
            _maps.clear()
        _maps[key] = local_map(fn, outs, ins, out_shapes=shapes)
    return _maps[key]


@declared(("V", "*", "->", "V"), ("V", "R", "*", "->", "V"))
def _column_products(x, weights, biases, how: How):
    return Columns.apply(x, weights, biases, how)


@declared(("V", "V", "->", "V"), ("V", "R", "->", "V"))
def _row_product(x, w, how: How):
    return Rows.apply(x, w, how)


def _columns(together: _Together, x: DTensor) -> tuple[DTensor, ...]:
    layout, axis, dim = _cut(x.layout, together.axis), together.axis, together.dim
    x = x if x.layout is layout else x.redistribute(placements=list(layout.placements))
    weights, late, debt = _weights(tuple(together.cells.values()), layout, together.pieces)
    biases = tuple(b for cell in together.cells.values() if (b := cell._params.get("bias")) is not None)
    widths = tuple(cell._params["weight"].shape[0] for cell in together.cells.values())
    columns, rows = _with(layout, axis, together.cut(x.ndim - 1)), {axis: together.cut(0)}
    run = _mapped(_column_products, ("columns", layout, axis, dim, widths, together.parts, len(biases), debt is None),
                  (columns,) * len(widths), (list(layout.placements), rows if debt is None else None, rows, None),
                  lambda *shapes: tuple((*shapes[0][:-1], n) for n in widths))
    return run(x, weights, biases, How(x.device_mesh.get_group(axis), together.pieces, dim, late, debt))


def _weights(cells: tuple[nn.Cell, ...], layout: Layout, pieces: Pieces
             ) -> tuple[tuple[Tensor, ...], Late | None, Debt | None]:
    """The weights that a product takes, what the block's backward owes, and the debt that is this product's."""
    late: Late | None = cells[0].__dict__.get(RUN)
    if late is None or pieces == "kernel":
        return tuple(cell._params["weight"] for cell in cells), None, None
    weights, debt = late.weights(cells, layout)
    return weights, late, debt


class OverlappedRowwise(ParallelStyle):
    """`RowwiseParallel` of a Linear whose output's sequence is to be cut: sums are scattered while the product goes on.

    Args:
        pieces: as for `OverlappedColwise`.
        sequence_dim: dim of the output that is cut; default 1.

    Raises:
        ConfigError: as for `OverlappedColwise`.

    Source: as `OverlappedColwise`.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> from ms_dtensor.parallel import OverlappedRowwise
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> cell = OverlappedRowwise(pieces=2, sequence_dim=0).apply(nn.Dense(6, 16), mesh)
        >>> cell(md.ones((8, 6), mesh, [md.Shard(1)]))
        DTensor(f32[8@tp, 16], mesh=(tp=1), rank 0 holds [8, 16])
    """

    def __init__(self, *, pieces: Pieces = 4, sequence_dim: int = 1):
        self.pieces, self.sequence_dim = pieces, sequence_dim

    def check(self, module: nn.Cell, device_mesh: DeviceMesh) -> dict[str, Placement]:
        _check("OverlappedRowwise", self.pieces, {"": module}, device_mesh)
        return {key: Shard(1) if key == "weight" else Replicate() for key, p in module._params.items() if p is not None}

    def apply(self, module: nn.Cell, device_mesh: DeviceMesh) -> nn.Cell:
        for key, placement in self.check(module, device_mesh).items():
            shard_parameter(module, key, device_mesh, [placement], self.src_data_rank)
        replicate_buffers(module, device_mesh, self.src_data_rank)
        axis, (dim, pieces) = device_mesh.mesh_dim_names[0], (self.sequence_dim, self.pieces)
        place_first_input(module, device_mesh, Shard(-1), Shard(-1), "OverlappedRowwise")

        def wrap(given):
            def construct(self, x: Tensor):
                layout = _cut(x.layout, axis)
                rows = _with(layout, axis, Shard(dim))
                if not _even(layout.with_placements(rows), axis, dim):
                    return place(given(self, x), device_mesh, Shard(dim), "OverlappedRowwise")
                x = x if x.layout is layout else x.redistribute(placements=list(layout.placements))
                (weight,), late, debt = _weights((self,), layout, pieces)
                bias, width = self._params.get("bias"), weight.shape[0]
                run = _mapped(_row_product, ("rows", x.layout, axis, dim, width, debt is None), rows,
                              (list(x.layout.placements), {axis: Shard(1)} if debt is None else None, None),
                              lambda a, *rest: (*a[:-1], width))
                y = run(x, weight, How(x.device_mesh.get_group(axis), pieces, dim, late, debt))
                return y if bias is None else y + bias
            return construct
        around_construct(module, wrap)
        module.__dict__[_ALONE] = True
        return module


class OverlappedGradients(ParallelStyle):
    """For a block whose cells have the styles above: gradients of their weights are computed behind the next communication.

    In the backward of an attention before a feed-forward, say, the rows that the attention's last product needs travel while
    the feed-forward's weights get their gradients. Values, gradients and communication stay the same; what one product
    reads stays in memory until then. Apply it to one block of a model, with the plan's entry "".

    Raises:
        ConfigError: by the block's first forward: no cell inside has one of the styles.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> from ms_dtensor.parallel import OverlappedColwise, OverlappedGradients, OverlappedRowwise
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> block = nn.SequentialCell(nn.Dense(6, 16), nn.Dense(16, 6))
        >>> block = md.parallelize_module(block, mesh, {"0": OverlappedColwise(sequence_dim=0),
        ...                               "1": OverlappedRowwise(sequence_dim=0), "": OverlappedGradients()})
        parallelize_module over tp=1:
          0  OverlappedColwise: 0
          1  OverlappedRowwise: 1
             OverlappedGradients: 
        >>> block(md.ones((8, 6), mesh, [md.Shard(0)]))
        DTensor(f32[8@tp, 6], mesh=(tp=1), rank 0 holds [8, 6])
    """

    def apply(self, module: nn.Cell, device_mesh: DeviceMesh) -> nn.Cell:
        around_construct(module, _owing)
        return module


def _owing(given):
    def construct(self, *args, **kwargs):
        cells = self.__dict__.get(_OVERLAPPED)
        if cells is None:  # styles of cells inside may be applied after the block's
            inside = [cell for _, cell in self.cells_and_names()]
            groups = [tuple(c.__dict__[_TOGETHER][1].cells.values()) for c in inside if _TOGETHER in c.__dict__]
            groups += [(c,) for c in inside if _ALONE in c.__dict__]
            if not groups:
                raise ConfigError(f"For 'OverlappedGradients', no cell of {type(self).__name__} has an overlapped style.",
                                  f"{len(inside)} cells", "It is for the weights of cells that have one.",
                                  ("OverlappedColwise or OverlappedRowwise for cells inside, before the block first runs",
                                   "leave it out of the plan"))
            cells = self.__dict__[_OVERLAPPED] = list({id(group[0]): group for group in groups}.values())
        late = Late(cells)
        for group in cells:
            group[0].__dict__[RUN] = late
        try:
            return given(self, *args, **kwargs)
        finally:
            for group in cells:
                group[0].__dict__.pop(RUN, None)
    return construct
