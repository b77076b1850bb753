# SPDX-License-Identifier: Apache-2.0
"""What kind of thing a rank returns, raises and communicates must not depend on what its shard holds.

A public call runs through the dispatcher, forward and backward, as the first and as the last rank of a pretended world,
in which the last one's shards are empty. Nothing is sent and no value is looked at: structure, dtypes, layouts, whether
autograd made nodes, the error, and the collectives in their order must be the same.
"""
from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ... import comm
from ...comm.world import fake_world
from ...core.layout import Layout
from ...core.mesh import DeviceMesh
from ...core.placements import REPLICATE, Shard
from ...core.tree import leaves, map_leaves
from ...dispatch.modes import implicit_replication
from ...dispatch.operands import dtype_name
from ...internals.names import Function, NoFallbackGuard
from ...ops.rng import frozen
from ...tensor.dtensor import DTensor

WORLD = 8  # ranks: more than a dim of the corpus has elements


def check_alike(fn: Callable, args: tuple, kwargs: dict) -> list[str]:
    """What differs between ranks in `fn(*args, **kwargs)`, for its tensors sharded on one dim after another.

    Args:
        fn: a public op, method, or any function of tensors.
        args: sample arguments.
        kwargs: sample keyword arguments.
    """
    ndim = max((x.ndim for x in leaves((args, kwargs), Tensor)), default=0)
    wrong = []
    for dim in range(-ndim, 0):
        first, last = (_seen(fn, args, kwargs, rank, dim) for rank in (0, WORLD - 1))
        if first != last:
            wrong.append(f"sharded on dim {dim}, the first rank sees {first}, the last {last}")
    return wrong


def _seen(fn, args, kwargs, rank: int, dim: int) -> str:
    """One rank's account of the call: its results, or its error, and what it communicates."""
    with fake_world(WORLD, rank):
        mesh = DeviceMesh("cpu", np.arange(WORLD), mesh_dim_names=("x",))

        def place(x):
            layout = Layout(mesh, [Shard(x.ndim + dim) if x.ndim + dim >= 0 and x.shape[dim] > 1 else REPLICATE],
                            tuple(x.shape), dtype_name(x.dtype))
            cut = tuple(slice(lo, hi) for lo, hi in layout.local_box())
            return DTensor.from_local(Tensor(np.array(x.asnumpy()[cut], order="C")), mesh, layout.placements, shape=x.shape)
        placed = map_leaves(place, (tuple(args), dict(kwargs)), Tensor)
        told: list[str] = []
        active = [x for x in leaves(placed, Tensor) if x.is_floating_point()]

        def run(*differentiated):
            it = iter(differentiated)
            ours, named = map_leaves(lambda x: next(it) if x.is_floating_point() else x, placed, Tensor)
            try:
                out = fn(*ours, **named)
            except Exception as e:  # noqa: BLE001  an error is an answer
                told.append(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")
                return _end(differentiated)
            told.append(_kind(out))
            return _end([x for x in leaves(out, Tensor) if x.is_floating_point()])
        with comm.record() as events, implicit_replication(), frozen(0):
            if active:
                try:
                    ms.grad(run, tuple(range(len(active))))(*active)
                except Exception as e:  # noqa: BLE001  an op without a backward kernel
                    told.append(type(e).__name__)
            else:
                run()
    return f"{told}, {[(e.op, e.phase) for e in events]}"


def _end(tensors):
    with NoFallbackGuard():
        return Sum.apply(*tensors)


def _kind(x) -> str:
    if isinstance(x, tuple | list):
        return f"{type(x).__name__}({', '.join(map(_kind, x))})"
    if not isinstance(x, Tensor):
        return type(x).__name__
    layout = repr(x.layout) if isinstance(x, DTensor) else "plain"
    dtype = str(x.dtype).lower()
    return f"{layout} {dtype}{'' if x._requires_grad else ' constant'}{' leaf' if x._is_leaf else ''}"


class Sum(Function):
    """A loss whose cotangents are ones of each shard's shape."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.likes = [(x._shape, x.dtype) for x in tensors]
        return Tensor(0.0)

    @staticmethod
    def backward(ctx, _):
        ones = tuple(ops.ones(*like) for like in ctx.likes)
        return ones if len(ones) > 1 else ones[0]
