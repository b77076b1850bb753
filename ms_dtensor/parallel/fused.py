# SPDX-License-Identifier: Apache-2.0
"""Fused projections cut by head or block: one weight that holds q, k and v, or gate and up, one under the other.

A contiguous cut would give the first ranks q and the last ones v. Here the axis cuts each part, between units that belong
together (a key head, its value head and the query heads that share it; one gate row and its up row). The weight's
placement says so (`FusedShard`), so whoever reads it, its gradient or its moments gets the model's own order. Invariant:
each rank's output is its heads of q, then of k, then of v, as the one device code would split it, and nothing moves.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from mindspore import mint, nn

from ..core.layout import known_layout
from ..core.mesh import DeviceMesh
from ..core.placements import FusedShard, Placement, Shard
from ..dispatch.operands import dtype_name, wrap
from ..errors import LayoutError
from ..tensor.dtensor import DTensor
from .layouts import HANDED_OUT, hand_out, place
from .styles import ColwiseParallel


class FusedColwiseParallel(ColwiseParallel):
    """`ColwiseParallel` for a Linear whose weight is several ones under each other, cut by head or block.

    Args:
        parts: output features of each, in order: `(q, k, v)` or `(gate, up)`.
        units: units that stay together: key-value heads for q, k, v; by default the most there can be (each gate row
            with its up row).
        input_layouts: how a plain input is laid out; default `Replicate()`. The input is brought to Replicate.
        use_local_output: True: the output is one plain tensor, this rank's q, then k, then v, for code that counts local
            heads. False: DTensors.
        split_output: the DTensors are a tuple, one per part, each sharded on its last dim in the model's own order. False:
            one DTensor, `FusedShard` on its last dim, for models that cut it themselves: `qkv.reshape(b, n, 3, heads, dim)`
            and `mint.split(qkv, parts, -1)` give heads that are sharded, and nothing moves.

    The parameter is laid out as `FusedShard(0, parts)`: its global order, and a checkpoint's, is the model's. Not for a
    weight whose rows are q, k and v head by head (GPT-NeoX, BLOOM); there `ColwiseParallel` cuts between heads.

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

    def __init__(self, parts: Sequence[int], *, units: int | None = None, input_layouts=None, use_local_output: bool = True,
                 split_output: bool = True):
        super().__init__(input_layouts=input_layouts, use_local_output=use_local_output)
        self.split_output = split_output
        self.parts = tuple(int(p) for p in parts)
        self.units = math.gcd(*self.parts) if units is None else int(units)
        if not self.parts or self.units < 1 or any(p % self.units for p in self.parts):
            raise LayoutError(f"For 'FusedColwiseParallel', {self.units} units do not divide the parts {self.parts}.", "",
                              "Each unit has the same number of rows of every part.", "pass the number of key-value heads")

    def check(self, module: nn.Cell, device_mesh: DeviceMesh) -> dict[str, Placement]:
        placed = super().check(module, device_mesh)
        rows = {tuple(module._params[key].shape)[0] for key in placed}
        if rows != {sum(self.parts)} or any(placed[key] != Shard(0) for key in placed):
            raise LayoutError(f"For 'FusedColwiseParallel', the parts {self.parts} have {sum(self.parts)} rows, the "
                              f"{type(module).__name__} has {sorted(rows)}.", "",
                              "The parts are all output features of one Linear.", "correct 'parts'")
        if self.units % device_mesh.size():
            raise LayoutError(f"For 'FusedColwiseParallel', {self.units} units do not divide by {device_mesh.size()} ranks.",
                              f"mesh({device_mesh.describe()})", "A unit is not divided.",
                              ("an axis whose size divides the number of units", "ColwiseParallel(use_local_output=False)"))
        return {key: FusedShard(0, self.parts) for key in placed}

    def apply(self, module: nn.Cell, device_mesh: DeviceMesh) -> nn.Cell:
        for key in self.check(module, device_mesh):
            param = module._params[key]
            if isinstance(param, DTensor):  # one that is tied to it, and laid out alike, is not
                raise LayoutError(f"For 'FusedColwiseParallel', parameter '{param.name}' is laid out already.",
                                  param.layout.describe(), "", "apply the style first")
        return super().apply(module, device_mesh)

    def _leave(self, output: DTensor, mesh: DeviceMesh, cell: nn.Cell):
        """One tensor, or the parts; each rank has its share of all."""
        output = place(output, mesh, FusedShard(output.ndim - 1, self.parts), "FusedColwiseParallel")
        if self.use_local_output:
            return hand_out(output)
        if not self.split_output:
            return output
        layout, local, at, done = output.layout, output.to_local(), 0, []
        placed = [Shard(p.dim) if p.parts else p for p in layout.placements]
        for p in self.parts:
            mine = p // mesh.size()
            whole = known_layout(layout.mesh, placed, (*layout.shape[:-1], p), dtype_name(output.dtype))
            # not mint.split: on CPU its backward takes what reshape and cat leave for dense memory
            done.append(wrap(mint.narrow(local, -1, at, mine).contiguous(), whole))
            at += mine
        HANDED_OUT["parts"] += 1
        return tuple(done)

    def __repr__(self):
        return (f"FusedColwiseParallel({self.parts}, units={self.units}, input_layouts={self.input_layouts}, "
                f"use_local_output={self.use_local_output}, split_output={self.split_output})")
