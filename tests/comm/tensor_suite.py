# SPDX-License-Identifier: Apache-2.0
"""Run by msrun: the contract on tensors, through `Group`, on a real backend; then HCCL's and NCCL's code on their emulator.

The world is MCCL's; the shared-memory backend is made beside it, so that one launch serves both.
"""
import copy
import os
import sys
import time

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from contract import ALL, CASES, groups  # noqa: E402

from ms_dtensor import DeviceMesh, comm  # noqa: E402
from ms_dtensor.comm.agree import Agreement  # noqa: E402
from ms_dtensor.comm.shm.backend import ShmBackend  # noqa: E402
from ms_dtensor.comm.shm.rendezvous import job_name  # noqa: E402
from ms_dtensor.errors import CollectiveMismatch  # noqa: E402
from tests.comm.left import files_of  # noqa: E402
from tests.msrun import report  # noqa: E402
from tests.rehearsal.emulator import emulated  # noqa: E402
from tests.rehearsal.kernels import stood_in  # noqa: E402

DEVICE = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")


class Tensors:
    """A backend as the contract sees it: arrays become tensors and back."""

    def __init__(self, backend, exact=True, dtypes=ALL):
        self._backend, self.exact, self.dtypes = backend, exact, dtypes

    def _group(self, ranks):
        return comm.Group(self._backend, ranks)

    def _in(self, x):
        return Tensor.from_numpy(np.array(x, order="C"))

    def _out(self, t):
        assert type(t) is Tensor, type(t)
        return t.asnumpy()

    def _tensor(self, method, x, ranks, *args):
        t = self._in(x)
        work = getattr(self._group(ranks), method)(t, *args, async_op=True)
        first = work.wait()
        again = getattr(self._group(ranks), method)(t, *args)
        np.testing.assert_array_equal(self._out(first), self._out(again))  # async or not, and twice: the same bits
        np.testing.assert_array_equal(t.asnumpy(), x)
        if again.size and t.size:
            before = again.asnumpy().copy()
            t.asnumpy()[...] = 0  # a result must not alias the input
            np.testing.assert_array_equal(again.asnumpy(), before)
        return self._out(again)

    def all_reduce(self, x, op, ranks):
        out = self._tensor("all_reduce", x, ranks, op)
        if self._backend.on_host and x.size:
            place = self._backend.buffer(x.size, x.dtype)
            place[...] = x.reshape(-1)
            self._group(ranks).all_reduce_(Tensor.from_numpy(place), op).wait()
            np.testing.assert_array_equal(place, out.reshape(-1))
        return out

    def all_gather(self, x, dim, sizes, ranks):
        return self._tensor("all_gather", x, ranks, dim, sizes)

    def reduce_scatter(self, x, op, dim, sizes, ranks):
        return self._tensor("reduce_scatter", x, ranks, op, dim, sizes)

    def all_to_all(self, x, sd, ss, cd, cs, ranks):
        return self._tensor("all_to_all", x, ranks, sd, ss, cd, cs)

    def all_to_all_rows(self, x, sends, recvs, ranks):
        return self._tensor("all_to_all_rows", x, ranks, sends, recvs)

    def broadcast(self, x, src, ranks):
        return self._tensor("broadcast", x, ranks, src)

    def scatter(self, x, dim, sizes, src, ranks, shape, dtype):
        dtype = ms.Tensor(np.zeros(1, dtype)).dtype
        return self._out(self._group(ranks).scatter(None if x is None else self._in(x), dim, sizes, src,
                                                    shape=shape, dtype=dtype))

    def exchange(self, sends, recvs):
        world = tuple(range(self._backend.size))
        dtypes = {np.dtype(d): Tensor(np.zeros(1, d)).dtype for _, _, d in recvs}
        got = self._group(world).exchange([(r, self._in(x)) for r, x in sends],
                                          [(r, s, dtypes[np.dtype(d)]) for r, s, d in recvs])
        return [self._out(t) for t in got]

    def send(self, x, dst):
        self._group(tuple(range(self._backend.size))).send(self._in(x), dst)

    def recv(self, shape, dtype, src):
        world = self._group(tuple(range(self._backend.size)))
        return self._out(world.recv(shape, Tensor(np.zeros(1, dtype)).dtype, src))

    def barrier(self, ranks):
        self._group(ranks).barrier()

    def all_gather_object(self, obj, ranks):
        return self._group(ranks).all_gather_object(obj)

    def broadcast_object(self, obj, src, ranks):
        return self._group(ranks).broadcast_object(obj, src)


def bfloat16(backend, exact):
    """MindSpore's own bfloat16, which NumPy does not know."""
    n, me = backend.size, backend.rank
    world = comm.Group(backend, range(n))
    xs = [np.random.default_rng(i).normal(size=(n, 4)).astype(np.float32) for i in range(n)]
    mine = Tensor(xs[me], ms.bfloat16)
    rounded = [Tensor(x, ms.bfloat16).asnumpy().astype(np.float32) for x in xs]
    total = rounded[0]
    for x in rounded[1:]:
        total = total + x
    want = Tensor(total, ms.bfloat16).asnumpy().astype(np.float32)
    got = world.all_reduce(mine, "sum")
    assert got.dtype == ms.bfloat16
    near = dict(rtol=0, atol=0) if exact else dict(rtol=2**-6, atol=0.05)  # devices round at each step
    np.testing.assert_allclose(got.asnumpy().astype(np.float32), want, **near)
    part = world.reduce_scatter(mine, "sum", 0, [1] * n).asnumpy().astype(np.float32)
    np.testing.assert_allclose(part, want[me:me + 1], **near)
    wide = world.all_gather(mine, 1, [4] * n)
    assert wide.dtype == ms.bfloat16
    np.testing.assert_array_equal(wide.asnumpy().astype(np.float32), np.concatenate(rounded, 1))
    template = mine if me == 0 else Tensor(np.zeros((n, 4)), ms.bfloat16)
    np.testing.assert_array_equal(world.broadcast(template, 0).asnumpy().astype(np.float32), rounded[0])
    got = world.exchange([((me + 1) % n, mine)], [((me - 1) % n, (n, 4), ms.bfloat16)])[0]
    np.testing.assert_array_equal(got.asnumpy().astype(np.float32), rounded[me - 1])


def desync(backend):
    """The library compares the calls where the backend does not."""
    backend._agreement = Agreement(1, backend._gather_number, backend.all_gather_object)
    g = comm.Group(backend, range(backend.size))
    for odd in range(backend.size):
        try:
            g.all_reduce(Tensor(np.ones(3 + (backend.rank == odd), np.float32)))
        except CollectiveMismatch as e:
            assert f"rank(s) {odd} made another call" in str(e) and __file__ in str(e), e
        else:
            raise AssertionError("unnoticed")
        g.barrier()


def recorded():
    """A real collective is recorded with this file and line."""
    world = comm.current_world()
    g = comm.group(range(world.size), ("tp",))
    with comm.record() as events:
        with comm.annotate(phase="backward", implicit=True, src="a", dst="b"):
            g.all_reduce(Tensor(np.ones((2, 3), np.float32)))
        g.barrier()
    first, second = events
    assert (first.op, first.axes, first.shape, first.bytes) == ("all_reduce", ("tp",), (2, 3), 2 * 24 * 3 // 4), first
    assert (first.phase, first.implicit, first.src, first.dst) == ("backward", True, "a", "b")
    assert first.site.startswith(__file__ + ":"), first.site
    assert second.phase == "forward" and second.op == "barrier"


def named(world):
    """Where the backend is MindSpore's own, a mesh's group is what MindSpore's own collectives take."""
    mesh = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("dp", "tp"))
    tp, everyone = mesh.get_group("tp"), mesh.get_group()
    partner = world.rank ^ 1
    assert isinstance(tp, str) and tp is mesh.get_group("tp") and tp.ranks == tuple(mesh.mesh[world.rank // 2].tolist())
    assert repr(tp).startswith("Group(mccl, (") and copy.deepcopy(tp) == str(tp) and type(copy.deepcopy(tp)) is str
    mine = np.array([1.5, -2.0], np.float32) * (world.rank + 1)
    sums = mine / (world.rank + 1) * (world.rank + partner + 2)
    assert np.array_equal(ops.AllReduce(group=tp)(Tensor(mine)).asnumpy(), sums)
    x = Tensor(mine)
    mint.distributed.all_reduce(x, group=tp)
    assert np.array_equal(x.asnumpy(), sums)
    parts = [Tensor(mine * 0), Tensor(mine * 0)]
    mint.distributed.all_gather(parts, Tensor(mine), group=tp)
    low, high = sorted((world.rank, partner))
    assert [p.asnumpy()[0] for p in parts] == [1.5 * (low + 1), 1.5 * (high + 1)], "in order of rank"
    assert mint.distributed.get_world_size(everyone) == 4 and mint.distributed.get_rank(tp) == world.rank % 2
    assert np.array_equal(tp.all_reduce(Tensor(mine)).asnumpy(), sums), "and what our own group can"
    assert not isinstance(comm.group(tp.ranks), str)


def main():
    started = time.time()
    comm.set_cpu_backend("mccl")
    world = comm.start("cpu")
    assert comm.start("CPU") is world and world.backend.name == "mccl"
    shm = ShmBackend(world.rank, world.size, os.environ["MS_SCHED_PORT"], timeout=60)
    times, count = {"start": time.time() - started}, 0

    def timed(name, tensors, ranks):
        t = time.time()
        for case in CASES:
            case(tensors, world.rank, ranks)
        times[name] = round(time.time() - t, 1)
        return len(CASES)
    reverse, half = groups(world.size, world.rank)[2], groups(world.size, world.rank)[1]
    for ranks in groups(world.size, world.rank):
        count += timed(f"shm {len(ranks)}", Tensors(shm), ranks)
    bfloat16(shm, exact=True)
    for kind, ranks in (("hccl", reverse), ("nccl", half)):
        backend = emulated(kind, shm)
        with stood_in(backend.double, clock=False):
            count += timed(kind, Tensors(backend, exact=False, dtypes=DEVICE), ranks)
            bfloat16(backend, exact=False)
            desync(backend)
        backend.double.close()
    for ranks in (tuple(range(world.size)), half[::-1]):  # each communicator of MCCL costs a second
        count += timed(f"mccl {len(ranks)}", Tensors(world.backend, exact=False), ranks)
    bfloat16(world.backend, exact=False)
    desync(world.backend)
    recorded()
    named(world)
    job = job_name(os.environ["MS_SCHED_PORT"])
    report({"cases": count, "times": times, "job": job, "files": files_of([job])})
    shm.close()


if __name__ == "__main__":
    main()
