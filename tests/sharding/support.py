# SPDX-License-Identifier: Apache-2.0
"""Data parallelism against one device: ways to wrap a model, and a step whose value and every gradient are compared."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

from ms_dtensor import Shard, distribute_tensor, fully_shard, init_device_mesh, replicate, value_and_grad
from tests.operands import filled
from tests.support import counted, equal, equal_each, equal_steps, mean_square

ROWS = np.random.default_rng(5).normal(size=(8, 4)).astype(np.float32)


class Mul(nn.Cell):
    """`tanh(x * w + b)`; rows keep their width, so cells go in any order."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.w = Parameter(Tensor(np.zeros(width, np.float32)), name="w")
        self.b = Parameter(Tensor(np.zeros(width, np.float32)), name="b")

    def construct(self, x):
        return mint.tanh(x * self.w + self.b)


class Net(nn.Cell):
    """Dense cells of one shape, in the order that `order` says, and a weight of the model's own before them."""

    def __init__(self, order=(0, 1, 2), count: int = 3) -> None:
        super().__init__()
        self.order = order
        self.blocks = nn.CellList([nn.SequentialCell(nn.Dense(4, 4), nn.Tanh()) for _ in range(count)])
        self.scale = Parameter(Tensor(np.zeros(4, np.float32)), name="scale")

    def construct(self, x):
        x = x * self.scale
        for i in self.order:
            x = self.blocks[i](x)
        return x


def data_mesh(world, device: str = "cpu"):
    """All ranks on one data axis."""
    return init_device_mesh(device, (world.size,), mesh_dim_names=("dp",))


def sharded(**how) -> Callable:
    """Each of `cells` as a unit, then the whole model."""
    def wrap(net, mesh, cells=()):
        for cell in cells:
            fully_shard(cell, mesh=mesh, **how)
        return fully_shard(net, mesh=mesh, **how)
    return wrap


def replicated(**how) -> Callable:
    """The whole model on every rank."""
    return lambda net, mesh, cells=(): replicate(net, mesh=mesh, **how)


SHARDED: dict[str, Callable] = {"fully_shard": sharded(), "kept": sharded(reshard_after_forward=False),
                                "neighbours": sharded(reshard_after_forward=2)}
WAYS: dict[str, Callable] = {**SHARDED, "zero1": replicated(zero1=True), "replicate": replicated(),
                             "bucket_mb=0": replicated(bucket_mb=0)}


def rows_of(mesh, rows=ROWS):
    """The batch as a DTensor, so that its gradient is one too."""
    return distribute_tensor(Tensor(rows), mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)


def own_rows(mesh, rows=ROWS) -> Tensor:
    """This rank's rows, plain."""
    return Tensor(np.array_split(rows, mesh.size())[mesh.get_group().rank_index])


def alike(net, plain, mesh, loss: Callable[[Any], Callable] = mean_square, what: str = "", rows=ROWS, rtol: float = 2e-5):
    """Value, gradient of the input and of every trainable parameter, of one step; returns its communication."""
    params, theirs = list(plain.trainable_params()), list(net.trainable_params())
    want = ms.value_and_grad(loss(plain), 0, params or None)(Tensor(rows))
    with counted() as count:
        got = value_and_grad(loss(net), 0, theirs or None)(rows_of(mesh, rows))
    equal(got[0], want[0], f"{what}: value", rtol)
    (dx, grads), (wanted_dx, wanted) = (got[1], want[1]) if params else ((got[1], ()), (want[1], ()))
    equal_each(grads, wanted, theirs, f"{what}: gradient", rtol)
    equal(dx, wanted_dx, f"{what}: gradient of the input", rtol)
    return count


def twins(make: Callable[[], nn.Cell], way: str | Callable, mesh, cells: str = "blocks") -> tuple[nn.Cell, nn.Cell]:
    """A model of one device, and the same laid out in a way.

    Args:
        way: a word of `WAYS`, or a function like those.
        cells: the names of those that are units of their own.
    """
    plain, net = filled(make()), filled(make())
    units = [getattr(net, name) for name in cells.split()]
    (WAYS[way] if isinstance(way, str) else way)(
        net, mesh, [cell for one in units for cell in (one if isinstance(one, nn.CellList) else (one,))])
    return plain, net


def same_step(net, plain, x, loss: Callable[[Any], Callable] = mean_square, rows=ROWS):
    """Loss and the gradient of each trainable parameter, of a step on `x`, are one device's; returns its communication."""
    want = ms.value_and_grad(loss(plain), None, plain.trainable_params())(Tensor(rows))
    with counted() as count:
        got = value_and_grad(loss(net), None, net.trainable_params())(x)
    equal_steps(got, want, net.trainable_params())
    return count
