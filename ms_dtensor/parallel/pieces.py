# SPDX-License-Identifier: Apache-2.0
"""Products beside the collective before or behind them, piece by piece: while one piece travels, another is multiplied.

Columns: rows of the input are gathered, and multiplied as they come; in the backward the input's gradient is scattered piece
by piece while the next is computed, and the last ones while the weight's gradient is. Rows: the other way round. A piece has
as many rows of every rank, so between pieces and the order of rows lies one strided copy. Invariant: values and gradients
are those of the whole product; sums over ranks are of the same summands, and nothing is sent twice.

Source: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models".
"""
from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from mindspore import Tensor, mint

from .. import comm
from ..comm.fused_products import all_gather_matmul, matmul_reduce_scatter, product
from ..comm.group import Group
from ..comm.pretended import executing
from ..comm.record import active
from ..custom_ops.function import DFunction
from ..ops.local.dtypes import rounded, wider
from .late import Debt, Late
from .sharding.sums import blank

Pieces = int | Literal["kernel"]


def pieces_of(rows: int, wanted: int) -> int:
    """The most pieces of equal size, up to `wanted`, that a rank's rows can be cut into.

    Example:
        >>> from ms_dtensor.parallel.pieces import pieces_of
        >>> pieces_of(1024, 8), pieces_of(12, 8), pieces_of(7, 4)
        (8, 6, 1)
    """
    return max(k for k in range(1, min(wanted, rows) + 1) if rows % k == 0)


@dataclass(frozen=True, slots=True)
class How:
    """What both functions below are told.

    Attributes:
        group: ranks that the rows are cut over.
        pieces: at most so many; "kernel": Ascend's, which does it inside.
        dim: of the input that is cut over the ranks, and gathered.
        late: what the backward of the block owes so far, to be paid while something is under way; None: nobody owes.
        debt: as which the weights' gradients are owed; None: they are not.
    """

    group: Group
    pieces: Pieces
    dim: int
    late: Late | None = None
    debt: Debt | None = None

    def pay(self) -> None:
        """Something is under way."""
        if self.late is not None:
            self.late.pay()

    def now_or_later(self, weights: Sequence[Tensor], compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The weights' gradients, or what stands for them until they are computed."""
        if self.debt is None or self.late is None:
            return compute()
        self.late.owe(self.debt, compute)
        return tuple(blank(w._shape, w.dtype) for w in weights)

    def rows(self, x: Tensor) -> Tensor:
        """`x` as a matrix whose rows begin with `dim`, so that a rank's lie one behind another."""
        shape = prod(x._shape[:-1]), x._shape[-1]
        if not self.dim:
            return _view(x, shape)
        return _dense(mint.permute(x, (self.dim, *(d for d in range(x.ndim) if d != self.dim))), shape)

    def shaped(self, matrix: Tensor, lead: tuple[int, ...]) -> Tensor:
        """The matrix as a tensor with these leading dims again."""
        if not self.dim:
            return _view(matrix, (*lead, matrix._shape[1]))
        order = [self.dim, *(d for d in range(len(lead)) if d != self.dim)]
        x = _view(matrix, (*(lead[d] for d in order), matrix._shape[1]))
        return _dense(mint.permute(x, (*(order.index(d) for d in range(len(lead))), len(lead))), (*lead, matrix._shape[1]))

    def gathered(self, x: Tensor) -> list[comm.Work]:
        """The pieces of all ranks' rows, under way."""
        k = pieces_of(x._shape[0], self.pieces)  # type: ignore[arg-type]
        each = x._shape[0] // k
        with comm.annotate(src="rows of this rank", dst=f"rows of all, in {k} pieces"):
            return [self.group.all_gather(mint.narrow(x, 0, c * each, each), 0, [each] * self.group.size,
                                          async_op=True) for c in range(k)]

    def scattered(self, x: Tensor, k: int) -> comm.Work:
        """This rank's rows of the sum of a piece, under way."""
        with comm.annotate(src="summands of a piece", dst=f"rows of this rank, one of {k} pieces"):
            return self.group.reduce_scatter(x, "sum", 0, [x._shape[0] // self.group.size] * self.group.size, async_op=True)

    def in_pieces(self, x: Tensor, k: int) -> Tensor:
        """Rows of all ranks, in order, by piece: [k, rows of a piece, columns]; not yet one behind another."""
        n = self.group.size
        by_rank = _view(x, (n, k, x._shape[0] // (n * k), x._shape[1]))
        return mint.permute(by_rank, (1, 0, 2, 3))

    def in_order(self, pieces: Sequence[Tensor], start: int, width: int) -> Tensor:
        """Columns of products of pieces, their rows in the ranks' order."""
        n = self.group.size
        parts = [mint.narrow(_view(y, (n, y._shape[0] // n, y._shape[1])), 2, start, width) for y in pieces]
        return _view(_joined(parts, 1), (sum(y._shape[0] for y in pieces), width))


def _backward_context() -> contextvars.Context:
    """For the backward, which MindSpore may run on a thread of its own: who listens, and the line that caused it."""
    if not active():
        return contextvars.copy_context()
    with comm.annotate(site=comm.user_site()):
        return contextvars.copy_context()


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """In memory in order."""
    shape = tuple(parts[0]._shape)
    if len(parts) == 1:
        return _dense(parts[0], shape)
    dry = executing()
    if dry is not None:
        return dry.like(parts[-1], (*shape[:dim], sum(x._shape[dim] for x in parts), *shape[dim + 1:]))
    return mint.cat(list(parts), dim)


def _view(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The same elements, which lie in order, as another shape."""
    dry = executing()
    return mint.reshape(x, shape) if dry is None else dry.on_storage_of(x, shape)


def _dense(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The same elements, in memory in order; a copy where they do not lie so."""
    dry = executing()
    if dry is None:
        return mint.reshape(x, shape).contiguous()
    return dry.on_storage_of(x, shape) if tuple(x._shape) == shape else dry.like(x, shape)


def _summed(x: Tensor) -> Tensor:
    """Over rows."""
    dry = executing()
    return rounded(mint.sum(wider(x), 0), x) if dry is None else dry.like(x, x._shape[1:])


class Columns(DFunction):
    """(x, [w, ...], [bias, ...]) -> [gathered x @ w.T + bias, ...]: ranks cut the input's rows, and the outputs' columns."""

    @staticmethod
    def forward(ctx, x, weights, biases, how: How):
        ctx.context = _backward_context()
        matrix, whole = how.rows(x), _joined(weights, 0)
        if how.pieces == "kernel":
            made, there = all_gather_matmul(how.group, matrix, whole, True)
            pieces, gathered = [made], [there]
        else:
            turned, pieces, gathered = mint.transpose(whole, 0, 1), [], []
            for work in how.gathered(matrix):
                gathered.append(work.wait())
                pieces.append(product(gathered[-1], turned))
        lead = (*x._shape[:how.dim], x._shape[how.dim] * how.group.size, *x._shape[how.dim + 1:-1])
        out, at = [], 0
        for i, w in enumerate(weights):
            y = how.in_order(pieces, at, w._shape[0])
            out.append(how.shaped(y + biases[i] if biases and executing() is None else y, lead))
            at += w._shape[0]
        ctx.save_for_backward(*weights, *gathered)  # not `whole`: a copy would stay while a unit's weights go
        ctx.rest = how, tuple(x._shape[:-1]), [w._shape[0] for w in weights], bool(biases)
        return tuple(out)

    @staticmethod
    def backward(ctx, *grads):
        return ctx.context.copy().run(Columns._backward, ctx, grads)

    @staticmethod
    def _backward(ctx, grads):
        how, lead, widths, biased = ctx.rest
        weights, gathered = ctx.saved_tensors[:len(widths)], ctx.saved_tensors[len(widths):]
        whole, k = _joined(weights, 0), len(gathered)
        rows = [how.rows(g) for g in grads]
        with comm.annotate(phase="backward"):
            if how.pieces == "kernel":
                dy = _joined(rows, 1)
                dx = matmul_reduce_scatter(how.group, dy, whole, False)
            else:
                dy = _joined([how.in_pieces(g, k) for g in rows], 3)
                dy = _view(dy, (prod(dy._shape[:3]), dy._shape[3]))
                each = dy._shape[0] // k
                works = [how.scattered(product(mint.narrow(dy, 0, c * each, each), whole), k) for c in range(k)]
            starts = [sum(widths[:i]) for i in range(len(widths))]

            def gradients() -> tuple[Tensor, ...]:
                dw = product(mint.transpose(dy, 0, 1), _joined(gathered, 0))
                return tuple(_dense(mint.narrow(dw, 0, a, n), (n, dw._shape[1])) for a, n in zip(starts, widths))
            how.pay()
            dws = how.now_or_later(weights, gradients)
            if how.pieces != "kernel":
                dx = _joined([work.wait() for work in works], 0)
        return how.shaped(dx, lead), dws, tuple(_summed(g) for g in rows) if biased else (), None


class Rows(DFunction):
    """(x, w) -> this rank's rows of the sum over ranks of x @ w.T: ranks cut the input's columns, and the output's rows."""

    @staticmethod
    def forward(ctx, x, w, how: How):
        ctx.context = _backward_context()
        matrix, n, lead = how.rows(x), how.group.size, tuple(x._shape[:-1])
        if how.pieces == "kernel":
            kept = matrix
            out = matmul_reduce_scatter(how.group, matrix, w, True)
        else:
            k = pieces_of(matrix._shape[0] // n, how.pieces)
            kept = _dense(how.in_pieces(matrix, k), matrix._shape)
            turned, each = mint.transpose(w, 0, 1), matrix._shape[0] // k
            works = [how.scattered(product(mint.narrow(kept, 0, c * each, each), turned), k) for c in range(k)]
            out = _joined([work.wait() for work in works], 0)
        ctx.save_for_backward(kept, w)
        ctx.rest = how, lead
        return how.shaped(out, (*lead[:how.dim], lead[how.dim] // n, *lead[how.dim + 1:]))

    @staticmethod
    def backward(ctx, grad):
        return ctx.context.copy().run(Rows._backward, ctx, grad)

    @staticmethod
    def _backward(ctx, grad):
        how, lead = ctx.rest
        kept, w = ctx.saved_tensors
        dy = how.rows(grad)
        with comm.annotate(phase="backward"):
            if how.pieces == "kernel":
                dx, whole = all_gather_matmul(how.group, dy, w, False)
            else:
                made, gathered = [], []
                works = how.gathered(dy)
                how.pay()
                for work in works:
                    gathered.append(work.wait())
                    made.append(product(gathered[-1], w))
                dx, whole = how.in_order(made, 0, w._shape[1]), _joined(gathered, 0)
            dw, = how.now_or_later([w], lambda: (product(mint.transpose(whole, 0, 1), kept),))
        return how.shaped(dx, lead), dw, None
