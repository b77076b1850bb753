# SPDX-License-Identifier: Apache-2.0
"""MindSpore's device communication over another backend: real data, strict about what the documents promise, and late.

A collective takes place when it is called, but its result is garbage until the compute stream would have it: until its
handle, or that of a later one of the same communicator, is waited for. What it reads must not change before, and what it
writes must not be touched: `watch.py` tells of it, and the bytes at the wait tell of what nobody told. The invariant: a
program that this does not refuse, and whose numbers are right, has every wait that it needs; `times` says how many of them
it could have had later.
"""
import ctypes
import inspect
import math
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import mindspore
import numpy as np
from mindspore import Tensor, mint

from ms_dtensor.comm.hccl import HcclBackend
from ms_dtensor.comm.nccl import NcclBackend
from ms_dtensor.comm.packing import numpy_dtype
from ms_dtensor.internals.names import GroupOptions
from tests.rehearsal.tables import HCCL, NCCL, Rates, wire_share

_data_ptr, _stride, _contiguous = Tensor.data_ptr, Tensor.stride, Tensor.is_contiguous  # a rehearsal counts these
_INIT = inspect.signature(mint.distributed.init_process_group)

RATES = Rates()


class Refused(AssertionError):
    """What a device would refuse, or get wrong in silence."""


def check(held: bool, *why) -> None:
    if not held:
        raise Refused(" ".join(map(str, why)))


def memory(t: Tensor) -> np.ndarray:
    """A tensor's elements where they lie, also of a strided view."""
    dtype, shape = numpy_dtype(t.dtype), tuple(t._shape)
    if not math.prod(shape):
        return np.empty(shape, dtype)
    strides = [s * dtype.itemsize for s in (_stride(t) or ())]
    span = dtype.itemsize + sum(s * (n - 1) for s, n in zip(strides, shape))
    raw = np.frombuffer((ctypes.c_char * span).from_address(_data_ptr(t)), np.uint8)[:dtype.itemsize].view(dtype)
    return np.lib.stride_tricks.as_strided(raw, shape, strides)


# a negative signalling not-a-number: arithmetic makes it quiet, `abs` positive, so that whoever writes changes its bytes
_SPOILED = {"bfloat16": 0xFF81, "float16": 0xFC01, "float32": 0xFF800001, "float64": 0xFFF0000000000001}


def spoil(a: np.ndarray) -> None:
    """Garbage: not-a-number where there is one."""
    name = "bfloat16" if a.dtype.kind == "V" else str(a.dtype)
    if name in _SPOILED:
        a.view(f"u{a.dtype.itemsize}")[...] = _SPOILED[name]
    else:
        a.view(np.uint8)[...] = 0xA5


def span(t: Tensor, values: np.ndarray | None = None) -> tuple[int, int]:
    """The addresses from a tensor's first byte to its last one's end; of no tensor with elements (0, 0)."""
    if values is None:
        values = memory(t)
    if not values.size:
        return 0, 0
    at = _data_ptr(t)
    return at, at + values.itemsize + sum(s * (n - 1) for s, n in zip(values.strides, values.shape))


def meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return max(a[0], b[0]) < min(a[1], b[1])


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


@dataclass
class Task:
    """A collective on its way: what it will have written, and the tensors, which are kept alive as MindSpore does."""

    name: str
    comm: str
    ends: float
    seconds: float
    outputs: list = field(default_factory=list)  # (tensor, its values to come)
    garbage: list = field(default_factory=list)
    inputs: list = field(default_factory=list)  # (tensor, its values when the collective began)
    writes: list = field(default_factory=list)  # spans of addresses
    reads: list = field(default_factory=list)


class Handle:
    """What an asynchronous call returns."""

    def __init__(self, device, task):
        self._device, self._task = device, task

    def wait(self):
        self._device.wait(self._task)


class Device:
    """Communicators, streams, clocks and counts of one rank.

    Attributes:
        calls: the calls so far, by name, communicator and shapes.
        counts: "launches" of collectives; `kernels.py` adds "kernels", "copied" bytes and "syncs", `watch.py` "ops".
        syncs: lines of host synchronisations.
        uploads: lines that make tensors of host values.
        resized: bytes that a storage had after each `resize_` that changed them.
        cann: kernels that CANN would launch for copies, and before it joins, by name (`cann.py`).
        times: of each collective waited for: name, communicator, its seconds, those the compute stream stood still for it.
    """

    def __init__(self, under, table, rates=RATES):
        self.under, self.table, self.rates, self.calls = under, table, rates, []
        self.comms = {"world": tuple(range(under.size))}
        self.buffers = {"world": 2 * table.buffer << 20}
        self.flying: dict[str, list[Task]] = {}
        self.compute, self.stream = 0.0, Counter()
        self.counts: Counter = Counter()
        self.cann: Counter = Counter()
        self.within = False  # an op that is counted
        self.syncs: list[str] = []
        self.uploads: list[str] = []
        self.resized: list[int] = []
        self.times: list[tuple[str, str, float, float]] = []

    # -- communicators -------------------------------------------------------------------------------------------------
    def create_group(self, name, ranks, options=None):
        check(len(name) <= 120 and name not in self.comms and sorted(ranks) == list(ranks), "communicator", name, ranks)
        check(self.under.rank in ranks, "a rank makes a communicator of others", ranks)
        size = self.buffer_size(options)
        told = self.under.all_gather_object((name, size), tuple(ranks))
        check({n for n, _ in told} == {name}, "ranks make communicators in different orders", told)
        check(len(set(told)) == 1, "ranks make a communicator with buffers of different sizes", told)
        self.calls.append(("create_group", name, tuple(ranks)))
        self.comms[name] = tuple(ranks)
        self.buffers[name] = 2 * size << 20
        check(sum(self.buffers.values()) <= self.table.buffers, len(self.comms), "communicators take",
              sum(self.buffers.values()) >> 20, "MiB of the device for their buffers")

    def buffer_size(self, options) -> int:
        """MiB of one of a communicator's two buffers, as its options say; none that this library does not know."""
        check(options is None, type(self).__name__, "takes no options", options)
        return 0

    # -- who touches what is on its way --------------------------------------------------------------------------------
    def touched(self, name, tensors, writes=False):
        """An op is about to read these tensors, and to write the first."""
        for i, t in enumerate(tensors):
            at = span(t)
            for task in (task for queue in self.flying.values() for task in queue):
                check(not any(meet(at, out) for out in task.writes), name, "touches the result of", task.name,
                      "which nobody has waited for", t.shape)
                check(not (writes and i == 0 and any(meet(at, given) for given in task.reads)), name, "writes what",
                      task.name, "reads: it is changed before the wait", t.shape)

    # -- streams -------------------------------------------------------------------------------------------------------
    def begin(self, name, comm, tensors, **kw):
        """Notes a call of tensors that a device takes; the members of its communicator."""
        check(comm in self.comms, name, "on unknown communicator", comm)
        for t in tensors:
            check(type(t) is Tensor and t.ndim > 0 and t.size > 0, name, "takes tensors of a dim that hold something", t)
            check(_contiguous(t), name, "takes contiguous tensors")
            check(str(t.dtype) in self.table.moved, name, "does not move", t.dtype)
        if "op" in kw:
            check(self.table.reduces(kw["op"], str(tensors[0].dtype)), name, "does not reduce", kw["op"], tensors[0].dtype)
        self.calls.append((name, comm, *[tuple(t.shape) for t in tensors], kw))
        self.counts["launches"] += 1
        return self.comms[comm]

    def read(self, t, comm):
        """An operand as the communicator's stream finds it: earlier results of its own are there."""
        values = memory(t).copy()
        at, end = _data_ptr(t), _data_ptr(t) + values.nbytes
        for task in (task for other, queue in self.flying.items() if other != comm for task in queue):
            check(not any(meet((at, end), out) for out in task.writes), "on", comm, "a collective reads the result of",
                  task.name, "on", task.comm, "which nobody has waited for")
        for task in self.flying.get(comm, ()):
            for out, coming in task.outputs:
                lo, hi = max(at, _data_ptr(out)), min(end, _data_ptr(out) + coming.nbytes)
                if lo < hi:
                    here, there = lo - at, lo - _data_ptr(out)
                    values.view(np.uint8).reshape(-1)[here:here + hi - lo] = \
                        coming.view(np.uint8).reshape(-1)[there:there + hi - lo]
        return Tensor.from_numpy(values)

    def end(self, name, comm, inputs, outputs, async_op):
        """The collective has taken place; `outputs`: (tensor, result)."""
        n = len(self.comms[comm])
        nbytes = max((memory(t).nbytes for t in (*inputs, *(o for o, _ in outputs))), default=0)
        seconds = self.rates.latency + wire_share(name, n) * nbytes / self.rates.wire
        starts = max(self.compute, self.stream[comm])  # its stream waits for the compute stream's event
        self.stream[comm] = starts + seconds
        task = Task(name, comm, starts + seconds, seconds)
        for out, result in outputs:
            result = result.asnumpy() if isinstance(result, Tensor) else result
            check(memory(out).shape == result.shape and memory(out).dtype == result.dtype, name, "writes", result.shape,
                  result.dtype, "into", out.shape, out.dtype)
            task.outputs.append((out, result.copy()))
        written = {_data_ptr(out) for out, _ in outputs}
        task.inputs = [(t, memory(t).copy()) for t in inputs if _data_ptr(t) not in written]
        task.writes, task.reads = [span(out) for out, _ in outputs], [span(t) for t, _ in task.inputs]
        for other in (t for c, queue in self.flying.items() if c != comm for t in queue):
            check(not any(meet(mine, its) for mine in task.writes for its in (*other.writes, *other.reads)), name, "on",
                  comm, "writes what", other.name, "on", other.comm, "reads or writes")
        for out, _ in outputs:
            spoil(memory(out))
            task.garbage.append(memory(out).copy())
        self.flying.setdefault(comm, []).append(task)
        if not async_op:
            return self.wait(task)
        return Handle(self, task)

    def wait(self, task):
        """The compute stream goes on after this collective, and so after all before it on its stream."""
        queue = self.flying.get(task.comm, [])
        if task not in queue:
            return
        done = queue[:queue.index(task) + 1]
        for t in done:
            for tensor, began in t.inputs:
                check(same(memory(tensor), began), t.name, "reads a tensor that was changed before the wait", tensor.shape)
            for (tensor, _), garbage in zip(t.outputs, t.garbage):
                check(same(memory(tensor), garbage), t.name, "writes what was written before the wait", tensor.shape)
        del queue[:len(done)]
        for t in done:
            for tensor, result in t.outputs:
                memory(tensor)[...] = result
            self.times.append((t.name, t.comm, t.seconds, max(0.0, min(t.seconds, t.ends - self.compute))))
            self.compute = max(self.compute, t.ends)

    def overlapped(self, name: str, comm: str = "") -> float:
        """Which part of the time of these collectives the compute stream did not stand still for."""
        mine = [(seconds, still) for n, c, seconds, still in self.times if n == name and comm in ("", c)]
        return 1 - sum(still for _, still in mine) / sum(seconds for seconds, _ in mine)

    def close(self) -> None:
        """Every collective has been waited for."""
        left = [f"{t.name} on {t.comm}" for queue in self.flying.values() for t in queue]
        check(not left, "never waited for:", ", ".join(left))


class MintDistributed(Device):
    """`mindspore.mint.distributed` as HCCL serves it, with `mindspore.communication.create_group`."""

    initialised = False
    rendezvous = False  # whether a message leaves only when it is received

    def is_initialized(self):
        return self.initialised

    def init_process_group(self, *args, **kwargs):
        try:
            given = _INIT.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise Refused(f"init_process_group: {error}") from error
        check(not self.initialised, "init_process_group once a process")
        check(given.get("backend", "hccl") == "hccl", "init_process_group: on Ascend the backend is hccl", given)
        self.initialised = True

    def get_rank(self, group=None):
        check(self.initialised, "get_rank before init_process_group")
        return self.under.rank

    def get_world_size(self, group=None):
        check(self.initialised, "get_world_size before init_process_group")
        return self.under.size

    def buffer_size(self, options):
        if options is None:
            return self.table.buffer
        check(isinstance(options, GroupOptions), "create_group: options are a GroupOptions", options)
        config = dict(options.hccl_config)
        check(set(config) <= {"hccl_buffer_size"}, "create_group: hccl_config knows no", config)  # of ours; HCCL knows more
        size = config.get("hccl_buffer_size", self.table.buffer)
        check(type(size) is int and 0 < size < 2**32, "hccl_buffer_size is a number of MiB", size)
        return size

    def all_reduce(self, tensor, op="sum", group=None, async_op=False):
        ranks = self.begin("all_reduce", group, [tensor], op=op)
        got = self.under.all_reduce(self.read(tensor, group), op, ranks)
        return self.end("all_reduce", group, [tensor], [(tensor, got)], async_op)

    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None, async_op=False):
        ranks = self.begin("all_gather_into_tensor", group, [output_tensor, input_tensor])
        n, rest = input_tensor.shape[0], input_tensor.shape[1:]
        check(output_tensor.shape == (n * len(ranks), *rest), "all_gather: sizes", output_tensor.shape, input_tensor.shape)
        got = self.under.all_gather(self.read(input_tensor, group), 0, [n] * len(ranks), ranks)
        return self.end("all_gather_into_tensor", group, [input_tensor], [(output_tensor, got)], async_op)

    def reduce_scatter_tensor(self, output, input, op="sum", group=None, async_op=False):
        ranks = self.begin("reduce_scatter_tensor", group, [output, input], op=op)
        check(input.shape == (output.shape[0] * len(ranks), *output.shape[1:]), "reduce_scatter: sizes", output.shape,
              input.shape)
        got = self.under.reduce_scatter(self.read(input, group), op, 0, [output.shape[0]] * len(ranks), ranks)
        return self.end("reduce_scatter_tensor", group, [input], [(output, got)], async_op)

    def all_to_all_single(self, output, input, output_split_sizes=None, input_split_sizes=None, group=None,
                          async_op=False):
        ranks = self.begin("all_to_all_single", group, [output, input])
        sends, recvs = (sizes or even(t, ranks) for sizes, t in ((input_split_sizes, input), (output_split_sizes, output)))
        check(sum(sends) == input.shape[0] and sum(recvs) == output.shape[0], "all_to_all: sizes", sends, recvs)
        sends, recvs = ([n * (t.size // t.shape[0]) for n in sizes] for sizes, t in ((sends, input), (recvs, output)))
        given = self.read(input, group)  # kept: `memory` does not
        got = swap(self.under, memory(given).reshape(-1), sends, recvs, ranks, input.dtype)
        return self.end("all_to_all_single", group, [input], [(output, got.reshape(output.shape))], async_op)

    def broadcast(self, tensor, src, group=None, async_op=False):
        ranks = self.begin("broadcast", group, [tensor], src=src)
        got = self.under.broadcast(self.read(tensor, group), src, ranks)
        return self.end("broadcast", group, [tensor], [(tensor, got)], async_op)

    def P2POp(self, op, tensor, peer, group=None, tag=0):  # noqa: N802  MindSpore's name
        self.begin(op, "world", [tensor], peer=peer)
        self.counts["launches"] -= 1  # a batch is one
        return op, tensor, peer

    def batch_isend_irecv(self, work):
        check(bool(work), "an empty batch")
        check(len({(op, peer) for op, _, peer in work}) == len(work), "HcclBatchSendRecv: two of one kind for one peer")
        check(all(peer != self.under.rank for _, _, peer in work), "HcclBatchSendRecv: a task for itself")
        self.counts["launches"] += 1
        sends, recvs = ([(p, t) for op, t, p in work if op == what] for what in ("isend", "irecv"))
        got = self.under.exchange([(p, self.read(t, "world")) for p, t in sends],
                                  [(p, tuple(t.shape), t.dtype) for p, t in recvs])
        if self.rendezvous:
            told = Tensor(np.zeros(1, np.int32))
            self.under.exchange([(p, told) for p, _ in recvs], [(p, (1,), mindspore.int32) for p, _ in sends])
        outputs = [(t, value) for (_, t), value in zip(recvs, got)]
        return [self.end("batch_isend_irecv", "world", [t for _, t in sends], outputs, True)]


def even(t, ranks):
    check(t.shape[0] % len(ranks) == 0, "pieces of", t.shape, "for", len(ranks))
    return [t.shape[0] // len(ranks)] * len(ranks)


def swap(under, flat, sends, recvs, ranks, dtype):
    """Pieces of any length from everybody to everybody, as messages."""
    at, me = np.cumsum([0, *sends]), ranks.index(under.rank)
    pieces = [Tensor.from_numpy(flat[at[i]:at[i + 1]].copy()) for i in range(len(ranks))]
    got = under.exchange([(r, p) for r, p in zip(ranks, pieces) if p.shape[0] and r != under.rank],
                         [(r, (n,), dtype) for r, n in zip(ranks, recvs) if n and r != under.rank])
    rest = iter(got)
    parts = [(pieces[me] if i == me else next(rest)).asnumpy() for i, n in enumerate(recvs) if n]
    return np.concatenate(parts) if parts else flat[:0]


class Primitives(Device):
    """`mindspore.ops` as NCCL serves it: primitives bound to a communicator; point-to-point blocks. All are waited for."""

    def _give(self, name, comm, x, got):
        out = Tensor.from_numpy(np.empty(got.shape, numpy_dtype(got.dtype)))
        self.end(name, comm, [x], [(out, got)], False)
        return out

    def AllReduce(self, op, group):  # noqa: N802
        def call(x):
            ranks = self.begin("AllReduce", group, [x], op=op)
            return self._give("all_reduce", group, x, self.under.all_reduce(x, op, ranks))
        return call

    def AllGather(self, group):  # noqa: N802
        def call(x):
            ranks = self.begin("AllGather", group, [x])
            return self._give("AllGather", group, x, self.under.all_gather(x, 0, [x.shape[0]] * len(ranks), ranks))
        return call

    def ReduceScatter(self, op, group):  # noqa: N802
        def call(x):
            ranks = self.begin("ReduceScatter", group, [x], op=op)
            return self._give("ReduceScatter", group, x, self.under.reduce_scatter(x, op, 0, even(x, ranks), ranks))
        return call

    def AlltoAll(self, split_count, split_dim, concat_dim, group):  # noqa: N802
        def call(x):
            ranks = self.begin("AlltoAll", group, [x])
            check(split_count == len(ranks) and split_dim == concat_dim == 0, "AlltoAll", split_count, split_dim, concat_dim)
            sizes = even(x, ranks)
            check(x.ndim == 1, "AlltoAll")  # as ours are
            got = swap(self.under, memory(x), sizes, sizes, ranks, x.dtype)
            return self._give("AlltoAll", group, x, Tensor.from_numpy(got))
        return call

    def Broadcast(self, root_rank, group):  # noqa: N802
        def call(xs):
            ranks = self.begin("Broadcast", group, list(xs), root=root_rank)
            return (self._give("Broadcast", group, xs[0], self.under.broadcast(xs[0], ranks[root_rank], ranks)),)
        return call

    def Send(self, sr_tag, dest_rank, group):  # noqa: N802
        def call(x):
            self.begin("Send", group, [x], to=dest_rank, tag=sr_tag)
            self.under.exchange([(dest_rank, x)], [])
            self.under.barrier(tuple(sorted((self.under.rank, dest_rank))))  # NCCL's send waits for its receive
        return call

    def Receive(self, sr_tag, src_rank, shape, dtype, group):  # noqa: N802
        def call():
            self.begin("Receive", group, [], of=src_rank, tag=sr_tag)
            got = self.under.exchange([], [(src_rank, shape, dtype)])[0]
            self.under.barrier(tuple(sorted((self.under.rank, src_rank))))
            return got
        return call


def emulated(kind, under, rates=RATES):
    """The backend of a device, "hccl" or "nccl", on an emulator (its `double`) that moves its data over `under`."""
    if kind == "hccl":
        device = MintDistributed(under, HCCL, rates)
        with in_place_of_mindspore(device):
            backend = HcclBackend.start(under.rank, under.size, False)
    else:
        device = Primitives(under, NCCL, rates)
        backend = NcclBackend(under.rank, under.size, "world", device.create_group, device)
    backend.double = device
    return backend


@contextmanager
def in_place_of_mindspore(device):
    """Inside, `mindspore.communication` and `mindspore.mint.distributed` are the device's, for who imports them."""
    communication = SimpleNamespace(create_group=device.create_group, GlobalComm=SimpleNamespace(WORLD_COMM_GROUP="world"))
    places = ((mindspore, "communication", communication), (mint, "distributed", device))
    before = [(place, name, getattr(place, name)) for place, name, _ in places]
    try:
        for place, name, double in places:
            setattr(place, name, double)
            sys.modules[f"{place.__name__}.{name}"] = double
        yield
    finally:
        for place, name, real in before:
            setattr(place, name, real)
            sys.modules[f"{place.__name__}.{name}"] = real
