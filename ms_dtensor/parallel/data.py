# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: parameters whole on every rank of an axis, the batch cut over it.

Nothing but layouts: a replicated parameter that meets a batch-sharded activation is varying on the axis, so by the
library's gradient table its gradient is summed over it; `buckets.py` does that for many at once. The loss,
computed on DTensors, is the mean over the global batch; nothing is scaled by a world size.
"""
from __future__ import annotations

from mindspore import Parameter, Tensor, nn

from .. import comm
from ..core.mesh import DeviceMesh
from ..core.placements import REPLICATE, Shard
from ..core.tree import leaves, map_leaves
from ..dispatch.operands import local_alias, wrap
from ..dispatch.replaced import current
from ..errors import LayoutError
from ..tensor import deferred_init
from ..tensor.distribute import distribute_parameter, distribute_tensor, like_parameter, set_parameter
from ..tensor.dtensor import DTensor
from .buckets import make_buckets
from .layouts import OUTER, ROOT, count_handed_out, enter, global_shape, lift, taken_back, union_mesh
from .precision import MixedPrecisionPolicy

_OVER = "_ms_dtensor_replicated_over"  # parameter attribute: axes that replicate has dealt with


def replicate(module: nn.Cell, *, mesh: DeviceMesh, bucket_mb: float = 25,
              mp_policy: MixedPrecisionPolicy | None = None) -> nn.Cell:
    """Makes a cell data parallel over an axis, in place; after tensor-parallel styles, which refuse a replicated cell.

    Args:
        module: the model. Parameters and buffers that are DTensors (on `mesh["tp"]`, say) move to the common mesh of
            both, replicated over the new axis; values are those of its coordinate 0.
        mesh: one axis of a mesh, e.g. `mesh["dp"]`.
        bucket_mb: gradients are reduced together in buckets of this many MiB; 0 reduces each by itself.
        mp_policy: in which dtypes the cell computes and gradients are reduced, see `MixedPrecisionPolicy`.

    Returns:
        The same cell. Plain inputs are taken as this rank's rows of the global batch (`Shard(0)`), whose sizes the ranks
        tell each other when they change (one small message): the last ranks may have fewer rows, as chunks do. Outputs are
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

    batch = _Batch(mesh)

    def before(cell, inputs, kwargs):
        cell.__dict__[ROOT] = count_handed_out()
        plain = [x for x in (*inputs, *kwargs.values()) if _is_rows(x)]
        shapes = dict(zip(map(id, plain), batch.global_shapes(plain)))

        def place(x):
            return enter(x, cell, mesh, {a: Shard(0) for a in mesh.mesh_dim_names}, "replicate", shapes[id(x)],
                         (inputs, kwargs)) if _is_rows(x) else x
        return tuple(place(x) for x in inputs), {k: place(x) for k, x in kwargs.items()}

    def after(cell, inputs, outputs):
        if all(isinstance(x, DTensor) for x in leaves(outputs, Tensor)):
            return None
        return map_leaves(lambda x: taken_back(x, cell, cell.__dict__[ROOT]), outputs, Tensor)
    module.__dict__[ROOT] = 0
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
    if mp_policy is not None:
        mp_policy.apply(module)
    if bucket_mb and mesh.size() > 1:
        dtype = mp_policy and (mp_policy.reduce_dtype or mp_policy.param_dtype)
        make_buckets([p for p in new if p.requires_grad], mesh, bucket_mb, dtype)
    return module


def _is_rows(x) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, DTensor) and x.ndim > 0


class _Batch:
    """Global shapes of batches of which every rank brings its rows.

    Asking at every call would cost a message a step, and on devices a host synchronisation. Asking when the own shapes
    change misses that another rank's did; that rank then waits in a collective which no other calls, and all are told.
    """

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self.mine: list | None = None
        self.shapes: list = []

    def global_shapes(self, rows: list[Tensor]) -> list[tuple[int, ...] | None]:
        """The global shape of each; None on a mesh of one rank.

        Raises:
            LayoutError: on all ranks, if the pieces do not make one tensor.
        """
        mine = [tuple(x.shape) for x in rows]
        if mine == self.mine:
            return self.shapes
        if self.mesh.size() == 1 or not mine:
            return [None] * len(mine)
        with comm.annotate(src="replicate: rows of the batch", dst=str(mine)):
            everyone = self.mesh.get_group().all_gather_object(mine)
        self.mine, self.shapes = None, []
        if any(len(theirs) != len(mine) for theirs in everyone):
            raise self._unlike(everyone)
        for pieces in ([tuple(piece) for piece in each] for each in zip(*everyone)):
            whole = global_shape(pieces, self.mesh, [Shard(0)] * self.mesh.ndim)
            if whole is None:
                raise self._unlike(everyone)
            self.shapes.append(whole)
        self.mine = mine
        return self.shapes

    def _unlike(self, everyone) -> LayoutError:
        held = "\n".join(f"rank {rank} brings {', '.join(str(list(shape)) for shape in theirs)}"
                         for rank, theirs in zip(self.mesh.rank_list, everyone))
        return LayoutError("For 'replicate', the ranks' plain inputs are not the rows of one batch.", held,
                           "Ranks bring as many rows each, or chunks: of 7 rows on 4 ranks 2, 2, 2 and 1; other dims agree.",
                           ("drop the last batch, if it is smaller (drop_remainder=True)",
                            "cut the whole batch with distribute_tensor(batch, mesh, {'dp': Shard(0)})"))


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
