# SPDX-License-Identifier: Apache-2.0
"""Making meshes, distributing tensors and modules: the door from one-device programs to distributed ones.

`distribute_tensor` decides whose data is the source (coordinate 0 of each axis, or every rank's own); everything after
it only moves data. Read next: `tensor/dtensor.py`; styles that distribute whole models are in `parallel/`.
"""
from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn

from .. import comm
from ..comm.pretended import executing
from ..comm.record import annotate, note
from ..core.layout import Layout, layout_for, said_of
from ..core.mesh import _DEVICE_TYPES, DeviceMesh, resolve_mesh
from ..dispatch import patches
from ..dispatch.operands import dtype_name, local_alias, recording, wrap
from ..dispatch.patches import jit
from ..dispatch.patches.hooks import move_hooks
from ..dispatch.replaced import PLACE, current, remember
from ..errors import ConfigError, LayoutError, MeshError
from ..internals.names import NoFallbackGuard
from ..internals.target import META, is_meta, on_cpu, with_values
from ..redistribute.execute import cut_whole
from . import deferred_init, token_lists  # noqa: F401  who makes a mesh can cut tokens over it
from .dtensor import DTensor

_DONE = "_ms_dtensor_distributed"  # cell attribute: distribute_module has been here
# of one tensor, not of the role it plays:
_OWN_STATE = frozenset((PLACE, "_layout", "_memo", "_kin", "_inited_param"))


@with_values
def init_device_mesh(device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None,
                     rank_list: Sequence[int] | None = None) -> DeviceMesh:
    """A mesh over all ranks; starts the process group if needed.

    Args:
        device_type: "npu", "gpu" or "cpu" (also "Ascend", "GPU", "CPU"): HCCL, NCCL or the CPU backend. In one plain
            process (no msrun) the world has one rank.
        mesh_shape: ranks along each axis; their product is the number of ranks used.
        mesh_dim_names: one name per axis.
        rank_list: the ranks, row-major; default: the block of that many ranks that contains this one.

    Raises:
        MeshError: a shape or names that no mesh has, which is told before anything starts; or the shape does not fit the
            world.

    Example:
        >>> from ms_dtensor import init_device_mesh
        >>> init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        DeviceMesh(cpu, dp=1, tp=1)
    """
    shape = _mesh_shape(mesh_shape)
    kind = _DEVICE_TYPES.get(str(device_type).lower())
    if kind is None:
        raise MeshError(f"For 'init_device_mesh', 'device_type' must be npu, gpu or cpu, but got {device_type!r}.")
    need = math.prod(shape)
    try:
        DeviceMesh(device_type, np.arange(need).reshape(shape), mesh_dim_names=mesh_dim_names)
    except MeshError as error:
        raise said_of(error, "init_device_mesh") from None
    world = comm.start(kind)
    blocks = rank_list is None and need < world.size
    if rank_list is None:
        if world.size % need:
            names = tuple(mesh_dim_names or ())
            product = " x ".join(f"{n}={s}" for n, s in zip(names, shape)) if len(names) == len(shape) else \
                " x ".join(map(str, shape))
            raise MeshError(f"For 'init_device_mesh', the mesh {product} needs {need} ranks, the world has {world.size}.",
                            "", "The axes' sizes multiply to the number of ranks.",
                            (f"launch with msrun --worker_num={need}", "change one of the degrees"))
        start = world.rank // need * need
        rank_list = range(start, start + need)
    ranks = list(rank_list)
    if len(ranks) != need or not set(ranks) <= set(range(world.size)):
        raise MeshError(f"For 'init_device_mesh', 'rank_list' must be {need} of the ranks 0 to {world.size - 1}, "
                        f"but got {ranks}.")
    mesh = DeviceMesh(device_type, np.array(ranks).reshape(shape), mesh_dim_names=mesh_dim_names)
    mesh.varies = blocks
    if not on_cpu() and mesh.get_coordinate() is not None:
        for axis in (a for a, n in enumerate(shape) if n > 1):  # to make a communicator takes seconds, and one order
            mesh.get_group(axis)
    return mesh


def _mesh_shape(given) -> tuple[int, ...]:
    sizes = tuple(given) if isinstance(given, tuple | list | np.ndarray) else ()
    if not sizes or not all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0 for n in sizes):
        raise MeshError(f"For 'init_device_mesh', 'mesh_shape' must be a tuple of positive integers, but got {given!r}.", "",
                        "Every axis of a mesh has one rank or more.",
                        "write the number of ranks along each axis: (2, 4)")
    return tuple(map(int, sizes))


@with_values
def distribute_tensor(tensor, device_mesh: DeviceMesh | None = None, placements=None, *,
                      src_data_rank: int | None = 0) -> DTensor:
    """A global tensor, laid out.

    Args:
        tensor: the global tensor; every rank passes one of the same shape and dtype.
        device_mesh: default the current one.
        placements: any form `Layout` accepts; default all Replicate. Partial is refused.
        src_data_rank: 0: the values of coordinate 0 are broadcast. None: every rank cuts its own
            copy, without communication; the caller vouches that all copies are equal.

        A parameter whose initialisation was deferred (`no_init_parameters`) gets the values that it would have had
        eagerly, and no rank keeps more than its shard; see `deferred_init.py`.

    Raises:
        LayoutError: Partial placements, a DTensor of another mesh or layout, a result that is being differentiated, or
            another `src_data_rank`.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.distribute_tensor(ms.ops.ones((4, 2)), mesh, [md.Shard(0)])
        DTensor(f32[4@tp, 2], mesh=(tp=1), rank 0 holds [4, 2])
    """
    mesh = resolve_mesh(device_mesh, "distribute_tensor")
    check_source(src_data_rank, mesh, "distribute_tensor")
    if isinstance(tensor, DTensor):
        wanted = layout_for("distribute_tensor", mesh, placements, tensor.shape, dtype_name(tensor.dtype))
        if wanted is not tensor.layout:
            raise LayoutError("For 'distribute_tensor', the tensor is a DTensor already, in another layout.",
                              f"{tensor.layout.describe()} -> {wanted}", "", "use .redistribute()")
        return tensor
    if not isinstance(tensor, Tensor):
        raise LayoutError(f"For 'distribute_tensor', 'tensor' must be a Tensor, but got {type(tensor).__name__}.")
    layout = layout_for("distribute_tensor", mesh, placements, tuple(tensor._shape), dtype_name(tensor.dtype))
    if layout.has_partial():
        raise LayoutError("For 'distribute_tensor', Partial is no way to lay out a whole tensor.", layout.describe(),
                          "Summands cannot be made from their sum.", "DTensor.from_local(summand, mesh, [Partial()])")
    if recording() and not tensor._is_leaf:
        raise LayoutError("For 'distribute_tensor', the tensor was computed under differentiation.", layout.describe(),
                          "What this makes is a leaf of its own: the gradient would end here, unnoticed.",
                          ("DTensor.from_local(t, mesh, placements) keeps the gradient", "distribute it outside"))
    patches.install()
    if is_meta(tensor):
        return wrap(empty_shard(layout), layout)
    if deferred_init.is_deferred(tensor):
        return wrap(deferred_init.materialise(tensor, layout, src_data_rank), layout)
    with NoFallbackGuard():
        local = _cut(_source_data(tensor, layout, src_data_rank), layout)
    return wrap(local, layout)


def empty_shard(layout: Layout) -> Tensor:
    """This rank's shard of a tensor without values, without values, too."""
    with ms.DeviceCtx(META), NoFallbackGuard():
        return ms.mint.empty(layout.local_shape(), dtype=getattr(ms, layout.dtype))


def _source_data(tensor, layout: Layout, src_data_rank: int | None):
    mesh = layout.mesh
    # One broadcast of the whole tensor: a scatter would send less, but needs one round per axis; see the planner issue.
    if src_data_rank is None or mesh.size() == 1 or mesh.get_coordinate() is None:
        return tensor
    group = mesh.get_group()
    name = tensor.name if isinstance(tensor, Parameter) else ""
    with annotate(of=" ".join(filter(None, (note().of, name, layout.describe())))):  # which ranks compare: each cuts its own
        return group.broadcast(local_alias(tensor).contiguous(), group.ranks[src_data_rank])


def _cut(tensor, layout: Layout):
    local = cut_whole(local_alias(tensor), layout)
    return Tensor(local.asnumpy().copy()) if local.data_ptr() == tensor.data_ptr() and local.size else local


def check_source(src_data_rank: int | None, mesh: DeviceMesh, who: str) -> None:
    """Refuses what is no coordinate of the mesh."""
    if src_data_rank is None:
        return
    if isinstance(src_data_rank, bool) or not isinstance(src_data_rank, int) or not 0 <= src_data_rank < mesh.size():
        raise LayoutError(f"For '{who}', 'src_data_rank' is {src_data_rank!r}.", f"mesh({mesh.describe()})",
                          "It counts the ranks of the mesh, row-major; 0 sends its values to all, None every rank's own.",
                          f"use one of 0 to {mesh.size() - 1}, or None")


@with_values
def distribute_module(module: nn.Cell, device_mesh: DeviceMesh | None = None, partition_fn: Callable | None = None,
                      input_fn: Callable | None = None, output_fn: Callable | None = None) -> nn.Cell:
    """Every parameter and buffer of a Cell becomes a DTensor, in place; hooks convert inputs and outputs.

    Args:
        module: the cell.
        device_mesh: default the current one.
        partition_fn: `(name, cell, mesh) -> None`, called for every sub-cell; distributes parameters it wants sharded
            (`cell._params[...]`). What it leaves is replicated from coordinate 0.
        input_fn: `(cell, inputs, mesh) -> inputs`, run before the cell.
        output_fn: `(cell, outputs, mesh) -> outputs`, run after it.

    Returns:
        The same cell. Names, `requires_grad` and ties of parameters are kept.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from mindspore import nn
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> def rows(name, cell, mesh):
        ...     for key, p in cell._params.items():
        ...         cell._params[key] = ms.Parameter(md.distribute_tensor(p, mesh, [md.Shard(0)]), name=p.name)
        >>> net = md.distribute_module(nn.Dense(4, 8), mesh, rows)
        >>> net.weight
        DTensor(Parameter 'weight', f32[8@tp, 4], mesh=(tp=1), rank 0 holds [8, 4])
    """
    mesh = resolve_mesh(device_mesh, "distribute_module")
    # all refusals come before anything is communicated
    if not isinstance(module, nn.Cell):
        raise ConfigError(f"For 'distribute_module', 'module' must be a Cell, but got {type(module).__name__}.", "",
                          "Its parameters become DTensors.", "distribute_tensor(t, mesh, placements) for one tensor")
    for name, fn in (("partition_fn", partition_fn), ("input_fn", input_fn), ("output_fn", output_fn)):
        if fn is not None and not callable(fn):
            raise ConfigError(f"For 'distribute_module', '{name}' must be a function, but got {type(fn).__name__}.", "",
                              "It is called with a cell, or its name, and the mesh.", "None, or a function")
    if module.__dict__.get(_DONE):
        raise LayoutError(f"For 'distribute_module', this {type(module).__name__} was distributed already.",
                          f"mesh({mesh.describe()})", "Its hooks would run twice.",
                          "p.redistribute(...) of single parameters, or a new cell")
    before = None if input_fn is None else _three_arguments(input_fn, "input_fn", module, mesh)
    after = None if output_fn is None else _three_arguments(output_fn, "output_fn", module, mesh)
    deferred_init.remember(module, mesh, 0)
    for name, cell in module.cells_and_names():
        if partition_fn is not None:
            _partition(partition_fn, name, cell, mesh)
    for _, cell in module.cells_and_names():
        for key, param in list(cell._params.items()):
            if param is not None:
                param = current(param)
                set_parameter(cell, key, param if isinstance(param, DTensor) else distribute_parameter(param, mesh, None))
        replicate_buffers(cell, mesh, 0)
    if before is not None:
        module.register_forward_pre_hook(lambda cell, inputs: before(cell, inputs))
    if after is not None:
        module.register_forward_hook(lambda cell, inputs, outputs: after(cell, outputs))
    module.__dict__[_DONE] = True
    return module


def replicate_buffers(cell: nn.Cell, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Makes the buffers that a cell holds itself DTensors, whole on every rank."""
    for key, buffer in getattr(cell, "_buffers", {}).items():
        if isinstance(buffer, Tensor) and not isinstance(buffer, DTensor):
            cell._buffers[key] = distribute_tensor(buffer, mesh, None, src_data_rank=src_data_rank)


def _partition(partition_fn, name: str, cell: nn.Cell, mesh: DeviceMesh) -> None:
    """Calls `partition_fn` for one cell; what was tied to a parameter that was distributed before stays tied to it."""
    before = {key: param for key, param in cell._params.items() if param is not None}
    partition_fn(name, cell, mesh)
    for key, old in before.items():
        new, tied = cell._params.get(key), current(old)
        if new is old or not isinstance(new, Parameter):
            continue
        if tied is old:
            remember(old, new)
        elif getattr(new, "_layout", None) is tied._layout:
            set_parameter(cell, key, tied)
        else:
            raise LayoutError(f"For 'distribute_module', parameter '{old.name}' is shared by cells that lay it out in "
                              "different ways.", f"{tied._layout.describe()}, {new}", "A parameter has one layout.",
                              "let 'partition_fn' lay it out alike wherever it meets it")


@with_values
def distribute_parameter(param: Parameter, mesh: DeviceMesh, placements, *, src_data_rank: int | None = 0) -> Parameter:
    """A Parameter as a DTensor Parameter; name, `requires_grad`, `param_info` and attributes of the user's are kept."""
    return like_parameter(distribute_tensor(param, mesh, placements, src_data_rank=src_data_rank), param)


def like_parameter(data, param: Parameter) -> Parameter:
    """`data` as a Parameter that takes the place of `param`."""
    dry = executing()
    out = Parameter(data, name=param.name, requires_grad=param.requires_grad) if dry is None else dry.parameter(data, param)
    for key, value in param.__dict__.items():
        if key not in out.__dict__ and key not in _OWN_STATE:
            out.__dict__[key] = value
    out.param_info = param.param_info
    move_hooks(param, out)
    remember(param, out)
    return out


def set_parameter(cell: nn.Cell, key: str, param: Parameter) -> None:
    """Puts a parameter into a cell's slot without MindSpore's copying setattr."""
    if cell._params.get(key) is not param:
        jit.forget_compiled()
    cell._params[key] = param
    if key in cell.__dict__:
        cell.__dict__[key] = param
    for name, held in cell.__dict__.items():  # as `nn.RNN` keeps its weights
        if isinstance(held, ParameterTuple) and any(current(p) is not p for p in held):
            cell.__dict__[name] = ParameterTuple([current(p) for p in held])


def _three_arguments(fn, what: str, module, mesh):
    taken = inspect.signature(fn).parameters.values()
    count = 3 if any(p.kind is p.VAR_POSITIONAL for p in taken) else len(taken)
    if count == 3:
        return lambda cell, values: fn(cell, values, mesh)
    if count == 2:
        warnings.warn(f"distribute_module: '{what}' takes (values, mesh); (cell, values, mesh) is the current form",
                      FutureWarning, stacklevel=3)
        return lambda cell, values: fn(values, mesh)
    raise LayoutError(f"For 'distribute_module', '{what}' must take 3 arguments (cell, values, mesh), but takes {count}.",
                      type(module).__name__)
