# SPDX-License-Identifier: Apache-2.0
"""Gradients of weights that wait for the next communication of a block's backward, to be computed while it travels.

A backward computes what the cell before is waiting for, and is left with the gradients of its weights, which nobody waits
for. So it *owes* them: a *debt* is a product not computed yet. The next function of the block's backward that has begun to
communicate pays what is owed, before it waits. Weights come through a *gate*, a node of autograd made before the block's
other nodes: as MindSpore runs nodes from the last one made to the first, a gate comes last, with what its debt has become.
Whatever the order, a gradient is right: a gate pays a debt that nobody else has paid. Memory: what one product reads
is kept until the next communication. Not here: pipelines whose backward comes in two parts, which delay all of this anyway.
"""
from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from functools import cache, partial

from mindspore import Tensor, nn

from ..core.layout import Layout
from ..custom_ops.function import DFunction
from ..dispatch import modes
from ..dispatch.held import holding
from ..dispatch.memo import times_written
from ..dispatch.operands import as_local, recording

RUN = "_ms_dtensor_late"  # of a cell, while its block runs: the `Late` of that run


class Debt:
    """The gradients of some weights, which are one product."""

    compute: Callable[[], Sequence[Tensor]] | None = None  # once: who calls it again is given the same; None: none are owed


class Gate(DFunction):
    """(weights, their debt) -> the weights."""

    @staticmethod
    def forward(ctx, weights, debt: Debt):
        ctx.debt = debt
        return tuple(weights)

    @staticmethod
    def backward(ctx, *grads):
        compute, ctx.debt.compute = ctx.debt.compute, None
        return grads if compute is None else tuple(compute()), None


class Late:
    """One run of a block.

    Args:
        cells: of each function that may owe gradients, the cells whose weights it computes with.
    """

    def __init__(self, cells: Sequence[tuple[nn.Cell, ...]]):
        self._cells, self._owed = cells, list[Callable]()
        self._gates: dict[int, tuple] | None = None  # by id of the first of the cells

    def weights(self, cells: tuple[nn.Cell, ...], layout: Layout) -> tuple[tuple[Tensor, ...], Debt | None]:
        """The weights of the cells, local ones behind a gate, and the debt; or as they are, and none: nothing may be owed.

        Args:
            cells: that compute.
            layout: of their input; on the axes that cut it, ranks have summands of the weights' gradients.
        """
        axes = tuple(a for a, p in enumerate(layout.placements) if not p.is_replicate())
        if self._gates is None:  # the first that computes has the last backward, behind which nothing is sent
            mode = modes.mode.get()
            delays = recording() and holding.get() is None and not mode.check_types and not mode.check_gradients
            others = [c for c in self._cells if c[0] is not cells[0]] if delays else []
            self._gates = {id(c[0]): self._gate(c, axes) for c in others if all(w._requires_grad for w in _weights(c))}
        seen, local, debt = self._gates.pop(id(cells[0]), (None, (), None))
        return (local, debt) if seen == _seen(cells, axes) else (_weights(cells), None)

    def _gate(self, cells: tuple[nn.Cell, ...], axes: tuple[int, ...]) -> tuple:
        debt = Debt()
        local = [as_local(w, w._layout.gradient(axes)) for w in _weights(cells)]
        return _seen(cells, axes), Gate.apply(local, debt), debt

    def owe(self, debt: Debt, compute: Callable[[], Sequence[Tensor]]) -> None:
        """A backward leaves gradients to whoever sends next; they are computed as if it were now."""
        debt.compute = cache(partial(contextvars.copy_context().run, compute))
        self._owed.append(debt.compute)

    def pay(self) -> None:
        """What is owed is computed, as something is under way."""
        owed, self._owed = self._owed, []
        for compute in owed:
            compute()


def _weights(cells: tuple[nn.Cell, ...]) -> tuple:
    return tuple(cell._params["weight"] for cell in cells)


def _seen(cells: tuple[nn.Cell, ...], axes: tuple[int, ...]) -> tuple:
    """What a gate was made for: which weights, of which values."""
    return axes, *((id(w), times_written(w)) for w in _weights(cells))
