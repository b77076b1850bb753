# SPDX-License-Identifier: Apache-2.0
"""The batch of data parallelism: plain inputs are this rank's rows, and what comes back is of the global batch."""
from __future__ import annotations

from collections.abc import Callable

from mindspore import Tensor, nn

from ... import comm
from ...core.mesh import DeviceMesh
from ...core.placements import REPLICATE, Shard
from ...core.tree import leaves, map_leaves
from ...dispatch import modes
from ...dispatch.operands import LAID_OUT, wrap
from ...dispatch.patches.recomputed import standing_in
from ...errors import LayoutError
from ...tensor.dtensor import DTensor
from ..layouts import HANDED_OUT, OUTER, ROOT, enter, global_shape, taken_back

BATCH = "_ms_dtensor_batch"  # cell attribute: what is done with its inputs, and with its outputs


def batch_over(module: nn.Cell, mesh: DeviceMesh, given: DeviceMesh, who: str, label: str) -> tuple[Callable, Callable]:
    """Hooks by which a cell takes plain inputs as rows of the global batch, and returns DTensors.

    `given` is the mesh of which `mesh` has the axes, none of them flattened: rows are chunks over that.
    Rows are what comes from outside into the outermost cell of data parallelism. Inside, a plain tensor is what it is
    elsewhere: refused beside a DTensor, or replicated where that was asked for; but a style's output is known. Where
    implicit replication was asked for, it is replicated beside a DTensor among the inputs, too; and inside a cell with
    `constants="replicate"`, which no rows entered.
    """
    last: list = [None, []]  # what ranks told at the last call, and what it came to

    def before(cell, inputs, kwargs):
        cell.__dict__[ROOT] = HANDED_OUT["tensors"]
        taken = map_leaves(lambda x: _unflattened(x, cell), (inputs, kwargs), DTensor)
        mode = modes.mode.get()
        if standing_in.get() or mode.constants or mode.implicit_replication and leaves(taken, DTensor):
            return map_leaves(_known_again, taken, Tensor)
        plain = [x for x in leaves(taken, Tensor) if _is_rows(x)]
        shapes = dict(zip(map(id, plain), _global_shapes([tuple(x.shape) for x in plain], given, who, label, last)))

        def place(x):
            if not _is_rows(x):
                return x
            shape = shapes[id(x)]
            if given is not mesh and shape is not None and shape[0] % given.size():  # several axes cut it at other places
                return _unflattened(DTensor.from_local(x, given, [Shard(0)] * given.ndim, shape=shape), cell)
            return enter(x, cell, mesh, {a: Shard(0) for a in mesh.mesh_dim_names}, who, shape, taken)
        return map_leaves(place, taken, Tensor)

    def after(cell, inputs, outputs):
        if all(isinstance(x, DTensor) for x in leaves(outputs, Tensor)):
            return None
        return map_leaves(lambda x: taken_back(x, cell, cell.__dict__[ROOT], who), outputs, Tensor)
    module.__dict__[ROOT] = 0
    return before, after


def _is_rows(x) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, DTensor) and x.ndim > 0


def _unflattened(x: DTensor, cell) -> DTensor:
    """An input that lies on a flattened axis as the cell's parameters know that: on the axes it stands for."""
    whole, own = cell.__dict__[OUTER][0], x.device_mesh  # equal meshes are one to layouts, so `own` may have another root
    axes = {a: p for name, p in zip(own.mesh_dim_names, x.placements) for a in whole.root.expand_axes(name)}
    if tuple(axes) == own.mesh_dim_names or not set(axes) <= set(whole.mesh_dim_names):
        return x
    # what does not divide is cut at other places on several axes
    uneven = any(p.is_shard() and x.shape[p.dim] % own.size() for p in x.placements)
    there = x.redistribute(own, [REPLICATE] * own.ndim) if uneven else x
    out = DTensor.from_local(there.to_local(), whole, {} if uneven else axes, shape=x.shape)
    return out.redistribute(whole, axes) if uneven else out


def _known_again(x: Tensor) -> Tensor:
    layout = x.__dict__.get(LAID_OUT)
    return x if layout is None or isinstance(x, DTensor) or layout.local_shape() != tuple(x._shape) else wrap(x, layout)


def _global_shapes(mine: list, mesh: DeviceMesh, who: str, label: str, last: list) -> list[tuple[int, ...] | None]:
    """The global shapes of batches of which this rank brings rows of shapes `mine`; None on a mesh of one rank.

    Told anew at every call: of 7 rows after 8 on 4 ranks the last one alone brings fewer, so no rank can know by itself
    whether a shape changed. On devices the host waits for that one message; who cannot wait passes DTensors.

    Raises:
        LayoutError: on all ranks, if the pieces do not make one tensor.
    """
    if mesh.size() == 1 or not mine:
        return [None] * len(mine)
    with comm.annotate(src=f"{who}: rows of the batch", dst=str(mine), of=label):
        everyone = mesh.get_group().all_gather_object(mine)
    if everyone != last[0]:
        shapes = [global_shape(list(map(tuple, pieces)), mesh, [Shard(0)] * mesh.ndim) for pieces in zip(*everyone)]
        if None in shapes or any(len(theirs) != len(mine) for theirs in everyone):
            held = "\n".join(f"rank {rank} brings {', '.join(str(list(shape)) for shape in theirs)}"
                             for rank, theirs in zip(mesh.rank_list, everyone))
            raise LayoutError(f"For '{who}', the ranks' plain inputs are not the rows of one batch.", held,
                              "Ranks bring as many rows each, or chunks: of 7 rows on 4 ranks 2, 2, 2 and 1; other dims "
                              "agree.", ("drop the last batch, if it is smaller (drop_remainder=True)",
                                         "cut the whole batch with distribute_tensor(batch, mesh, {'dp': Shard(0)})",
                                         "pad what a row has several of, as images, to [rows, most, ...]"))
        last[:] = everyone, shapes
    return last[1]
