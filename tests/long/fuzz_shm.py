# SPDX-License-Identifier: Apache-2.0
"""Every collective of the shm backend on small and uneven tensors of every dtype, against NumPy.

    python -m tests.long.fuzz_shm [--ranks 2 3 4 5 6 7 8] [--seed 0] [--every 1] [--case '[...]']

A grid: collective x reduction x kind of split x dtype x 0 to 2n+1 elements, once on the paths as they are and once with all
the limits between small and large messages at nothing, so that few elements take the paths of large ones. Groups, dims,
roots, shapes and values of a case are drawn from the seed and the case alone. Elements grow along the grid: the first
failing line is the smallest, and `--case` repeats it alone. Ranks are forked processes that share one import of MindSpore
and run no op. A rank that dies or raises is a failure too; the grid goes on behind it in a new world. Prints JSON.
"""
import argparse
import json
import mmap
import os
import random
import struct
import sys
import time
from collections.abc import Iterator

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
from mindspore import Tensor  # noqa: E402

from ms_dtensor.comm.shm import engine  # noqa: E402
from ms_dtensor.comm.shm.backend import ShmBackend  # noqa: E402

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *INTS, "bool", "complex64", "complex128")
SPLITS = ("chunks", "random", "one")
MOST_FAILURES = 20
BFLOAT16 = Tensor([0.0], ms.bfloat16).asnumpy().dtype
UFUNC = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def reductions(dtype: str) -> tuple[str, ...]:
    if dtype == "bool":
        return "max", "min", "prod"
    if dtype.startswith("complex"):
        return "sum", "avg", "prod"
    return ("sum", "max", "min", "prod", "avg") if dtype in FLOATS else ("sum", "max", "min", "prod")


def grid(n: int) -> Iterator[list]:
    """Cases: paths, elements, dtype, collective, and what it comes in several kinds of."""
    for large in (False, True):
        for count in range(2 * n + 2):
            for dtype in DTYPES:
                for op in reductions(dtype):
                    yield from ([large, count, dtype, "all_reduce", op, how] for how in ("now", "async", "in place"))
                    yield from ([large, count, dtype, "reduce_scatter", op, split] for split in SPLITS)
                for what in ("all_gather", "all_to_all", "scatter"):
                    yield from ([large, count, dtype, what, "", split] for split in SPLITS)
                for what in ("broadcast", "exchange", "objects"):
                    yield [large, count, dtype, what, "", ""]


# -- bfloat16 as NumPy would have it -----------------------------------------------------------------------------------
def to_float(x: np.ndarray) -> np.ndarray:
    return (x.reshape(-1).view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(x.shape)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """The nearer of the two neighbours, of equally near ones the even one."""
    shape, x = x.shape, x.reshape(-1)  # NumPy computes with 0-d arrays as with numbers, in wider dtypes
    low = (x.view(np.uint32) >> 16).astype(np.uint16)
    high = low + np.uint16(1)
    below, above = (np.abs(to_float(b).astype(np.float64) - x) for b in (low, high))
    return np.where((above < below) | ((above == below) & (low % 2 == 1)), high, low).view(BFLOAT16).reshape(shape)


def reduced(xs: list[np.ndarray], op: str) -> np.ndarray:
    dtype = xs[0].dtype
    if dtype == BFLOAT16:
        return to_bfloat16(reduced([to_float(x) for x in xs], op))
    acc = xs[0].astype(np.float32) if dtype == np.float16 else xs[0]
    with np.errstate(all="ignore"):
        for x in xs[1:]:
            acc = UFUNC[op](acc, x.astype(acc.dtype))
        return np.asarray(acc / acc.dtype.type(len(xs)) if op == "avg" else acc).astype(dtype)


# -- one rank ------------------------------------------------------------------------------------------------------------
class Rank:
    """Draws what all ranks give in a case, makes the call, and says what is wrong with its own result."""

    def __init__(self, rank: int, size: int, seed: int):
        self.rank, self.size, self.seed = rank, size, seed
        self.backend = ShmBackend(rank, size, f"fuzz-{os.getppid()}", timeout=30, blocking=True)
        self.pools: dict[tuple[str, int], np.ndarray] = {}
        self.draw = random.Random(seed)
        world = list(range(size))
        self.groups = [world, world[::-1], *(self.draw.sample(world, self.draw.randint(2, size)) for _ in range(60))]

    def data(self, dtype: str, rank: int, shape: tuple[int, ...]) -> np.ndarray:
        """Values of a rank; asymmetric, both zeros among the floats."""
        pool = self.pools.get((dtype, rank))
        if pool is None:
            rng = np.random.default_rng((self.seed, rank, DTYPES.index(dtype)))
            quarters = rng.integers(-20, 20, 4096) / 4 + 0.0
            quarters[::17] = -0.0
            if dtype == "bfloat16":
                pool = to_bfloat16(quarters.astype(np.float32))
            elif dtype == "bool":
                pool = quarters > 0
            elif dtype.startswith("complex"):  # whole, as NumPy itself rounds products of them in one way or another
                pool = (quarters % 3 // 1 - 1 + 1j * (quarters[::-1] % 2 // 1)).astype(dtype)
            else:
                pool = (quarters if dtype in FLOATS else np.abs(quarters * 3)).astype(dtype)
            self.pools[dtype, rank] = pool
        at = self.draw.randrange(3000)
        return pool[at:at + int(np.prod(shape))].reshape(shape)

    def sizes(self, total: int, parts: int, split: str) -> list[int]:
        if split == "chunks":
            each = -(-total // parts)
            return [max(min(total - i * each, each), 0) for i in range(parts)]
        cuts = sorted(self.draw.randint(0, total) for _ in range(parts - 1))
        if split == "one":
            cuts = [0] * (owner := self.draw.randrange(parts)) + [total] * (parts - 1 - owner)
        return [b - a for a, b in zip([0, *cuts], [*cuts, total])]

    def run(self, case: list) -> None:
        large, count, dtype, what, op, kind = case
        self.draw.seed(f"{self.seed} {case}")
        group = self.groups[self.draw.choice((0, 1, self.draw.randrange(len(self.groups))))]
        engine._EVERYBODY, engine.SLOT, engine.INLINE, engine._STEP, engine.CHUNK = \
            (0, 0, 0, 1, 64 * self.size) if large else LIMITS
        if self.rank in group:
            getattr(self, what)(tuple(group), group.index(self.rank), count, dtype, op, kind)

    def shape(self, count: int) -> tuple[int, ...]:
        return self.draw.choice([(count,), (1, count), (count, 1, 1), *([()] if count == 1 else [])])

    def same(self, got: Tensor | np.ndarray, want: np.ndarray) -> None:
        got = got.asnumpy() if isinstance(got, Tensor) else got
        if want.dtype == BFLOAT16 == got.dtype:
            got, want = to_float(got), to_float(want)
        zeros = np.signbit(got) == np.signbit(want) if want.dtype.kind == "f" else np.True_
        if got.shape != want.shape or got.dtype != want.dtype or not np.array_equal(got, want) or not zeros.all():
            raise AssertionError(f"{got.dtype}{got.shape} {got.tolist()}, NumPy {want.dtype}{want.shape} {want.tolist()}")

    def all_reduce(self, group, me, count, dtype, op, how):
        shape = self.shape(count)
        xs = [self.data(dtype, r, shape) for r in group]
        if how == "in place":
            place = self.backend.buffer(count + self.draw.choice((0, 5)), xs[me].dtype)[:count]
            if count:
                place[...] = xs[me].reshape(-1)
            self.backend.all_reduce_(Tensor.from_numpy(place), op, group)
            self.same(place, reduced(xs, op).reshape(-1))
            return
        got = self.backend.all_reduce(tensor(xs[me]), op, group, async_op=how == "async")
        self.same(got.wait() if how == "async" else got, reduced(xs, op))

    def cut(self, group, total, split):
        """A dim, the sizes on it, and a function that makes a shape of a size there."""
        dim, other = self.draw.randrange(2), self.draw.choice((1, 1, 3, 0))
        return dim, self.sizes(total, len(group), split), lambda n: (n, other) if dim == 0 else (other, n)

    def all_gather(self, group, me, count, dtype, op, split):
        dim, sizes, shaped = self.cut(group, count, split)
        xs = [self.data(dtype, r, shaped(n)) for r, n in zip(group, sizes)]
        self.same(self.backend.all_gather(tensor(xs[me]), dim, sizes, group), joined(xs, dim))

    def reduce_scatter(self, group, me, count, dtype, op, split):
        dim, sizes, shaped = self.cut(group, count, split)
        xs = [self.data(dtype, r, shaped(count)) for r in group]
        got = self.backend.reduce_scatter(tensor(xs[me]), op, dim, sizes, group)
        self.same(got, pieces(reduced(xs, op), dim, sizes)[me])

    def all_to_all(self, group, me, count, dtype, op, split):
        split_dim = self.draw.randrange(2)
        splits = self.sizes(count, len(group), split)
        joins = self.sizes(len(group) + 1, len(group), self.draw.choice(SPLITS))
        xs = [self.data(dtype, r, (count, n) if split_dim == 0 else (n, count)) for r, n in zip(group, joins)]
        got = self.backend.all_to_all(tensor(xs[me]), split_dim, splits, 1 - split_dim, joins, group)
        self.same(got, joined([pieces(x, split_dim, splits)[me] for x in xs], 1 - split_dim))

    def scatter(self, group, me, count, dtype, op, split):
        dim, sizes, shaped = self.cut(group, count, split)
        src = self.draw.choice(group)
        x = self.data(dtype, src, shaped(count))
        got = self.backend.scatter(tensor(x) if src == self.rank else None, dim, sizes, src, group, shape=x.shape,
                                   dtype=tensor(x).dtype)
        self.same(got, pieces(x, dim, sizes)[me])

    def broadcast(self, group, me, count, dtype, op, kind):
        src, shape = self.draw.choice(group), self.shape(count)
        xs = [self.data(dtype, r, shape) for r in group]
        self.same(self.backend.broadcast(tensor(xs[me]), src, group), xs[group.index(src)])

    def exchange(self, group, me, count, dtype, op, kind):
        messages = [(src, dst, self.data(dtype, src, self.shape(self.draw.randint(0, count))))
                    for src, dst in (self.draw.choices(group, k=2) for _ in range(2 * len(group)))]
        mine = [(src, x) for src, dst, x in messages if dst == self.rank]
        got = self.backend.exchange([(dst, tensor(x)) for src, dst, x in messages if src == self.rank],
                                    [(src, x.shape, tensor(x).dtype) for src, x in mine])
        for t, (_, x) in zip(got, mine):
            self.same(t, x)

    def objects(self, group, me, count, dtype, op, kind):
        src = self.draw.choice(group)
        objs = [(r, {"n": [count] * count}, self.data("float32" if dtype == "bfloat16" else dtype, r, (count,)))
                for r in group]
        for (r, n, x), (want_r, want_n, want_x) in zip([*self.backend.all_gather_object(objs[me], group),
                                                       self.backend.broadcast_object(objs[me], src, group)],
                                                      [*objs, objs[group.index(src)]], strict=True):
            assert (r, n) == (want_r, want_n)
            self.same(x, want_x)


LIMITS = engine._EVERYBODY, engine.SLOT, engine.INLINE, engine._STEP, engine.CHUNK


def tensor(x: np.ndarray) -> Tensor:
    return Tensor.from_numpy(np.ascontiguousarray(x).reshape(x.shape))


def pieces(x: np.ndarray, dim: int, sizes: list[int]) -> list[np.ndarray]:
    return np.split(x, np.cumsum(sizes)[:-1], dim)


def joined(xs: list[np.ndarray], dim: int) -> np.ndarray:
    if xs[0].dtype == BFLOAT16:
        return np.concatenate([x.view(np.uint16) for x in xs], dim).view(BFLOAT16)
    return np.concatenate(xs, dim)


# -- a world ---------------------------------------------------------------------------------------------------------------
def run(size: int, seed: int, cases: list[list]) -> tuple[int, dict[int, dict]]:
    """Runs cases until one ends the world; the first that some rank did not come to, and what was wrong in which."""
    progress = mmap.mmap(-1, 4096)
    ranks = []
    for rank in range(size):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _rank(rank, size, seed, cases, progress, write)
        os.close(write)
        ranks.append((pid, read))
    wrong: dict[int, dict] = {}
    lost: dict[int, dict] = {}  # told of another rank's end
    ended = []
    for rank, (pid, read) in enumerate(ranks):
        with os.fdopen(read) as f:
            for line in f:
                at, what = json.loads(line)
                (lost if what.startswith("PeerLost") else wrong).setdefault(at, {})[rank] = what
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            ended.append(struct.unpack_from("I", progress, 4 * rank)[0])
        if status < 0:
            wrong.setdefault(ended[-1], {})[rank] = f"died of signal {-status}"
    if ended and not any(at >= min(ended) for at in wrong):
        wrong.update(lost)
    return min(ended, default=len(cases)), wrong


def _rank(rank: int, size: int, seed: int, cases: list[list], progress: mmap.mmap, write: int) -> None:
    at, me = 0, None

    def tell(what: str) -> None:
        os.write(write, (json.dumps([at, what[:1000]]) + "\n").encode())
    try:
        me = Rank(rank, size, seed)
        for at, case in enumerate(cases):
            struct.pack_into("I", progress, 4 * rank, at)
            try:
                me.run(case)
            except AssertionError as e:  # the ranks are in step
                tell(f"wrong: {e}")
        me.backend.barrier(tuple(range(size)))
        me.backend.close()
    except BaseException as e:
        tell(f"{type(e).__name__}: {e}")
        if me is not None:
            me.backend.close(f"{type(e).__name__}: {e}".split("\n")[0])
        os._exit(1)
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=list(range(2, 9)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="of the grid only each so many-th case")
    parser.add_argument("--case", type=json.loads, help="one case, as a failing line prints it")
    args = parser.parse_args()
    out = {"seed": args.seed, "ranks": {}, "cases": 0, "wrong": 0}
    started = time.time()
    for size in args.ranks:
        cases = [args.case] if args.case else list(grid(size))[size % args.every::args.every]
        begun, left, wrong = time.time(), cases, 0
        while left and wrong < MOST_FAILURES:
            until, failures = run(size, args.seed, left)
            for at, told in sorted(failures.items()):
                again = f"--ranks {size} --seed {args.seed} --case '{json.dumps(left[at])}'"
                print(f"tests/long/fuzz_shm.py {again}: {told}", file=sys.stderr)
            wrong += len(failures)
            left = [case for at, case in enumerate(left) if at >= until and at not in failures]
        out["ranks"][size] = {"cases": len(cases) - len(left), "wrong": wrong, "seconds": round(time.time() - begun, 1)}
        out["cases"] += len(cases) - len(left)
        out["wrong"] += wrong
    out["seconds"] = round(time.time() - started, 1)
    print(json.dumps(out))
    return int(out["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
