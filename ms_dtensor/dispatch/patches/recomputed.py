# SPDX-License-Identifier: Apache-2.0
"""A recomputation sees what the forward saw: where other tensors stood in the place of parameters, so they do again.

MindSpore's recomputed cell runs without being recorded; its node in the graph gives gradients to a list of parameters, here
the trainable ones of each run; MindSpore's own list is of those that were trainable when `recompute()` was called. In
the backward it runs again, in a graph of its own. A cell around it (a unit of `fully_shard`) may have put whole tensors in
the place of cut parameters. Then the node's list has these tensors, and the second run gets new ones, whose gradients are
collected and go where the first ones came from. So a parameter's gradients meet in the one node that handed it out.
"""
from __future__ import annotations

import functools
import itertools
import weakref
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

from mindspore import Tensor, nn, ops

from ...internals.names import RecomputeCell, composite, recompute_module
from ..replaced import current

# Who has put tensors in the place of parameters. Each has `nodes`, these by id of the parameter, and `again(cell)`, inside
# which it has done so anew for the cells in `cell`; what that gives has `taken`: the gradients, by id of the parameter.
standing_in: ContextVar[tuple] = ContextVar("ms_dtensor_standing_in", default=())
# attribute of a `RecomputeCell`, for each run that awaits its backward: its parameters, what stood there and whose it was,
# who had put it there, random state
_ENTERED = "_ms_dtensor_entered"
_awaiting: weakref.WeakSet = weakref.WeakSet()  # cells that have such runs
# Whether a cell under `recompute()` runs its forward again, in the backward.
recomputing: ContextVar[bool] = ContextVar("ms_dtensor_recomputing", default=False)


def _first(original):
    @functools.wraps(original)
    def construct(self, *args, **kwargs):
        function = self.wrap_cell.function
        listed = [current(p) for p in getattr(function, "__self__", function).trainable_params()]
        nodes = {key: (x, whose) for whose in standing_in.get() for key, x in whose.nodes.items()}
        there = [nodes.get(id(p), (p, None)) for p in listed]
        self.internal_params[:] = [x for x, _ in there]
        entered = [listed, there, standing_in.get(), None]
        _awaiting.add(self)
        self.__dict__.setdefault(_ENTERED, []).append(entered)  # as MindSpore does with the arguments
        out = original(self, *args, **kwargs)
        entered[3] = self.cpu_rng_state  # of which MindSpore keeps the last call's alone
        return out
    return construct


def _again(original):
    @functools.wraps(original)
    def bprop(self, *args):
        _bring_last(self, args[:-1])
        listed, there, present, self.cpu_rng_state = self.__dict__[_ENTERED].pop()
        self.internal_params[:] = listed
        net, function = self.net, self.wrap_cell.function
        cell, anew = getattr(function, "__self__", function), {}

        def run(*args, **kwargs):  # inside the second graph
            with ExitStack() as stack:
                for whose in present:
                    anew[whose] = stack.enter_context(whose.again(cell))
                around = standing_in.set(tuple(anew.values()))
                try:
                    return function(*args, **kwargs)
                finally:
                    standing_in.reset(around)
        token, own = recomputing.set(True), self.wrap_cell.__dict__
        held = own.get("function")  # a bound method; a cell stands among the sub-cells, behind what is put here
        try:
            self.net, own["function"] = self.wrap_cell, run
            inputs, weights = original(self, *args)
        finally:
            self.net = net
            own.pop("function", None)
            if held is not None:
                own["function"] = held
            recomputing.reset(token)
        for p, (x, whose) in zip(listed, there):
            if whose is not None:
                del weights[p]
                taken = anew[whose].taken
                weights[x] = taken[id(p)] if id(p) in taken else ops.zeros(x._shape, x.dtype)  # else it was not used
        return inputs, weights
    return bprop


def _bring_last(cell, inputs) -> None:
    """The run that had these inputs becomes the last one, which MindSpore takes: a later one may have no backward."""
    lists = cell.args, cell.kwargs, cell.__dict__[_ENTERED]
    if len(cell.args) < 2:
        return
    wanted = _places(inputs)  # on a device this waits for it
    for i in reversed(range(len(cell.args))):
        if _places(cell.args[i]) == wanted:
            for entries in lists:
                entries.append(entries.pop(i))
            return


def _places(inputs) -> list[int]:
    return [Tensor.data_ptr(x) for x in inputs if isinstance(x, Tensor) and x._shape]


def forget() -> None:
    """A gradient has ended: runs that still await a backward will have none."""
    if not _awaiting:
        return
    for cell in list(_awaiting):
        for entries in (cell.args, cell.kwargs, cell.__dict__[_ENTERED]):
            entries.clear()
    _awaiting.clear()


def _not_reentrant(original):
    """What runs the same cell twice, recorded both times: the second graph, whose gradients nobody asks for, is dropped."""
    @functools.wraps(original)
    def recompute(block, output_recompute, early_stop, context_fn, *args, **kwargs):
        present, runs, cell = standing_in.get(), itertools.count(), getattr(block, "__self__", block)
        if isinstance(cell, nn.Cell) and cell is not block:  # `construct` as it was when `cell.recompute()` was called
            block = getattr(cell, block.__name__)

        def run(*args, **kwargs):
            if not next(runs):
                return block(*args, **kwargs)
            with as_before(present, cell):
                return block(*args, **kwargs)
        return original(run, output_recompute, early_stop, context_fn, *args, **kwargs)
    return recompute


@contextmanager
def as_before(present: tuple, cell):
    """A cell runs again: who had put tensors in the place of parameters in its forward, `present`, does so anew."""
    running, around = recomputing.set(True), standing_in.set(())
    try:
        with ExitStack() as stack:
            standing_in.set(tuple(stack.enter_context(whose.again(cell)) for whose in present))
            yield
    finally:
        standing_in.reset(around)
        recomputing.reset(running)


def _reduce_grad_operation(original):
    def reduce_ex(self, protocol):  # which a `RecomputeCell` has, and a copy of the model copies
        return type(self), (self.get_all, self.get_by_list, self.sens_param)
    return reduce_ex


DOORS = ((composite.GradOperation, "__reduce_ex__", _reduce_grad_operation),
         (RecomputeCell, "construct", _first), (RecomputeCell, "bprop", _again),
         (recompute_module, "recompute_without_reentrant", _not_reentrant))
