# SPDX-License-Identifier: Apache-2.0
"""The collectives on NumPy arrays, over shared memory. Knows nothing of MindSpore.

Small messages: everybody writes its slot, one meeting, everybody reads (of an all-reduce among more than two its share of
all slots, then, after another meeting, the shares of the others). Slots are double, so the next call needs no meeting more.
Large ones: results lie in the segments of their owners (`arena`), the members meet, each writes its part straight into
everybody's result, and they meet again: every byte is copied once. A reduction's summands go through a bounded area in
chunks, or, of an all-reduce, through the result. Invariant: results own fresh memory, and the order of a reduction is the
order of the group on every rank.
"""
from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...errors import CollectiveMismatch, CommError
from ..objects import decode, encode
from ..owner import Owner
from ..protocol import dtype_text, offsets
from ..protocol import kind as _kind
from . import rendezvous
from .future import Future, Worker
from .pieces import across, along
from .reduce import reduce_into
from .segment import CHUNK, SLOT, Segment
from .signals import INLINE, Signals
from .state import GroupState

Ranks = tuple[int, ...]
Body = Callable[[GroupState, int], None]
_EVERYBODY = 256 << 10  # bytes of all members' operands: up to here an all-reduce goes through the slots
_STEP = 512 << 10       # least bytes of a broadcast that are worth a wake
_ALIGN = 64


def _up(count: int) -> int:
    return (count + _ALIGN - 1) // _ALIGN * _ALIGN


class Engine:
    """One rank of a shared-memory world.

    Args:
        rank: this rank.
        size: number of ranks.
        name: the job's name (see `rendezvous.job_name`).
        timeout: seconds after which a wait for other ranks gives up.
        start_timeout: seconds to wait for all ranks to start.
        site: returns "file:line" of the calling user code, for messages.
        of: returns whose data the call is about, which all members must agree on.

    Attributes:
        sent: payload bytes that went from this rank to others or, where readers fetch them, from others to this rank; each
            byte that crosses between two ranks is counted on one of them.

    With `async_op=True` a collective returns a `Future` at once and runs on a thread of its own; calls keep their order.
    """

    def __init__(self, rank: int, size: int, name: str, *, timeout: float = 300.0, start_timeout: float = 120.0,
                 site: Callable[[], str] = lambda: "?", of: Callable[[], str] = str):
        self.rank, self.size, self.sent = rank, size, 0
        fd, links = rendezvous.connect(rank, size, name, start_timeout)
        self._memory = Segment(fd, own=True)
        self._signals = Signals(rank, self._memory, links, timeout)
        self._groups: dict[Ranks, GroupState] = {}
        self._site, self._of = site, of
        self._worker, self._owner = Worker(), Owner()
        self._broken: BaseException | None = None
        self._last: BaseException | None = None
        self._closed = False

    # -- one call --------------------------------------------------------------------------------------------------

    def _check_open(self, what: str) -> None:
        if self._signals.given_up and not self._closed:
            self._signals.raise_told()  # read by a wait that came to its end
            raise CommError(f"For '{what}', ranks have left a step by an exception.", f"after: {self._broken}",
                            "What they had in flight is void, until all of them meet again.",
                            ("the pipeline's next step, on all ranks", "end the process; restart from a checkpoint"))
        if self._broken is not None or self._closed:
            raise CommError(f"For '{what}', the communication of this process has ended.",
                            f"after: {self._broken}" if self._broken else "after 'shutdown'",
                            "After a failed collective the ranks no longer agree where they are.",
                            "end the process; restart from a checkpoint")

    def _do(self, what: str, key: tuple, about: Callable[[], str], ranks: Ranks, out: Any, body: Body,
            async_op: bool = False) -> Any:
        """Runs a collective, which fills `out`, now or later.

        Args:
            what: its name.
            key: what its description depends on.
            about: the description of its arguments that must be equal on all members.
            ranks: the group.
            out: the result.
            body: does it, given the group and the checksum to be compared at the first meeting.
            async_op: return a `Future` instead of waiting.
        """
        self._owner.check(what)
        site, of = self._site().encode(), self._of()
        key = of, key
        if async_op:
            return Future(out, self._worker.submit(lambda: self._run(what, key, about, ranks, body, site)))
        if self._worker.busy:
            self._worker.drain()
        self._run(what, key, about, ranks, body, site)
        return out

    def _run(self, what: str, key: tuple, about: Callable[[], str], ranks: Ranks, body: Body, site: bytes) -> None:
        self._check_open(what)
        try:
            g = self._groups.get(ranks)
            call = g.described.get(key) if g is not None else None
            if call is None:
                text = f"{what} {key[0]}{': ' if key[0] else ''}{about()} over ranks {ranks}".encode()
                call = text, zlib.crc32(text)
            self._memory.enter(call[0], site)
            if g is None:
                g = self._groups[ranks] = self._signals.group(ranks, what)
            if len(g.described) > 4096:  # shapes that never come back
                g.described.clear()
            g.described[key] = call
            g.turn ^= 1
            body(g, call[1])
        except BaseException as e:  # also an interrupt: the others are in the collective, we are not
            if self._broken is None and not (isinstance(e, CollectiveMismatch) and getattr(e, "in_step", False)):
                self._broken = e
            self._last = e
            raise
        self._memory.leave()

    # -- memory ----------------------------------------------------------------------------------------------------

    def _result(self, shape: Sequence[int], dtype: np.dtype, large: bool) -> tuple[np.ndarray, int]:
        """An array for a result, and where it is in this rank's segment if it is large."""
        if not large:
            return np.empty(shape, dtype), 0
        return self._memory.arena.array(shape, dtype, math.prod(shape) * dtype.itemsize)

    def _results(self, g: GroupState, shapes: Sequence[Sequence[int]], dtype: np.dtype) -> list[np.ndarray]:
        """The results of all members, to write into; after a meeting."""
        return [np.ndarray(shape, dtype, m.map, g.result_of(i)) for i, (m, shape) in enumerate(zip(g.members, shapes))]

    @staticmethod
    def _parts(g: GroupState, count: int, dtype: np.dtype, skip: int = 0, half: int | None = None) -> list[np.ndarray]:
        """`count` elements of each member's slot, or half of its chunk area, `skip` bytes behind its start.

        Views are kept, as loops repeat themselves.
        """
        key = g.turn, half, count, dtype, skip
        views = g.cache.get(key)
        if views is None:
            starts = g.slots() if half is None else [m.chunk(half) for m in g.members]
            views = g.keep(key, [m.view(at + skip, count, dtype) for m, at in zip(g.members, starts)])
        return views

    # -- transport of pieces ---------------------------------------------------------------------------------------

    def _spread(self, g: GroupState, check: int, key: tuple, pieces: Sequence[np.ndarray | None],
                places: Sequence[Any], stride: int) -> None:
        """Small: piece i to member i (or the only piece to all); what member j gives arrives in `places[j]`.

        `key`, the call's, says all that the views of the slots depend on; they are kept.
        """
        kept = g.cache.get((g.turn, key))
        if kept is None:
            kept = g.keep((g.turn, key), self._slots(g, pieces, places, stride))
        give, take, crossing = kept
        for i, view in give:
            view[...] = pieces[i]
        self._signals.sync(g, key[0], check)
        for j, view in take:
            places[j][...] = view
        if places[g.index] is not None:
            places[g.index][...] = pieces[0 if len(pieces) == 1 else g.index]
        self.sent += crossing

    @staticmethod
    def _slots(g: GroupState, pieces: Sequence[np.ndarray | None], places: Sequence[np.ndarray | None],
               stride: int) -> tuple[list[tuple[int, np.ndarray]], list[tuple[int, np.ndarray]], int]:
        """Of `_spread`: where in the own slot pieces are put, where in the others' slots they are found, and bytes."""
        one, starts = len(pieces) == 1, g.slots()

        def view(member: int, piece: int, like: np.ndarray) -> np.ndarray:
            return g.members[member].view(starts[member] + piece * stride, like.size, like.dtype).reshape(like.shape)
        give = [(i, view(g.index, i, x)) for i, x in enumerate(pieces)
                if x is not None and x.size and (one or i != g.index)]
        take = [(j, view(j, 0 if one else g.index, x)) for j, x in enumerate(places)
                if x is not None and x.size and j != g.index]
        return give, take, sum(x.nbytes for _, x in take)

    def _push(self, g: GroupState, what: str, check: int, at: int, shapes: Sequence[Sequence[int]], dtype: np.dtype,
              pieces: Sequence[np.ndarray | None], where: Sequence[tuple[slice, ...]]) -> None:
        """Large: writes piece i at `where[i]` of member i's result, whose shape is `shapes[i]`."""
        g.show_result(at)
        self._signals.sync(g, what, check)
        results = self._results(g, shapes, dtype)
        for i in (*range(g.index, g.size), *range(g.index)):  # everybody begins elsewhere
            if pieces[i] is not None:
                results[i][where[i]] = pieces[i]
                if i != g.index:
                    self.sent += pieces[i].nbytes
        self._signals.sync(g, what)

    # -- collectives -----------------------------------------------------------------------------------------------

    def all_reduce(self, x: np.ndarray, op: str, ranks: Ranks, async_op: bool = False, inplace: bool = False) -> Any:
        """See `Backend.all_reduce`; with `inplace` the result is written into `x`, which is best a `buffer`."""
        dtype, n = x.dtype, len(ranks)
        flat = np.ascontiguousarray(x).reshape(-1)
        together = flat.nbytes * n <= _EVERYBODY
        at = self._memory.offset_of(flat) if inplace and not together else None
        if at is not None:
            out = x
        else:
            out, at = self._result(x.shape, dtype, not together)

        def body(g: GroupState, check: int) -> None:
            result = out.reshape(-1)
            if together:
                views = self._parts(g, flat.size, dtype)
                views[g.index][...] = flat
                self._signals.sync(g, "all_reduce", check)
                if n == 2:  # reading the other's whole is as little as a share of it and a share of the result
                    reduce_into([result], op, views)
                    self.sent += flat.nbytes
                    return
                starts = [flat.size * i // n for i in range(n + 1)]
                mine = slice(starts[g.index], starts[g.index + 1])
                reduce_into([views[g.index][mine]], op, [v[mine] for v in views])  # nobody else reads this share here
                self._signals.sync(g, "all_reduce")
                for view, start, stop in zip(views, starts, starts[1:]):
                    result[start:stop] = view[start:stop]
                self.sent += (flat[mine].size * (n - 2) + flat.size) * dtype.itemsize
                return
            share = _up(-(-flat.size // n))  # each member reduces one share, and writes it into everybody's result
            mine = slice(g.index * share, min((g.index + 1) * share, flat.size))
            if out is not x:
                result[:mine.start] = flat[:mine.start]
                result[mine.stop:] = flat[mine.stop:]
            g.show_result(at)
            self._signals.sync(g, "all_reduce", check)
            results = [r[mine] for r in self._results(g, [flat.shape] * n, dtype)]
            reduce_into(results, op, [*results[:g.index], flat[mine], *results[g.index + 1:]])
            self.sent += 2 * results[0].nbytes * (n - 1)
            self._signals.sync(g, "all_reduce")
        done = self._do("all_reduce", ("all_reduce", op, dtype, x.shape), lambda: f"{op} {_kind(x)}", ranks, out, body,
                        async_op)
        if inplace and out is not x:
            x[...] = out
        return done

    def buffer(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Memory in which all-reduces need no copies."""
        return self._memory.arena.array((count,), np.dtype(dtype), count * np.dtype(dtype).itemsize, again=True)[0]

    def all_gather(self, x: np.ndarray, dim: int, sizes: Sequence[int], ranks: Ranks, async_op: bool = False) -> Any:
        """See `Backend.all_gather`."""
        sizes = tuple(sizes)
        joined = along(x.shape, dim, sizes)
        stride = _up(joined.biggest * x.itemsize)
        out, place = self._result(joined.whole, x.dtype, stride > SLOT)
        key = "all_gather", x.dtype, joined.whole, dim, sizes

        def body(g: GroupState, check: int) -> None:
            if stride <= SLOT:
                self._spread(g, check, key, [x], joined.of(out), 0)
            else:
                self._push(g, "all_gather", check, place, [joined.whole] * g.size, x.dtype, [x] * g.size,
                           [joined.at[g.index]] * g.size)
        return self._do("all_gather", key, lambda: f"{_kind(x, dim)} dim={dim} sizes={sizes}", ranks, out, body, async_op)

    def reduce_scatter(self, x: np.ndarray, op: str, dim: int, sizes: Sequence[int], ranks: Ranks,
                       async_op: bool = False) -> Any:
        """See `Backend.reduce_scatter`."""
        sizes = tuple(sizes)
        split = along(x.shape, dim, sizes)
        pieces, biggest = split.of(x), split.biggest
        out = np.empty(split.shapes[ranks.index(self.rank)], x.dtype)

        def body(g: GroupState, check: int) -> None:
            flat, own = out.reshape(-1), np.ascontiguousarray(pieces[g.index]).reshape(-1)
            stride = _up(biggest * x.itemsize)
            small = stride * g.size <= SLOT
            if small:
                step = max(biggest, 1)
            else:
                stride = min(stride, CHUNK // g.size // _ALIGN * _ALIGN)
                step = stride // x.itemsize
            whole = pieces if step >= biggest else [np.ascontiguousarray(p).reshape(-1) for p in pieces]
            for number, start in enumerate(range(0, max(biggest, 1), step)):
                half = None if small else number & 1
                for i, piece in enumerate(whole):
                    if i != g.index and start < piece.size:
                        part = piece if step >= biggest else piece[start:start + step]
                        target = self._parts(g, part.size, x.dtype, i * stride, half)[g.index]
                        target.reshape(part.shape)[...] = part
                self._signals.sync(g, "reduce_scatter", check if number == 0 else None)
                count = min(flat.size - start, step)
                if count > 0:
                    views = list(self._parts(g, count, x.dtype, g.index * stride, half))
                    views[g.index] = own[start:start + count]
                    reduce_into([flat[start:start + count]], op, views)
                    self.sent += count * x.itemsize * (g.size - 1)
            if not small:
                self._signals.sync(g, "reduce_scatter")  # all groups share the area: leave it when all have read
        return self._do("reduce_scatter", ("reduce_scatter", op, x.dtype, x.shape, dim, sizes),
                        lambda: f"{op} {_kind(x)} dim={dim} sizes={sizes}", ranks, out, body, async_op)

    def all_to_all(self, x: np.ndarray, split_dim: int, split_sizes: Sequence[int], concat_dim: int,
                   concat_sizes: Sequence[int], ranks: Ranks, async_op: bool = False) -> Any:
        """See `Backend.all_to_all`."""
        split_sizes, concat_sizes = tuple(split_sizes), tuple(concat_sizes)
        split, joined, biggest = across(x.shape, split_dim, split_sizes, concat_dim, concat_sizes)
        stride = _up(biggest * x.itemsize)
        small = stride * len(ranks) <= SLOT
        out, place = self._result(split.shapes[ranks.index(self.rank)], x.dtype, not small)
        key = "all_to_all", x.dtype, joined.whole, split_dim, split_sizes, concat_dim, concat_sizes

        def body(g: GroupState, check: int) -> None:
            if small:
                self._spread(g, check, key, split.of(x), joined.of(out), stride)
            else:
                self._push(g, "all_to_all", check, place, split.shapes, x.dtype, split.of(x),
                           [joined.at[g.index]] * g.size)
        return self._do("all_to_all", key, lambda: f"{_kind(x, concat_dim)} split {split_dim}:{split_sizes} concat "
                                                   f"{concat_dim}:{concat_sizes}", ranks, out, body, async_op)

    def broadcast(self, x: np.ndarray, src: int, ranks: Ranks, async_op: bool = False) -> Any:
        """See `Backend.broadcast`."""
        small = x.nbytes <= SLOT
        out, place = self._result(x.shape, x.dtype, not small)

        def body(g: GroupState, check: int) -> None:
            source = ranks.index(src)
            if not small:
                self._follow(g, check, x, out, place, source)
                return
            slot = self._parts(g, x.size, x.dtype)[source].reshape(x.shape)
            if g.index == source:
                slot[...] = out[...] = x
                self._signals.sync(g, "broadcast", check)
            else:
                self._signals.sync(g, "broadcast", check)
                out[...] = slot
                self.sent += x.nbytes
        return self._do("broadcast", ("broadcast", x.dtype, x.shape, src), lambda: f"{_kind(x)} from {src}", ranks, out,
                        body, async_op)

    def _follow(self, g: GroupState, check: int, x: np.ndarray, out: np.ndarray, place: int, source: int) -> None:
        """A large broadcast: the source copies its result step by step, and the others copy that while it goes on."""
        g.show_result(place)
        done = g.steps[source].get()  # nobody steps before all have met
        self._signals.sync(g, "broadcast", check)
        result, step = out.reshape(-1), max(_STEP // x.itemsize, -(-x.size // 16))
        if g.index == source:
            given = np.ascontiguousarray(x).reshape(-1)
        else:
            given = self._results(g, [result.shape] * g.size, x.dtype)[source]
            self.sent += x.nbytes
        for number, start in enumerate(range(0, result.size, step)):
            if g.index != source:
                self._signals.await_step(g, source, done + number + 1, "broadcast")
            result[start:start + step] = given[start:start + step]
            if g.index == source:
                self._signals.step(g)
        self._signals.sync(g, "broadcast")  # then the source may change its result

    def scatter(self, x: np.ndarray | None, dim: int, sizes: Sequence[int], src: int, ranks: Ranks, *,
                shape: Sequence[int], dtype: np.dtype, async_op: bool = False) -> Any:
        """See `Backend.scatter`."""
        sizes, dtype = tuple(sizes), np.dtype(dtype)
        split = along(tuple(shape), dim, sizes)
        give = split.of(x) if x is not None and self.rank == src else [None] * len(ranks)
        stride = _up(split.biggest * dtype.itemsize)
        small = stride * len(ranks) <= SLOT
        out, place = self._result(split.shapes[ranks.index(self.rank)], dtype, not small)
        key = "scatter", dtype, split.whole, dim, sizes, src

        def body(g: GroupState, check: int) -> None:
            if small:
                self._spread(g, check, key, give, [out if r == src else None for r in ranks], stride)
            else:
                self._push(g, "scatter", check, place, split.shapes, dtype, give, [()] * g.size)
        return self._do("scatter", key, lambda: f"{dtype_text(dtype)}{list(shape)} dim={dim} sizes={sizes} from {src}",
                        ranks, out, body, async_op)

    def barrier(self, ranks: Ranks) -> None:
        """Returns when every member has called it."""
        self._do("barrier", ("barrier",), str, ranks, None, lambda g, check: self._signals.sync(g, "barrier", check))

    def agree(self, what: str, ranks: Ranks) -> None:
        """See `Backend.agree`: a meeting at which nothing is handed over."""
        self._do("agree", ("agree", what), lambda: what, ranks, None, lambda g, check: self._signals.sync(g, "agree", check))

    # -- objects ---------------------------------------------------------------------------------------------------

    def all_gather_object(self, obj: Any, ranks: Ranks) -> list[Any]:
        """See `Backend.all_gather_object`."""
        data = np.frombuffer(encode(obj), np.uint8)
        sizes = self.all_gather(np.array([data.size]), 0, [1] * len(ranks), ranks).tolist()
        joined, at = self.all_gather(data, 0, sizes, ranks).data, offsets(sizes)
        return [decode(bytes(joined[at[i]:at[i + 1]])) for i in range(len(ranks))]

    def broadcast_object(self, obj: Any, src: int, ranks: Ranks) -> Any:
        """See `Backend.broadcast_object`."""
        data = np.frombuffer(encode(obj), np.uint8) if self.rank == src else None
        count = self.broadcast(np.array([data.size if data is not None else 0]), src, ranks)
        data = self.broadcast(data if data is not None else np.empty(int(count[0]), np.uint8), src, ranks)
        return decode(data.tobytes())

    # -- point to point --------------------------------------------------------------------------------------------

    def exchange(self, sends: Sequence[tuple[int, np.ndarray]],
                 recvs: Sequence[tuple[int, Sequence[int], np.dtype]]) -> list[np.ndarray]:
        """See `Backend.exchange`. Sending never waits for the receiver: a large message is a memory file of its own."""
        self._owner.check("exchange")
        if self._worker.busy:
            self._worker.drain()
        self._check_open("exchange")
        to, come = [dst for dst, _ in sends], [src for src, _, _ in recvs]
        of = self._of()
        self._memory.enter(f"exchange to {to} from {come}{of and f', {of}'}".encode(), self._site().encode())
        try:
            kept = [np.ascontiguousarray(x) for dst, x in sends if dst == self.rank]  # to myself
            for dst, x in sends:
                if dst != self.rank:
                    self._post(dst, x, of)
            out = [kept.pop(0).reshape(shape).copy() if src == self.rank else self._take(src, shape, np.dtype(dtype), of)
                   for src, shape, dtype in recvs]
        except BaseException as e:
            self._broken = self._broken or e
            raise
        self._memory.leave()
        return out

    def _post(self, dst: int, x: np.ndarray, of: str) -> None:
        about = f"{_kind(x)}{of and f', {of}'}".encode()
        data = np.ascontiguousarray(x).reshape(-1).view(np.uint8).data
        self.sent += len(data)
        if len(data) <= INLINE:
            self._signals.post(dst, about, data)
            return
        fd = os.memfd_create("ms_dtensor-message", os.MFD_CLOEXEC)
        try:
            done = 0
            while done < len(data):
                done += os.write(fd, data[done:])
            self._signals.post(dst, about, b"", fd)
        finally:
            os.close(fd)  # the message in flight holds its own reference

    def _take(self, src: int, shape: Sequence[int], dtype: np.dtype, of: str) -> np.ndarray:
        about, payload, fd = self._signals.take(src, f"recv of {of}" if of else "recv")
        out = np.empty(tuple(shape), dtype)
        wanted = f"{_kind(out)}{of and f', {of}'}"
        try:
            if about.decode() != wanted:
                peers = self._signals.peers
                calls = [(src, f"send {about.decode()}", peers[src].memory.call()[1]),
                         (self.rank, f"recv {wanted}", self._memory.call()[1])]
                raise self._signals.mismatch(calls, list(peers.values()), "exchange")
            data = out.reshape(-1).view(np.uint8)
            if fd < 0:
                data[...] = np.frombuffer(payload, np.uint8)
            else:
                done, buffer = 0, data.data
                while done < len(buffer):
                    done += os.preadv(fd, [buffer[done:]], done)
            return out
        finally:
            if fd >= 0:
                os.close(fd)

    def close(self, reason: str = "") -> None:
        """Leaves the world; see `Signals.close`. A forked child has nothing to say in its parent's name."""
        if not self._closed and not self._owner.forked:
            if not reason and self._worker.busy:
                self._worker.drain()
            self._closed = True
            self._worker.end()
            if isinstance(self._last, CollectiveMismatch) and reason.startswith("CollectiveMismatch"):
                self._signals.tell_all(self._last)  # also ranks that were not in that group
            self._signals.close(reason)
