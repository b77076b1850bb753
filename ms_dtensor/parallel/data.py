# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: parameters whole on every rank of an axis, the batch cut over it.

Nothing but layouts: a replicated parameter that meets a batch-sharded activation is varying on the axis, so by the
library's gradient table its gradient is summed over it; `buckets.py` does that for many at once. The loss,
computed on DTensors, is the mean over the global batch; nothing is scaled by a world size.
"""
from __future__ import annotations

from mindspore import Parameter, Tensor, nn

from ..core.mesh import DeviceMesh
from ..core.placements import Shard
from ..dispatch.replaced import current
from ..errors import LayoutError
from ..tensor import deferred_init
from ..tensor.distribute import set_parameter
from ..tensor.dtensor import DTensor
from .batch import batch_over
from .buckets import make_buckets
from .fsdp import fully_shard
from .layouts import OUTER, replicated_over, union_mesh
from .precision import MixedPrecisionPolicy

_OVER = "_ms_dtensor_replicated_over"  # parameter attribute: axes that replicate has dealt with


def replicate(module: nn.Cell, *, mesh: DeviceMesh, bucket_mb: float = 25, mp_policy: MixedPrecisionPolicy | None = None,
              zero1: bool = False) -> nn.Cell:
    """Makes a cell data parallel over an axis, in place; after tensor-parallel styles, which refuse a replicated cell.

    Args:
        module: the model. Parameters and buffers that are DTensors (on `mesh["tp"]`, say) move to the common mesh of
            both, replicated over the new axis; values are those of its coordinate 0.
        mesh: one axis of a mesh, e.g. `mesh["dp"]`.
        bucket_mb: gradients are reduced together in buckets of this many MiB; 0 reduces each by itself.
        mp_policy: in which dtypes the cell computes and gradients are reduced, see `MixedPrecisionPolicy`.
        zero1: divide the optimizer's work and state over the axis (ZeRO-1): each rank reduces, updates and hands out its
            part of the parameters. The bytes are the same, one all-gather and one reduce-scatter a step; parameters are
            DTensors cut over the axis, whole between a step's forward and backward. It is `fully_shard` of the whole cell
            with `reshard_after_forward=False`; call that block by block where communication is to overlap.

    Returns:
        The same cell. Plain inputs are taken as this rank's rows of the global batch (`Shard(0)`), whose sizes the ranks
        tell each other at every call (one small message, on devices a wait of the host; none for DTensors, as
        `DTensor.from_local` makes them): the last ranks may have fewer rows, as chunks do. Outputs are
        DTensors, also where a style inside hands out plain tensors, so compute the loss on them: its value and gradients
        are those of the global batch. A loss cell is replicated in the same way: its plain labels are this rank's rows,
        on whatever larger mesh the logits live.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        >>> md.replicate(nn.Dense(4, 2), mesh=mesh).weight
        DTensor(Parameter 'weight', f32[2, 4], mesh=(dp=1), rank 0 holds [2, 4])
    """
    if zero1:
        return fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=mp_policy)
    outer = dict.fromkeys(mesh.mesh_dim_names, Shard(0))
    whole = mesh
    for param in (current(p) for _, p in module.parameters_and_names()):
        if isinstance(param, DTensor):
            cut = [a for a, p in zip(param.device_mesh.mesh_dim_names, param.placements)
                   if a in mesh.mesh_dim_names and not p.is_replicate()]
            if cut:
                raise LayoutError(f"For 'replicate', parameter '{param.name}' is laid out over '{cut[0]}' already.",
                                  param.layout.describe(), "A parameter is copied or cut over an axis, not both.",
                                  "fully_shard(module, mesh=...) for a cell of which some parameters are cut")
            whole = union_mesh(param.device_mesh, whole)
    deferred_init.remember(module, whole, 0)
    new: list[Parameter] = []
    for _, cell in module.cells_and_names():
        for key, param in list(cell._params.items()):
            if param is not None:
                param = current(param)
                if not set(mesh.mesh_dim_names) <= set(param.__dict__.get(_OVER, ())):  # else a tied cell has been here
                    param = replicated_over(param, mesh, whole)
                    param.__dict__[_OVER] = (*param.__dict__.get(_OVER, ()), *mesh.mesh_dim_names)
                    new.append(param)
                set_parameter(cell, key, param)
        for key, buffer in list(getattr(cell, "_buffers", {}).items()):
            if isinstance(buffer, Tensor):
                cell._buffers[key] = replicated_over(buffer, mesh, whole)
        cell.__dict__[OUTER] = (whole, outer)

    batch_over(module, mesh, "replicate")
    if mp_policy is not None:
        mp_policy.apply(module)
    if bucket_mb and mesh.size() > 1:
        dtype = mp_policy and (mp_policy.reduce_dtype or mp_policy.param_dtype)
        make_buckets([p for p in new if p.requires_grad], mesh, bucket_mb, dtype)
    return module
