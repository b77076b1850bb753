# SPDX-License-Identifier: Apache-2.0
"""`fully_shard` and `replicate`: data parallelism whose parameters are cut over the ranks, or whole on each of them.

Both lay a cell's parameters out, make a `Unit` of it (`unit.py`) and let it run as one (`call.py`); nothing here runs in a
step. The batch is laid out alike (`batch.py`), and so is the meaning: the loss, computed on DTensors, is that of the global
batch, and gradients are those of one device; nothing is scaled by a world size.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

from mindspore import Parameter, Tensor, nn

from ...core.layout import Layout
from ...core.mesh import DeviceMesh
from ...core.placements import REPLICATE, Placement, Shard
from ...dispatch.operands import SHARDED_BY, local_alias, wrap
from ...dispatch.replaced import current
from ...errors import ConfigError, LayoutError
from ...internals.names import NoFallbackGuard
from ...internals.target import is_meta, on_cpu, with_values
from ...redistribute.execute import cut_further
from ...tensor import deferred_init
from ...tensor.distribute import distribute_parameter, distribute_tensor, empty_shard, like_parameter, set_parameter
from ...tensor.dtensor import DTensor
from ..layouts import OUTER, STYLES_MESH, around_construct, union_mesh
from ..precision import MixedPrecisionPolicy
from . import local
from .batch import BATCH, batch_over
from .call import UNIT, runs_as_unit, units_of
from .methods import METHODS
from .unit import DataAxes, Unit, cells_in, lift

_BUCKET_MB = 25  # of gradients that are reduced together
_ZERO1 = "replicate(zero1=True)"  # as messages call it
_OVER = "_ms_dtensor_replicated_over"  # parameter attribute: axes that replicate has dealt with
Slots = list[tuple[nn.Cell, str, Parameter]]


@dataclass(frozen=True)
class OffloadPolicy:
    """Where `fully_shard` keeps parameters, gradients and optimizer state: on the device.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        >>> _ = md.fully_shard(nn.Dense(4, 2), mesh=mesh, offload_policy=md.parallel.OffloadPolicy())
    """


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """In host memory, where they are on a CPU; refused on devices.

    Args:
        pin_memory: of no meaning on a CPU.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        >>> _ = md.fully_shard(nn.Dense(4, 2), mesh=mesh, offload_policy=md.parallel.CPUOffloadPolicy())
    """

    pin_memory: bool = True


@with_values
def fully_shard(module: nn.Cell | Sequence[nn.Cell], *, mesh: DeviceMesh, reshard_after_forward: bool | int = True,
                shard_placement_fn: Callable[[Parameter], Placement | None] | None = None,
                mp_policy: MixedPrecisionPolicy | None = None, offload_policy: OffloadPolicy | None = None,
                ignored_params: Iterable[Parameter] = (), replicate_params: Iterable[Parameter] = (),
                local_inputs: bool = False):
    """Cuts a cell's parameters over a data axis, in place, gathering them while the cell runs (FSDP2, HSDP).

    Apply it to each block and then to the model: one call's parameters are gathered in one collective before its cell
    runs (forward, and again for the backward), and their gradients reduced in one; the model's own are kept between
    forward and backward. Tensor-parallel styles come before it.

    Args:
        module: the cell, or a list of cells that run one after another and are gathered together; parameters that inner
            calls took are left to them. Plain parameters, DTensors of styles, tied and frozen ones, and deferred ones
            (`no_init_parameters`), of which only shards are made.
        mesh: one axis, over which parameters are cut, or several of a mesh as one, `mesh["dp", "ep"].flatten("data")`; or
            two: they are copied over the first and cut over the second (HSDP).
        reshard_after_forward: whether the whole parameters are given back between forward and backward. A number n: each
            rank keeps an n-th meanwhile, and the backward gathers among n neighbours on the axis, of one node, say.
        shard_placement_fn: `param -> Shard(dim)`; or `FusedShard(0, parts)` of a parameter that is several on top of each
            other, q, k and v, say: each rank has a chunk of every part, so all ranks have equally many rows of each; or
            `Replicate()`, where each rank keeps it whole and its gradient is all-reduced; or None for dim 0. None of a
            parameter that a style has cut by parts: by these, or by dim 1 where the ranks do not divide them.
        mp_policy: `MixedPrecisionPolicy`: dtypes of computing, of reducing gradients, and of what the cell returns.
        offload_policy: `CPUOffloadPolicy()` keeps parameters, gradients and optimizer state in host memory. On a CPU they
            are there: it changes nothing. On devices it is refused.
        ignored_params: parameters to leave as they are; others than the cell's own mean nothing. DTensors among them work
            as ever. A plain one is each rank's own: it works on local tensors (`x.to_local()`), its gradient is of this
            rank's rows and is not reduced; where it meets a DTensor it is refused.
        replicate_params: those of the cell that each rank keeps whole, as `shard_placement_fn` says it by `Replicate()`.
        local_inputs: cells compute on each rank's own plain tensors, with collectives of their own: plain in, plain out. A
            parameter is a DTensor on the axes that `mesh` has not, and plain where there are none; cells take
            `weight.to_local()` of it. What is differentiated is the sum over all ranks of what each of them differentiates:
            the gradient of a parameter that is replicated over tensor-parallel ranks is added up over them, too, so where
            all of them compute one loss each begins with its part of it. Over the ranks of `mesh` gradients are averaged,
            as in PyTorch, or added up: `set_reduce_op_type("sum")`.

    Returns:
        The same cell or list; each cell with the methods `unshard(async_op=False)` and `reshard()` (gather now and keep;
        give back), `set_requires_gradient_sync(bool, recurse=True)` (False: the gradients asked for are added up on each
        rank, and handed out as zeros, until a step with True), `set_requires_all_reduce(bool, recurse=True)` (the same for
        the ranks that have copies), `forget_gradients(recurse=True)` (drops these), `zero_grad(recurse=True)`,
        `set_modules_to_forward_prefetch(cells)`, `set_modules_to_backward_prefetch(cells)` and
        `set_reshard_after_forward(bool, recurse=True)`. Parameters are DTensors, cut; so are their gradients. Plain inputs
        of the outermost cell are this rank's rows of the global batch, as for `replicate`.

    Raises:
        LayoutError: the cell was sharded before; a parameter is laid out over the axis already; a dim it does not have;
            parts that the ranks do not divide.
        ConfigError: a mesh of more than two axes; a number of neighbours that does not divide the axis; offloading on a
            device; `replicate_params` of another cell. Later, by a forward: a parameter of the cell was replaced or taken
            out.

    A step that raises leaves nothing behind; what was gathered up without synchronising is forgotten with it, so begin again
    with the first micro-batch. What raises between two steps does not: call `forget_gradients()`.

    The meaning is that of `torch.distributed.fsdp.fully_shard`.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        >>> net = nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 2))
        >>> for cell in (net[0], net[2], net):
        ...     _ = md.fully_shard(cell, mesh=mesh)
        >>> net[0].weight
        DTensor(Parameter '0.weight', f32[8@dp, 4], mesh=(dp=1), rank 0 holds [8, 4])
        >>> md.fully_shard(nn.Dense(4, 8, has_bias=False), mesh=mesh,
        ...                shard_placement_fn=lambda p: md.FusedShard(0, (4, 2, 2))).weight
        DTensor(Parameter 'weight', f32[4+2+2@dp, 4], mesh=(dp=1), rank 0 holds [8, 4])
    """
    cells: list[nn.Cell] = list(module) if isinstance(module, list | tuple) else [module]
    ignored_params, replicate_params = list(ignored_params), list(replicate_params)
    _check("fully_shard", cells, mesh, ("mp_policy", mp_policy, MixedPrecisionPolicy | None),
           *(("ignored_params", p, Parameter) for p in ignored_params),
           *(("replicate_params", p, Parameter) for p in replicate_params), ("local_inputs", local_inputs, bool),
           ("offload_policy", offload_policy, OffloadPolicy | None))
    if isinstance(offload_policy, CPUOffloadPolicy) and not on_cpu():
        raise ConfigError("For 'fully_shard', 'CPUOffloadPolicy' is for CPUs only.", repr(mesh),
                          "A MindSpore Parameter lies where its device is.", "more ranks, or optimizer state of fewer bytes")
    whole, placed = {id(current(p)) for p in replicate_params}, shard_placement_fn or (lambda p: None)
    own = {id(current(p)): p.name for cell in cells for p in cell.get_parameters()}
    if strange := [p.name for p in replicate_params if id(current(p)) not in own]:
        raise ConfigError("For 'fully_shard', 'replicate_params' names parameters that the cell does not have.",
                          f"{', '.join(strange[:5])}; {type(cells[0]).__name__} has {', '.join(own.values())[:200]}",
                          "A call lays out the parameters of its own cells.",
                          ("pass them to the call for their own cell", "leave them out"))
    _make_unit("fully_shard", cells, _cutting("fully_shard", mesh, reshard_after_forward), mp_policy, ignored=ignored_params,
               place=lambda p: REPLICATE if id(p) in whole else placed(p), local_inputs=local_inputs)
    return module


@with_values
def replicate(module: nn.Cell, *, mesh: DeviceMesh, bucket_mb: float = _BUCKET_MB,
              mp_policy: MixedPrecisionPolicy | None = None, zero1: bool = False,
              ignored_modules: Iterable[nn.Cell] = ()) -> nn.Cell:
    """Makes a cell data parallel over an axis, in place; after tensor-parallel styles, which refuse a replicated cell.

    Args:
        module: the model. Parameters and buffers that are DTensors (on `mesh["tp"]`, say) move to the common mesh of
            both, replicated over the new axis; values are those of its coordinate 0.
        mesh: one axis of a mesh, e.g. `mesh["dp"]`, or several as one, `mesh["dp", "ep"].flatten("data")`.
        bucket_mb: gradients are reduced together in buckets of this many MiB; 0 reduces each by itself.
        mp_policy: in which dtypes the cell computes and gradients are reduced, see `MixedPrecisionPolicy`.
        zero1: divide the optimizer's work and state over the axis (ZeRO-1): each rank reduces, updates and hands out its
            part of the parameters. The bytes are the same, one all-gather and one reduce-scatter a step; parameters are
            DTensors cut over the axis, whole between a step's forward and backward. It is `fully_shard` of the whole cell
            with `reshard_after_forward=False`; call that block by block where communication is to overlap.
        ignored_modules: cells inside whose parameters and buffers are left as they are.

    Returns:
        The same cell, with the methods of `fully_shard`, of which `set_requires_gradient_sync` and `forget_gradients` are
        the ones of use here. Plain inputs of the outermost cell are taken as this rank's rows of the global batch
        (`Shard(0)`), also within tuples, dicts and dataclasses; the ranks tell each other the sizes at every call (one small
        message, on devices a wait of the host; none for DTensors, as `DTensor.from_local` makes them): the last ranks may
        have fewer rows, as chunks do. Outputs are DTensors, also where a style inside hands out plain tensors, so compute
        the loss on them: its value and gradients are those of the global batch. A loss cell is replicated in the same way:
        its plain labels are this rank's rows, on whatever larger mesh the logits live.

    Raises:
        LayoutError: the cell was made data parallel before; a parameter is laid out over the axis already.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        >>> md.replicate(nn.Dense(4, 2), mesh=mesh).weight
        DTensor(Parameter 'weight', f32[2, 4], mesh=(dp=1), rank 0 holds [2, 4])
    """
    ignored_modules = list(ignored_modules)
    _check("replicate", [module], mesh, ("mp_policy", mp_policy, MixedPrecisionPolicy | None),
           *(("ignored_modules", cell, nn.Cell) for cell in ignored_modules))
    if zero1:
        _check(_ZERO1, [module], mesh)  # nor over a replicated cell
        _make_unit(_ZERO1, [module], _cutting(_ZERO1, mesh, False), mp_policy, but=ignored_modules,
                   ignored=[p for c in ignored_modules for p in c.get_parameters()])
    else:
        _make_unit("replicate", [module], DataAxes(_unflattened(mesh), mesh, 0, 0), mp_policy, but=ignored_modules,
                   bucket_mb=bucket_mb)
    return module


# -- checks ------------------------------------------------------------------------------------------------------------


def _check(who: str, cells: list, mesh, *more: tuple[str, Any, Any]) -> None:
    """Refuses cells that cannot be a unit, and what is of another kind than it should be; `more`: (name, value, kinds)."""
    for what, value, kinds in (*(("module", cell, nn.Cell) for cell in cells or [None]), ("mesh", mesh, DeviceMesh), *more):
        if not isinstance(value, kinds):
            function = what == "module" and callable(value) and not isinstance(value, type)
            raise ConfigError(f"For '{who}', '{what}' does not take {value!r}.", type(value).__name__,
                              f"It takes: {getattr(kinds, '__name__', kinds)}.",
                              "a Cell whose construct calls the function" if function else "call it for each cell of a list")
    if len({id(cell) for cell in cells}) < len(cells):
        raise ConfigError(f"For '{who}', a cell is twice in the list.", ", ".join(type(cell).__name__ for cell in cells),
                          "A unit has each of its cells once.", "leave it out the second time")
    for cell in cells:
        if UNIT in cell.__dict__ and (who != "replicate" or cell.__dict__[UNIT].axes.cut):
            raise LayoutError(f"For '{who}', this {type(cell).__name__} was sharded already.", f"mesh({mesh.describe()})",
                              "Its parameters would be gathered twice.", "call it once for each cell, blocks first")


def _cutting(who: str, mesh: DeviceMesh, reshard_after_forward: bool | int) -> DataAxes:
    """The axes of a unit whose parameters are cut, and among how many ranks of the last one the backward gathers."""
    if mesh.ndim > 2:
        raise ConfigError(f"For '{who}', 'mesh' has {mesh.ndim} axes.", f"mesh({mesh.describe()})",
                          "One axis cuts; one before it may copy.", 'pass mesh["dp"], or mesh["replicate", "shard"]')
    size, count = mesh.shape[-1], reshard_after_forward
    if not isinstance(count, int) or not isinstance(count, bool) and (count < 1 or size % count):
        raise ConfigError(f"For 'fully_shard', 'reshard_after_forward' = {count!r} is out of range.",
                          f"mesh({mesh.describe()})", f"A bool, or a number that divides the {size} ranks of the axis.",
                          "reshard_after_forward=True")
    data = _unflattened(mesh)
    near = size if count is True else 0 if count is False or count == 1 else count
    return DataAxes(data, mesh, 1 if mesh.ndim == 2 else data.ndim, near)


# -- where parameters go -----------------------------------------------------------------------------------------------


def _unflattened(mesh: DeviceMesh) -> DeviceMesh:
    """The axes that a flattened one stands for: parameters on other axes know these."""
    names = [a for name in mesh.mesh_dim_names for a in mesh.root.expand_axes(name)]
    return mesh if names == list(mesh.mesh_dim_names) else mesh.root[tuple(names)]


def _whole_mesh(who: str, cells: list[nn.Cell], slots: Slots, data: DeviceMesh, local_inputs: bool) -> DeviceMesh:
    """The axes of all parameters, and of a plan for other stages. Of local tensors an inner unit's may run across them:
    experts over all ranks, say."""
    whole = data
    for cell in () if local_inputs else cells:
        whole = union_mesh(cell.__dict__.get(STYLES_MESH, whole), whole, who)
    for _, _, p in slots:
        if isinstance(p, DTensor):
            try:
                whole = union_mesh(p.device_mesh, whole, who)
            except LayoutError:
                if not local_inputs or not p.__dict__.get(SHARDED_BY):
                    raise
    return whole


def _target(who: str, p: Parameter, axes: DataAxes, whole: DeviceMesh, placement_fn) -> Layout:
    """Where a parameter goes: as it lies on other axes, then cut over those that cut."""
    layout = p.layout if isinstance(p, DTensor) else None
    placed = {} if layout is None else dict(zip(layout.mesh.mesh_dim_names, layout.placements))
    cut = axes.cutting
    doubly = [a for a in axes.mesh.mesh_dim_names if not placed.get(a, REPLICATE).is_replicate()]
    if doubly and not cut:
        raise LayoutError(f"For 'replicate', parameter '{p.name}' is laid out over '{doubly[0]}' already.",
                          p.layout.describe(), "A parameter is copied or cut over an axis, not both.",
                          ("fully_shard(module, mesh=...) for a cell of which some parameters are cut",
                           "ignored_modules=[...] with the cells of which all are"))
    shape = tuple(p.shape)
    default: Placement = Shard(0) if shape else REPLICATE  # a number is kept by every rank
    ranks = math.prod(n for a, n in zip(whole.mesh_dim_names, whole.shape) if a in cut or placed.get(a, REPLICATE).parts)
    by_parts = [f for f in placed.values() if f.parts and f.dim == 0]
    if by_parts:
        default = by_parts[0] if not _remainders(by_parts[0], ranks) else Shard(1) if len(shape) > 1 else REPLICATE
    where = placement_fn(p) if placement_fn is not None and shape else None
    where = default if where is None else where
    if not isinstance(where, Placement):
        raise ConfigError(f"For 'fully_shard', 'shard_placement_fn' gave {where!r} for parameter '{p.name}'.",
                          f"{list(shape)}", "It gives a placement, or None for dim 0.", ("Shard(dim)", "Replicate()"))
    if doubly or where.is_partial() or isinstance(where, Shard) and not -len(shape) <= where.dim < len(shape):
        raise LayoutError(f"For '{who}', parameter '{p.name}' cannot be cut over '{cut[-1]}'.",
                          f"{list(shape)} as {where}" if layout is None else layout.describe(),
                          f"It is laid out over '{doubly[0]}' already." if doubly else "It has no such dim.",
                          ("pass it in ignored_params=", "give its dim by shard_placement_fn=lambda p: Shard(dim)")
                          if who == "fully_shard" else ("pass its cell in ignored_modules=", "zero1=False"))
    if where.parts and (where.dim % len(shape) or _remainders(where, ranks)):
        raise LayoutError(f"For '{who}', parameter '{p.name}' cannot be cut by parts over '{cut[-1]}'.",
                          f"{list(shape) if layout is None else layout} as {where} over {ranks} ranks",
                          "A parameter is cut by parts along dim 0, where a part is one piece of memory."
                          if where.dim % len(shape) else "All ranks have as many rows of each part: "
                          f"{ranks} does not divide {', '.join(map(str, _remainders(where, ranks)))}.",
                          ("Shard(dim)", "fewer ranks on the axis: HSDP copies parameters over another one"))
    return lift(p, whole, dict.fromkeys(cut, where))


def _remainders(by_parts: Placement, ranks: int) -> list[int]:
    """The parts that so many ranks do not divide."""
    return [n for n in by_parts.parts if n % ranks]


def _lay_out(slots: Slots, targets: dict[int, Layout], data: DeviceMesh) -> Slots:
    """Puts the parameters that have a target, laid out, into their slots, which it returns."""
    params = {id(p): p for _, _, p in slots}
    made = {key: _laid_out(params[key], data, target) for key, target in targets.items()}
    for cell, key, p in slots:
        set_parameter(cell, key, made.get(id(p), p))  # one that an inner unit took may be tied to this slot
    return [(cell, key, made[id(p)]) for cell, key, p in slots if id(p) in made]


def _lay_buffers_out(cells: list[nn.Cell], data: DeviceMesh, whole: DeviceMesh) -> None:
    """Lays the buffers of cells out, which take plain inputs as rows from here on."""
    for cell in cells:
        for key, buffer in list(getattr(cell, "_buffers", {}).items()):
            if isinstance(buffer, Tensor) and not (isinstance(buffer, DTensor) and buffer.device_mesh == whole):
                cell._buffers[key] = _laid_out(buffer, data, lift(buffer, whole))
        cell.__dict__[OUTER] = (whole, dict.fromkeys(data.mesh_dim_names, Shard(0)))


def _laid_out(x, mesh: DeviceMesh, target: Layout):
    """A parameter or buffer as `target` says, which tells more of the axes of `mesh`: values are those of coordinate 0."""
    if is_meta(x):
        local = empty_shard(target)
    elif not isinstance(x, DTensor):
        make = distribute_parameter if isinstance(x, Parameter) else distribute_tensor
        return make(x, target.mesh, list(target.placements))
    else:
        local = local_alias(x)
        if mesh.size() > 1:  # a group of one rank would be a communicator, too
            local = mesh.get_group().broadcast(local, mesh.get_group().ranks[0])
        with NoFallbackGuard():
            local = cut_further(local, x.layout, target)
    out = wrap(local, target)
    return like_parameter(out, x) if isinstance(x, Parameter) else out


def _make_unit(who: str, cells: list[nn.Cell], axes: DataAxes, mp_policy: MixedPrecisionPolicy | None, *,
               but: Iterable[nn.Cell] = (), ignored: Iterable[Parameter] = (), place: Callable | None = None,
               bucket_mb: float = _BUCKET_MB, local_inputs: bool = False) -> None:
    """Lays the parameters of cells out, but for those ignored and in the cells `but`, and lets the cells run as one unit."""
    data, names = axes.mesh, set(axes.mesh.mesh_dim_names)
    left = {id(p): p.__dict__.setdefault(SHARDED_BY, "") for p in map(current, ignored)}
    apart = set(map(id, cells_in(*but)))
    inside = [c for c in cells_in(*cells) if id(c) not in apart]
    found = [(c, key, p) for c in inside for key, held in c._params.items()
             if held is not None and id(p := current(held)) not in left]
    whole = _whole_mesh(who, inside, found, data, local_inputs)
    targets = {id(p): _target(who, p, axes, whole, place) for _, _, p in found  # refuses before anything moves
               if not (p.__dict__.get(SHARDED_BY) if axes.cut else names <= p.__dict__.get(_OVER, set()))}
    inner = units_of(*cells)
    taken = {(id(c), key) for u in inner for c, key, _ in (*u.slots, *u.tied)}
    tied = [(c, key, p) for c, key, p in found if (id(c), key) not in taken and id(p) not in targets]  # to another unit's
    local.check(who, local_inputs, cells, inner, tied)
    for cell in cells:
        deferred_init.remember(cell, whole, 0)
    mine = _lay_out(found, targets, data)
    if not local_inputs:
        _lay_buffers_out(inside, data, whole)
    for unit in inner:  # which may have known of fewer axes
        unit.move_to(whole)
    for _, _, p in mine:
        key, value = (SHARDED_BY, type(cells[0]).__name__) if axes.cut else (_OVER, names | p.__dict__.get(_OVER, set()))
        p.__dict__[key] = value
    unit = Unit(who, cells, mine, tied, axes, local_inputs, mp_policy or MixedPrecisionPolicy(), bucket_mb)
    for cell in cells:
        cell.__dict__[UNIT] = unit
        around_construct(cell, runs_as_unit)
        for method in METHODS:
            cell.__dict__[method.__name__] = MethodType(method, cell)
        before, after = cell.__dict__[BATCH] = local.plain_in_and_out(who) if local_inputs else batch_over(
            cell, data, axes.given, who, unit.label)
        cell.register_forward_pre_hook(before, with_kwargs=True)
        cell.register_forward_hook(after)
