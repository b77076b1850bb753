# SPDX-License-Identifier: Apache-2.0
"""The contract every backend keeps, as data: each case gives one rank's result and what NumPy says it must be.

A case is a function `(comm, rank, size, rng) -> None` that calls the collectives on `comm` with NumPy arrays and
asserts. `comm` hides whether the arrays travel as arrays (shm engine) or as tensors (backends). Data is random and
different on every rank, made from one seed, so each rank can compute everybody's input.
"""
import itertools

import numpy as np

FLOATS = ("float16", "float32", "float64")
INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
OTHERS = ("bool", "complex64", "complex128")
ALL = FLOATS + INTS + OTHERS


class Arrays:
    """The shared-memory engine as the contract sees it."""

    exact = True
    dtypes = ALL

    def __init__(self, engine):
        self._e = engine

    def __getattr__(self, name):
        return getattr(self._e, name)

    def scatter(self, x, dim, sizes, src, ranks, shape, dtype):
        return self._e.scatter(x, dim, sizes, src, ranks, shape=shape, dtype=dtype)

    def send(self, x, dst):
        self._e.exchange([(dst, x)], [])

    def recv(self, shape, dtype, src):
        return self._e.exchange([], [(src, shape, dtype)])[0]


def data(rng, shape, dtype):
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype.startswith("complex"):
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    if dtype.startswith(("int", "uint")):
        return rng.integers(0, 4, shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


def inputs(seed, size, shapes, dtype):
    """Everybody's input; `shapes` is one shape, or one per member."""
    rng = np.random.default_rng(seed)
    shapes = [shapes] * size if not isinstance(shapes, list) else shapes
    return [np.asarray(data(rng, s, dtype)) for s in shapes]


def reduced(xs, op):
    wide = np.float32 if xs[0].dtype == np.float16 else xs[0].dtype.type
    ufunc = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}[op]
    acc = xs[0].astype(wide)
    for x in xs[1:]:
        acc = ufunc(acc, x.astype(wide))
    return (acc / wide(len(xs)) if op == "avg" else acc).astype(xs[0].dtype)


def same(got, want, exact=True):
    assert got.shape == want.shape, (got.shape, want.shape)
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    if exact:
        np.testing.assert_array_equal(got, want)
    else:  # another order of summation: a few roundings apart
        eps = np.finfo(want.dtype).eps if want.dtype.kind in "fc" else 0
        np.testing.assert_allclose(got.astype(np.complex128), want.astype(np.complex128), rtol=16 * eps, atol=16 * eps)


def uneven(total, parts, seed=0):
    """Sizes that sum to `total`, uneven, some of them zero."""
    cuts = sorted(np.random.default_rng(seed).integers(0, total + 1, parts - 1).tolist())
    return [b - a for a, b in zip([0, *cuts], [*cuts, total])]


def slices(x, dim, sizes):
    return np.split(x, np.cumsum(sizes)[:-1], axis=dim)


def case_all_reduce(comm, rank, ranks):
    n, me = len(ranks), ranks.index(rank)
    shapes = [(), (1,), (0, 3), (3, 5), (3000,), (40_001,)]
    for shape, op in itertools.product(shapes, ("sum", "max", "min", "prod", "avg")):
        xs = inputs(1, n, shape, "float32")
        mine = xs[me].copy()
        same(comm.all_reduce(mine, op, ranks), reduced(xs, op), comm.exact)
        np.testing.assert_array_equal(mine, xs[me])
    for dtype in comm.dtypes:
        ops = {"bool": ("max", "min", "prod")}.get(dtype, ("sum", "prod") if dtype.startswith("complex") else
                                                   ("sum", "max", "min", "prod"))
        for op in ops:
            xs = inputs(2, n, (2, 7), dtype)
            same(comm.all_reduce(xs[me], op, ranks), reduced(xs, op), comm.exact)


def case_all_reduce_noncontiguous(comm, rank, ranks):
    n, me = len(ranks), ranks.index(rank)
    xs = inputs(3, n, (6, 8), "float32")
    same(comm.all_reduce(xs[me].T[1:, ::2], "sum", ranks), reduced([x.T[1:, ::2] for x in xs], "sum"), comm.exact)


def case_half_sums_round_once(comm, rank, ranks):
    n, me = len(ranks), ranks.index(rank)
    xs = [np.full((4,), 1.0 if i == 0 else 2.0**-11, np.float16) for i in range(n)]  # lost if rounded at each step
    same(comm.all_reduce(xs[me], "sum", ranks), reduced(xs, "sum"))


def case_all_gather(comm, rank, ranks):
    n, me = len(ranks), ranks.index(rank)
    for dim, total in itertools.product((0, 1, 2), (0, 1, n, 2 * n + 1)):
        for sizes in (uneven(total, n, dim), [total // n] * n):
            shapes = [tuple(sizes[i] if d == dim else s for d, s in enumerate((2, 3, 4))) for i in range(n)]
            xs = inputs(4, n, shapes, "float32")
            same(comm.all_gather(xs[me], dim, sizes, ranks), np.concatenate(xs, dim))
    for dtype in comm.dtypes:
        xs = inputs(5, n, [(2, i + 1) for i in range(n)], dtype)
        same(comm.all_gather(xs[me], 1, [i + 1 for i in range(n)], ranks), np.concatenate(xs, 1))


def case_reduce_scatter(comm, rank, ranks):
    n, me = len(ranks), ranks.index(rank)
    for dim, op in itertools.product((0, 1, 2), ("sum", "max", "avg")):
        for sizes in (uneven(2 * n + 1, n, dim), [2] * n):
            shape = tuple(sum(sizes) if d == dim else s for d, s in enumerate((2, 3, 4)))
            xs = inputs(6, n, shape, "float32")
            want = slices(reduced(xs, op), dim, sizes)[me]
            same(comm.reduce_scatter(xs[me], op, dim, sizes, ranks), want, comm.exact)
    for dtype in ("float16", "float64", "int32", "uint8"):
        xs = inputs(7, n, (n, 3), dtype)
        same(comm.reduce_scatter(xs[me], "sum", 0, [1] * n, ranks), reduced(xs, "sum")[me:me + 1], comm.exact)


def case_all_to_all(comm, rank, ranks):
    n, me = len(ranks), ranks.index(rank)
    for split, concat in itertools.permutations((0, 1, 2), 2):
        for ss, cs in ((uneven(2 * n + 1, n, split), uneven(n + 2, n, concat)), ([2] * n, [1] * n)):
            def shape(i, split=split, concat=concat, ss=ss, cs=cs):
                s = [2, 3, 4]
                s[split], s[concat] = sum(ss), cs[i]
                return tuple(s)
            xs = inputs(8, n, [shape(i) for i in range(n)], "float32")
            want = np.concatenate([slices(x, split, ss)[me] for x in xs], concat)
            same(comm.all_to_all(xs[me], split, ss, concat, cs, ranks), want)
    for dtype in ("bool", "float64", "int16", "float16"):
        xs = inputs(9, n, (n, 2), dtype)
        want = np.concatenate([x[me:me + 1] for x in xs], 1)
        same(comm.all_to_all(xs[me], 0, [1] * n, 1, [2] * n, ranks), want)


def case_all_to_all_rows(comm, rank, ranks):
    n, me = len(ranks), ranks.index(rank)
    some = np.random.default_rng(n).integers(0, 4, (n, n))
    lonely = some.copy()
    lonely[0], lonely[:, -1] = 0, 0                                      # one gives nothing, one gets nothing
    big = some * 0
    big[0, -1], big[-1, 0], big[0, 0] = 30_000, 1, 2                     # too much for a slot one way, not the other
    for give, rest, dtype in ((some, (3,), "float32"), (lonely, (2, 2), "float32"), (some * 0, (3,), "float32"),
                              (some, (0,), "float32"), (some, (), "int32"), (big, (3,), "float32"), (some, (5,), "bool"),
                              (some, (5,), "float64"), (some, (1,), "float16")):
        xs = inputs(13, n, [(int(g.sum()), *rest) for g in give], dtype)
        want = np.concatenate([slices(x, 0, g)[me] for x, g in zip(xs, give)])
        same(comm.all_to_all_rows(xs[me], give[me].tolist(), give[:, me].tolist(), ranks), want)


def case_broadcast_and_scatter(comm, rank, ranks):
    n, me = len(ranks), ranks.index(rank)
    for src, shape in itertools.product((ranks[0], ranks[-1]), ((), (0, 2), (3, 4))):
        for dtype in ("float32", "bool", "int64"):
            x = inputs(10, 1, shape, dtype)[0]
            same(comm.broadcast(x if rank == src else np.zeros_like(x), src, ranks), x)
    for src, dim in itertools.product((ranks[0], ranks[-1]), (0, 1)):
        sizes = uneven(n + 2, n, dim)
        x = inputs(11, 1, (n + 2, 3) if dim == 0 else (3, n + 2), "float32")[0]
        got = comm.scatter(x if rank == src else None, dim, sizes, src, ranks, x.shape, x.dtype)
        same(got, np.ascontiguousarray(slices(x, dim, sizes)[me]))


def case_exchange(comm, rank, ranks):
    n, me = len(ranks), ranks.index(rank)
    for shape in ((), (0, 2), (5, 3), (30_000,)):
        xs = inputs(12, n, shape, "float32")
        right, left = ranks[(me + 1) % n], ranks[(me - 1) % n]
        same(comm.exchange([(right, xs[me])], [(left, shape, np.float32)])[0], xs[(me - 1) % n])
    # everybody to everybody, in an order of its own, with sizes of their own
    order = list(range(n))[me:] + list(range(n))[:me]
    out = comm.exchange([(ranks[i], np.full((me + 1, i), me, np.int32)) for i in order],
                        [(ranks[i], (i + 1, me), np.int32) for i in reversed(order)])
    for i, got in zip(reversed(order), out):
        same(got, np.full((i + 1, me), i, np.int32))
    x = np.arange(4.0)
    if me == 0:
        comm.send(x, ranks[-1])
    if me == n - 1:
        same(comm.recv((4,), np.float64, ranks[0]), x)


def case_objects_and_barrier(comm, rank, ranks):
    comm.barrier(ranks)
    assert comm.all_gather_object({"rank": rank, "pad": "x" * rank * 100}, ranks) == [
        {"rank": r, "pad": "x" * r * 100} for r in ranks]
    assert comm.broadcast_object(("a", rank), ranks[-1], ranks) == ("a", ranks[-1])
    comm.barrier(ranks)


CASES = [f for name, f in sorted(globals().items()) if name.startswith("case_")]


def groups(size, rank):
    """The groups this rank runs every case on: the world, a pair, the world reversed."""
    world = tuple(range(size))
    out = [world]
    if size > 2:
        half = size // 2
        out.append(world[:half] if rank < half else world[half:])
        out.append(world[::-1])
    return [g for g in out if len(g) > 1]


def run_all(comm, rank, size):
    """Runs every case on every group; returns the number of cases run."""
    count = 0
    for group in groups(size, rank):
        for case in CASES:
            case(comm, rank, group)
            count += 1
    return count
