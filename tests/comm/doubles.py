# SPDX-License-Identifier: Apache-2.0
"""Doubles of MindSpore's device communication, strict about what its documentation promises.

They record each call, refuse what a device would refuse (uneven, empty, 0-d, unknown communicators), and move the data
over another backend, so that the packing of the HCCL and NCCL backends is checked by value on real ranks.
"""
from __future__ import annotations

from mindspore import Tensor

from ms_dtensor.comm.hccl import HcclBackend
from ms_dtensor.comm.nccl import NcclBackend


class Handle:
    """An asynchronous call: the output is filled by `wait`, not before."""

    def __init__(self, fill):
        self._fill = fill

    def wait(self):
        self._fill()


class Double:
    """What both doubles know: the communicators made, the calls so far."""

    def __init__(self, under):
        self.under, self.calls = under, []
        self.comms = {"world": tuple(range(under.size))}

    def create_group(self, name, ranks):
        assert len(name) <= 120 and name not in self.comms and sorted(ranks) == list(ranks)
        assert self.under.rank in ranks
        self.calls.append(("create_group", name, tuple(ranks)))
        self.comms[name] = tuple(ranks)

    def note(self, name, comm, *tensors, **kw):
        for t in tensors:
            assert type(t) is Tensor and t.ndim == 1 and t.shape[0] > 0, (name, t)
            assert not str(t.dtype).startswith(("Bool", "Complex")), t.dtype
        ranks = self.comms[comm]
        self.calls.append((name, comm, *[tuple(t.shape) for t in tensors], kw))
        return ranks


def write(out, value):
    assert out.shape == value.shape and out.dtype == value.dtype, (out.shape, value.shape, out.dtype, value.dtype)
    out.asnumpy()[...] = value.asnumpy()


class MintDistributed(Double):
    """`mindspore.mint.distributed` as HCCL serves it."""

    def _finish(self, out, value, async_op):
        if async_op:
            return Handle(lambda: write(out, value))
        return write(out, value)

    def all_reduce(self, tensor, op="sum", group=None, async_op=False):
        ranks = self.note("all_reduce", group, tensor, op=op)
        return self._finish(tensor, self.under.all_reduce(tensor, op, ranks), async_op)

    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None, async_op=False):
        ranks = self.note("all_gather_into_tensor", group, output_tensor, input_tensor)
        n = input_tensor.shape[0]
        assert output_tensor.shape[0] == n * len(ranks)
        return self._finish(output_tensor, self.under.all_gather(input_tensor, 0, [n] * len(ranks), ranks), async_op)

    def reduce_scatter_tensor(self, output, input, op="sum", group=None, async_op=False):
        ranks = self.note("reduce_scatter_tensor", group, output, input, op=op)
        assert input.shape[0] == output.shape[0] * len(ranks)
        got = self.under.reduce_scatter(input, op, 0, [output.shape[0]] * len(ranks), ranks)
        return self._finish(output, got, async_op)

    def all_to_all_single(self, output, input, output_split_sizes=None, input_split_sizes=None, group=None,
                          async_op=False):
        ranks = self.note("all_to_all_single", group, output, input)
        return self._finish(output, swap(self.under, input, ranks), async_op)

    def broadcast(self, tensor, src, group=None, async_op=False):
        ranks = self.note("broadcast", group, tensor, src=src)
        return self._finish(tensor, self.under.broadcast(tensor, src, ranks), async_op)

    def P2POp(self, op, tensor, peer, group=None, tag=0):  # noqa: N802  MindSpore's name
        self.note(op, "world", tensor, peer=peer)
        return op, tensor, peer

    def batch_isend_irecv(self, work):
        assert work
        recvs = [(t, p) for op, t, p in work if op == "irecv"]
        got = self.under.exchange([(p, t) for op, t, p in work if op == "isend"],
                                  [(p, tuple(t.shape), t.dtype) for t, p in recvs])

        def fill():
            for (t, _), value in zip(recvs, got):
                write(t, value)
        return [Handle(fill)]


def swap(under, flat, ranks):
    n = len(ranks)
    assert flat.shape[0] % n == 0
    block = flat.shape[0] // n
    import numpy as np
    rows = Tensor.from_numpy(np.ascontiguousarray(flat.asnumpy().reshape(n, 1, block)))
    got = under.all_to_all(rows, 0, [1] * n, 1, [1] * n, ranks)
    return Tensor.from_numpy(got.asnumpy().reshape(-1).copy())


class Primitives(Double):
    """`mindspore.ops` as NCCL serves it: primitives bound to a communicator; point-to-point blocks."""

    def AllReduce(self, op, group):  # noqa: N802
        return lambda x: self.under.all_reduce(x, op, self.note("AllReduce", group, x, op=op))

    def AllGather(self, group):  # noqa: N802
        def call(x):
            ranks = self.note("AllGather", group, x)
            return self.under.all_gather(x, 0, [x.shape[0]] * len(ranks), ranks)
        return call

    def ReduceScatter(self, op, group):  # noqa: N802
        def call(x):
            ranks = self.note("ReduceScatter", group, x, op=op)
            assert x.shape[0] % len(ranks) == 0
            return self.under.reduce_scatter(x, op, 0, [x.shape[0] // len(ranks)] * len(ranks), ranks)
        return call

    def AlltoAll(self, split_count, split_dim, concat_dim, group):  # noqa: N802
        def call(x):
            ranks = self.note("AlltoAll", group, x)
            assert split_count == len(ranks) and split_dim == concat_dim == 0
            return swap(self.under, x, ranks)
        return call

    def Broadcast(self, root_rank, group):  # noqa: N802
        def call(xs):
            ranks = self.note("Broadcast", group, *xs, root=root_rank)
            return (self.under.broadcast(xs[0], ranks[root_rank], ranks),)
        return call

    def Send(self, sr_tag, dest_rank, group):  # noqa: N802
        def call(x):
            self.note("Send", group, x, to=dest_rank, tag=sr_tag)
            self.under.exchange([(dest_rank, x)], [])
            self.under.barrier(tuple(sorted((self.under.rank, dest_rank))))  # NCCL's send waits for its receive
        return call

    def Receive(self, sr_tag, src_rank, shape, dtype, group):  # noqa: N802
        def call():
            self.note("Receive", group, of=src_rank, tag=sr_tag)
            got = self.under.exchange([], [(src_rank, shape, dtype)])[0]
            self.under.barrier(tuple(sorted((self.under.rank, src_rank))))
            return got
        return call


def doubled(kind, under):
    """The backend of a device, on a double that moves its data over `under`."""
    double = (MintDistributed if kind == "hccl" else Primitives)(under)
    make = HcclBackend if kind == "hccl" else NcclBackend
    backend = make(under.rank, under.size, "world", double.create_group, double)
    backend.double = double
    return backend
