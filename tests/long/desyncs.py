# SPDX-License-Identifier: Apache-2.0
"""Ways in which one rank's program differs from the others', as data for `check_failures.py` and tests/comm.

Each function makes the calls of one rank of a world; `odd` says whether it is the one that differs. What follows on every
rank is a barrier of the world.
"""
from collections.abc import Callable

import numpy as np

KINDS: dict[str, Callable] = {}
# Two ranks meet: which one is odd is known only if a third has made the same call by then, else both are named.
PAIRS = ("shape_within_a_row",)


def kind(fn: Callable) -> Callable:
    KINDS[fn.__name__] = fn
    return fn


def either(name: str, usual: Callable, other: Callable) -> None:
    """One call, or another one in its place; `usual` and `other` take the engine, the rank and the world's ranks."""
    def run(e, rank, size, odd):
        world = tuple(range(size))
        e.all_reduce(np.ones(3), "sum", world)  # the group exists; see `first_call_of_a_group`
        (other if odd else usual)(e, rank, world)
    KINDS[name] = run


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def reduce(x, op="sum"):
    return lambda e, rank, world: e.all_reduce(x, op, world)


def gather(x, dim=0, sizes=None):
    return lambda e, rank, world: e.all_gather(x, dim, sizes or [x.shape[dim]] * len(world), world)


def scatter_sum(x, dim=0, op="sum", sizes=None):
    return lambda e, rank, world: e.reduce_scatter(x, op, dim, sizes or [x.shape[dim] // len(world)] * len(world), world)


def swap(x, a=0, b=1, sizes=None):
    return lambda e, rank, world: e.all_to_all(x, a, sizes or [x.shape[a] // len(world)] * len(world), b,
                                               [x.shape[b]] * len(world), world)


def cast(x, src=0):
    return lambda e, rank, world: e.broadcast(x, src, world)


def deal(x, src=0, dim=0, sizes=None):
    def run(e, rank, world):
        cut = sizes or [x.shape[dim] // len(world)] * len(world)
        e.scatter(x if rank == src else None, dim, cut, src, world, shape=x.shape, dtype=x.dtype)
    return run


def barrier(e, rank, world):
    e.barrier(world)


LARGE = 1 << 18
either("shape", reduce(ones(3)), reduce(ones(4)))
either("number_of_dims", reduce(ones(2, 6)), reduce(ones(12)))
either("transposed", reduce(ones(2, 6)), reduce(ones(6, 2)))
either("empty", reduce(ones(3)), reduce(ones(0)))
either("large_shape", reduce(ones(LARGE)), reduce(ones(LARGE + 64)))
either("dtype", reduce(ones(3)), reduce(ones(3, dtype=np.float64)))
either("dtype_of_one_width", reduce(ones(3)), reduce(ones(3, dtype=np.int32)))
either("reduction", reduce(ones(3)), reduce(ones(3), "max"))
either("large_reduction", reduce(ones(LARGE)), reduce(ones(LARGE), "prod"))
either("another_collective", reduce(ones(4)), gather(ones(4)))
either("barrier_instead", reduce(ones(4)), barrier)
either("reduce_for_reduce_scatter", scatter_sum(ones(24)), reduce(ones(24)))
either("gather_dim", gather(ones(5, 5)), gather(ones(5, 5), 1))
either("gather_shape", gather(ones(2, 3)), gather(ones(2, 4)))
either("large_gather", gather(ones(LARGE)), gather(ones(LARGE, dtype=np.float64)))
either("scatter_reduction", scatter_sum(ones(24)), scatter_sum(ones(24), op="avg"))
either("scatter_dim", scatter_sum(ones(24, 24)), scatter_sum(ones(24, 24), 1))
either("swap_dims", swap(ones(24, 24)), swap(ones(24, 24), 1, 0))
either("swap_dtype", swap(ones(24, 24)), swap(ones(24, 24, dtype=np.float16)))
either("broadcast_source", cast(ones(3)), cast(ones(3), 1))
either("broadcast_shape", cast(ones(3)), cast(ones(3, 1)))
either("large_broadcast", cast(ones(LARGE)), cast(ones(LARGE), 1))
either("dealt_source", deal(ones(24)), deal(ones(24), 1))
either("dealt_dim", deal(ones(24, 24)), deal(ones(24, 24), dim=1))


@kind
def uneven_sizes(e, rank, size, odd):
    sizes = [2] * size if not odd else [1, 3] + [2] * (size - 2)
    e.reduce_scatter(ones(2 * size), "sum", 0, sizes, tuple(range(size)))


@kind
def order(e, rank, size, odd):
    calls = [reduce(ones(3)), gather(ones(3))]
    for call in reversed(calls) if odd else calls:
        call(e, rank, tuple(range(size)))


@kind
def one_call_too_few(e, rank, size, odd):
    for _ in range(2 - odd):
        e.all_reduce(ones(3), "sum", tuple(range(size)))


@kind
def one_call_too_many(e, rank, size, odd):
    for _ in range(2 + odd):
        e.all_reduce(ones(3), "sum", tuple(range(size)))


@kind
def first_call_of_a_group(e, rank, size, odd):
    e.all_reduce(ones(4 if odd else 3), "sum", tuple(reversed(range(size))))


@kind
def a_part_of_the_world(e, rank, size, odd):
    others = tuple(r for r in range(size) if r != (rank + 1) % size)
    e.all_reduce(ones(3), "sum", others if odd else tuple(range(size)))


@kind
def another_order_of_ranks(e, rank, size, odd):
    e.all_gather(ones(3), 0, [3] * size, tuple(reversed(range(size))) if odd else tuple(range(size)))


@kind
def another_axis(e, rank, size, odd):
    half = size // 2
    row = tuple(range(half)) if rank < half else tuple(range(half, size))
    column = (rank % half, rank % half + half)
    e.all_reduce(ones(3), "sum", column if odd else row)


@kind
def shape_within_a_row(e, rank, size, odd):
    half = size // 2
    row = tuple(range(half)) if rank < half else tuple(range(half, size))
    e.barrier(tuple(range(size)))
    e.all_reduce(ones(4 if odd else 3), "sum", row)


@kind
def waits_for_a_message(e, rank, size, odd):
    if odd:
        e.exchange([], [((rank + 1) % size, (3,), np.dtype(np.float32))])
    else:
        e.all_reduce(ones(3), "sum", tuple(range(size)))


@kind
def later(e, rank, size, odd):
    e.all_reduce(ones(4 if odd else 3), "sum", tuple(range(size)), async_op=True).wait()
