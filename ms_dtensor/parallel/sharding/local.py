# SPDX-License-Identifier: Apache-2.0
"""Units whose cells compute on local tensors: `fully_shard(..., local_inputs=True)`.

Activations are each rank's own plain tensors; collectives are the cells' own; a parameter is a DTensor on the axes that do
not bring data, and cells take `weight.to_local()` of it. Nobody knows how an activation is laid out, so nothing is derived
from it: what is differentiated is the sum, over all ranks, of what each of them differentiates. So a gradient is added up
over every axis on which its parameter is replicated. Not here: when that happens (`reduce.py`), and when parameters are
whole (`call.py`), which is the same in both modes.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mindspore import Tensor, nn, ops

from ...core.layout import Layout, in_dtype
from ...core.tree import leaves
from ...dispatch import classes, modes
from ...dispatch.constants import constant
from ...dispatch.cotangent import as_copy
from ...dispatch.memo import memo_of
from ...dispatch.operands import as_local, dtype_name, frozen_alias, wrap
from ...errors import ConfigError, LayoutError, MixedOperandError, OpRuleError
from ...internals.names import NoFallbackGuard, recording, set_requires_grad
from ...redistribute.execute import redistribute_local
from ...tensor.dtensor import DTensor
from .stand_in import UnshardedDTensor

if TYPE_CHECKING:
    from .call import Call
    from .unit import Unit


class LocalWeight(UnshardedDTensor):
    """What stands for a parameter there: layout, shape, dtype, and `to_local()`, whose cotangent is a summand."""

    def to_local(self, *, grad_placements=None) -> Tensor:
        """As `DTensor.to_local`; without `grad_placements` ranks do different work with it."""
        if grad_placements is not None:
            return DTensor.to_local(self, grad_placements=grad_placements)
        return as_local(self, self._layout.gradient(memo_of(self).partial_grad_axes))

    def __fallback__(self, func, args=(), kwargs=None):
        if modes.mode.get().skip:
            return super().__fallback__(func, args, kwargs)
        raise _no_op(getattr(func, "name", str(func)), self)


def _no_op(op: str, x: DTensor) -> OpRuleError:
    return OpRuleError(f"For '{op}', a parameter of a cell under fully_shard(local_inputs=True) is no operand.",
                       x._layout.describe(), "Such cells compute on plain tensors; of what an op makes of a DTensor nobody "
                       "knows which ranks do different work with it.", ("parameter.to_local()",
                                                                        "fully_shard without local_inputs=True"))


def _refusing(name: str) -> Callable:
    def refused(self, *args, **kwargs):
        raise _no_op(name, self)
    return refused


for _name in ("__getitem__", "__setitem__", "redistribute", "full_tensor", "reduce_partial", "clone", "contiguous"):
    setattr(LocalWeight, _name, _refusing(_name))
classes.KINDS[LocalWeight] = classes.OURS


def summed_axes(layout: Layout) -> tuple[int, ...]:
    """The axes of its mesh on which a parameter that is laid out like this is replicated."""
    return tuple(a for a, p in enumerate(layout.placements) if p.is_replicate())


@lru_cache(maxsize=4096)
def _seen_as(layout: Layout, data: tuple[str, ...]) -> Layout | None:
    """A parameter's layout without the axes that bring data; None: there are no others."""
    names = layout.mesh.mesh_dim_names
    others = tuple(a for a in names if a not in data)
    if not others:
        return None
    placed = {a: layout.placements[layout.mesh.axis_index(a)] for a in others}
    order = [names[a] for a in layout.order if names[a] in others]
    return Layout(layout.mesh[others], placed, layout.shape, layout.dtype, order)


def stands_for(call: Call, p: Any, x: Tensor, layout: Layout) -> Tensor:
    """The local tensor `x`, connected or not, as cells see the parameter `p`; `layout`: how it lies on all axes."""
    seen = _seen_as(layout, call.unit.mesh.mesh_dim_names)
    if seen is None:
        return constant(x) if id(p) in call.lent and call.recorded and not x._requires_grad else x
    out = wrap(x, seen)
    memo_of(out).partial_grad_axes = summed_axes(seen)
    if id(p) in call.lent:
        memo_of(out).lent = call, p
    out.__class__ = LocalWeight
    return out


def kept(call: Call, p: Any) -> Tensor:
    """A parameter that every rank keeps whole."""
    unit, layout = call.unit, p.layout
    dtype, cotangent = unit.policy.compute_dtype(p), layout.gradient(unit.partial_on[id(p)])
    with NoFallbackGuard():
        x = frozen_alias(p) if dtype == p.dtype else ops.stop_gradient(p).astype(dtype)
    if not recording() or not p.requires_grad:
        set_requires_grad(x, False)
    elif dtype == p.dtype:
        x = redistribute_local(p, layout, layout, cotangent, cotangent, data=p)
    else:
        x = as_copy(x, p, unit.policy.reduce_dtype or dtype, cotangent)
    return stands_for(call, p, x, in_dtype(layout, dtype_name(dtype)))


def plain_in_and_out(who: str) -> tuple[Callable, Callable]:
    """Hooks by which a cell refuses DTensors, in its inputs and its outputs."""
    def refuse(cell, side: str, values) -> None:
        found = [x for x in leaves(values, DTensor) if not isinstance(x, LocalWeight)]
        if found:
            raise MixedOperandError(
                f"For '{who}', a DTensor is among the {side} of {type(cell).__name__}, which computes on local tensors.",
                found[0].layout.describe(), "With local_inputs=True activations are plain: each rank's own, and gradients "
                "are added up over ranks.", ("x.to_local()", f"{who} without local_inputs=True, for cells of DTensors"))

    def before(cell, inputs, kwargs):
        refuse(cell, "inputs", (inputs, kwargs))
        return inputs, kwargs

    def after(cell, inputs, outputs):
        refuse(cell, "outputs", outputs)
    return before, after


def check(who: str, here: bool, cells: list[nn.Cell], inner: list[Unit], tied: list) -> None:
    """Refuses units that compute on local tensors beside those on DTensors, and what only these can do."""
    mode = {False: "GLOBAL", True: "LOCAL"}
    for unit in inner:
        if unit.local is not here:
            raise ConfigError(f"For '{who}', cells inside {type(cells[0]).__name__} are of the other mode.",
                              f"{unit.label}: {mode[unit.local]}, here: {mode[here]}",
                              "A cell's activations are DTensors, or they are local tensors.",
                              "the same local_inputs= in all calls for one model")
    if here and tied:
        raise LayoutError(f"For '{who}', parameter '{tied[0][2].name}' is of a unit already, and is used in another.",
                          tied[0][2].layout.describe(), "With local_inputs=True a cell sees the parameters of its own unit "
                          "whole, and others as they are cut.", f"{who}([cell, other], ...), one unit of both cells")


def no_parts(unit: Unit) -> ConfigError:
    """Why such a unit cannot be in a schedule that has the gradients of weights later."""
    return ConfigError(f"For '{unit.who}', a backward in two parts was asked for.", unit.label,
                       "With local_inputs=True ops are not dispatched, so nobody knows which gradients can come later.",
                       ("Schedule1F1B, ScheduleInterleaved1F1B or ScheduleGPipe", "fully_shard without local_inputs=True"))
