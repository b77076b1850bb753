# SPDX-License-Identifier: Apache-2.0
"""hyper_parallel's `fully_shard`: cells that compute on local tensors, whose parameters are cut over data-parallel ranks.

It is `ms_dtensor.fully_shard(..., local_inputs=True)`: there DTensors are parameters and gradients, and never activations.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable

from mindspore import Parameter, nn

from ...core.mesh import DeviceMesh
from ...core.placements import Placement
from ...parallel import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ...parallel import fully_shard as ours
from ...parallel.sharding.call import UNIT

__all__ = ["CPUOffloadPolicy", "HSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "fully_shard"]


class _HasUnit(type):
    def __instancecheck__(cls, cell):
        return isinstance(cell, nn.Cell) and UNIT in cell.__dict__


class HSDPModule(metaclass=_HasUnit):
    """What a cell is after `fully_shard`, to be asked by `isinstance`; its methods are those that `fully_shard` adds.

    Example:
        >>> from mindspore import nn
        >>> from ms_dtensor.compat.hyper_parallel import HSDPModule, fully_shard, init_device_mesh
        >>> net = nn.Dense(4, 2)
        >>> isinstance(net, HSDPModule), isinstance(
        ...     fully_shard(net, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))), HSDPModule)
        (False, True)
    """


def fully_shard(module: nn.Cell, *, mesh: DeviceMesh, reshard_after_forward: bool | int = True,
                shard_placement_fn: Callable[[Parameter], Placement | None] | None = None,
                mp_policy: MixedPrecisionPolicy | None = None, offload_policy: OffloadPolicy | None = None,
                ignored_params: Iterable[Parameter] | None = None, replicate_params: Iterable[Parameter] | None = None,
                comm_fusion: bool = False) -> nn.Cell:
    """Cuts a cell's parameters over a data axis; plain inputs stay plain, and what cells see are local tensors.

    Args:
        module, mesh, reshard_after_forward, shard_placement_fn, mp_policy, offload_policy: as in `ms_dtensor.fully_shard`.
        ignored_params: parameters to leave as they are.
        replicate_params: parameters that every rank keeps whole.
        comm_fusion: without effect: one call's parameters are one collective.

    Raises:
        ConfigError, LayoutError: as `ms_dtensor.fully_shard`.

    Example:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_dtensor.compat.hyper_parallel import fully_shard, init_device_mesh
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        >>> net = fully_shard(nn.Dense(4, 2), mesh=mesh, comm_fusion=False)
        >>> type(net(ms.ops.ones((3, 4)))).__name__, net.weight
        ('Tensor', DTensor(Parameter 'weight', f32[2@fsdp, 4], mesh=(fsdp=1), rank 0 holds [2, 4]))
    """
    return ours(module, mesh=mesh, reshard_after_forward=reshard_after_forward, shard_placement_fn=shard_placement_fn,
                mp_policy=mp_policy, offload_policy=offload_policy, ignored_params=ignored_params or (),
                replicate_params=replicate_params or (), local_inputs=True)
