# SPDX-License-Identifier: Apache-2.0
"""Real ranks: bfloat16 with fewer elements than ranks; which processes and threads may communicate."""
import _thread
import os
import threading

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from ms_dtensor import comm, value_and_grad
from tests.operands import R, S, data, placed
from tests.support import array, counted, equal


def _wide(x):
    return array(x).astype(np.float32)


def bfloat16_of_fewer_elements_than_ranks(world, line):
    group, me = comm.group(tuple(range(4))), world.rank
    for n in range(10):
        numbers = np.arange(1, n + 1, dtype=np.float32) / 4
        x = Tensor(numbers, ms.bfloat16)
        if n:
            dx = placed(x, line, S(0))
            with counted() as count:
                value, grad = value_and_grad(lambda t: (t * t).mean(), 0)(dx)
                whole = _wide(value)
            assert value.dtype == grad.dtype == ms.bfloat16
            assert n == 1 or count == {("all_reduce", "forward"): 1}, count  # one element is cheaper gathered
            np.testing.assert_allclose(whole, np.mean(numbers ** 2), rtol=2 ** -6)
            np.testing.assert_allclose(_wide(grad), 2 * numbers / n, rtol=2 ** -6)
        sizes = [n // 2, 0, n - n // 2, 0]
        mine = np.split(numbers, np.cumsum(sizes)[:3])[me]
        part = group.reduce_scatter(x, "sum", 0, sizes)
        for got, want in (
            (group.all_reduce(x), 4 * numbers), (group.all_reduce(x, "max", async_op=True).wait(), numbers),
            (part, 4 * mine), (group.all_gather(part, 0, sizes), 4 * numbers), (group.broadcast(x, 2), numbers),
            (group.scatter(x if me == 1 else None, 0, sizes, 1, shape=(n,), dtype=ms.bfloat16), mine),
            (group.all_to_all(mint.reshape(x, (1, n)), 1, sizes, 0, [1] * 4), np.stack([mine] * 4)),
            (group.exchange([((me + 1) % 4, x)], [((me + 3) % 4, (n,), ms.bfloat16)])[0], numbers),
        ):
            assert got.dtype == ms.bfloat16 and got.shape == want.shape
            np.testing.assert_array_equal(_wide(got), want)


def _step(mesh):
    x = data(3, 5, 4)
    dx = placed(x, mesh, S(0))
    w = placed(data(4, 4, 3), mesh, R)
    with counted() as count:
        value, grad = value_and_grad(lambda t: (mint.matmul(dx, t) ** 2).sum(), 0)(w)
        equal(grad, 2 * array(x).T @ array(x) @ array(data(4, 4, 3)))
        equal(value, ((array(x) @ array(data(4, 4, 3))) ** 2).sum())
    assert count[("all_reduce", "backward")] == 1, count


def _told(call):
    try:
        call()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


def gradients_communicate_on_the_owners_thread_and_on_mindspores(world, line):
    done, told = threading.Event(), []
    _step(line)
    other = threading.Thread(target=lambda: told.append(_told(lambda: _step(line))), name="other")
    other.start()
    other.join()
    assert told[0].startswith("CommError: For 'all_reduce', another thread communicates"), told
    _step(line)
    # Python has not started this one, nor those on which MindSpore runs a backward where ops are asynchronous.
    _thread.start_new_thread(lambda: (told.append(_told(lambda: _step(line))), done.set()), ())
    done.wait()
    assert told[1] == "", told
    _step(line)


def a_forked_child_is_refused_and_its_parent_goes_on(world):
    group = comm.group(tuple(range(4)))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, _told(group.barrier).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as f:
        said = f.read()
    os.waitpid(pid, 0)
    assert said.startswith("CommError: For 'barrier', this process is a forked child of the rank's."), said
    group.barrier()
