# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: parameters whole on every rank of an axis, the batch cut over it.

Nothing but layouts: a replicated parameter that meets a batch-sharded activation is varying on the axis, so by the
library's gradient table its gradient is summed over it; `buckets.py` does that for many at once. The loss,
computed on DTensors, is the mean over the global batch; nothing is scaled by a world size.
"""
from __future__ import annotations

from mindspore import Parameter, Tensor, nn

from ..core.mesh import DeviceMesh
from ..core.placements import REPLICATE, Shard
from ..core.tree import leaves, map_leaves
from ..dispatch.operands import local_alias, wrap
from ..dispatch.replaced import current
from ..tensor import deferred_init
from ..tensor.distribute import distribute_parameter, distribute_tensor, like_parameter, set_parameter
from ..tensor.dtensor import DTensor
from .buckets import make_buckets
from .layouts import OUTER, ROOT, count_handed_out, enter, lift, taken_back, union_mesh

_OVER = "_ms_dtensor_replicated_over"  # parameter attribute: axes that replicate has dealt with


def replicate(module: nn.Cell, *, mesh: DeviceMesh, bucket_mb: float = 25) -> nn.Cell:
    """Makes a cell data parallel over an axis, in place; before or after tensor-parallel styles.

    Args:
        module: the model. Parameters and buffers that are DTensors (on `mesh["tp"]`, say) move to the common mesh of
            both, replicated over the new axis; values are those of its coordinate 0.
        mesh: one axis of a mesh, e.g. `mesh["dp"]`.
        bucket_mb: gradients are reduced together in buckets of this many MiB; 0 reduces each by itself.

    Returns:
        The same cell. Plain inputs are taken as this rank's rows of the global batch (`Shard(0)`); outputs are
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
    outer = dict.fromkeys(mesh.mesh_dim_names, Shard(0))
    whole = mesh
    for _, param in module.parameters_and_names():
        if isinstance(current(param), DTensor):
            whole = union_mesh(current(param).device_mesh, mesh)
            break
    deferred_init.remember(module, whole, 0)
    new: list[Parameter] = []
    for _, cell in module.cells_and_names():
        for key, param in list(cell._params.items()):
            if param is not None:
                param = current(param)
                if not set(mesh.mesh_dim_names) <= set(param.__dict__.get(_OVER, ())):  # else a tied cell has been here
                    param = _replicated(param, mesh, whole)
                    param.__dict__[_OVER] = (*param.__dict__.get(_OVER, ()), *mesh.mesh_dim_names)
                    new.append(param)
                set_parameter(cell, key, param)
        for key, buffer in list(getattr(cell, "_buffers", {}).items()):
            if isinstance(buffer, Tensor):
                cell._buffers[key] = _replicated(buffer, mesh, whole)
        cell.__dict__[OUTER] = (whole, outer)

    def before(cell, inputs, kwargs):
        cell.__dict__[ROOT] = count_handed_out()

        def place(x):
            return enter(x, cell, mesh, {a: Shard(0) for a in mesh.mesh_dim_names}, "replicate",
                         (inputs, kwargs)) if isinstance(x, Tensor) and x.ndim else x
        return tuple(place(x) for x in inputs), {k: place(x) for k, x in kwargs.items()}

    def after(cell, inputs, outputs):
        if all(isinstance(x, DTensor) for x in leaves(outputs, Tensor)):
            return None
        return map_leaves(lambda x: taken_back(x, cell, cell.__dict__[ROOT]), outputs, Tensor)
    module.__dict__[ROOT] = 0
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
    if bucket_mb and mesh.size() > 1:
        make_buckets([p for p in new if p.requires_grad], mesh, bucket_mb)
    return module


def _replicated(x, mesh: DeviceMesh, whole: DeviceMesh):
    if not isinstance(x, DTensor):
        if isinstance(x, Parameter):
            return distribute_parameter(x, whole, [REPLICATE] * whole.ndim)
        return distribute_tensor(x, whole, [REPLICATE] * whole.ndim)
    group = mesh.get_group()
    local = local_alias(x)
    if group.size > 1:
        local = group.broadcast(local, group.ranks[0])
    out = wrap(local, lift(x, whole))
    return like_parameter(out, x) if isinstance(x, Parameter) else out
