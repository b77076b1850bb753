# SPDX-License-Identifier: Apache-2.0
"""The collectives on NumPy arrays, over shared memory. Knows nothing of MindSpore.

Small messages: everybody writes its slot, one sync, everybody reads. Slots are double, so the next call needs no second
sync. Larger ones go through a bounded area in chunks and end with a sync of their own, because all groups share it.
The invariant: results own fresh memory, and the order of a reduction is the order of the group on every rank.
"""
from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...errors import CollectiveMismatch, CommError
from ..protocol import cut, offsets, with_dim
from . import rendezvous
from .reduce import reduce_into
from .segment import CHUNK, SLOT, Segment
from .signals import INLINE, GroupState, Signals

Ranks = tuple[int, ...]
_EVERYBODY = 64 << 10  # read by a rank in all: up to here each reduces everything, which is cheaper than a second sync
_ALIGN = 64


def _up(count: int) -> int:
    return (count + _ALIGN - 1) // _ALIGN * _ALIGN


_names: dict[np.dtype, str] = {}


def _name(dtype: np.dtype) -> str:
    """`dtype.name`, which NumPy computes anew each time."""
    name = _names.get(dtype)
    if name is None:
        name = _names[dtype] = dtype.name
    return name


def _dots(shape: Sequence[int], *dims: int) -> str:
    """A shape for comparison between ranks, with the dims that may differ left open."""
    return "[" + ", ".join("·" if d in dims else str(s) for d, s in enumerate(shape)) + "]"


class Engine:
    """One rank of a shared-memory world.

    Args:
        rank: this rank.
        size: number of ranks.
        name: the job's name (see `rendezvous.job_name`).
        timeout: seconds after which a wait for other ranks gives up.
        start_timeout: seconds to wait for all ranks to start.
        site: returns "file:line" of the calling user code, for messages.
    """

    def __init__(self, rank: int, size: int, name: str, *, timeout: float = 300.0, start_timeout: float = 120.0,
                 site: Callable[[], str] = lambda: "?"):
        self.rank, self.size = rank, size
        fd, links = rendezvous.connect(rank, size, name, start_timeout)
        self._memory = Segment(fd, writable=True)
        self._signals = Signals(rank, self._memory, links, timeout)
        self._groups: dict[Ranks, GroupState] = {}
        self._abouts: dict[tuple[Any, ...], str] = {}      # the most frequent call, described once per shape
        self._site = site
        self._broken: BaseException | None = None
        self._closed = False

    # -- one call --------------------------------------------------------------------------------------------------

    def _begin(self, what: str, about: str, ranks: Ranks) -> tuple[GroupState, bytes]:
        if self._broken is not None or self._closed:
            raise CommError(f"For '{what}', the communication of this process has ended.",
                            f"after: {self._broken}" if self._broken else "after 'shutdown'",
                            "After a failed collective the ranks no longer agree where they are.",
                            "end the process; restart from a checkpoint")
        head = self._memory.enter(f"{what} {about} over ranks {ranks}".encode(), self._site().encode())
        g = self._groups.get(ranks)
        if g is None:
            g = GroupState(ranks, self.rank, self._signals.peers)
            self._signals.sync(g, what, head)          # compares the calls before anything is built on them
            g.slot = self._memory.allocate()
            self._signals.sync(g, what)
            g.offsets = [p.memory.allocated() if p else g.slot for p in g.peers]
            self._signals.sync(g, what)                # nobody publishes another slot before all have read this one
            self._groups[ranks] = g
        g.turn ^= 1
        return g, head

    def _run(self, what: str, about: str, ranks: Ranks, body: Callable[[GroupState, bytes], Any]) -> Any:
        try:
            result = body(*self._begin(what, about, ranks))
        except BaseException as e:  # also an interrupt: the others are in the collective, we are not
            if self._broken is None and not (isinstance(e, CollectiveMismatch) and getattr(e, "in_step", False)):
                self._broken = e
            raise
        self._memory.leave()
        return result

    def _member(self, g: GroupState, i: int) -> Segment:
        return g.peers[i].memory if g.peers[i] is not None else self._memory

    # -- transport of pieces ---------------------------------------------------------------------------------------

    def _pieces(self, g: GroupState, what: str, head: bytes, pieces: Sequence[np.ndarray | None],
                lengths: Sequence[int], dtype: np.dtype, biggest: int) -> Iterator[tuple[int, list[np.ndarray]]]:
        """Gives piece i to member i (or the only piece to all); yields what came, chunk by chunk.

        Args:
            pieces: what this rank gives, one per member, or one for all; None where it gives nothing.
            lengths: how many elements come from each member.
            biggest: elements of the largest piece anywhere; every member must compute the same number.

        Yields:
            The position of the chunk within the pieces, and a flat view of each member's chunk, valid until the next.
        """
        item, shares = dtype.itemsize, len(pieces)
        stride = _up(biggest * item)
        mine = g.index if shares > 1 else 0
        small = stride * shares <= SLOT
        if small:
            bases = [o + g.turn * SLOT for o in g.offsets]
        else:
            stride = min(stride, CHUNK // shares // _ALIGN * _ALIGN)
        step = max(stride // item, 1)
        for number, start in enumerate(range(0, max(biggest, 1), step)):
            if not small:
                bases = [self._memory.chunk(number & 1)] * g.size
            for i, piece in enumerate(pieces):
                if piece is not None and start < piece.size:
                    if step >= biggest:  # in one go: shaped, so that a strided piece is copied once
                        target = self._memory.view(bases[g.index] + i * stride, piece.size, dtype)
                        target.reshape(piece.shape)[...] = piece
                    else:
                        part = piece.reshape(-1)[start:start + step]
                        self._memory.view(bases[g.index] + i * stride, part.size, dtype)[...] = part
            self._signals.sync(g, what, head if number == 0 else None)
            yield start, [self._member(g, j).view(bases[j] + mine * stride, max(min(n - start, step), 0), dtype)
                          for j, n in enumerate(lengths)]
        if not small:
            self._signals.sync(g, what)  # the area is shared with other groups: leave it when all have read

    def _collect(self, g: GroupState, what: str, head: bytes, pieces: Sequence[np.ndarray | None],
                 places: Sequence[np.ndarray | None], dtype: np.dtype, biggest: int) -> None:
        """`_pieces` into `places`, one array (view) per member, or None where nothing comes."""
        pieces = [p if p is None or biggest * dtype.itemsize * len(pieces) <= CHUNK else np.ascontiguousarray(p)
                  for p in pieces]
        lengths = [0 if p is None else p.size for p in places]
        flat: dict[int, np.ndarray] = {}
        for start, views in self._pieces(g, what, head, pieces, lengths, dtype, biggest):
            for j, (view, place) in enumerate(zip(views, places)):
                if not view.size:
                    continue
                if view.size == place.size:
                    place[...] = view.reshape(place.shape)
                elif place.flags.c_contiguous:
                    place.reshape(-1)[start:start + view.size] = view
                else:  # parts of a strided place: assemble first
                    whole = flat.setdefault(j, np.empty(place.size, dtype))
                    whole[start:start + view.size] = view
        for j, whole in flat.items():
            places[j][...] = whole.reshape(places[j].shape)

    # -- collectives -----------------------------------------------------------------------------------------------

    def all_reduce(self, x: np.ndarray, op: str, ranks: Ranks) -> np.ndarray:
        """See `Backend.all_reduce`."""
        key = (op, x.dtype, x.shape)
        about = self._abouts.get(key)
        if about is None:
            about = self._abouts[key] = f"{op} {_name(x.dtype)}{_dots(x.shape)}"
        return self._run("all_reduce", about, ranks, lambda g, head: self._all_reduce(g, head, x, op))

    def _all_reduce(self, g: GroupState, head: bytes, x: np.ndarray, op: str) -> np.ndarray:
        dtype, out = x.dtype, np.empty(x.shape, x.dtype)
        flat, result = np.ascontiguousarray(x).reshape(-1), out.reshape(-1)
        sync, own = self._signals.sync, self._memory
        if flat.nbytes * g.size <= _EVERYBODY:
            bases = [o + g.turn * SLOT for o in g.offsets]
            own.view(bases[g.index], flat.size, dtype)[...] = flat
            sync(g, "all_reduce", head)
            reduce_into(result, op, [self._member(g, j).view(b, flat.size, dtype) for j, b in enumerate(bases)])
            return out
        small = flat.nbytes <= SLOT
        step = (SLOT if small else CHUNK) // dtype.itemsize
        for number, start in enumerate(range(0, flat.size, step)):
            bases = [o + g.turn * SLOT for o in g.offsets] if small else [own.chunk(number & 1)] * g.size
            part = flat[start:start + step]
            own.view(bases[g.index], part.size, dtype)[...] = part
            sync(g, "all_reduce", head if number == 0 else None)
            views = [self._member(g, j).view(b, part.size, dtype) for j, b in enumerate(bases)]
            share = _up(-(-part.size // g.size))  # each member reduces one share, in place in its own memory
            mine = slice(g.index * share, (g.index + 1) * share)
            reduce_into(views[g.index][mine], op, [v[mine] for v in views])
            sync(g, "all_reduce")
            for j, view in enumerate(views):
                theirs = slice(j * share, min((j + 1) * share, part.size))
                result[start:start + step][theirs] = view[theirs]
        if not small:
            sync(g, "all_reduce")
        return out

    def all_gather(self, x: np.ndarray, dim: int, sizes: Sequence[int], ranks: Ranks) -> np.ndarray:
        """See `Backend.all_gather`."""
        def body(g: GroupState, head: bytes) -> np.ndarray:
            at = offsets(sizes)
            out = np.empty(with_dim(x.shape, dim, at[-1]), x.dtype)
            places = [out[cut(dim, at[i], at[i + 1])] for i in range(g.size)]
            self._collect(g, "all_gather", head, [x], places, x.dtype, max(p.size for p in places))
            return out
        about = f"{_name(x.dtype)}{_dots(x.shape, dim)} dim={dim} sizes={tuple(sizes)}"
        return self._run("all_gather", about, ranks, body)

    def reduce_scatter(self, x: np.ndarray, op: str, dim: int, sizes: Sequence[int], ranks: Ranks) -> np.ndarray:
        """See `Backend.reduce_scatter`."""
        def body(g: GroupState, head: bytes) -> np.ndarray:
            at = offsets(sizes)
            pieces = [x[cut(dim, at[i], at[i + 1])] for i in range(g.size)]
            biggest = max(p.size for p in pieces)
            if biggest * x.itemsize * g.size > CHUNK:
                pieces = [np.ascontiguousarray(p) for p in pieces]
            out = np.empty(pieces[g.index].shape, x.dtype)
            flat = out.reshape(-1)
            for start, views in self._pieces(g, "reduce_scatter", head, pieces, [out.size] * g.size, x.dtype, biggest):
                if views[0].size:
                    reduce_into(flat[start:start + views[0].size], op, views)
            return out
        about = f"{op} {_name(x.dtype)}{_dots(x.shape)} dim={dim} sizes={tuple(sizes)}"
        return self._run("reduce_scatter", about, ranks, body)

    def all_to_all(self, x: np.ndarray, split_dim: int, split_sizes: Sequence[int], concat_dim: int,
                   concat_sizes: Sequence[int], ranks: Ranks) -> np.ndarray:
        """See `Backend.all_to_all`."""
        def body(g: GroupState, head: bytes) -> np.ndarray:
            cuts, joins = offsets(split_sizes), offsets(concat_sizes)
            pieces = [x[cut(split_dim, cuts[i], cuts[i + 1])] for i in range(g.size)]
            shape = with_dim(with_dim(x.shape, split_dim, split_sizes[g.index]), concat_dim, joins[-1])
            out = np.empty(shape, x.dtype)
            places = [out[cut(concat_dim, joins[j], joins[j + 1])] for j in range(g.size)]
            rest = int(np.prod([s for d, s in enumerate(x.shape) if d not in (split_dim, concat_dim)], dtype=np.int64))
            self._collect(g, "all_to_all", head, pieces, places, x.dtype, rest * max(split_sizes) * max(concat_sizes))
            return out
        return self._run("all_to_all", f"{_name(x.dtype)}{_dots(x.shape, concat_dim)} split {split_dim}:"
                         f"{tuple(split_sizes)} concat {concat_dim}:{tuple(concat_sizes)}", ranks, body)

    def broadcast(self, x: np.ndarray, src: int, ranks: Ranks) -> np.ndarray:
        """See `Backend.broadcast`."""
        def body(g: GroupState, head: bytes) -> np.ndarray:
            if self.rank == src:
                self._collect(g, "broadcast", head, [x], [None] * g.size, x.dtype, x.size)
                return x.copy()
            out = np.empty(x.shape, x.dtype)
            places = [out if r == src else None for r in ranks]
            self._collect(g, "broadcast", head, [None], places, x.dtype, x.size)
            return out
        return self._run("broadcast", f"{_name(x.dtype)}{_dots(x.shape)} from {src}", ranks, body)

    def scatter(self, x: np.ndarray | None, dim: int, sizes: Sequence[int], src: int, ranks: Ranks, *,
                shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """See `Backend.scatter`."""
        def body(g: GroupState, head: bytes) -> np.ndarray:
            at = offsets(sizes)
            out = np.empty(with_dim(shape, dim, sizes[g.index]), dtype)
            rest = int(np.prod(with_dim(shape, dim, 1), dtype=np.int64))
            give = [x[cut(dim, at[i], at[i + 1])] if self.rank == src else None for i in range(g.size)]
            places = [out if r == src else None for r in ranks]
            self._collect(g, "scatter", head, give, places, out.dtype, rest * max(sizes))
            return out
        return self._run("scatter", f"{_name(np.dtype(dtype))}{_dots(shape)} dim={dim} sizes={tuple(sizes)} from {src}",
                         ranks, body)

    def barrier(self, ranks: Ranks) -> None:
        """Returns when every member has called it."""
        self._run("barrier", "", ranks, lambda g, head: self._signals.sync(g, "barrier", head))

    # -- objects ---------------------------------------------------------------------------------------------------

    def all_gather_object(self, obj: Any, ranks: Ranks) -> list[Any]:
        """See `Backend.all_gather_object`."""
        data = np.frombuffer(pickle.dumps(obj), np.uint8)
        sizes = self.all_gather(np.array([data.size]), 0, [1] * len(ranks), ranks).tolist()
        joined, at = self.all_gather(data, 0, sizes, ranks).data, offsets(sizes)
        return [pickle.loads(joined[at[i]:at[i + 1]]) for i in range(len(ranks))]

    def broadcast_object(self, obj: Any, src: int, ranks: Ranks) -> Any:
        """See `Backend.broadcast_object`."""
        data = np.frombuffer(pickle.dumps(obj), np.uint8) if self.rank == src else None
        count = self.broadcast(np.array([data.size if data is not None else 0]), src, ranks)
        data = self.broadcast(data if data is not None else np.empty(int(count[0]), np.uint8), src, ranks)
        return pickle.loads(data.data)

    # -- point to point --------------------------------------------------------------------------------------------

    def exchange(self, sends: Sequence[tuple[int, np.ndarray]],
                 recvs: Sequence[tuple[int, Sequence[int], np.dtype]]) -> list[np.ndarray]:
        """See `Backend.exchange`. Sending never waits for the receiver: a large message is a memory file of its own."""
        to, come = [dst for dst, _ in sends], [src for src, _, _ in recvs]
        if self._broken is not None or self._closed:
            self._begin("exchange", "", (self.rank,))
        self._memory.enter(f"exchange to {to} from {come}".encode(), self._site().encode())
        try:
            kept = [np.ascontiguousarray(x) for dst, x in sends if dst == self.rank]  # to myself
            for dst, x in sends:
                if dst != self.rank:
                    self._post(dst, x)
            out = [kept.pop(0).reshape(shape).copy() if src == self.rank else self._take(src, shape, np.dtype(dtype))
                   for src, shape, dtype in recvs]
        except BaseException as e:
            self._broken = self._broken or e
            raise
        self._memory.leave()
        return out

    def _post(self, dst: int, x: np.ndarray) -> None:
        about = f"{_name(x.dtype)}{_dots(x.shape)}".encode()
        data = np.ascontiguousarray(x).reshape(-1).view(np.uint8).data
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

    def _take(self, src: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        about, payload, fd = self._signals.take(src, "recv")
        wanted = f"{_name(dtype)}{_dots(shape)}"
        try:
            if about.decode() != wanted:
                peer = self._signals.peers[src]
                calls = [(src, f"send {about.decode()}", peer.memory.call()[1]),
                         (self.rank, f"recv {wanted}", self._memory.call()[1])]
                raise self._signals.mismatch(calls, [peer], "exchange")
            out = np.empty(tuple(shape), dtype)
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
        """Leaves the world; see `Signals.close`."""
        if not self._closed:
            self._closed = True
            self._signals.close(reason)
