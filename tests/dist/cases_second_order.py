# SPDX-License-Identifier: Apache-2.0
"""Derivatives of derivatives: the gradient's own moves are differentiable, to any order, also where shards are empty."""
from __future__ import annotations

import itertools

import mindspore as ms
import numpy as np
from mindspore import mint

from ms_dtensor import DTensor, Partial, Replicate, Shard, comm, distribute_tensor, grad
from ms_dtensor.errors import DTensorError
from tests.cases import case
from tests.dist.support import array, counted, data, equal, mesh_1d, mesh_2d

R, S = Replicate(), Shard
POSITIONS = (0, 1)


def second(take, f):
    """The gradient of the sum of squares of f's gradients, for all positions; `take` is a grad function."""
    inner = take(f, POSITIONS)
    return take(lambda *xs: sum((g * g).sum() for g in inner(*xs)), POSITIONS)


def third(take, f):
    """One order more, for the first position."""
    inner = second(take, f)
    return take(lambda *xs: (inner(*xs)[0] ** 2).sum(), 0)


def laid_out(x, *placements):
    return x.redistribute(placements=placements) if isinstance(x, DTensor) else x


FUNCTIONS = {
    "a cube of a product": lambda a, b: (mint.matmul(a, b) ** 3).sum(),
    "a cube by hand": lambda a, b: (lambda y: (y * y * y).sum())(mint.matmul(a, b)),
    "a mean over what may be cut": lambda a, b: ((mint.matmul(a, b) - mint.matmul(a, b).mean(0)) ** 3).mean(),
    "moved by hand": lambda a, b: (mint.matmul(laid_out(a, S(0)) * laid_out(a, R), laid_out(b, S(1))) ** 3).sum(),
}


def _everywhere(mesh, f, what, a, b, rtol=2e-4):  # sums of products of products, in another order
    wanted = (*second(ms.grad, f)(a, b), third(ms.grad, f)(a, b))
    assert all(np.abs(array(w)).max() > 1e-3 for w in wanted), f"{what}: nothing to compare"
    options = [(p,) if mesh.ndim == 1 else (p, q) for p, q in itertools.product((R, S(0), S(1)), repeat=2)]
    options = list(dict.fromkeys(options if mesh.ndim > 1 else [(p,) for p in (R, S(0), S(1))]))
    for i, j in itertools.product(range(len(options)), repeat=2):
        if mesh.ndim > 1 and (i + 2 * j) % 4:  # a quarter of the 81 pairs
            continue
        x, y = (distribute_tensor(t, mesh, p, src_data_rank=None) for t, p in ((a, options[i]), (b, options[j])))
        label = f"{what}, {options[i]} and {options[j]}"
        for k, (got, want) in enumerate(zip((*second(grad, f)(x, y), third(grad, f)(x, y)), wanted)):
            equal(got, want, f"{label}: derivative {k}", rtol)


@case(world_size=4, timeout=180)
def second_and_third_derivatives_are_one_devices_on_any_layout(world):
    for what, f in FUNCTIONS.items():
        _everywhere(mesh_1d(), f, what, data(1, 4, 8), data(2, 8, 3))  # the last rank's share of 3 columns is empty


@case(world_size=4, timeout=180)
def they_are_on_two_axes(world):
    for what in ("a cube of a product", "a mean over what may be cut"):
        _everywhere(mesh_2d(), FUNCTIONS[what], what, data(3, 3, 6), data(4, 6, 5))


@case(world_size=4)
def they_are_where_the_input_is_a_sum_or_an_average(world):
    mesh = mesh_1d()
    whole = sum(array(data(10 + r, 4, 6)) for r in range(world.size))
    b = distribute_tensor(data(6, 4, 6), mesh, [R], src_data_rank=None)
    factor = array(data(6, 4, 6)).sum()
    for op, parts in (("sum", 1), ("avg", world.size)):
        x = DTensor.from_local(data(10 + world.rank, 4, 6), mesh, [Partial(op)])
        got = grad(lambda t: (grad(lambda u: (u ** 3).sum() * b.sum(), 0)(t) ** 2).sum(), 0)(x)
        value = whole / parts  # the inner gradient is 3 value^2 factor for each summand, and an average divides once more
        equal(got, 2 * (3 * value ** 2 * factor / parts) * 6 * value * factor / parts / parts, op, 2e-4)


@case(world_size=4)
def a_second_derivative_moves_what_it_must_and_says_so(world):
    mesh = mesh_1d()
    a, b = (distribute_tensor(t, mesh, p, src_data_rank=None) for t, p in ((data(1, 4, 8), [S(1)]), (data(2, 8, 4), [R])))
    with counted() as count:
        second(grad, FUNCTIONS["a cube of a product"])(a, b)
    assert set(op for op, _ in count) <= {"reduce_scatter", "all_gather", "all_reduce"}, count
    assert sum(count.values()) <= 8 and any(phase == "backward" for _, phase in count), count


@case(world_size=4)
def an_empty_shard_makes_the_nodes_of_the_others(world):
    """The last two ranks of four hold nothing of two rows; all ranks must meet in every derivative."""
    mesh = mesh_1d()
    x = distribute_tensor(data(7, 2, 3), mesh, [S(0)], src_data_rank=None)
    w = distribute_tensor(data(8, 3, 3), mesh, [R], src_data_rank=None)
    f = lambda t, u: (mint.matmul(t, u).exp() * t.sin() + u.mean()).sum()  # noqa: E731
    for k, (got, want) in enumerate(zip(second(grad, f)(x, w), second(ms.grad, f)(data(7, 2, 3), data(8, 3, 3)))):
        equal(got, want, f"derivative {k}", 2e-4)
    try:
        comm.group(tuple(range(world.size))).barrier()
    except DTensorError as e:
        raise AssertionError("ranks parted") from e
