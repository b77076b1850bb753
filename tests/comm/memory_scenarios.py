# SPDX-License-Identifier: Apache-2.0
"""What forked ranks do about memory: what calls keep, what results own, what is gathered into windows."""
import contract
import numpy as np

from ms_dtensor.comm.parts import Parts


def shared_memory():
    """Bytes of shared pages this process has touched, its own and others'."""
    with open("/proc/self/status") as f:
        return int(next(line for line in f if line.startswith("RssShmem")).split()[1]) << 10


def bounded(e, rank, size):
    """A reduction keeps no more than its chunks; results of ever other sizes leave no more than the arena keeps."""
    world = tuple(range(size))
    x = np.ones(16 << 20, np.float32)
    e.reduce_scatter(x, "sum", 0, [x.size // size] * size, world)
    e.exchange([((rank + 1) % size, x)], [((rank - 1) % size, x.shape, x.dtype)])
    reducing = shared_memory()
    for i in range(8):
        part = x[:(1 + i) << 20]
        e.all_reduce(part, "sum", world)
        e.all_gather(part, 0, [part.size] * size, world)
        e.all_to_all(part.reshape(size, -1), 0, [1] * size, 1, [part.size // size] * size, world)
        e.broadcast(part, 0, world)
    e.barrier(world)
    return reducing, shared_memory()


def held(e, rank, size):
    """Results own their memory: later calls do not change them, and what is freed is used again."""
    world, kept = tuple(range(size)), []
    for k in range(12):
        got = e.all_reduce(np.full(200_000, rank + k, np.int64), "sum", world)
        e.broadcast(np.full(200_000, k, np.int64), k % size, world)
        if k % 2:
            kept.append((k, got))
        for was, array in kept:
            assert (array == sum(world) + size * was).all()
    addresses = set()
    for _ in range(6):
        addresses.add(e.all_reduce(np.ones(200_000), "sum", world).ctypes.data)
    assert len(addresses) <= 2
    return True


def parted(e, rank, size):
    """Tensors that are gathered into windows, and reduced from where they are: cut along any dim, unevenly."""
    world, rng = tuple(range(size)), np.random.default_rng(3)
    uneven = [5] + [2] * (size - 1)
    shapes, dims = [(sum(uneven), 70_001), (7, 2 * size), (size - 1,), (3, sum(uneven), 2)], [0, 1, 0, 1]
    sizes = [uneven, [2] * size, [1] * (size - 1) + [0], uneven]
    parts = Parts(shapes, dims, sizes)
    wholes = [rng.normal(size=s).astype(np.float32) for s in shapes]
    window, other = e.window(sum(w.nbytes for w in wholes)), e.window(1 << 20)
    seen = [np.ndarray(s, np.float32, window, at * 4) for s, at in zip(shapes, parts.starts)]
    for turn in range(3):
        pieces = [(w + turn)[parts.index(i, rank)] for i, w in enumerate(wholes)]
        done = e.all_gather_into(pieces, window, parts, np.dtype(np.float32), world, turn == 1)
        if turn == 1:
            done.wait()
        for got, w in zip(seen, wholes):
            contract.same(got, w + turn)
        window.release()
        assert not any(x.any() for x in seen)
        other.claim()  # takes what was under the first
        other[...] = 255
        other.release()
    low = [w.astype(np.float16) for w in wholes]
    half = e.window(sum(x.nbytes for x in low))
    e.all_gather_into([w[parts.index(i, rank)] for i, w in enumerate(wholes)], half, parts, np.dtype(np.float16), world)
    for x, s, at in zip(low, shapes, parts.starts):
        contract.same(np.ndarray(s, np.float16, half, at * 2), x)
    for numbers in ((0, 1, 2, 3), (3, 1), (2,)):
        for op in ("sum", "max"):
            mine = {i: wholes[i] * (rank + 1) for i in numbers}
            got = e.reduce_scatter_from(mine, parts, op, world)
            all_ = [np.stack([wholes[i] * (r + 1) for r in world]) for i in numbers]
            want = [(a.sum(0) if op == "sum" else a.max(0))[parts.index(i, rank)].reshape(-1) for i, a in zip(numbers, all_)]
            np.testing.assert_allclose(got, np.concatenate(want), 1e-5, 1e-5)
    return True
