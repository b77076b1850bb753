# SPDX-License-Identifier: Apache-2.0
"""Rows travel by a table: `SendRows` gives rows to the ranks that need them, `ReturnRows` brings rows home and adds them up.

Both are linear and each other's transpose, so each is the other's backward, to any order. Keys for attention and tokens for
experts go this way. They work on local tensors, inside `local_map`, over one uneven all-to-all.

Invariant: all members of the group call them, forward and backward, also those that give or get nothing. MindSpore walks
only paths that a result was made of; a rank that has no use for what came connects it to its result with `connected`, or
the others wait for it in the backward.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from .. import comm
from ..comm.group import Group
from ..comm.pretended import executing
from ..comm.protocol import Work
from ..comm.record import active
from ..dispatch import modes
from ..dispatch.operands import DIFFERENTIABLE, dtype_name
from ..internals.names import Function
from ..internals.target import cpu_kernels, on_cpu
from ..ops.local import Nothing
from ..ops.local.dtypes import full, rounded, wider


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """Which rows of its tensors a rank gives to whom, and how many it gets: its part of a table that all members share.

    Attributes:
        count: rows (of dim 0) that this rank has.
        index: which of them it gives, in the order of the group's members who get them; a row may go to several.
        send: how many of these go to each member.
        recv: how many come from each member.
        src: what they are, for the record of communication.
        dst: what they become.

    Example:
        >>> import numpy as np
        >>> from ms_dtensor.custom_ops.rows import Rows
        >>> Rows(3, np.array([2, 0, 2]), send=(2, 1), recv=(2, 0)).index  # 2 and 0 stay here, 2 goes to member 1 too
        array([2, 0, 2])
    """

    count: int
    index: np.ndarray
    send: Sequence[int]
    recv: Sequence[int]
    src: str = "rows"
    dst: str = "rows of their ranks"


class SendRows(Function):
    """`SendRows.apply(rows, group, *tensors)`: of each tensor `[count, ...]` the rows that come, `[sum(recv), ...]`.

    They come in the order of the members who gave them, and within one in the order in which it gave them. Its gradient
    is `ReturnRows`: what became of a row on all the ranks that got it is added up. Integers travel, without a gradient.

    Returns:
        A tuple, one tensor for each; all of them are one node of autograd.

    Example:
        >>> import numpy as np, mindspore as ms
        >>> import ms_dtensor as md
        >>> from ms_dtensor.custom_ops.rows import Rows, SendRows
        >>> x = ms.Tensor([[1.0], [2.0], [3.0]])
        >>> group = md.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",)).get_group("cp")
        >>> twice = Rows(3, np.array([2, 0, 2]), send=(3,), recv=(3,))
        >>> SendRows.apply(twice, group, x)[0].asnumpy().ravel()
        array([3., 1., 3.], dtype=float32)
        >>> ms.grad(lambda t: SendRows.apply(twice, group, t)[0].sum())(x).asnumpy().ravel()
        array([1., 0., 2.], dtype=float32)
    """

    @classmethod
    def apply(cls, rows: Rows, group: Group, *tensors: Tensor) -> tuple:
        """See above; recompute that keeps "send_rows" has what came stand in when it runs again."""
        call, kept = partial(super().apply, rows, group, *tensors), _kept(tensors)
        return call() if kept is None else kept(call)

    @classmethod
    def leave(cls, rows: Rows, group: Group, *tensors: Tensor) -> Callable[[], tuple]:
        """`apply` in two halves: rows leave, and the function that is returned waits for those that come, and gives them.

        What is computed between the two hides the way of the rows, and its backward the way of their gradients: of two
        nodes of autograd the second one's backward sends them, and the first one's waits.
        """
        if (kept := _kept(tensors)) is not None:  # what came stands in for one call
            came = kept(partial(super().apply, rows, group, *tensors))
            return lambda: came
        way = _Way(rows, group, True)
        return partial(_Arrive.apply, way, _Leave.apply(way, *tensors))

    @staticmethod
    def forward(ctx, rows: Rows, group: Group, *tensors: Tensor):
        ctx.way = way = _Way(rows, group, True)
        return way.whole(tensors)

    @staticmethod
    def backward(ctx, *grads):
        return _transposed(ctx.way, ReturnRows, grads)


class ReturnRows(Function):
    """`ReturnRows.apply(rows, group, *tensors)`: rows `[sum(recv), ...]` go back where they came from and are added up.

    Row i of the result, of `count`, is the sum of all that came back for row i; zeros where nobody had it. Sums of 16-bit
    floats are made in float32 and rounded once.

    Returns:
        A tuple, one tensor `[count, ...]` for each; all of them are one node of autograd.

    Example:
        >>> import numpy as np, mindspore as ms
        >>> import ms_dtensor as md
        >>> from ms_dtensor.custom_ops.rows import ReturnRows, Rows
        >>> group = md.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",)).get_group("cp")
        >>> twice = Rows(3, np.array([2, 0, 2]), send=(3,), recv=(3,))
        >>> y, = ReturnRows.apply(twice, group, ms.Tensor([[1.0], [10.0], [100.0]]))
        >>> y.asnumpy().ravel()
        array([ 10.,   0., 101.], dtype=float32)
    """

    @staticmethod
    def forward(ctx, rows: Rows, group: Group, *tensors: Tensor):
        ctx.way = way = _Way(rows, group, False)
        return way.whole(tensors)

    @staticmethod
    def backward(ctx, *grads):
        return _transposed(ctx.way, SendRows, grads)


class _Way:
    """One way of rows: `there`, to the ranks that need them, or home. Its gradients go the other one."""

    back: _Way  # on which gradients are, once they have left

    def __init__(self, rows: Rows, group: Group, there: bool):
        self.rows, self.group, self.there = rows, group, there
        self.works: list[Work[Tensor]] = []

    def whole(self, tensors: Sequence[Tensor]) -> tuple:
        """What arrives; several tensors are under way together."""
        if len(tensors) > 1:
            self.leave(tensors)
            return self.arrived()
        return self._at_home([self._sent(x, False) for x in self._noted(tensors)])

    def leave(self, tensors: Sequence[Tensor]) -> None:
        self.works = [self._sent(x, True) for x in self._noted(tensors)]

    def arrived(self) -> tuple:
        works, self.works = self.works, []
        return self._at_home([work.wait() for work in works])

    def moved_only(self, tensors: Iterable) -> list:
        """Those that have a gradient: integers have none, and every rank knows which these are."""
        return [x for x, moved in zip(tensors, self.moved) if moved]

    def gradients_of(self, given: Iterable[Tensor]) -> tuple:
        """For every tensor, None for integers."""
        left = iter(given)
        return tuple(next(left) if moved else None for moved in self.moved)

    def backward(self) -> AbstractContextManager:
        """Communication of the backward is told by the line that caused it."""
        return comm.annotate(phase="backward", **({"site": self.site} if self.site else {}))

    def _noted(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        self.site = comm.user_site() if active() else None
        self.moved = [dtype_name(x.dtype).startswith(DIFFERENTIABLE) for x in tensors]
        return [taken(x, self.rows.index) for x in tensors] if self.there else tensors

    def _sent(self, x: Tensor, async_op: bool):
        r, x = self.rows, x.contiguous()
        send, recv, src, dst = (r.send, r.recv, r.src, r.dst) if self.there else (r.recv, r.send, r.dst, r.src)
        with comm.annotate(src=src, dst=dst):
            return self.group.all_to_all_rows(x, send, recv, async_op=async_op)

    def _at_home(self, came: list[Tensor]) -> tuple:
        return tuple(came) if self.there else tuple(_home(x, self.rows) for x in came)


def connected(result: Tensor, *tensors: Tensor) -> Tensor:
    """The same values, connected to tensors of which this rank made nothing; their gradients from here are zeros.

    Example:
        >>> import mindspore as ms
        >>> from ms_dtensor.custom_ops.rows import connected
        >>> far = ms.Tensor([[5.0, 6.0]])
        >>> ms.grad(lambda x, far: connected(x * 2, far).sum(), (0, 1))(ms.Tensor([1.0]), far)[1].asnumpy()
        array([[0., 0.]], dtype=float32)
    """
    return result + Nothing.apply(tuple(result._shape), result.dtype, *tensors)


def _kept(tensors: Sequence[Tensor]):
    """Of recompute that keeps "send_rows", what a call of these is given to; else None."""
    watch = modes.mode.get().watch
    return None if watch is None else watch("send_rows", tensors)


def _transposed(way: _Way, other: type[Function], grads: Sequence[Tensor]) -> tuple:
    """Gradients for (rows, group, *tensors)."""
    with way.backward():
        given = other.apply(way.rows, way.group, *way.moved_only(grads))
    return None, None, *way.gradients_of(given)


class _Leave(Function):
    """Rows leave. Its result is a number that says nothing, and which `_Arrive` takes, to be behind it for autograd."""

    @staticmethod
    def forward(ctx, way: _Way, *tensors: Tensor):
        ctx.way = way
        way.leave(tensors)
        return Tensor.from_numpy(np.zeros((), np.float32))

    @staticmethod
    def backward(ctx, number: Tensor):
        with ctx.way.backward():
            given = _Arrive.apply(ctx.way.back, number)
        return None, *ctx.way.gradients_of(given)


class _Arrive(Function):
    """They are there. In the backward this comes first: gradients leave, and what `_Leave` takes is their number."""

    @staticmethod
    def forward(ctx, way: _Way, number: Tensor):
        ctx.way = way
        return way.arrived()

    @staticmethod
    def backward(ctx, *grads):
        way = ctx.way
        way.back = _Way(way.rows, way.group, not way.there)
        with way.backward():
            return None, _Leave.apply(way.back, *way.moved_only(grads))


def index_of(numbers: np.ndarray | Tensor) -> Tensor:
    """Numbers of rows, as ops take them."""
    return numbers if isinstance(numbers, Tensor) else Tensor(np.ascontiguousarray(numbers, np.int32))


def taken(x: Tensor, index: np.ndarray) -> Tensor:
    """Rows of a local tensor, by number; for use inside a forward or a backward."""
    shape = len(index), *x._shape[1:]
    if not math.prod(shape):  # the CPU's kernels refuse it, and there is nothing to take
        return full(shape, 0, x.dtype)
    if _by_numpy() and x.dtype != ms.bfloat16:
        return Tensor.from_numpy(np.take(x.asnumpy(), index, 0))
    if x.dtype == ms.bfloat16 and cpu_kernels():
        return ops.gather(x.astype(ms.float32), index_of(index), 0).astype(x.dtype)
    return ops.gather(x, index_of(index), 0)


def added_up(x: Tensor, index: np.ndarray | Tensor, to: Tensor) -> Tensor:
    """`to` with the rows of `x` added at the rows of these numbers."""
    return ms.mint.index_add(to, 0, index_of(index), x) if math.prod(x._shape) else to


def zeros_for(x: Tensor, shape: Sequence[int], dtype) -> Tensor:
    """To which parts of `x` are added up; a dry run has no kernel that makes them."""
    return full(shape, 0, dtype) if (dry := executing()) is None else dry.alone(dry.like(x, shape, dtype))


def _by_numpy() -> bool:
    """MindSpore's CPU backend builds a kernel for each number of rows that it meets, and keeps it."""
    return on_cpu() and executing() is None


def _home(x: Tensor, rows: Rows) -> Tensor:
    if (dry := executing()) is not None:
        return dry.seen(lambda xs: _summed(xs[0], rows))((x,))
    return _summed(x, rows)


def _summed(x: Tensor, rows: Rows) -> Tensor:
    wide, shape = wider(x), (rows.count, *x._shape[1:])
    if _by_numpy() and math.prod(x._shape):
        return rounded(Tensor.from_numpy(_sums(wide.asnumpy(), rows.index, shape)), x)
    return rounded(added_up(wide, rows.index, zeros_for(wide, shape, wide.dtype)), x)


def _sums(x: np.ndarray, index: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Zeros, with row i of x added to row `index[i]`: first what comes first for each, then what comes second."""
    order = np.argsort(index, kind="stable")
    to = index[order]
    nth, out = np.arange(len(to)) - np.searchsorted(to, to), np.zeros(shape, x.dtype)
    for n in range(int(nth.max(initial=-1)) + 1):
        some = nth == n
        out[to[some]] += x[order[some]]
    return out
