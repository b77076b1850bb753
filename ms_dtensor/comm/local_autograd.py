# SPDX-License-Identifier: Apache-2.0
"""Collectives of local tensors that autograd goes through: each one's backward is the transposed collective.

What is differentiated is the sum over the ranks of what each of them differentiates, as of MindSpore's own collectives:
what a rank's tensor contributed to on all ranks is added up. The backward is recorded as such, with the line that called.
"""
from __future__ import annotations

from collections.abc import Sequence

from mindspore import Tensor

from ..errors import CommError
from ..internals.names import Function, NoFallbackGuard
from .group import Group
from .record import active, annotate, user_site


class AllReduce(Function):
    """`AllReduce.apply(x, group, op)`; "sum" and "avg" have a gradient.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from ms_dtensor.comm.local_autograd import AllReduce
        >>> group = md.init_device_mesh("cpu", (1,)).get_group()
        >>> ms.grad(lambda x: (AllReduce.apply(x, group, "sum") * x).sum())(ms.Tensor([1.0, 2.0])).asnumpy()
        array([2., 4.], dtype=float32)
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, op: str = "sum"):
        ctx.site, ctx.group, ctx.op = _site(), group, op
        with NoFallbackGuard():
            return group.all_reduce(x, op)

    @staticmethod
    def backward(ctx, grad):
        if ctx.op not in ("sum", "avg"):
            raise CommError(f"For 'all_reduce', the reduction {ctx.op!r} has no gradient.", repr(ctx.group),
                            "Only of a sum or an average each rank's part is known.",
                            ("reduce with 'sum'", "mindspore.ops.stop_gradient(x) before the call"))
        with _backward(ctx, "all_reduce"):
            return ctx.group.all_reduce(grad, ctx.op), None, None


class AllGather(Function):
    """`AllGather.apply(x, group)`: all ranks' tensors, of one shape, along dim 0; its gradient is a reduce-scatter.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from ms_dtensor.comm.local_autograd import AllGather
        >>> AllGather.apply(ms.Tensor([1.0]), md.init_device_mesh("cpu", (1,)).get_group()).asnumpy()
        array([1.], dtype=float32)
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: Group):
        ctx.site, ctx.group = _site(), group
        with NoFallbackGuard():
            return group.all_gather(x, 0, [x.shape[0]] * group.size)

    @staticmethod
    def backward(ctx, grad):
        n = ctx.group.size
        with _backward(ctx, "all_gather"):
            return ctx.group.reduce_scatter(grad, "sum", 0, [grad.shape[0] // n] * n), None


class ReduceScatter(Function):
    """`ReduceScatter.apply(x, group, op)`: this rank's part, along dim 0, of the sum; its gradient is an all-gather.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from ms_dtensor.comm.local_autograd import ReduceScatter
        >>> ReduceScatter.apply(ms.Tensor([1.0]), md.init_device_mesh("cpu", (1,)).get_group(), "sum").asnumpy()
        array([1.], dtype=float32)
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, op: str = "sum"):
        ctx.site, ctx.group, ctx.op = _site(), group, op
        with NoFallbackGuard():
            return group.reduce_scatter(x, op, 0, even("reduce_scatter", x, group))

    @staticmethod
    def backward(ctx, grad):
        if ctx.op not in ("sum", "avg"):
            raise CommError(f"For 'reduce_scatter', the reduction {ctx.op!r} has no gradient.", repr(ctx.group),
                            "Only of a sum or an average each rank's part is known.", "reduce with 'sum'")
        with _backward(ctx, "reduce_scatter"):
            out = ctx.group.all_gather(grad, 0, [grad.shape[0]] * ctx.group.size)
            return out if ctx.op == "sum" else out / ctx.group.size, None, None


class AllToAll(Function):
    """`AllToAll.apply(x, group, send_sizes, recv_sizes)`: rows to each rank and from each; its gradient goes back.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from ms_dtensor.comm.local_autograd import AllToAll
        >>> AllToAll.apply(ms.Tensor([1.0, 2.0]), md.init_device_mesh("cpu", (1,)).get_group(), [2], [2]).asnumpy()
        array([1., 2.], dtype=float32)
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, send_sizes: Sequence[int], recv_sizes: Sequence[int]):
        ctx.site, ctx.group, ctx.sizes = _site(), group, (list(send_sizes), list(recv_sizes))
        with NoFallbackGuard():
            return group.all_to_all_rows(x, *ctx.sizes)

    @staticmethod
    def backward(ctx, grad):
        send, recv = ctx.sizes
        with _backward(ctx, "all_to_all"):
            return ctx.group.all_to_all_rows(grad, recv, send), None, None, None


def even(op: str, x: Tensor, group: Group) -> list[int]:
    """The members' equal parts of dim 0."""
    if not x.shape or x.shape[0] % group.size:
        raise CommError(f"For '{op}', dim 0 is not cut evenly.", f"{x.dtype}{list(x.shape)} over ranks {group.ranks}",
                        "Each member gets as many rows.", "pad dim 0, or a Group's own reduce_scatter with sizes")
    return [x.shape[0] // group.size] * group.size


def _site() -> str | None:
    return user_site() if active() else None


def _backward(ctx, of: str) -> annotate:
    return annotate(phase="backward", site=ctx.site, of=of)
