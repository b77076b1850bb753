# SPDX-License-Identifier: Apache-2.0
"""What a data-parallel cell can be told: its methods, with the names and meanings of PyTorch's FSDP2."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MethodType

from mindspore import nn

from ...comm.protocol import Work
from ...dispatch.patches.recomputed import standing_in
from ...errors import ConfigError
from ..constants import ALIKE, with_constants
from .batch import BATCH
from .call import UNIT, runs_as_unit, units_of
from .unit import Unit


def unshard(self, async_op: bool = False) -> Work | None:
    """Gathers this cell's parameters now, and keeps them until `reshard()`: for many forwards.

    A forward asks whether they were changed (one number of all ranks), and gathers them again if so. With `async_op` the
    gathering goes on meanwhile; the next forward waits for it, or the handle's `wait()`.
    """
    unit: Unit = self.__dict__[UNIT]
    unit.reshard(forced=True)
    unit.kept_by_user = True
    unit.prefetch("forward")
    work = Work[None](finish=functools.partial(unit.unshard, "forward"))
    return work if async_op else work.wait()


def reshard(self) -> None:
    """Gives the gathered parameters back."""
    self.__dict__[UNIT].kept_by_user = False
    self.__dict__[UNIT].reshard()


def _units(cell: nn.Cell, recurse: bool, what: str = "", flag=True) -> list[Unit]:
    """The units that method `what` tells a flag."""
    if not isinstance(flag, bool):
        raise ConfigError(f"For '{what}', {flag!r} is no bool.", type(cell).__name__, "It is True or False.",
                          "True, or False")
    return units_of(cell) if recurse else [cell.__dict__[UNIT]]


def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """Whether backwards reduce gradients; while not, they are gathered up on each rank, and handed out as zeros."""
    for unit in _units(self, recurse, "set_requires_gradient_sync", requires_gradient_sync):
        unit.reduction.sync = requires_gradient_sync


def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
    """Of parameters that are cut and copied (HSDP): whether backwards reduce over the copies, too; while not, sums over the
    axis that cuts are gathered up, and zeros handed out. Those that every rank keeps whole wait for all ranks meanwhile."""
    for unit in _units(self, recurse, "set_requires_all_reduce", requires_all_reduce):
        unit.reduction.sync_copies = requires_all_reduce


def forget_gradients(self, *, recurse: bool = True) -> None:
    """Drops what backwards without synchronisation have gathered up; a sequence of micro-batches that was broken off."""
    for unit in _units(self, recurse):
        unit.reduction.forget()


def set_reduce_op_type(self, reduce_op_type: str, *, recurse: bool = True) -> None:
    """Whether gradients are the "sum" over the ranks that bring data or their "avg"; of cells of local tensors only.

    Raises:
        ConfigError: another word, or a unit whose loss is the global batch's, of which there is nothing to choose.
    """
    if reduce_op_type not in ("sum", "avg"):
        raise ConfigError(f"For 'set_reduce_op_type', {reduce_op_type!r} is not known.", type(self).__name__,
                          "Gradients of ranks' own losses are added up, or averaged.", ('"sum"', '"avg"'))
    units = _units(self, recurse)
    if others := [unit.label for unit in units if not unit.local]:
        raise ConfigError("For 'set_reduce_op_type', the cells compute on DTensors.", others[0],
                          "Their loss is the global batch's, and gradients are those of one device.",
                          "fully_shard(..., local_inputs=True), for cells of local tensors")
    for unit in units:
        unit.reduction.scale = 1 / unit.mesh.size() if reduce_op_type == "avg" else 1.0


def zero_grad(self, *, recurse: bool = True) -> None:
    """Lets go of `.grad` and `.main_grad` of this cell's parameters."""
    for unit in _units(self, recurse):
        for p in unit.params.values():
            for kept in ("grad", "main_grad"):
                if getattr(p, kept, None) is not None:
                    setattr(p, kept, None)


def set_reshard_after_forward(self, reshard_after_forward: bool, *, recurse: bool = True) -> None:
    """Whether the gathered parameters are given back between forward and backward."""
    for unit in _units(self, recurse, "set_reshard_after_forward", reshard_after_forward):
        unit.reshards = reshard_after_forward


def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Cell]) -> None:
    """Whose parameters are gathered ahead while this cell runs: those of the cells in the list, and no others.

    Without it, those of the cell that ran next the last time.
    """
    self.__dict__[UNIT].forward_prefetch = _listed(self, "set_modules_to_forward_prefetch", modules)


def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Cell]) -> None:
    """Whose parameters are gathered ahead when the backward comes to this cell; without it, those of the cell before."""
    self.__dict__[UNIT].backward_prefetch = _listed(self, "set_modules_to_backward_prefetch", modules)


def _listed(cell: nn.Cell, what: str, modules: Sequence[nn.Cell]) -> list[Unit]:
    for m in modules if isinstance(modules, list | tuple) else [modules]:
        if not isinstance(m, nn.Cell) or UNIT not in m.__dict__:
            raise ConfigError(f"For '{what}', {type(m).__name__} is no cell that 'fully_shard' was applied to.",
                              type(cell).__name__, "What is gathered ahead are the parameters of a unit.",
                              "pass a list of cells to which fully_shard was applied")
    return [m.__dict__[UNIT] for m in modules]


METHODS = (unshard, reshard, set_requires_gradient_sync, set_requires_all_reduce, forget_gradients, set_reduce_op_type,
           zero_grad, set_reshard_after_forward, set_modules_to_forward_prefetch, set_modules_to_backward_prefetch)


def register_fsdp_forward_method(module: nn.Cell, method_name: str) -> None:
    """Lets another method of a data-parallel cell run as its `construct` does: parameters whole, plain inputs rows.

    Also with `constants="replicate"`, where `parallelize_module` was told so, before or after.

    Args:
        module: a cell; nothing is done to one that neither `fully_shard` nor `replicate` was applied to, as in PyTorch.
        method_name: of the method, such as "generate" or "encode".

    Raises:
        ConfigError: the cell has no such method.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from mindspore import nn
        >>> class Coder(nn.Dense):
        ...     def encode(self, x):
        ...         return super().construct(x) * 2
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        >>> coder = md.fully_shard(Coder(4, 2), mesh=mesh)
        >>> md.register_fsdp_forward_method(coder, "encode")
        >>> coder.encode(ms.ops.ones((3, 4))).shape
        (3, 2)
    """
    given = getattr(module, method_name, None)
    if not callable(given):
        raise ConfigError(f"For 'register_fsdp_forward_method', {type(module).__name__} has no method '{method_name}'.", "",
                          "A method that is called in the place of the cell.", "check the name")
    if UNIT not in module.__dict__:
        return
    own = given.__func__
    inner = runs_as_unit(own)

    @functools.wraps(own)
    def run(cell, *args, **kwargs):
        if any(call.unit is cell.__dict__[UNIT] for call in standing_in.get()):  # called by the cell itself
            return own(cell, *args, **kwargs)
        before, after = cell.__dict__[BATCH]
        args, kwargs = before(cell, args, kwargs)
        out = (with_constants(inner) if ALIKE in cell.__dict__ else inner)(cell, *args, **kwargs)
        changed = after(cell, args, out)
        return out if changed is None else changed
    module.__dict__[method_name] = MethodType(run, module)
