# SPDX-License-Identifier: Apache-2.0
"""What the forked ranks of `worker.py` do: the contract, and the ways a job can go wrong."""
import _thread
import os
import signal
import threading
import time

import contract
import numpy as np
from memory_scenarios import bounded, held, parted  # noqa: F401  worker.py asks this module for all

BESIDE = os.pipe()  # of all ranks, which are forks: what they tell each other without the engine


def suite(e, rank, size):
    return contract.run_all(contract.Arrays(e), rank, size)


def inplace(e, rank, size):
    """All-reduces that write into what they are given: a buffer, the beginning of one, and other memory."""
    world, count = tuple(range(size)), (3 << 20) // 4 + 5
    xs = contract.inputs(5, size, (count,), "float32")
    for taken, where in ((count, e.buffer(count, np.float32)), (count - 1000, e.buffer(count, np.float32)),
                         (count, np.empty(count, np.float32)), (100, e.buffer(100, np.float32)),
                         (0, e.buffer(10, np.float32))):
        x = where[:taken]
        x[...] = xs[rank][:taken]
        where[taken:] = 7.0
        before = e.sent
        e.all_reduce(x, "sum", world, inplace=True)
        contract.same(x.copy(), contract.reduced([v[:taken] for v in xs], "sum"))
        assert e.sent - before <= 2 * (size - 1) * (-(-taken // size) + 64) * 4  # shares are rounded up to 64 elements
        e.all_reduce(x, "max", world, inplace=True)  # of equal operands
        contract.same(x.copy(), contract.reduced([v[:taken] for v in xs], "sum"))
        assert (where[taken:] == 7.0).all()
    return True


def bfloat16(e, rank, size):
    import ml_dtypes
    bf = ml_dtypes.bfloat16
    world = tuple(range(size))
    xs = [np.random.default_rng(i).normal(size=5000).astype(bf) for i in range(size)]
    xs[0][:4] = [np.inf, -np.inf, np.nan, 3.3e38]
    want = xs[0].astype(np.float32)
    for x in xs[1:]:
        want = want + x.astype(np.float32)
    got = e.all_reduce(xs[rank], "sum", world)
    assert got.dtype == bf
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(bf).astype(np.float32))
    wide = e.all_gather(xs[rank].reshape(50, 100), 1, [100] * size, world)
    np.testing.assert_array_equal(wide.astype(np.float32),
                                  np.concatenate([x.reshape(50, 100) for x in xs], 1).astype(np.float32))
    return True


def overtaking(e, rank, size):
    """Ranks sleep at random: every result must still be the right one, in groups that interleave."""
    rng = np.random.default_rng(rank)
    world, pair = tuple(range(size)), tuple(sorted((rank, rank ^ 1)))
    for k in range(60):
        if rng.random() < 0.2:
            time.sleep(0.002)
        if k % 3 and max(pair) == size:
            continue
        g = pair if k % 3 else world
        n = (8, 3000, 12000)[k % 3]
        assert (e.all_reduce(np.full(n, k + rank, np.int64), "max", g) == k + max(g)).all()
    return True


def killed(e, rank, size):
    """One rank is killed while the others wait for it or work with each other."""
    world = tuple(range(size))
    e.barrier(world)
    victim = size - 1
    pids = e.all_gather_object(os.getpid(), world)
    if rank == victim:
        os.write(1, f'{{"victim": {os.getpid()}, "at": {time.monotonic()}}}\n'.encode())
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        while True:
            e.all_reduce(np.ones(4), "sum", world)
    except Exception as error:
        took = time.monotonic() - start
        assert type(error).__name__ == "PeerLost", error
        assert f"rank {victim} (pid {pids[victim]}) died" in str(error), error
        try:
            e.barrier(world)
        except Exception as again:
            assert "has ended" in str(again)
        else:
            raise AssertionError("a broken engine went on")
        return took


def killed_with_a_child(e, rank, size):
    """The dead rank has forked a process that keeps its sockets open, as a data loader does."""
    world = tuple(range(size))
    e.barrier(world)
    if rank == 1:
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    e.barrier(world)


def killed_elsewhere(e, rank, size):
    """Ranks 0 and 1 wait for rank 3 only, which computes; rank 2 dies: all notice, though none waits for it."""
    e.barrier(tuple(range(size)))
    if rank == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        time.sleep(1)
    e.exchange([], [(0 if rank == 3 else 3, (1,), np.dtype("float32"))])


def circle(e, rank, size):
    e.exchange([], [((rank + 1) % size, (1,), np.dtype("float32"))])


def mismatch_and_on(e, rank, size):
    """After a mismatch at one and the same point the caller may catch it and go on."""
    world = tuple(range(size))
    for k in range(4):
        try:
            e.all_reduce(np.ones(3 + 10_000 * (rank == k % size)), "sum", world)
        except Exception as error:
            assert type(error).__name__ == "CollectiveMismatch" and f"rank(s) {k % size} made" in str(error), error
        else:
            raise AssertionError("unnoticed")
        contract.same(e.all_reduce(np.full(2000, float(rank)), "sum", world), np.full(2000, float(sum(world))))
    return True


def leaves_early(e, rank, size):
    """A rank that ends normally while the others go on without it harms nobody."""
    world = tuple(range(size))
    e.all_reduce(np.ones(4), "sum", world)
    if rank == size - 1:
        return True
    time.sleep(0.1)
    rest = world[:-1]
    for _ in range(5):
        e.all_reduce(np.ones(100_000), "sum", rest)
    return True


def leaves_and_is_missed(e, rank, size):
    world = tuple(range(size))
    e.barrier(world)
    if rank == size - 1:
        return True
    e.barrier(world)


def late(e, rank, size):
    if rank == size - 1:
        time.sleep(1.2)
        return True
    e.barrier(tuple(range(size)))


def raises(e, rank, size):
    world = tuple(range(size))
    e.barrier(world)
    if rank == size - 1:
        raise ValueError("boom")
    e.all_reduce(np.ones(3), "sum", world)


def raises_with_unread_messages(e, rank, size):
    """A rank ends while messages for it are unread: what it says last is read all the same."""
    world = tuple(range(size))
    if rank:
        e.exchange([(0, np.arange(10.0))], [])
    e.barrier(world)
    if rank == 0:
        raise ValueError("boom")
    time.sleep(0.2)  # it has gone
    e.barrier(world)


def sends_to_one_that_ended(e, rank, size):
    """A rank leaves after messages to others, who learn of it when they send to it; its process goes on for a while."""
    world = tuple(range(size))
    e.barrier(world)
    if rank == 0:
        e.exchange([(r, np.arange(10.0)) for r in world[1:] for _ in range(3)], [])
        e.close("ValueError: boom")
        time.sleep(1)
        return
    time.sleep(0.3)
    e.exchange([(0, np.arange(10.0))], [])


def later(e, rank, size):
    """Results that come while the caller goes on, in order with calls that do not."""
    world = tuple(range(size))
    xs = [np.full(n, float(rank + n)) for n in (5, 70_000, 900_000)]
    waiting = [e.all_reduce(x, "sum", world, async_op=True) for x in xs]
    waiting.append(e.all_gather(np.full(3, rank), 0, [3] * size, world, async_op=True))
    total = e.all_reduce(np.ones(4), "sum", world)
    assert (total == size).all()
    for x, result in zip(xs, waiting):
        assert (result.wait() == sum(r + x.size for r in world)).all()
        assert result.wait() is result.out
    assert waiting[3].wait().tolist() == [r for r in world for _ in range(3)]
    for _ in world[1:] if rank == 0 else ():
        os.read(BESIDE[0], 1)  # rank 0 comes when the others' calls have returned
    slow = e.broadcast(np.full(500_000, rank, np.int8), 0, world, async_op=True)
    os.write(BESIDE[1], b"." if rank else b"")
    assert (slow.wait() == 0).all()
    bad = e.all_reduce(np.ones(3 + (rank == 1)), "sum", world, async_op=True)
    try:
        bad.wait()
    except Exception as error:
        assert type(error).__name__ == "CollectiveMismatch" and (
            "rank(s) 1 made" if size > 2 else "ranks 0, 1 made different calls") in str(error), error
    else:
        raise AssertionError("unnoticed")
    return True


def counted(e, rank, size):
    """Bytes this rank sent in each collective, by the engine's own counter; even and uneven, small and large."""
    world, out = tuple(range(size)), {}
    uneven = [4 + i for i in range(size)]

    def count(name, call):
        e.barrier(world)
        before = e.sent
        call()
        out[name] = e.sent - before
    for name, rows in (("small", 1), ("large", 8192)):
        n = 64 * size
        x = np.ones((n, rows), np.float32)
        part, cut = x[:64], [64] * size
        count(f"all_reduce {name}", lambda x=x: e.all_reduce(x, "sum", world))
        count(f"all_gather {name}", lambda part=part, cut=cut: e.all_gather(part, 0, cut, world))
        count(f"reduce_scatter {name}", lambda x=x, cut=cut: e.reduce_scatter(x, "sum", 0, cut, world))
        wide = np.ones((n, 2, rows), np.float32)
        count(f"all_to_all {name}", lambda x=wide, cut=cut: e.all_to_all(x, 0, cut, 1, [2] * size, world))
        count(f"broadcast {name}", lambda x=x: e.broadcast(x, 0, world))
        mine = np.ones((uneven[rank], rows), np.float32)
        whole = np.ones((sum(uneven), rows), np.float32)
        count(f"uneven all_gather {name}", lambda x=mine: e.all_gather(x, 0, uneven, world))
        count(f"uneven reduce_scatter {name}", lambda x=whole: e.reduce_scatter(x, "sum", 0, uneven, world))
        count(f"uneven all_to_all {name}", lambda x=whole: e.all_to_all(x[:, None], 0, uneven, 1, [1] * size, world))
        count(f"scatter {name}", lambda x=whole: e.scatter(x, 0, uneven, 0, world, shape=x.shape, dtype=x.dtype))
    return out


def refusal(call):
    """Class and text of what `call` raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def forks(e, rank, size):
    """A forked child, as a data loader's: it may not communicate, and its end is not its parent's."""
    world = tuple(range(size))
    e.barrier(world)
    slow = e.all_reduce(np.ones(3), "sum", world, async_op=True)  # the child has no thread to wait for
    read, write = os.pipe()
    if os.fork() == 0:
        said = [refusal(lambda: e.all_reduce(np.ones(3), "sum", world)), refusal(lambda: e.exchange([(0, np.ones(3))], [])),
                refusal(lambda: e.all_reduce(np.ones(3), "sum", world, async_op=True).wait())]
        e.close()  # as `world` does at exit
        e.close("ValueError: boom")
        os.write(write, "\0".join(said).encode())
        os._exit(0)
    os.close(write)
    said = os.fdopen(read).read().split("\0")
    os.wait()
    slow.wait()
    for k in range(5):
        assert (e.all_reduce(np.full(3, rank + k), "sum", world) == sum(world) + size * k).all()
    return said


def threads(e, rank, size):
    """Two threads whose equal calls come in another order on every rank; after them the thread that began."""
    world, said = tuple(range(size)), {}
    e.barrier(world)

    def work(k):
        time.sleep(0.1 * ((k + rank) % 2))
        try:
            said[k] = e.all_reduce(np.full(3, 10.0 ** k), "sum", world).tolist()
        except Exception as error:
            said[k] = f"{type(error).__name__}: {error}"
    running = [threading.Thread(target=work, args=(k,), name=f"worker {k}") for k in range(2)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    e.barrier(world)
    return said


def threads_in_turn(e, rank, size):
    """A thread after another one has ended, and threads that Python did not start, as MindSpore's for a backward."""
    world = tuple(range(size))

    def add():
        assert (e.all_reduce(np.full(3, rank), "sum", world) == sum(world)).all()
    failed = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: failed.append(refusal(add)))
        thread.start()
        thread.join()
    add()
    done = threading.Event()
    _thread.start_new_thread(lambda: (failed.append(refusal(add)), done.set()), ())
    done.wait()
    add()
    return failed


def objects(e, rank, size):
    """What ranks send each other as objects; what they cannot send is refused on all of them."""
    world = tuple(range(size))
    obj = {"shapes": ((rank, 3), ()), 1: [None, True, 2.5, float("inf"), -0.0, 1 << 70, "\ud800 ö"], (2, "a"): {3, 4},
           "bytes": b"\x00\xff", "c": 1 + 2j, "n": np.float32(0.1), "a": np.arange(6, dtype=">i2").reshape(2, 3), "e": ()}
    got = e.all_gather_object(obj, world)[rank]
    assert repr(got) == repr(obj) and got["a"].dtype == obj["a"].dtype, got
    assert e.broadcast_object(("a", rank), 1, world) == ("a", 1)
    said = [refusal(lambda: e.all_gather_object(Evil() if rank == 1 else 3, world)),
            refusal(lambda: e.broadcast_object([Evil()], 1, world))]
    assert e.all_gather_object(rank, world) == list(world)
    return said


class Evil:
    """Runs something where it is unpickled."""

    def __reduce__(self):
        return os._exit, (7,)
