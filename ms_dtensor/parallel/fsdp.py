# SPDX-License-Identifier: Apache-2.0
"""`fully_shard`: data parallelism whose parameters, gradients and optimizer state are cut over the ranks (ZeRO-3, FSDP).

Applied to blocks first and to the model last: each call takes the parameters that no inner call took, as one unit
(`fsdp_unit.py`). The batch is laid out as by `replicate`, and so is the meaning: the loss is that of the global batch, and
gradients are those of one device; nothing is scaled.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

from mindspore import Parameter, Tensor, nn

from ..core.layout import Layout
from ..core.mesh import DeviceMesh
from ..core.placements import REPLICATE, Placement, Shard
from ..core.tree import map_leaves
from ..dispatch.operands import LAID_OUT, dtype_name, local_alias, wrap
from ..dispatch.patches.gradients import SHARDED_BY, in_this_gradient
from ..dispatch.patches.recomputed import recomputing, standing_in
from ..dispatch.replaced import current
from ..errors import ConfigError, LayoutError
from ..internals.names import NoFallbackGuard, RecomputeCell, recording
from ..internals.target import on_cpu
from ..redistribute.boxes import relative
from ..redistribute.execute import slice_local
from ..tensor import deferred_init
from ..tensor.distribute import distribute_parameter, like_parameter, set_parameter
from ..tensor.dtensor import DTensor
from .batch import batch_over
from .buckets import make_buckets
from .fsdp_lent import lend
from .fsdp_memory import CPUOffloadPolicy, OffloadPolicy
from .fsdp_unit import Again, Call, Unit, gather_changed, gathered
from .layouts import OUTER, replicated_over, union_mesh
from .precision import MixedPrecisionPolicy

_BUCKET_MB = 25  # of gradients that are reduced together, of parameters kept whole
_UNIT = "_ms_dtensor_unit"  # cell attribute: the `Unit` that `fully_shard` made of it


def fully_shard(module: nn.Cell, *, mesh: DeviceMesh, reshard_after_forward: bool | int = True,
                shard_placement_fn: Callable[[Parameter], Placement | None] | None = None,
                mp_policy: MixedPrecisionPolicy | None = None, offload_policy: OffloadPolicy | None = None,
                ignored_params: Iterable[Parameter] = ()) -> nn.Cell:
    """Cuts a cell's parameters over a data axis, in place, gathering them while the cell runs (FSDP2, HSDP).

    Apply it to each block and then to the model: one call's parameters are gathered in one collective before its cell
    runs (forward, and again for the backward), and their gradients reduced in one; the model's own are kept between
    forward and backward. Tensor-parallel styles come before it.

    Args:
        module: the cell; parameters that inner calls took are left to them. Plain parameters, DTensors of styles, tied and
            frozen ones, and deferred ones (`no_init_parameters`), of which only shards are made.
        mesh: one axis, over which parameters are cut; or two: they are copied over the first and cut over the second (HSDP).
        reshard_after_forward: whether the whole parameters are given back between forward and backward. A number n: each
            rank keeps an n-th meanwhile, and the backward gathers among n neighbours on the axis, of one node, say.
        shard_placement_fn: `param -> Shard(dim)`; or `Replicate()`, where each rank keeps it whole and its gradient is
            all-reduced; or None for dim 0 (of a fused projection, whose dim 0 is cut by parts, dim 1).
        mp_policy: `MixedPrecisionPolicy`: dtypes of computing, of reducing gradients, and of what the cell returns.
        offload_policy: `CPUOffloadPolicy()` keeps parameters, gradients and optimizer state in host memory. On a CPU they
            are there: it changes nothing. On devices it is refused.
        ignored_params: parameters to leave as they are; others than the cell's own mean nothing.

    Returns:
        The same cell, with the methods `unshard()` and `reshard()` (gather now and keep; give back),
        `set_requires_gradient_sync(bool, recurse=True)` (False: the gradients asked for are added up on each rank, and
        handed out as zeros, until a step with True), `forget_gradients(recurse=True)` (drops these) and
        `set_reshard_after_forward(bool, recurse=True)`. Parameters are DTensors, cut; so are their gradients. Plain inputs
        are this rank's rows of the global batch, as for `replicate`.

    Raises:
        LayoutError: the cell was sharded before; a parameter is laid out over the axis already; a dim it does not have.
        ConfigError: a mesh of more than two axes; a number of neighbours that does not divide the axis; offloading on a
            device. Later, by a forward: a parameter of the cell was replaced, or taken out.

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
    """
    name, ignored_params = type(module).__name__, list(ignored_params)
    for what, value, kinds in (("module", module, nn.Cell), ("mesh", mesh, DeviceMesh),
                               ("mp_policy", mp_policy, MixedPrecisionPolicy | None),
                               ("offload_policy", offload_policy, OffloadPolicy | None),
                               *(("ignored_params", p, Parameter) for p in ignored_params)):
        if not isinstance(value, kinds):
            raise ConfigError(f"For 'fully_shard', '{what}' does not take {value!r}.", type(value).__name__,
                              f"It takes: {getattr(kinds, '__name__', kinds)}.", "call it for each cell of a list")
    if mesh.ndim > 2:
        raise ConfigError(f"For 'fully_shard', 'mesh' has {mesh.ndim} axes.", f"mesh({mesh.describe()})",
                          "One axis cuts; one before it may copy.", 'pass mesh["dp"], or mesh["replicate", "shard"]')
    if _UNIT in module.__dict__:
        raise LayoutError(f"For 'fully_shard', this {name} was sharded already.", f"mesh({mesh.describe()})",
                          "Its parameters would be gathered twice.", "call it once for each cell, blocks first")
    neighbours = _neighbours(mesh, reshard_after_forward)
    if isinstance(offload_policy, CPUOffloadPolicy) and not on_cpu():
        raise ConfigError("For 'fully_shard', 'CPUOffloadPolicy' is for CPUs only.", f"mesh({mesh.describe()})",
                          "A MindSpore Parameter lies where its device is.", "more ranks, or optimizer state of fewer bytes")
    ignored = {id(p): p.__dict__.setdefault(SHARDED_BY, "") for p in map(current, ignored_params)}
    found = [(cell, key, current(p)) for _, cell in module.cells_and_names() for key, p in cell._params.items()
             if p is not None and id(current(p)) not in ignored]
    slots = [(cell, key, p) for cell, key, p in found if not p.__dict__.get(SHARDED_BY)]
    whole = mesh
    for _, _, p in found:
        if isinstance(p, DTensor):
            whole = union_mesh(p.device_mesh, whole)
    wanted = {id(p): _target(p, mesh, whole, shard_placement_fn) for _, _, p in slots}  # refuses before anything moves
    deferred_init.remember(module, whole, 0)
    made: dict[int, Parameter] = {}
    for cell, key, p in found:
        if id(p) in wanted and id(p) not in made:
            made[id(p)] = _sharded(p, mesh, wanted[id(p)])
            made[id(p)].__dict__[SHARDED_BY] = name
        set_parameter(cell, key, made.get(id(p), p))  # one that an inner unit took may be tied to this slot
    for _, cell in module.cells_and_names():
        for key, buffer in getattr(cell, "_buffers", {}).items():
            if isinstance(buffer, Tensor) and not (isinstance(buffer, DTensor) and buffer.device_mesh == whole):
                cell._buffers[key] = replicated_over(buffer, mesh, whole)
        cell.__dict__[OUTER] = (whole, dict.fromkeys(mesh.mesh_dim_names, Shard(0)))
    policy = mp_policy or MixedPrecisionPolicy()
    kept = {i for i, layout in wanted.items() if layout.placements[whole.axis_index(mesh.mesh_dim_names[-1])].is_replicate()}
    if kept and mesh.size() > 1:
        make_buckets([made[i] for i in kept if made[i].requires_grad], mesh, _BUCKET_MB, policy.reduce_dtype)
    mine = [(cell, key, made[id(p)]) for cell, key, p in slots if id(p) not in kept or policy.compute_dtype(p) != p.dtype]
    unit = Unit(name, mine, mesh, neighbours, policy)
    module.__dict__[_UNIT] = unit
    given = module.__dict__["construct"].__func__ if "construct" in module.__dict__ else type(module).construct
    module.__dict__["construct"] = MethodType(_constructing(given), module)
    if isinstance(module._recompute_cell, RecomputeCell):  # it has noted which `construct` to run again
        module._recompute_cell.wrap_cell.function = module.construct
    for method in (unshard, reshard, set_requires_gradient_sync, forget_gradients, set_reshard_after_forward):
        module.__dict__[method.__name__] = MethodType(method, module)
    batch_over(module, mesh, "fully_shard")
    return module


def _neighbours(mesh: DeviceMesh, reshard_after_forward: bool | int) -> int:
    """Among how many ranks of the axis the backward gathers; 0: it does not."""
    size = mesh.shape[-1]
    if isinstance(reshard_after_forward, bool):
        return size if reshard_after_forward else 0
    if not isinstance(reshard_after_forward, int) or reshard_after_forward < 1 or size % reshard_after_forward:
        raise ConfigError(f"For 'fully_shard', 'reshard_after_forward' = {reshard_after_forward!r} is out of range.",
                          f"mesh({mesh.describe()})", f"A bool, or a number that divides the {size} ranks of the axis.",
                          "reshard_after_forward=True")
    return reshard_after_forward if reshard_after_forward > 1 else 0


def _target(p: Parameter, mesh: DeviceMesh, whole: DeviceMesh, placement_fn) -> Layout:
    """Where a parameter goes: as it lies on other axes, then cut over the last axis of `mesh`."""
    layout = p.layout if isinstance(p, DTensor) else None
    placed: dict[str, Any] = {} if layout is None else dict(zip(layout.mesh.mesh_dim_names, layout.placements))
    order = [] if layout is None else [layout.mesh.mesh_dim_names[a] for a in layout.order]
    doubly = [a for a in mesh.mesh_dim_names if not placed.get(a, REPLICATE).is_replicate()]
    shape = tuple(p.shape)
    default: Placement = Shard(0) if shape else REPLICATE  # a number is kept by every rank
    if layout is not None and any(f.dim == 0 for _, f in layout.fused):  # a dim that is cut by parts is cut once
        default = Shard(1) if len(shape) > 1 else REPLICATE
    where = placement_fn(p) if placement_fn is not None and shape else None
    where = default if where is None else where
    if not isinstance(where, Placement):
        raise ConfigError(f"For 'fully_shard', 'shard_placement_fn' gave {where!r} for parameter '{p.name}'.",
                          f"{list(shape)}", "It gives a placement, or None for dim 0.", ("Shard(dim)", "Replicate()"))
    if doubly or where.is_partial() or isinstance(where, Shard) and not -len(shape) <= where.dim < len(shape):
        raise LayoutError(f"For 'fully_shard', parameter '{p.name}' cannot be cut over '{mesh.mesh_dim_names[-1]}'.",
                          f"{list(shape)} as {where}" if layout is None else layout.describe(),
                          f"It is laid out over '{doubly[0]}' already." if doubly else "It has no such dim.",
                          ("pass it in ignored_params=", "give its dim by shard_placement_fn=lambda p: Shard(dim)"))
    placed[mesh.mesh_dim_names[-1]] = where
    dtype = dtype_name(p.dtype) if layout is None else layout.dtype
    return Layout(whole, {a: placed.get(a, REPLICATE) for a in whole.mesh_dim_names}, shape, dtype,
                  [*order, *(a for a in whole.mesh_dim_names if a not in order)])


def _sharded(p: Parameter, mesh: DeviceMesh, target: Layout) -> Parameter:
    if not isinstance(p, DTensor):
        return distribute_parameter(p, target.mesh, list(target.placements))
    group, local = mesh.get_group(), local_alias(p)
    if group.size > 1:
        local = group.broadcast(local, group.ranks[0])
    axes = [target.mesh.axis_index(a) for a in mesh.mesh_dim_names]
    with NoFallbackGuard():
        cut = slice_local(local, relative(target.local_box(), gathered(target, axes).local_box()), copy=True)
    return like_parameter(wrap(cut, target), p)


def _constructing(given: Callable) -> Callable:
    """A unit's cell at work: its parameters stand in its slots as whole tensors, and go whatever happens."""
    @functools.wraps(given)
    def construct(cell: nn.Cell, *args, **kwargs):
        unit, again = _unit(cell), recomputing.get()
        unit.check()
        call, policy = Call(unit) if recording() else None, unit.policy
        args, kwargs = policy.cast_inputs(args, kwargs)
        with _in_step(cell, again) as step:
            unit.gather(backward=again)
            with _known(call), unit.in_place(call, unit.slots) as whole:
                outputs = map_leaves(lambda x: x * 1 if unit.lends(x, whole) else x, given(cell, *args, **kwargs), Tensor)
        lend(unit, (w for k, w in whole.items() if k in unit.place))
        root = step is not None and len(step.units) > 1
        if call is None or (unit.reshard and not root and not again and not unit.running):
            unit.release(keep_part=call is not None)
        outputs = policy.cast_output(outputs)
        if call is None:
            return outputs
        unused = [] if step is None else [node for u in step.units if u not in step.ran for node in u.unsent_nodes()]
        return map_leaves(lambda x: _entrance(x, call, unused), outputs, Tensor)
    return construct


class _Step:
    """A forward of the outermost unit: which units ran, and which one last."""

    def __init__(self, unit: Unit, units: list[Unit]):
        self.last, self.units, self.ran = unit, units, {unit}


_step: ContextVar[_Step | None] = ContextVar("ms_dtensor_fully_shard_step", default=None)


@contextmanager
def _in_step(cell: nn.Cell, again: bool) -> Iterator[_Step | None]:
    """Notes the order of units, which tells whom to gather next; the outermost one is given the step."""
    unit, step = cell.__dict__[_UNIT], _step.get()
    if step is not None or again:
        if step is not None:
            step.ran.add(unit)
            unit.before, step.last = step.last, unit
            if unit.before is not None:
                unit.before.after = unit
        yield None
        return
    inner = _units(cell)
    for u in inner:  # what an earlier step that raised, or another order, has left
        u.running = 0
        u.release()
        if u.late is not None:
            u.late.finish()
    gather_changed(inner)
    if recording():
        in_this_gradient.update(inner)
    step = _Step(unit, inner)
    token = _step.set(step)
    try:
        yield step
    finally:
        _step.reset(token)


def _units(cell: nn.Cell) -> list[Unit]:
    return [c.__dict__[_UNIT] for _, c in cell.cells_and_names() if _UNIT in c.__dict__]


@contextmanager
def _known(call: Call | None) -> Iterator[None]:
    """What is recomputed inside knows who has put tensors in the place of parameters."""
    token = standing_in.set(standing_in.get() if call is None else (*standing_in.get(), call))
    try:
        yield
    finally:
        standing_in.reset(token)


def _entrance(x: Tensor, call: Call, unused: list[Tensor]) -> Tensor:
    """An output behind a node that gathers the parameters again when its gradient arrives; the first has `unused`, too."""
    if not x._requires_grad or not x.is_floating_point():
        return x
    with NoFallbackGuard():
        out = Again.apply(x, call, *unused)
    unused.clear()
    if isinstance(x, DTensor):
        out = wrap(out, x.layout)
    elif LAID_OUT in x.__dict__:
        out.__dict__[LAID_OUT] = x.__dict__[LAID_OUT]
    return out


def _unit(cell: nn.Cell) -> Unit:
    return cell.__dict__[_UNIT]


def unshard(self) -> None:
    """Gathers this cell's parameters now, and keeps them until `reshard()`: for many forwards.

    A forward asks whether they were changed (one number of all ranks), and gathers them again if so.
    """
    _unit(self).release()
    _unit(self).gather()
    _unit(self).kept = True


def reshard(self) -> None:
    """Gives the gathered parameters back."""
    _unit(self).kept = False
    _unit(self).release()


def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """Whether backwards reduce gradients; while not, they are gathered up on each rank, and handed out as zeros."""
    if not isinstance(requires_gradient_sync, bool):
        raise ConfigError(f"For 'set_requires_gradient_sync', {requires_gradient_sync!r} is no bool.", type(self).__name__,
                          "True: backwards reduce gradients.", "True, or False")
    for unit in _units(self) if recurse else [_unit(self)]:
        unit.sync = requires_gradient_sync


def forget_gradients(self, *, recurse: bool = True) -> None:
    """Drops what backwards without synchronisation have gathered up; a sequence of micro-batches that was broken off."""
    for unit in _units(self) if recurse else [_unit(self)]:
        unit.abandon()


def set_reshard_after_forward(self, reshard_after_forward: bool, *, recurse: bool = True) -> None:
    """Whether the gathered parameters are given back between forward and backward."""
    for unit in _units(self) if recurse else [_unit(self)]:
        unit.reshard = reshard_after_forward
