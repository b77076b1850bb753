# SPDX-License-Identifier: Apache-2.0
"""What stands in a parameter's slot while a cell runs: its whole values, or a copy in the dtype of the computation.

Inside, cells find it under the parameter's name; what they write into it, `set_data` among that, reaches the parameter.
Afterwards the parameter stands there again, whatever happened. Whole values lie in memory that goes when the cell returns:
what still lives of them then, views too, is refused until they are gathered again, in the backward, where what autograd and
own functions have kept is needed. Not here: local tensors and NumPy arrays taken from them, of which nobody knows.
"""
from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mindspore import Tensor

from ...comm.packing import write
from ...core.layout import Layout
from ...dispatch import classes
from ...dispatch.inplace import written_since
from ...dispatch.memo import memo_of, wrote
from ...dispatch.operands import local_alias
from ...dispatch.views import family
from ...errors import LayoutError
from ...internals.names import NoFallbackGuard, no_grad
from ...tensor.dtensor import DTensor, DTensorParameter

if TYPE_CHECKING:
    from .call import Call


class UnshardedDTensor(DTensor):
    """In the memory of a unit's gathered parameters; everything that reads a DTensor asks for its `_layout` first."""

    @property
    def _layout(self) -> Layout:  # type: ignore[override]
        held = self.__dict__
        lent = held["_memo"].lent  # None: a parameter that is kept, or a copy of one, as cells of local tensors see it
        if lent is not None and not (unit := lent[0].unit).whole:
            raise LayoutError(
                f"For '{unit.who}', a gathered parameter, or a view of one, is used after its cell has returned.",
                f"{held['_layout'].describe()} of {unit.name}", "The memory was given back when the cell returned.",
                ("return it from the cell: views of parameters are copied there", "keep w.clone() in place of w",
                 "use the cell's parameter itself: outside the cell it is a cut DTensor, and right"))
        return held["_layout"]

    def to_local(self, *, grad_placements=None) -> Tensor:
        """As of any DTensor; what is computed of it does not say in the backward that it needs the memory."""
        memo_of(self).lent[0].unseen = True
        return super().to_local(grad_placements=grad_placements)

    def __fallback__(self, func, args=(), kwargs=None):
        self._layout  # noqa: B018  also where dispatch is switched off
        return super().__fallback__(func, args, kwargs)


classes.UNSHARDED = UnshardedDTensor
classes.KINDS[UnshardedDTensor] = classes.OURS


def lend(call: Call, stand_ins: dict[int, Tensor]) -> None:
    """What lies in the memory of the unit of `call`, and views of it, may be read while the unit has that; ops that read it
    ask the unit to, backward. `stand_ins`: by id of the parameter."""
    unit = call.unit
    for w in () if unit.local else [w for k, w in stand_ins.items() if k in call.lent]:
        lent = call, w.inited_param  # type: ignore[attr-defined]
        for x in family(w) or (w,):
            if x.__class__ is DTensor:
                memo_of(x).lent = lent
                x.__class__ = UnshardedDTensor


@contextmanager
def standing(call: Call, slots: list, stand_ins: dict[int, Tensor]) -> Iterator[None]:
    """Inside, the slots, (cell, key, parameter) each, hold what stands for their parameters, given by these parameters' ids.

    The call hears of what was written: there (`write_back`), or to a parameter itself (`renew`), as cells list these.
    """
    watched = {k: x for k, x in stand_ins.items() if not isinstance(x, DTensorParameter)}  # else it stands for itself
    given, versions = set[int](), {k: x._version for k, x in watched.items()}
    for k, x in watched.items():
        x.set_data = x.assign_value = functools.partial(_take, call, given, k, weakref.ref(x))
        memo_of(x.inited_param).stood_for = functools.partial(call.renew, x)

    before = [cell._params[key] for cell, key, _ in slots]  # others, where a gradient is taken inside of a forward

    def put(held: Iterable) -> None:
        for (cell, key, _), x in zip(slots, held):
            cell._params[key] = x
            if key in cell.__dict__:
                cell.__dict__[key] = x
    put(stand_ins[id(p)] for _, _, p in slots)
    call.unit.runs += 1
    try:
        yield
    finally:
        call.unit.runs -= 1
        put(before)
        for k, x in watched.items():
            memo_of(x.inited_param).stood_for = None
            if k in given or written_since(x, versions[k]):  # also where the cell has raised, as on one device
                call.write_back(x)


def _take(call: Call, given: set[int], k: int, ref, data, slice_shape: bool = False):
    """`set_data` of what is no parameter."""
    x = ref()
    value = local_alias(DTensorParameter._own_shard(x, "set_data", data) if isinstance(x, DTensor) else data)
    with no_grad(), NoFallbackGuard():
        # Recorded ones, too: a view takes no write, and after `copy_` MindSpore refuses to read a copy.
        write(call.values(x.inited_param) if k in call.lent else local_alias(x), value.astype(x.dtype))
    if isinstance(x, DTensor):
        wrote(x)
    given.add(k)
    return x
