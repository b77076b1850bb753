# SPDX-License-Identifier: Apache-2.0
"""Host arrays of a batch as DTensors in the order of its `Tokens`: what `Tokens.cut` does.

Nothing is sent: every rank has the arrays.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from mindspore import Tensor

from ..core.mesh import DeviceMesh
from ..core.placements import chunk_bounds
from ..core.tokens import Tokens, bind_layout, shard_sizes
from ..errors import ConfigError
from .dtensor import DTensor

HEADS = "ulysses"  # the axis that attention cuts its heads over


def lay_out(tokens: Tokens, arrays: Sequence[np.ndarray], mesh: DeviceMesh, axes: Sequence[str]) -> tuple[DTensor, ...]:
    """See `Tokens.cut`."""
    names = [name for axis in axes for name in mesh.expand_axes(axis)]
    if len(set(names)) < len(names) or not set(names) <= set(mesh.mesh_dim_names):
        raise ConfigError(f"For 'Tokens.cut', the mesh is not cut by axes {tuple(axes)}.", f"mesh({mesh.describe()})",
                          "Axes of the mesh cut the list, each once, outermost first.",
                          f"axes among {mesh.mesh_dim_names}")
    sizes = {name: mesh.shape[mesh.mesh_dim_names.index(name)] for name in names}
    outer = [name for name in names if name != HEADS]
    first = next((k for k in range(len(outer), -1, -1) if math.prod(sizes[a] for a in outer[k:]) == tokens.ranks), None)
    ordered = outer + [name for name in names if name == HEADS] == names
    if first is None or not ordered or shard_sizes(len(tokens), *(sizes[a] for a in outer[first:])) != tokens.sizes:
        raise ConfigError(f"For 'Tokens.cut', the tokens are cut over {tokens.ranks} ranks, and no last axes are so many.",
                          f"axes {sizes}, tokens of each rank {list(tokens.sizes)[:8]}",
                          f"The last of the axes cut the list of a part of the batch, the first the batch; '{HEADS}' cuts "
                          "what a rank has.", "balance(documents, ranks) with the size of the axis that cuts a part")
    here = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate() or (0,) * mesh.ndim))  # outside of it nothing is held
    rank = 0
    for name in outer[first:]:
        rank = rank * sizes[name] + here[name]
    rows = tokens.index(rank)
    for name in names[len(outer):]:
        rows = rows[slice(*chunk_bounds(len(rows), sizes[name])[here[name]])]
    count = len(tokens) * math.prod(sizes[a] for a in outer[:first])
    return tuple(DTensor.from_local(Tensor(np.ascontiguousarray(x[rows])), mesh, (tuple(names), *("None",) * (x.ndim - 1)),
                                    shape=(count, *x.shape[1:])) for x in arrays)


bind_layout(lay_out)  # the module of tokens must not import upwards, so it is told
