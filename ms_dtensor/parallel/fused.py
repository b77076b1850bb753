# SPDX-License-Identifier: Apache-2.0
"""Fused projections cut by head or block: one weight that holds q, k and v, or gate and up, one under the other.

A contiguous cut would give the first ranks q and the last ones v. Here the rows are kept in units that belong together
(a key head, its value head and the query heads that share it; one gate row and its up row), and the axis cuts between
units. That order does not depend on the mesh, so a checkpoint of the parameter means the same on any other; `Fused` takes
it to the model's own order and back. Invariant: each rank's output is its heads of q, then of k, then of v, as the one
device code would split it, and nothing moves.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor, mint, nn

from ..core.layout import Layout
from ..core.mesh import DeviceMesh
from ..core.placements import Placement, Replicate, Shard
from ..dispatch.operands import dtype_name, wrap
from ..dispatch.replaced import current
from ..errors import LayoutError
from ..tensor.distribute import distribute_tensor, like_parameter, set_parameter
from ..tensor.dtensor import DTensor
from .layouts import convert_first, enter, hand_out, place, replicate_buffers
from .styles import ColwiseParallel, ParallelStyle

FUSED = "fused"  # Parameter attribute: the `Fused` that says how its rows are ordered


@dataclass(frozen=True, slots=True)
class Fused:
    """How the rows of a fused weight are ordered once it is cut: unit by unit, each with its share of every part.

    Args:
        parts: rows of each part, in the model's order: (q, k, v) or (gate, up).
        units: how many units there are; each part has the same number of rows in each.

    Example:
        >>> import numpy as np
        >>> from ms_dtensor.parallel import Fused
        >>> order = Fused(parts=(4, 2), units=2)
        >>> order.interleave(np.array([10, 11, 12, 13, 20, 21]))
        array([10, 11, 20, 12, 13, 21])
        >>> order.restore(order.interleave(np.arange(6)))
        array([0, 1, 2, 3, 4, 5])
    """

    parts: tuple[int, ...]
    units: int

    def rows(self) -> np.ndarray:
        """For each row of the cut weight, its row in the model's order."""
        starts = np.cumsum((0, *self.parts))[:-1]
        return np.concatenate([np.arange(s, s + p).reshape(self.units, -1) for s, p in zip(starts, self.parts)], 1).ravel()

    def interleave(self, array: np.ndarray) -> np.ndarray:
        """From the model's order of rows to the cut weight's."""
        return array[self.rows()]

    def restore(self, array: np.ndarray) -> np.ndarray:
        """From the cut weight's order of rows to the model's."""
        out = np.empty_like(array)
        out[self.rows()] = array
        return out


class FusedColwiseParallel(ParallelStyle):
    """`ColwiseParallel` for a Linear whose weight is several ones under each other, cut by head or block.

    Args:
        parts: output features of each, in order: `(q, k, v)` or `(gate, up)`.
        units: units that stay together: key-value heads for q, k, v; by default the most there can be (each gate row
            with its up row).
        input_layouts: how a plain input is laid out; default `Replicate()`. The input is brought to Replicate.
        use_local_output: True: the output is one plain tensor, this rank's q, then k, then v, for code that counts local
            heads. False: a tuple of DTensors, one per part, each sharded on its last dim in the model's own order.

    The parameter holds its rows unit by unit; `param.fused` is the `Fused` that restores the model's order.

    Source: Shoeybi et al. 2019, "Megatron-LM", whose fused attention weight is ordered by head.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> from ms_dtensor.parallel import FusedColwiseParallel
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> cell = FusedColwiseParallel((8, 4, 4), units=2, use_local_output=False).apply(nn.Dense(6, 16), mesh)
        >>> q, k, v = cell(md.ones((3, 6), device_mesh=mesh))
        >>> q
        DTensor(f32[3, 8@tp], mesh=(tp=1), rank 0 holds [3, 8])
    """

    def __init__(self, parts: Sequence[int], *, units: int | None = None, input_layouts=None, use_local_output: bool = True):
        self.parts = tuple(int(p) for p in parts)
        self.units = math.gcd(*self.parts) if units is None else int(units)
        self.input_layouts = Replicate() if input_layouts is None else input_layouts
        self.use_local_output = use_local_output
        if not self.parts or self.units < 1 or any(p % self.units for p in self.parts):
            raise LayoutError(f"For 'FusedColwiseParallel', {self.units} units do not divide the parts {self.parts}.", "",
                              "Each unit has the same number of rows of every part.", "pass the number of key-value heads")

    def check(self, module: nn.Cell, device_mesh: DeviceMesh) -> dict[str, Placement]:
        placed = ColwiseParallel(input_layouts=self.input_layouts).check(module, device_mesh)
        rows = {tuple(module._params[key].shape)[0] for key in placed}
        if rows != {sum(self.parts)} or any(placed[key] != Shard(0) for key in placed):
            raise LayoutError(f"For 'FusedColwiseParallel', the parts {self.parts} have {sum(self.parts)} rows, the "
                              f"{type(module).__name__} has {sorted(rows)}.", "",
                              "The parts are all output features of one Linear.", "correct 'parts'")
        if self.units % device_mesh.size():
            raise LayoutError(f"For 'FusedColwiseParallel', {self.units} units do not divide by {device_mesh.size()} ranks.",
                              f"mesh({device_mesh.describe()})", "A unit is not divided.",
                              ("an axis whose size divides the number of units", "ColwiseParallel(use_local_output=False)"))
        return placed

    def apply(self, module: nn.Cell, device_mesh: DeviceMesh) -> nn.Cell:
        order = Fused(self.parts, self.units)
        for key in self.check(module, device_mesh):
            param = current(module._params[key])
            if isinstance(param, DTensor) and param.__dict__.get(FUSED) == order and param is not module._params[key]:
                set_parameter(module, key, param)  # tied to a cell that was dealt with
                continue
            if isinstance(param, DTensor):
                raise LayoutError(f"For 'FusedColwiseParallel', parameter '{param.name}' is laid out already.",
                                  param.layout.describe(), "", "apply the style first")
            whole = distribute_tensor(param, device_mesh, [Replicate()], src_data_rank=self.src_data_rank).to_local()
            layout = Layout(device_mesh, [Shard(0)], tuple(param.shape), dtype_name(param.dtype))
            lo, hi = layout.local_box()[0]
            local = Tensor(np.ascontiguousarray(order.interleave(whole.asnumpy())[lo:hi]), param.dtype)
            out = like_parameter(wrap(local, layout), param)
            out.__dict__[FUSED] = order
            set_parameter(module, key, out)
        replicate_buffers(module, device_mesh, self.src_data_rank)
        who = "FusedColwiseParallel"

        def before(cell, inputs, kwargs):
            return convert_first(cell, inputs, kwargs, lambda x: place(
                enter(x, cell, device_mesh, self.input_layouts, who), device_mesh, Replicate(), who), who)

        def after(cell, inputs, output):
            lead = output.shape[:-1]
            by_unit = output.reshape((*lead, self.units, sum(self.parts) // self.units))
            done, at = [], 0
            for p in self.parts:  # not mint.split: on CPU its backward takes what reshape and cat leave for dense memory
                done.append(mint.narrow(by_unit, len(lead) + 1, at, p // self.units).reshape((*lead, p)))
                at += p // self.units
            return mint.cat([hand_out(x) for x in done], -1) if self.use_local_output else tuple(done)
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
        return module

    def __repr__(self):
        return (f"FusedColwiseParallel({self.parts}, units={self.units}, input_layouts={self.input_layouts}, "
                f"use_local_output={self.use_local_output})")
