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
from ..core.placements import Shard
from ..core.tokens import Tokens, bind_layout, shard_sizes
from ..errors import ConfigError
from .dtensor import DTensor


def lay_out(tokens: Tokens, arrays: Sequence[np.ndarray], mesh: DeviceMesh, axes: Sequence[str]) -> tuple[DTensor, ...]:
    """See `Tokens.cut`."""
    names = sorted((name for axis in axes for name in mesh.expand_axes(axis)), key=mesh.mesh_dim_names.index)
    sizes = [mesh.shape[mesh.mesh_dim_names.index(name)] for name in names]
    inner = next((k for k in range(len(sizes), -1, -1) if math.prod(sizes[k:]) == tokens.ranks), None)
    if inner is None or shard_sizes(len(tokens), *sizes[inner:]) != tokens.sizes:
        raise ConfigError(f"For 'Tokens.cut', the tokens are cut over {tokens.ranks} ranks, and no last axes are so many.",
                          f"axes {dict(zip(names, sizes))}, tokens of each rank {list(tokens.sizes)[:8]}",
                          "The last of the axes cut the list of a part of the batch, the first the batch.",
                          f"balance(documents, {sizes[-1:]}) with the sizes of the axes that cut a part")
    here = mesh.get_coordinate() or (0,) * mesh.ndim  # outside of it nothing is held
    rank = 0
    for name, size in zip(names[inner:], sizes[inner:]):
        rank = rank * size + here[mesh.mesh_dim_names.index(name)]
    rows, count = tokens.index(rank), len(tokens) * math.prod(sizes[:inner])
    return tuple(DTensor.from_local(Tensor(np.ascontiguousarray(x[rows])), mesh, dict.fromkeys(names, Shard(0)),
                                    shape=(count, *x.shape[1:])) for x in arrays)


bind_layout(lay_out)  # the module of tokens must not import upwards, so it is told
