# SPDX-License-Identifier: Apache-2.0
"""How parameters lie, as hyper_parallel's checkpoints write it down: per rank, parameter by parameter, in plain values."""
from __future__ import annotations

from typing import Any

from mindspore import nn

from ... import comm
from ...tensor.dtensor import DTensor
from .layout import Layout


def get_current_layout(cell: nn.Cell) -> dict[str, dict[str, dict[str, Any]]]:
    """How this rank's parameters lie. Nothing is communicated.

    Returns:
        `{rank: {name: {"type", "full_shape"}}}`, of a DTensor also "device_matrix", "alias_name", "rank_list" and
        "tensor_map", as `ms.Layout` takes them; ranks are strings.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> from ms_dtensor.compat.hyper_parallel import get_current_layout
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> net = md.distribute_module(nn.Dense(4, 2, has_bias=False), mesh)
        >>> get_current_layout(net)["0"]["weight"]["tensor_map"]
        (-1, -1)
    """
    return {str(_rank()): {p.name: _described(p) for _, p in cell.parameters_and_names()}}


def get_global_layout(cell: nn.Cell) -> dict[str, dict[str, dict[str, Any]]]:
    """How all ranks' parameters lie: one gather of plain values, which all ranks take part in.

    Returns:
        As `get_current_layout`, with all ranks.

    Example:
        >>> from mindspore import nn
        >>> from ms_dtensor.compat.hyper_parallel import get_global_layout
        >>> get_global_layout(nn.Dense(4, 2, has_bias=False))
        {'0': {'weight': {'type': 'Float32', 'full_shape': (2, 4)}}}
    """
    own, world = get_current_layout(cell), comm.current_world()
    if world is None or world.size == 1:
        return own
    out: dict[str, dict[str, dict[str, Any]]] = {}
    for of_rank in comm.group(tuple(range(world.size))).all_gather_object(own):
        out |= of_rank
    return out


def _rank() -> int:
    world = comm.current_world()
    return 0 if world is None else world.rank


def _described(p) -> dict[str, Any]:
    told: dict[str, Any] = {"type": str(p.dtype), "full_shape": tuple(p.shape)}
    if isinstance(p, DTensor):
        layout = Layout.of(p.layout)
        told |= {"device_matrix": layout.mesh_shape, "alias_name": layout.alias_name, "rank_list": layout.rank_list,
                 "tensor_map": layout.tensor_map}
    return told
