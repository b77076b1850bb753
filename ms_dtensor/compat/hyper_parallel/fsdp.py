# SPDX-License-Identifier: Apache-2.0
"""hyper_parallel's `fully_shard`: cells that compute on local tensors, whose parameters are cut over data-parallel ranks.

It is `ms_dtensor.fully_shard(..., local_inputs=True)`: there DTensors are parameters and gradients, and never activations.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable

from mindspore import Parameter, nn

from ...core.mesh import DeviceMesh
from ...core.placements import Placement, Replicate
from ...parallel import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ...parallel import fully_shard as ours
from ...parallel.sharding.call import UNIT
from ...tensor.dtensor import DTensor

__all__ = ["CPUOffloadPolicy", "HSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "fully_shard"]

_COUNTER = "_ms_dtensor_counter"  # attribute of a parameter that `fully_shard` has made plain


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
        ignored_params: parameters to leave as they are. Those among them that are not trained and that are replicated on
            all axes become plain parameters: cells count in them what this rank has seen, and a DTensor would say of the
            counts that they are alike on all ranks.
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
    ignored_params = _counters_made_plain(module, list(ignored_params or ()))
    return ours(module, mesh=mesh, reshard_after_forward=reshard_after_forward, shard_placement_fn=shard_placement_fn,
                mp_policy=mp_policy, offload_policy=offload_policy, ignored_params=ignored_params,
                replicate_params=replicate_params or (), local_inputs=True)


def _counters_made_plain(module: nn.Cell, ignored: list[Parameter]) -> list[Parameter]:
    """What is ignored, with plain parameters in the places of counters; later calls may name those that were replaced."""
    counters = {id(p) for p in ignored if isinstance(p, DTensor) and not p.requires_grad
                and all(isinstance(placement, Replicate) for placement in p.placements)}
    found: dict[int, Parameter] = {}  # a parameter of several cells stays one
    for _, cell in module.cells_and_names():
        for name, p in list(cell._params.items()):
            if id(p) in counters:
                found.setdefault(id(p), Parameter(p.to_local(), name=p.name, requires_grad=False))
                setattr(cell, name, found[id(p)])
                found[id(p)].__dict__[_COUNTER] = True
            elif p is not None and _COUNTER in p.__dict__:
                found[id(p)] = p
    return [*(p for p in ignored if id(p) not in found), *found.values()]
