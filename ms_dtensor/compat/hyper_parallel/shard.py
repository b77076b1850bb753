# SPDX-License-Identifier: Apache-2.0
"""hyper_parallel's ways to distribute a model: a plan of placements, a wrapped function, gradients, hsdp.

The meanings are ours where theirs are not one device's: gradients are whole DTensors and never scaled by hand, a
deferred parameter gets the values it would have had eagerly, and nothing is said to be sharded that is not.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from math import prod
from typing import Any

from mindspore import Parameter, Tensor, nn

from ... import comm
from ...core.mesh import DeviceMesh
from ...core.placements import Placement
from ...core.tree import map_leaves
from ...custom_ops import local_map
from ...dispatch.replaced import current
from ...errors import ConfigError, LayoutError
from ...parallel import replicate
from ...tensor import deferred_init
from ...tensor.autograd import value_and_grad
from ...tensor.distribute import distribute_parameter, init_device_mesh, set_parameter
from ...tensor.dtensor import DTensor
from .layout import for_mesh


@dataclass
class ShardingPlan:
    """What `shard_module` lays out; placements in any form that `distribute_tensor` takes.

    Attributes:
        plan: of parameters, by name: {"mlp.weight": placements}.
        input_plan: of the inputs of cells, by path: {"input": ..., "relu.input": ...}: the placements of one input, a
            sequence of those by position, or {name: placements}.
        output_plan: of their outputs, {"output": ..., "relu.output": ...}, in the first two forms.
        return_local_tensor: paths of cells that hand out local tensors.
    """

    plan: Mapping[str, Any] | None = None
    input_plan: Mapping[str, Any] | None = None
    output_plan: Mapping[str, Any] | None = None
    return_local_tensor: Sequence[str] | None = None


def shard_module(model, device_mesh: DeviceMesh, sharding_plan: ShardingPlan):
    """Distributes the parameters a plan names, and moves inputs and outputs of cells, in place.

    Args:
        model: a Cell, or a function, of which "input" and "output" are moved.
        device_mesh: the mesh of all placements.
        sharding_plan: what lies how. Parameters that are DTensors already must lie so; plain inputs are left alone.

    Returns:
        The model; of a function, one that moves.

    Raises:
        ConfigError: a plan that names what the model does not have. Found before anything is touched.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> from ms_dtensor.compat.hyper_parallel import ShardingPlan, init_device_mesh, shard_module
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> plan = ShardingPlan(plan={"weight": (md.Shard(0),)}, output_plan={"output": (md.Replicate(),)})
        >>> net = shard_module(nn.Dense(4, 8, has_bias=False), mesh, plan)
        >>> net(md.ones((2, 4), mesh, [md.Replicate()]))
        DTensor(f32[2, 8], mesh=(tp=1), rank 0 holds [2, 8])
    """
    if not isinstance(sharding_plan, ShardingPlan):
        raise _refused("shard_module", "'sharding_plan' must be a ShardingPlan, but got "
                       f"{type(sharding_plan).__name__}", "write ShardingPlan(plan={...})")
    inputs, outputs = dict(sharding_plan.input_plan or {}), dict(sharding_plan.output_plan or {})
    cells = dict(model.cells_and_names()) if isinstance(model, nn.Cell) else {"": model}
    moves = [(_found(key, "input", cells), "input", entry) for key, entry in inputs.items() if entry is not None]
    moves += [(_found(key, "output", cells), "output", entry) for key, entry in outputs.items() if entry is not None]
    local = [_found(f"{path}.output", "output", cells) for path in sharding_plan.return_local_tensor or ()]
    parameters = [_parameter(model, name, entry) for name, entry in (sharding_plan.plan or {}).items()]
    if not isinstance(model, nn.Cell):
        return _moving(model, device_mesh, inputs.get("input"), outputs.get("output"))
    deferred_init.remember(model, device_mesh, 0)
    for cell, key, entry in parameters:
        _lay_out(model, cell, key, device_mesh, entry)
    for cell, side, entry in moves:
        if side == "input":
            cell.register_forward_pre_hook(_move_inputs(device_mesh, entry), with_kwargs=True)
        else:
            cell.register_forward_hook(_move_outputs(device_mesh, entry))
    for cell in local:
        cell.register_forward_hook(lambda cell, inputs, outputs: map_leaves(lambda x: x.to_local(), outputs, DTensor))
    return model


def _refused(who: str, why: str, fix: str) -> ConfigError:
    return ConfigError(f"For '{who}', {why}.", "", "", fix)


def _found(key: str, side: str, cells: dict):
    path, _, last = key.rpartition(".")
    if last != side or path not in cells:
        raise _refused("shard_module", f"the plan's entry {key!r} names no {side} of a cell",
                       f"write the path of a cell and '.{side}', or '{side}' for the model itself")
    return cells[path]


def _parameter(model, name: str, entry):
    path, _, key = name.rpartition(".")
    cell = dict(model.cells_and_names()).get(path) if isinstance(model, nn.Cell) else None
    if cell is None or cell._params.get(key) is None:
        raise _refused("shard_module", f"the plan lays out {name!r}, and there is no such parameter",
                       "list the paths with parameters_and_names()")
    return cell, key, entry


def _lay_out(model: nn.Cell, cell: nn.Cell, key: str, mesh: DeviceMesh, entry) -> None:
    before, entry = cell._params[key], for_mesh(mesh, entry)
    param = current(before)
    new = distribute_parameter(param, mesh, entry) if not isinstance(param, DTensor) else param
    if new is param and param.layout is not param.layout.with_placements(entry):
        raise LayoutError(f"For 'shard_module', parameter '{param.name}' is laid out already.", param.layout.describe(),
                          f"The plan says {entry}.", "param.redistribute(...)")
    for _, other in model.cells_and_names():  # wherever it is tied
        for name, held in other._params.items():
            if held is before or held is param:
                set_parameter(other, name, new)


def _moving(fn: Callable, mesh: DeviceMesh, ins, outs) -> Callable:
    @functools.wraps(fn)
    def sharded(*args, **kwargs):
        args, kwargs = _move_inputs(mesh, ins, fn)(None, args, kwargs) if ins is not None else (args, kwargs)
        result = fn(*args, **kwargs)
        return result if outs is None else _move_outputs(mesh, outs)(None, args, result)
    return sharded


def _one(entry) -> bool:
    """Placements of one tensor, as opposed to a sequence of such."""
    if isinstance(entry, Placement):
        return True
    flat = [e for p in entry for e in (p if isinstance(p, tuple | list) else (p,))]
    nested = any(isinstance(e, Placement) for p in entry if isinstance(p, tuple | list) for e in p)
    return not nested and all(isinstance(e, Placement | str) for e in flat)


def _move(x, mesh: DeviceMesh, placements):
    return x.redistribute(mesh, for_mesh(mesh, placements)) if isinstance(x, DTensor) and placements is not None else x


def _move_inputs(mesh: DeviceMesh, entry, called: Callable | None = None) -> Callable:
    by_name = isinstance(entry, Mapping)
    by_place = () if by_name else (entry,) if _one(entry) else tuple(entry)

    def before(cell, args, kwargs):
        wanted: Mapping = entry if by_name else {}
        placed = [wanted.get(n) for n in signature(called or cell.construct).parameters] if by_name else list(by_place)
        if len(args) > len(placed) and not by_name and not _one(entry):
            raise LayoutError(f"For 'shard_module', {len(args)} inputs came, the plan lays out {len(placed)}.", "",
                              "There is one entry per positional input.", "write None for inputs to be left alone")
        placed += [None] * (len(args) - len(placed))
        return (tuple(_move(x, mesh, p) for x, p in zip(args, placed)),
                {k: _move(x, mesh, wanted.get(k)) for k, x in kwargs.items()})
    return before


def _move_outputs(mesh: DeviceMesh, entry) -> Callable:
    placed = (entry,) if _one(entry) else tuple(entry)

    def after(cell, inputs, outputs):
        many = isinstance(outputs, tuple | list)
        results = outputs if many else (outputs,)
        if len(results) != len(placed):
            raise LayoutError(f"For 'shard_module', {len(results)} results came, the plan lays out {len(placed)}.", "",
                              "There is one entry per result.", "write None for results to be left alone")
        moved = [_move(x, mesh, p) for x, p in zip(results, placed)]
        return type(outputs)(moved) if many else moved[0]
    return after


def custom_shard(func: Callable | None = None, device_mesh: DeviceMesh | None = None, out_placements=None,
                 in_placements=None, redistribute_inputs: bool = True) -> Callable:
    """A function of local tensors as a function of DTensors: `local_map`, with hyper_parallel's order and defaults.

    Args:
        func: the function; without it, a decorator.
        device_mesh: of the results.
        out_placements: one entry per result, also of one result.
        in_placements: one entry per positional argument, None for what is no DTensor.
        redistribute_inputs: move inputs that lie otherwise.

    Example:
        >>> import ms_dtensor as md
        >>> from ms_dtensor.compat.hyper_parallel import custom_shard
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> twice = custom_shard(lambda x: 2 * x, mesh, ((md.Shard(0),),), ((md.Shard(0),),))
        >>> twice(md.ones(4, device_mesh=mesh))
        DTensor(f32[4@tp], mesh=(tp=1), rank 0 holds [4])
    """
    if func is None:
        return functools.partial(custom_shard, device_mesh=device_mesh, out_placements=out_placements,
                                 in_placements=in_placements, redistribute_inputs=redistribute_inputs)
    name = getattr(func, "__name__", type(func).__name__)
    mapping = local_map.Mapping(f"custom_shard({name})", tuple(out_placements or ()), in_placements, None, device_mesh,
                                redistribute_inputs)
    return functools.wraps(func)(functools.partial(run_for_results, mapping, func))


def run_for_results(mapping: local_map.Mapping, func: Callable, *args, **kwargs):
    """One call of a mapping that has one entry per result, of a function that may return one result bare."""
    bare = []

    def several(*args, **kwargs):
        out = func(*args, **kwargs)
        bare.append(not isinstance(out, tuple | list))
        return (out,) if bare[-1] else out
    results = mapping.run(several, args, kwargs)
    return results[0] if bare[-1] else results


def parallelize_value_and_grad(fn: Callable, weights, sens: Sequence[float] | None = None) -> Callable:
    """`value_and_grad(fn, None, weights)`: whole gradients, as DTensors; nothing has to be scaled.

    Args:
        fn: function or Cell; of several results the first is differentiated.
        weights: a parameter, or several.
        sens: a factor per result: the gradient of their weighted sum then. (Not read there.)

    Example:
        >>> import ms_dtensor as md, mindspore as ms
        >>> from ms_dtensor.compat.hyper_parallel import parallelize_value_and_grad
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> w = ms.Parameter(md.ones(2, device_mesh=mesh), name="w")
        >>> loss, (grad,) = parallelize_value_and_grad(lambda x: (w * w * x).sum(), [w])(md.ones(2, device_mesh=mesh))
        >>> loss.item(), grad.tolist()
        (2.0, [2.0, 2.0])
    """
    weights = [weights] if isinstance(weights, Tensor) else list(weights)

    def wrapped(*args, **kwargs):
        several = []

        def loss(*args, **kwargs):
            out = fn(*args, **kwargs)
            several.append(isinstance(out, tuple | list))
            results = tuple(out) if several[-1] else (out,)
            if sens is None:
                return results[0], *results
            if not several[-1] or len(sens) != len(results):
                raise _refused("parallelize_value_and_grad", f"'sens' has {len(sens)} factors for {len(results)} results",
                               "give one factor per result, and none for a single one")
            return sum(s * r.sum() for s, r in zip(sens, results)), *results
        (_, *results), grads = value_and_grad(loss, None, weights, has_aux=True)(*args, **kwargs)
        return tuple(results) if several[-1] else results[0], grads
    return wrapped


def init_parameters(module: nn.Cell, stage_index: int = 0) -> nn.Cell:
    """Makes the parameters that are deferred still; all ranks get rank 0's values, those of one device.

    What was distributed has been made: each rank's shard of the eager values, whatever the mesh. So `stage_index`, which
    tells slices apart there, changes nothing.

    Example:
        >>> from mindspore import nn
        >>> from mindspore.nn.utils import no_init_parameters
        >>> from ms_dtensor.compat.hyper_parallel import init_device_mesh, init_parameters
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> with no_init_parameters():
        ...     net = nn.Dense(2, 2)
        >>> init_parameters(net).weight.has_init
        False
    """
    mesh = _world_mesh("init_parameters")
    deferred_init.remember(module, mesh, 0)
    for _, cell in module.cells_and_names():
        for param in cell._params.values():
            if param is not None and deferred_init.is_deferred(param):
                whole = distribute_parameter(param, mesh, None)
                param.set_data(whole.to_local())
    return module


def _world_mesh(who: str) -> DeviceMesh:
    world = comm.current_world()
    if world is None:
        raise _refused(who, "no process group runs", "call init_device_mesh first")
    return init_device_mesh(world.device_type, (world.size,), mesh_dim_names=("dp",))


def hsdp(cell: nn.Cell, shard_size: int = -1, threshold: int = 64, optimizer_level: str = "level1",
         enable_grad_accumulation: bool = False, use_eager_hook: bool = True, grad_scale: float = 1.0, reduce_dtype=None,
         comm_async: bool = False, comm_fusion: bool = False, bucket_size: int = -1) -> nn.Cell:
    """Data parallelism of what is not distributed yet; parameters are replicated, never sharded.

    Parameters on a mesh need nothing: the gradient of one that is replicated on an axis is summed over it anyway, and is
    the global loss's. Plain ones are replicated on that mesh, or over all ranks (`replicate`) if there is none.

    Args:
        cell: the model, after `shard_module`.
        shard_size: 1. Anything else asks for parameters of `threshold` KiB or more to be cut over the data-parallel ranks,
            which is refused where there are such.
        threshold: as said.
        optimizer_level, use_eager_hook, comm_async: of no effect where nothing is cut.
        enable_grad_accumulation: refused; add up the gradients of micro-batches.
        grad_scale: 1.0; a gradient is that of the loss.
        reduce_dtype: None; a gradient is reduced in its own dtype.
        comm_fusion: reduce several gradients together.
        bucket_size: at most that many KiB of them; -1 for no limit.

    Raises:
        ConfigError: something asked that it does not do.

    Example:
        >>> from mindspore import nn
        >>> from ms_dtensor.compat.hyper_parallel import hsdp, init_device_mesh
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> hsdp(nn.Dense(4, 2), shard_size=1).weight
        DTensor(Parameter 'weight', f32[2, 4], mesh=(dp=1), rank 0 holds [2, 4])
    """
    params = [current(p) for _, p in cell.parameters_and_names()]
    large = next((p.name for p in params if prod(p._shape) * p.itemsize >= threshold * 1024), None)
    refused = [(shard_size != 1 and large is not None,
                f"'shard_size' is {shard_size}, and parameters such as {large!r} are not cut over data-parallel ranks here",
                "shard_size=1 replicates them, with the same gradients and more memory"),
               (enable_grad_accumulation, "'enable_grad_accumulation' is on", "add up the gradients of the micro-batches"),
               (grad_scale != 1.0, f"'grad_scale' is {grad_scale}", "scale the loss"),
               (reduce_dtype is not None, f"'reduce_dtype' is {reduce_dtype}", "cast what the gradient comes from")]
    for asked, why, fix in refused:
        if asked:
            raise _refused("hsdp", why, fix)
    meshes = [p.layout.mesh for p in params if isinstance(p, DTensor)]
    if not meshes:
        fused = (2 ** 20 if bucket_size < 0 else bucket_size / 1024) if comm_fusion else 0
        return replicate(cell, mesh=_world_mesh("hsdp"), bucket_mb=fused)
    deferred_init.remember(cell, meshes[0], 0)
    for _, sub in cell.cells_and_names():
        for key, param in list(sub._params.items()):
            if isinstance(param, Parameter):
                param = current(param)
                set_parameter(sub, key, param if isinstance(param, DTensor) else
                              distribute_parameter(param, meshes[0], None))
    return cell
