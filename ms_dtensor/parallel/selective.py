# SPDX-License-Identifier: Apache-2.0
"""Selective recompute: of a cell's forward the results of some ops are kept; the others are computed again in the backward.

The forward is recorded as ever, but what autograd would save goes through hooks. What a kept op gave stays; of all else a
number is saved. When the backward first asks for a number, the cell runs once more, in a graph that is thrown away; kept ops
and kept moves are not run again: what they gave stands in. The n-th tensor that this run would save is the n-th of the
first run. Not here: which cells do this (`recompute.py`).
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from ..core.tree import leaves, map_leaves
from ..dispatch import modes
from ..dispatch.operands import local_alias, recording, wrap
from ..dispatch.patches.recomputed import as_before, standing_in
from ..errors import ConfigError, OpRuleError
from ..internals.names import Function, NoFallbackGuard, enabled, executor, recompute_module
from ..tensor.dtensor import DTensor


class Selective:
    """What a cell runs in place of its `construct`, as its `_recompute_cell`.

    Args:
        cell: the cell.
        keeps: `(op, arguments) -> bool`: whether the op's results are kept.
    """

    def __init__(self, cell: nn.Cell, keeps: Callable[[str, tuple], bool]):
        self.cell, self.keeps = cell, keeps

    def __call__(self, *args, **kwargs):
        if not (recording() and enabled()):
            return self.cell.construct(*args, **kwargs)
        return _Forward(self.cell, self.keeps, args, kwargs).first()


class _Kept:
    """One call of a kept op."""

    def __init__(self):
        self.saved: list[int | None] = []  # of what autograd saved of it: which operand it was; None: it is kept
        self.result: Any = None  # detached
        self.random: Any = None  # state of the generators after it


class _Forward:
    """One recorded forward of a cell, and its second run."""

    def __init__(self, cell: nn.Cell, keeps, args: tuple, kwargs: dict):
        self.cell, self.keeps = cell, keeps
        self.args, self.kwargs = map_leaves(_reader, args, Tensor), map_leaves(_reader, kwargs, Tensor)
        self.blocks, self.present, self.random = modes.open_blocks(), standing_in.get(), recompute_module.get_rng_state()
        self.calls: list[tuple[str, _Kept | None]] = []  # ops that were asked about, in order
        self.wanted: list[tuple] = []  # shape and dtype of what autograd saved, by number
        self.values: dict[int, Tensor] = {}  # of them, once the second run has made them
        self.at = self.number = 0  # how far it is in `calls` and `wanted`
        self.kept: tuple[_Kept, list[Tensor]] | None = None  # the kept op at work, and its operands

    # -- the first run -------------------------------------------------------------------------------------------

    def first(self):
        """The cell's outputs."""
        with modes.Watched(self._ask), ms.saved_tensors_hooks(self._pack, self._unpack):
            out = self.cell.construct(*self.args, **self.kwargs)
        if not self.calls:
            raise ConfigError(f"For 'checkpoint_wrapper', {type(self.cell).__name__} computed on no DTensor.", "",
                              "Of ops on plain tensors the library sees nothing, so it can keep none of their results.",
                              ("checkpoint_wrapper(module) without save=",
                               "replicate(module, mesh=mesh), on a mesh of one rank if need be"))
        return out

    def _ask(self, name: str, args: tuple):
        kept = _Kept() if self.keeps(modes.canonical(name), args) else None
        self.calls.append((name, kept))
        return None if kept is None else partial(self._keep, kept, args)

    def _keep(self, kept: _Kept, args: tuple, call: Callable):
        self.kept = kept, leaves(args, Tensor)
        try:
            with modes.Watched(None):
                out = call()
        finally:
            self.kept = None
        kept.result, kept.random = map_leaves(_detached, out, Tensor), recompute_module.get_rng_state()
        return out

    def _pack(self, x: Tensor):
        if self.kept is not None:
            kept, operands = self.kept
            at = next((i for i, a in enumerate(operands) if _same(a, x)), None)
            kept.saved.append(at)
            if at is None:
                return _detached(x)
        self.wanted.append((x._shape, x.dtype))
        return len(self.wanted) - 1

    def _unpack(self, saved):
        if isinstance(saved, Tensor):
            return saved
        if recording():
            raise OpRuleError("For 'checkpoint_wrapper', a derivative of a gradient was asked for.",
                              type(self.cell).__name__, "What runs again is not part of the graph.",
                              "checkpoint_wrapper(module) without save=")
        if saved not in self.values:
            self._again()
        return self.values.pop(saved)

    # -- the second one ------------------------------------------------------------------------------------------

    def _again(self) -> None:
        """Fills `values`."""
        self.at = self.number = 0
        state = recompute_module.get_rng_state()
        recompute_module.set_rng_state(self.random)
        grad, enable = executor.grad_flag(), executor.enable_grad()
        executor.set_grad_flag(True)
        executor.set_enable_grad(True)
        executor.new_empty_graph()
        try:
            with as_before(self.present, self.cell), modes.reopened(self.blocks), modes.Watched(self._ask_again), \
                    ms.saved_tensors_hooks(self._pack_again, lambda x: x):
                self.cell.construct(*self.args, **self.kwargs)
        finally:
            executor.end_empty_graph()
            executor.set_grad_flag(grad)
            executor.set_enable_grad(enable)
            recompute_module.set_rng_state(state)
        if self.number != len(self.wanted):
            raise self._unlike(f"{self.number} tensors were saved, {len(self.wanted)} the first time")

    def _ask_again(self, name: str, args: tuple):
        known, kept = self.calls[self.at] if self.at < len(self.calls) else ("nothing", None)
        if known != name:
            raise self._unlike(f"{name}, the first time {known}")
        self.at += 1
        return None if kept is None else partial(self._stand_in, kept, leaves(args, Tensor))

    def _stand_in(self, kept: _Kept, operands: list[Tensor], call: Callable):
        with NoFallbackGuard():
            for i in kept.saved:
                if i is not None:
                    self._pack_again(operands[i])
        recompute_module.set_rng_state(kept.random)
        readers = [x for x in operands if x._requires_grad]

        def stands(x: Tensor) -> Tensor:
            with NoFallbackGuard():
                out = _StandIn.apply(local_alias(x), *readers) if readers and x.is_floating_point() else local_alias(x)
            return wrap(out, x.layout) if isinstance(x, DTensor) else out
        return map_leaves(stands, kept.result, Tensor)

    def _pack_again(self, x: Tensor) -> Tensor:
        x = _detached(x)
        if self.number >= len(self.wanted) or self.wanted[self.number] != (x._shape, x.dtype):
            raise self._unlike(f"{x.dtype}{list(x._shape)} was saved as number {self.number} of {len(self.wanted)}")
        self.values[self.number] = x
        self.number += 1
        return x

    def _unlike(self, what: str) -> OpRuleError:
        return OpRuleError(f"For 'checkpoint_wrapper', {type(self.cell).__name__} did something else when it ran again.",
                           what, "What is recomputed does the same each time it is given the same.",
                           ("no state that a forward changes and reads", "leave this cell out of checkpoint_wrapper"))


class _StandIn(Function):
    """What a kept op gave, behind a node, so that what reads it is recorded as the first time."""

    @staticmethod
    def forward(ctx, kept, *readers):
        return ops.stop_gradient(kept)

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("a graph that is thrown away was run backward")


def _reader(x: Tensor) -> Tensor:
    """An argument with a memory of its own: both runs move it alike, whatever others have done with it."""
    return wrap(local_alias(x), x.layout) if isinstance(x, DTensor) and not x._is_leaf else x


def _detached(x: Tensor) -> Tensor:
    with NoFallbackGuard():
        out = ops.stop_gradient(local_alias(x))
    return wrap(out, x.layout) if isinstance(x, DTensor) else out


def _same(a: Tensor, b: Tensor) -> bool:
    return a._shape == b._shape and a.dtype == b.dtype and Tensor.data_ptr(a) == Tensor.data_ptr(b)
